"""DP-Bayes-by-Backprop."""

import keras

from keras_dpopt import posterior_queries, posterior_rules
from keras_dpopt.dp_optimizer import DPOptimizer


@keras.saving.register_keras_serializable(package="keras_dpopt")
class DPBayesByBackprop(DPOptimizer):
    """Bayes by Backprop: mean and scale of a Gaussian over the weights, privately.

    Blundell et al., "Weight Uncertainty in Neural Networks" (ICML 2015), section 3.2,
    on privatized gradients, as the paper of `DPIVON` compares with. The model's weights
    are the mean mu; the optimizer keeps rho:

        w    = mu + s*e,   s = softplus(rho),   e ~ N(0, I): one draw for the batch
        u_i  = (g_i, g_i*e*sigmoid(rho)),       g_i = grad l_i(w)
        g    = (1/B) * (sum_i clip(u_i, C) + sigma*C*z),          z of the length of u_i
        mu'  = mu  - lr * (g_mu  + mu/s0^2/N)
        rho' = rho - lr * (g_rho + (s/s0^2 - 1/s)*sigmoid(rho)/N)

    The second terms are the gradient of KL(N(mu, s^2) || N(0, s0^2))/N. The posterior
    is N(mu, s^2): see `keras_dpopt.posterior_predict`.

    Args:
        learning_rate: A float, a schedule or a callable. Defaults to 0.05.
        prior_stddev: s0, positive. Defaults to 1.0.
        rho_init: rho at first. Defaults to -4.0, which is s = 0.018.
        train_size: N of the KL term, a positive int. `None`, the default, takes that of
            the fit.
        **kwargs: The arguments of every private optimizer, `l2_norm_clip` and
            `noise_multiplier` among them: see `DPOptimizer`.

    Privacy:
        Both halves of a record are clipped together and noised together: one Gaussian
        release with L2 sensitivity C. The sample depends on earlier releases alone, the
        KL term on no data.

    Deviations from the paper:
        The KL term is added after the noise, not to each record before the clip (which
        would be legal, and would bias it).

    Example:
        >>> optimizer = DPBayesByBackprop(l2_norm_clip=1.0, noise_multiplier=1.1)
        >>> optimizer.query.views
        2
    """

    def __init__(
        self,
        learning_rate=0.05,
        *,
        prior_stddev=1.0,
        rho_init=-4.0,
        train_size: int | None = None,
        **kwargs,
    ):
        super().__init__(
            learning_rate,
            # All four slots are filled here, so that none comes with `kwargs`.
            query=posterior_queries.ReparametrizedQuery(),
            mechanism=None,
            filter=None,
            rule=posterior_rules.VariationalSGD(prior_stddev, rho_init, train_size),
            noise_correction=None,
            **kwargs,
        )

    def posterior_scale(self):
        """Returns the posterior's standard deviations, a tensor a variable."""
        return [
            keras.ops.softplus(slots["rho"].value) for slots in self._state.per_variable
        ]

    def get_config(self):
        """Returns the configuration."""
        config = super().get_config()
        config.update(
            prior_stddev=self.rule.prior_stddev,
            rho_init=self.rule.rho_init,
            train_size=self.rule.train_size,
        )
        return config

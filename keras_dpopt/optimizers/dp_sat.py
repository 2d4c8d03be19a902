"""DP-SAT."""

import keras

from keras_dpopt import ascent_queries, update_rules
from keras_dpopt.dp_optimizer import DPOptimizer


@keras.saving.register_keras_serializable(package="keras_dpopt")
class DPSAT(DPOptimizer):
    """Sharpness-aware training at the privacy cost of DP-SGD.

    Park, Kim, Choi and Lee, "Differentially Private Sharpness-Aware Training" (ICML
    2023): the ascent goes along the previous privatized gradient, which is public.

        e_t = rho * g_{t-1} / ||g_{t-1}||,    e_0 = 0
        g_t = (1/B) * (sum_i clip(grad l_i(theta_t + e_t), C) + sigma*C*z_t)
        theta_{t+1} = theta_t - lr*g_t            (with momentum: as `DPSGD`)

    With direction="last_update" e_t goes along theta_{t-1} - theta_t: their
    DPSATMomentum.

    Args:
        learning_rate: A float, a schedule or a callable. Defaults to 0.01.
        rho: Length of the ascent, non-negative; 0 is `DPSGD`. Defaults to 0.01. (The
            authors' code: 0.5 in the class, 0.01 to 0.1 in its examples.)
        direction: "last_gradient" (the default) or "last_update".
        momentum: mu in [0, 1). Defaults to 0.9, as the authors' base optimizer.
        nesterov: Whether to use Nesterov momentum.
        **kwargs: The arguments of every private optimizer, `l2_norm_clip` and
            `noise_multiplier` among them: see `DPOptimizer`.

    Privacy:
        e_t depends on earlier releases alone, so each step is one Gaussian release with
        L2 sensitivity C, as in `DPSGD`.

    Deviations from the paper:
        The weights are raised once for a logical batch and never moved for it. The
        authors' code raises them at each physical batch and restores once, so that with
        two physical batches a step they drift. Momentum is Keras' (the learning rate
        inside the velocity).

    Example:
        >>> optimizer = DPSAT(l2_norm_clip=0.1, noise_multiplier=1.1)
        >>> optimizer.get_config()["rho"]
        0.01
    """

    def __init__(
        self,
        learning_rate=0.01,
        *,
        rho=0.01,
        direction="last_gradient",
        momentum=0.9,
        nesterov=False,
        **kwargs,
    ):
        super().__init__(
            learning_rate,
            # All four slots are filled here, so that none comes with `kwargs`.
            query=ascent_queries.AscentQuery(rho, direction),
            mechanism=None,
            filter=None,
            rule=update_rules.SGD(momentum, nesterov),
            noise_correction=None,
            **kwargs,
        )

    def get_config(self):
        """Returns the configuration."""
        config = super().get_config()
        config.update(
            rho=self.query.rho,
            direction=self.query.direction,
            momentum=self.rule.momentum,
            nesterov=self.rule.nesterov,
        )
        return config

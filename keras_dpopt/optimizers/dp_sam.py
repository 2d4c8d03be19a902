"""DP-SAM."""

import keras

from keras_dpopt import ascent_queries, update_rules
from keras_dpopt.dp_optimizer import DPOptimizer


@keras.saving.register_keras_serializable(package="keras_dpopt")
class DPSAM(DPOptimizer):
    """Sharpness-aware minimization by two private gradients a step: a baseline.

    Foret et al., "Sharpness-Aware Minimization" (ICLR 2021), equations 2 and 3, with
    both gradients privatized, as Park et al. (ICML 2023) compare DP-SAT with:

        p_t = (1/B) * (sum_i clip(grad l_i(theta_t), C) + sigma*C*z_t)
        e_t = rho * p_t / ||p_t||
        g_t = (1/B) * (sum_i clip(grad l_i(theta_t + e_t), C) + sigma*C*z'_t)
        theta_{t+1} = theta_t - lr*g_t            (with momentum: as `DPSGD`)

    Args:
        learning_rate: A float, a schedule or a callable. Defaults to 0.01.
        rho: Length of the ascent, positive. Defaults to 0.05.
        momentum: mu in [0, 1). Defaults to 0.9.
        nesterov: Whether to use Nesterov momentum.
        **kwargs: The arguments of every private optimizer, `l2_norm_clip` and
            `noise_multiplier` among them: see `DPOptimizer`.

    Privacy:
        Each step makes two Gaussian releases on the same batch, each with L2
        sensitivity C: together one with the noise multiplier sigma/sqrt(2), which is
        what the ledger accounts. Calibrate with
        `keras_dpopt.noise_multiplier(..., optimizer=make)`.

    Deviations from the papers:
        Momentum is Keras' (the learning rate inside the velocity).

    Example:
        >>> optimizer = DPSAM(l2_norm_clip=1.0, noise_multiplier=1.1)
        >>> optimizer.noise_multipliers()
        (1.1, 1.1)
    """

    def __init__(
        self, learning_rate=0.01, *, rho=0.05, momentum=0.9, nesterov=False, **kwargs
    ):
        super().__init__(
            learning_rate,
            # All four slots are filled here, so that none comes with `kwargs`.
            query=ascent_queries.DoubleQuery(rho),
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
            momentum=self.rule.momentum,
            nesterov=self.rule.nesterov,
        )
        return config

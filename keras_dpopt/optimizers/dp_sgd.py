"""DP-SGD."""

import keras

from keras_dpopt import update_rules
from keras_dpopt.dp_optimizer import DPOptimizer


@keras.saving.register_keras_serializable(package="keras_dpopt")
class DPSGD(DPOptimizer):
    """Differentially private stochastic gradient descent.

    Abadi et al., "Deep Learning with Differential Privacy" (CCS 2016), Algorithm 1:

        g_t = (1/B) * (sum_i clip(grad l_i(theta_t), C) + sigma*C*z_t)
        theta_{t+1} = theta_t - lr*g_t

    With `momentum` mu, as Keras' `SGD`:

        v_t = mu*v_{t-1} - lr*g_t,    theta_{t+1} = theta_t + v_t
        (Nesterov: theta_{t+1} = theta_t + mu*v_t - lr*g_t)

    Args:
        learning_rate: A float, a schedule or a callable. Defaults to 0.01.
        momentum: mu in [0, 1). Defaults to 0.
        nesterov: Whether to use Nesterov momentum.
        **kwargs: The arguments of every private optimizer, `l2_norm_clip` and
            `noise_multiplier` among them: see `DPOptimizer`.

    Privacy:
        Each step releases g_t, a Gaussian release of the sum of clipped gradients with
        L2 sensitivity C under the removal of one record's contribution. Momentum is
        post-processing.

    Deviations from the paper:
        The sum is divided by the constant expected batch size B, never by the realised
        one.

    Example:
        >>> optimizer = DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.1, momentum=0.9)
        >>> optimizer.get_config()["momentum"]
        0.9
    """

    def __init__(self, learning_rate=0.01, *, momentum=0.0, nesterov=False, **kwargs):
        super().__init__(
            learning_rate,
            # All four slots are filled here, so that none comes with `kwargs`.
            query=None,
            mechanism=None,
            filter=None,
            rule=update_rules.SGD(momentum, nesterov),
            noise_correction=None,
            **kwargs,
        )

    def get_config(self):
        """Returns the configuration."""
        config = super().get_config()
        config.update(momentum=self.rule.momentum, nesterov=self.rule.nesterov)
        return config

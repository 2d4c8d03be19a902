"""DP-RMSprop."""

import keras

from keras_dpopt import update_rules
from keras_dpopt.dp_optimizer import DPOptimizer


@keras.saving.register_keras_serializable(package="keras_dpopt")
class DPRMSprop(DPOptimizer):
    """RMSprop on privatized gradients.

    Zhou, Chen, Hong, Wu and Banerjee, "Private Stochastic Non-Convex Optimization:
    Adaptive Algorithms and Tighter Generalization Bounds" (2020), DP RMSProp, on the
    g_t of `DPSGD`:

        v_t = rho*v_{t-1} + (1-rho)*g_t^2
        theta_{t+1} = theta_t - lr * g_t / (sqrt(v_t) + epsilon)          (the paper's)
        theta_{t+1} = theta_t - lr * g_t / sqrt(v_t + epsilon)            (Keras')

    Args:
        learning_rate: A float, a schedule or a callable. Defaults to 0.001.
        rho: In [0, 1). Defaults to 0.9. There is no bias correction: the first step of
            a coordinate is lr/sqrt(1-rho).
        epsilon: Non-negative; not the privacy epsilon. Defaults to 1e-7.
        epsilon_inside_root: `True`, the default, is Keras' form, `False` the paper's.
        **kwargs: The arguments of every private optimizer, `l2_norm_clip` and
            `noise_multiplier` among them: see `DPOptimizer`.

    Privacy:
        As `DPSGD`; the rest is post-processing.

    Deviations from the paper:
        The place of epsilon, unless `epsilon_inside_root=False`.

    Example:
        >>> optimizer = DPRMSprop(l2_norm_clip=1.0, noise_multiplier=1.1)
        >>> optimizer.get_config()["rho"]
        0.9
    """

    def __init__(
        self,
        learning_rate=0.001,
        *,
        rho=0.9,
        epsilon=1e-7,
        epsilon_inside_root=True,
        **kwargs,
    ):
        super().__init__(
            learning_rate,
            # All four slots are filled here, so that none comes with `kwargs`.
            query=None,
            mechanism=None,
            filter=None,
            rule=update_rules.RMSprop(rho, epsilon, epsilon_inside_root),
            noise_correction=None,
            **kwargs,
        )

    def get_config(self):
        """Returns the configuration."""
        config = super().get_config()
        config.update(
            rho=self.rule.rho,
            epsilon=self.rule.epsilon,
            epsilon_inside_root=self.rule.epsilon_inside_root,
        )
        return config

"""DP-Adam."""

import keras

from keras_dpopt import update_rules
from keras_dpopt.dp_optimizer import DPOptimizer


@keras.saving.register_keras_serializable(package="keras_dpopt")
class DPAdam(DPOptimizer):
    """Adam on privatized gradients.

    Kingma and Ba, "Adam" (ICLR 2015), Algorithm 1, on the g_t of `DPSGD`:

        g_t = (1/B) * (sum_i clip(grad l_i(theta_t), C) + sigma*C*z_t)
        m_t = b1*m_{t-1} + (1-b1)*g_t         m_hat = m_t / (1 - b1^k)
        v_t = b2*v_{t-1} + (1-b2)*g_t^2       v_hat = v_t / (1 - b2^k)
        theta_{t+1} = theta_t - lr * m_hat / (sqrt(v_hat) + epsilon),   k = t + 1

    The noise is part of v_hat: E[v_hat] = E[mean gradient^2] + (sigma*C/B)^2. Where it
    dominates, a step is about lr*m_hat*B/(sigma*C), that of DP-SGD with another rate.

    Args:
        learning_rate: A float, a schedule or a callable. Defaults to 0.001.
        beta_1: b1 in [0, 1). Defaults to 0.9.
        beta_2: b2 in [0, 1). Defaults to 0.999.
        epsilon: Added to the root of v_hat, non-negative; not the privacy epsilon.
            Defaults to 1e-8.
        **kwargs: The arguments of every private optimizer, `l2_norm_clip` and
            `noise_multiplier` among them: see `DPOptimizer`.

    Privacy:
        As `DPSGD`: each step releases g_t with L2 sensitivity C under the removal of
        one record's contribution; the rest is post-processing.

    Deviations:
        Keras' Adam adds its epsilon to the root of v_t before the bias correction; here
        it is added after, as in the paper.

    Example:
        >>> optimizer = DPAdam(l2_norm_clip=1.0, noise_multiplier=1.1)
        >>> optimizer.get_config()["beta_2"]
        0.999
    """

    def __init__(
        self, learning_rate=0.001, *, beta_1=0.9, beta_2=0.999, epsilon=1e-8, **kwargs
    ):
        super().__init__(
            learning_rate,
            # All four slots are filled here, so that none comes with `kwargs`.
            query=None,
            mechanism=None,
            filter=None,
            rule=update_rules.Adam(beta_1, beta_2, epsilon),
            noise_correction=None,
            **kwargs,
        )

    def get_config(self):
        """Returns the configuration."""
        config = super().get_config()
        config.update(
            beta_1=self.rule.beta_1, beta_2=self.rule.beta_2, epsilon=self.rule.epsilon
        )
        return config

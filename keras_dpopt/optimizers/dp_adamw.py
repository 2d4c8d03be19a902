"""DP-AdamW."""

import keras

from keras_dpopt import update_rules
from keras_dpopt.dp_optimizer import DPOptimizer


@keras.saving.register_keras_serializable(package="keras_dpopt")
class DPAdamW(DPOptimizer):
    """Adam with decoupled weight decay on privatized gradients.

    "DP-AdamW: Investigating Decoupled Weight Decay and Bias Correction in Private Deep
    Learning"; Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (ICLR
    2019), Algorithm 2, on the g_t of `DPSGD`:

        theta_{t+1} = (1 - lr*lambda)*theta_t - lr * m_hat / (sqrt(v_hat) + epsilon)

    with m_hat and v_hat of `DPAdam`.

    Args:
        learning_rate: A float, a schedule or a callable. Defaults to 0.001.
        weight_decay: lambda, non-negative. Defaults to 0.01, as the authors'.
        beta_1: b1 in [0, 1). Defaults to 0.9.
        beta_2: b2 in [0, 1). Defaults to 0.999.
        epsilon: Added to the root of v_hat, non-negative; not the privacy epsilon.
            Defaults to 1e-8.
        **kwargs: The arguments of every private optimizer, `l2_norm_clip` and
            `noise_multiplier` among them: see `DPOptimizer`.

    Privacy:
        As `DPSGD`. The decay acts on the weights alone and depends on no data.

    Deviations:
        Keras' AdamW has its epsilon before the bias correction (see `DPAdam`) and a
        default `weight_decay` of 0.004.

    Example:
        >>> optimizer = DPAdamW(l2_norm_clip=1.0, noise_multiplier=1.1)
        >>> optimizer.get_config()["weight_decay"]
        0.01
    """

    def __init__(
        self,
        learning_rate=0.001,
        *,
        weight_decay=0.01,
        beta_1=0.9,
        beta_2=0.999,
        epsilon=1e-8,
        **kwargs,
    ):
        super().__init__(
            learning_rate,
            # All four slots are filled here, so that none comes with `kwargs`.
            query=None,
            mechanism=None,
            filter=None,
            rule=update_rules.Adam(beta_1, beta_2, epsilon),
            noise_correction=None,
            weight_decay=weight_decay,
            **kwargs,
        )

    def get_config(self):
        """Returns the configuration."""
        config = super().get_config()
        config.update(
            beta_1=self.rule.beta_1, beta_2=self.rule.beta_2, epsilon=self.rule.epsilon
        )
        return config

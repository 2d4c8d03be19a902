"""DP-AdamBC."""

import keras

from keras_dpopt import update_rules
from keras_dpopt.dp_optimizer import DPOptimizer


@keras.saving.register_keras_serializable(package="keras_dpopt")
class DPAdamBC(DPOptimizer):
    """Adam with the variance of the privacy noise taken out of the second moment.

    Tang, Shpilevskiy and Lecuyer, "DP-AdamBC: Your DP-Adam Is Actually DP-SGD (Unless
    You Apply Bias Correction)" (AAAI 2024), Algorithm 1, with m_hat, v_hat of `DPAdam`:

        Phi         = (sigma*C/B)^2
        theta_{t+1} = theta_t - lr * m_hat / sqrt(max(v_hat - Phi, variance_floor))

    Phi is the noise's part of E[v_hat]. There is no epsilon outside of the root.

    Args:
        learning_rate: A float, a schedule or a callable. Defaults to 0.001. A
            coordinate at the floor moves by lr*|m_hat|/sqrt(variance_floor), so the two
            want to be tuned together.
        variance_floor: gamma', inside the root, positive. Defaults to 1e-8, as the
            authors' code. Under pure noise, v_hat - Phi has standard deviation
            sqrt(2*(1-b2)/(1+b2))*Phi = 0.03*Phi (b2 = 0.999): a lower floor steadies
            nothing.
        correction_start: Number of first steps that do not subtract Phi. Defaults to 0.
            At the first step v_hat is the square of one noisy gradient, and 68 % of the
            coordinates of pure noise are at the floor.
        beta_1: b1 in [0, 1). Defaults to 0.9.
        beta_2: b2 in [0, 1). Defaults to 0.999.
        **kwargs: The arguments of every private optimizer, `l2_norm_clip` and
            `noise_multiplier` among them: see `DPOptimizer`.

    Privacy:
        As `DPSGD`: Phi is public, and the correction is post-processing.

    Deviations from the paper:
        None with constant noise. If C changes (adaptive clipping), Phi is the average
        of the steps' noise variances with the weights of v_hat.

    Example:
        >>> optimizer = DPAdamBC(l2_norm_clip=1.0, noise_multiplier=1.1)
        >>> optimizer.get_config()["variance_floor"]
        1e-08
    """

    def __init__(
        self,
        learning_rate=0.001,
        *,
        variance_floor=1e-8,
        correction_start=0,
        beta_1=0.9,
        beta_2=0.999,
        **kwargs,
    ):
        super().__init__(
            learning_rate,
            # All four slots are filled here, so that none comes with `kwargs`.
            query=None,
            mechanism=None,
            filter=None,
            rule=update_rules.Adam(
                beta_1,
                beta_2,
                epsilon=0.0,
                variance_floor=variance_floor,
                correction_start=correction_start,
            ),
            noise_correction="unfiltered",
            **kwargs,
        )

    def get_config(self):
        """Returns the configuration."""
        config = super().get_config()
        config.update(
            variance_floor=self.rule.variance_floor,
            correction_start=self.rule.correction_start,
            beta_1=self.rule.beta_1,
            beta_2=self.rule.beta_2,
        )
        return config

"""DP-AdamW-BC."""

import keras

from keras_dpopt import update_rules
from keras_dpopt.dp_optimizer import DPOptimizer


@keras.saving.register_keras_serializable(package="keras_dpopt")
class DPAdamWBC(DPOptimizer):
    """`DPAdamBC` with decoupled weight decay.

    "DP-AdamW: Investigating Decoupled Weight Decay and Bias Correction in Private Deep
    Learning", its DP-AdamW-BC, with Phi, m_hat and v_hat of `DPAdamBC`:

        theta_{t+1} = (1 - lr*lambda)*theta_t
                      - lr * m_hat / sqrt(max(v_hat - Phi, variance_floor))

    It is `FiBeR` with kappa = 1, omega = 1 and epsilon = 0.

    Args:
        learning_rate: A float, a schedule or a callable. Defaults to 0.001.
        weight_decay: lambda, non-negative. Defaults to 0.01, as `DPAdamW`.
        variance_floor: As `DPAdamBC`. Defaults to 1e-8; the authors tried 1e-8 and
            5e-8.
        correction_start: As `DPAdamBC`. Defaults to 0.
        beta_1: b1 in [0, 1). Defaults to 0.9.
        beta_2: b2 in [0, 1). Defaults to 0.999.
        **kwargs: The arguments of every private optimizer, `l2_norm_clip` and
            `noise_multiplier` among them: see `DPOptimizer`.

    Privacy:
        As `DPSGD`: correction and decay depend on no data.

    Deviations from the paper:
        As `DPAdamBC`. (The paper finds that the correction lowers the accuracy of
        DP-AdamW on all of its tasks.)

    Example:
        >>> optimizer = DPAdamWBC(l2_norm_clip=1.0, noise_multiplier=1.1)
        >>> optimizer.get_config()["weight_decay"]
        0.01
    """

    def __init__(
        self,
        learning_rate=0.001,
        *,
        weight_decay=0.01,
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
            weight_decay=weight_decay,
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

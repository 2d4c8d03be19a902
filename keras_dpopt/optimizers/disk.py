"""DiSK."""

import keras

from keras_dpopt import filters, queries, update_rules
from keras_dpopt.dp_optimizer import DPOptimizer


@keras.saving.register_keras_serializable(package="keras_dpopt")
class DiSK(DPOptimizer):
    """DiSK: two-point observation and a simplified Kalman filter before a base rule.

    Zhang et al., "DiSK: Differentially Private Optimizer with Simplified Kalman Filter
    for Noise Reduction" (2024), as the paper of `FiBeR` has it in section 3. With
    a = (1-kappa)/(kappa*gamma) and d_{t-1} the last change of the weights (d_{-1} = 0):

        u_i = a*grad l_i(theta_t + gamma*d_{t-1}) + (1-a)*grad l_i(theta_t)
        g_t = (1/B) * (sum_i clip(u_i, C) + sigma*C*z_t)
        f_t = (1-kappa)*f_{t-1} + kappa*g_t,     f_{-1} = 0 or f_0 = g_0
        theta_{t+1} = base rule on f_t: SGD, Adam or AdamW

    With a `noise_correction` it is DiSK-CORR (`FiBeR`'s paper, appendix C.4), with the
    moments of `DPAdam` on f_t and A_state(kappa) = kappa/(2-kappa):

        v_bar = max(v_hat - A_state(kappa)*(sigma*C/B)^2, variance_floor)
        step  = lr * m_hat / (sqrt(v_bar) + epsilon)

    Args:
        learning_rate: A float, a schedule or a callable. Defaults to 0.001.
        kappa: In (0, 1]; 1 is the base optimizer alone. Defaults to 0.7.
        gamma: Look-ahead, positive. Defaults to 0.5.
        filter_init: "zero", or "first_gradient" (the default, as the authors' code):
            the filter's state before the first step.
        base: "sgd", "adam" (the default), or "adamw" (that with `weight_decay` 0.04,
            the authors', unless it is given).
        noise_correction: `None` for DiSK. "filtered" subtracts
            A_state(kappa)*(sigma*C/B)^2, "exact" the variance that the filter leaves at
            this step, "unfiltered" (sigma*C/B)^2. Not with base="sgd".
        variance_floor: epsilon_v of the correction, non-negative. Defaults to 1e-8.
        momentum: Of base="sgd", in [0, 1). Defaults to 0.
        beta_1: Of Adam, in [0, 1). Defaults to 0.9.
        beta_2: Of Adam, in [0, 1). Defaults to 0.999.
        epsilon: Of Adam, outside the root. Defaults to 1e-8.
        weight_decay: lambda, decoupled, non-negative, or `None`.
        **kwargs: The arguments of every private optimizer, `l2_norm_clip` and
            `noise_multiplier` among them: see `DPOptimizer`.

    Privacy:
        The two gradients of a record are combined before the one clip, so g_t is one
        Gaussian release with L2 sensitivity C and the full noise sigma*C.

    Deviations from the paper:
        None in the equations. The authors' code clips the two gradients apart and
        noises one of them, which leaves 0.164 of the noise that its epsilon is for;
        Opacus' divides sigma by sqrt(a^2+(1-a)^2) and swaps kappa with 1-kappa.
        Neither is imitated, so their accuracies are no target.

    Example:
        >>> optimizer = DiSK(l2_norm_clip=1.0, noise_multiplier=1.1)
        >>> round(optimizer.query.weight, 4)  # a
        0.8571
    """

    def __init__(
        self,
        learning_rate=0.001,
        *,
        kappa=0.7,
        gamma=0.5,
        filter_init="first_gradient",
        base="adam",
        noise_correction: str | None = None,
        variance_floor=1e-8,
        momentum=0.0,
        beta_1=0.9,
        beta_2=0.999,
        epsilon=1e-8,
        weight_decay: float | None = None,
        **kwargs,
    ):
        rule, weight_decay = update_rules.make_base(
            base,
            noise_correction=noise_correction,
            variance_floor=variance_floor,
            momentum=momentum,
            beta_1=beta_1,
            beta_2=beta_2,
            epsilon=epsilon,
            weight_decay=weight_decay,
            default_decay=0.04,
        )
        super().__init__(
            learning_rate,
            # All four slots are filled here, so that none comes with `kwargs`.
            query=queries.TwoPointQuery(kappa, gamma),
            mechanism=None,
            filter=filters.EMAFilter(kappa, filter_init),
            rule=rule,
            noise_correction=noise_correction,
            weight_decay=weight_decay,
            **kwargs,
        )
        # Whole, because the rule has only what its base uses.
        self._own = {
            "kappa": kappa,
            "gamma": gamma,
            "filter_init": filter_init,
            "base": base,
            "noise_correction": noise_correction,
            "variance_floor": variance_floor,
            "momentum": momentum,
            "beta_1": beta_1,
            "beta_2": beta_2,
            "epsilon": epsilon,
        }

    def get_config(self):
        """Returns the configuration."""
        return {**super().get_config(), **self._own}

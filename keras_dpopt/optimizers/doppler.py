"""DOPPLER."""

import keras

from keras_dpopt import arguments, filters, update_rules
from keras_dpopt.dp_optimizer import DPOptimizer


@keras.saving.register_keras_serializable(package="keras_dpopt")
class DOPPLER(DPOptimizer):
    """DOPPLER: a low-pass filter on the privatized gradients before a base rule.

    Zhang et al., "DOPPLER: Differentially Private Optimizers with Low-pass Filter for
    Privacy Noise Reduction" (NeurIPS 2024), on the g_t of `DPSGD`:

        m_t = - sum_{j>=1} a_j m_{t-j} + sum_{j>=0} b_j g_{t-j}
        c_t = the same recursion on g = 1 from t = 0 on;       f_t = m_t / c_t
        theta_{t+1} = (1 - lr*lambda)*theta_t - lr*f_t                          ("sgd")
        theta_{t+1} = (1 - lr*lambda)*theta_t - lr*m_hat/(sqrt(v_hat)+epsilon)  ("adam")

    m_hat is Adam's, of f_t. v_hat is of f_t as well, or with second_moment="raw" of the
    unfiltered g_t: the adaptive form of the authors' code.

    Args:
        learning_rate: A float, a schedule or a callable. Defaults to 0.01.
        a: (a_1, ..), without the leading 1, so scipy.signal's `a[1:]` where it gives
            `a[0] == 1`. All poles must be within the unit circle. Defaults to (-0.9,).
        b: (b_0, b_1, ..). Defaults to (0.05, 0.05).
        base: "sgd" (the default), "adam" or "adamw" ("adam" with `weight_decay` 0.01
            unless it is given).
        second_moment: "filtered" (the default) or "raw"; for Adam.
        noise_correction: `None`, the default, or which noise variance is taken out of
            v_hat: "filtered" or "exact" where it is of f_t, "unfiltered" (all of
            (sigma*C/B)^2) where it is of g_t. Not with base="sgd".
        variance_floor: Inside the root, of the correction. Defaults to 1e-8.
        momentum: Of base="sgd", in [0, 1). Defaults to 0.
        beta_1: Of Adam, in [0, 1). Defaults to 0.9.
        beta_2: Of Adam, in [0, 1). Defaults to 0.999.
        epsilon: Of Adam, outside the root. Defaults to 1e-8.
        weight_decay: lambda, decoupled, non-negative, or `None`.
        **kwargs: The arguments of every private optimizer, `l2_norm_clip` and
            `noise_multiplier` among them: see `DPOptimizer`.

    Privacy:
        As `DPSGD`; the filter is post-processing. It leaves the fraction
        `filter.steady_gain` of the noise variance.

    Deviations from the paper:
        The adaptive form has Adam's epsilon outside of the root where the authors' code
        bounds the root by 1e-5 from below, and Adam's m_hat of f_t in the numerator
        (`beta_1=0` gives theirs). The default filter is of first order with gain 0.05;
        their default is `scipy.signal.cheby1(2, 10, 0.02)`, to eight digits.

    Example:
        >>> import scipy.signal
        >>> b, a = scipy.signal.butter(2, 0.1)
        >>> optimizer = DOPPLER(
        ...     a=a[1:], b=b, l2_norm_clip=1.0, noise_multiplier=1.1)
        >>> round(optimizer.filter.steady_gain, 4)
        0.1097
    """

    def __init__(
        self,
        learning_rate=0.01,
        *,
        a=(-0.9,),
        b=(0.05, 0.05),
        base="sgd",
        second_moment="filtered",
        noise_correction: str | None = None,
        variance_floor=1e-8,
        momentum=0.0,
        beta_1=0.9,
        beta_2=0.999,
        epsilon=1e-8,
        weight_decay: float | None = None,
        **kwargs,
    ):
        arguments.check_choice("second_moment", second_moment, ("filtered", "raw"))
        arguments.check_choice(
            "noise_correction",
            noise_correction,
            ("filtered", "exact", "unfiltered", None),
        )
        rule, weight_decay = update_rules.make_base(
            base,
            noise_correction=noise_correction,
            variance_floor=variance_floor,
            momentum=momentum,
            beta_1=beta_1,
            beta_2=beta_2,
            epsilon=epsilon,
            weight_decay=weight_decay,
            default_decay=0.01,
            second_moment=second_moment,
        )
        of_raw = noise_correction == "unfiltered"
        if noise_correction is not None and of_raw != (second_moment == "raw"):
            raise ValueError(
                f"noise_correction={noise_correction!r} is not the variance of the "
                f"noise in the second moment of the {second_moment} gradient. Use "
                "'filtered' or 'exact' for the filtered one, 'unfiltered' for the raw."
            )
        super().__init__(
            learning_rate,
            # All four slots are filled here, so that none comes with `kwargs`.
            query=None,
            mechanism=None,
            filter=filters.LowPassFilter(a, b),
            rule=rule,
            noise_correction=noise_correction,
            weight_decay=weight_decay,
            **kwargs,
        )
        # Whole, because the rule has only what its base uses.
        self._own = {
            "a": list(self.filter.a),
            "b": list(self.filter.b),
            "base": base,
            "second_moment": second_moment,
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

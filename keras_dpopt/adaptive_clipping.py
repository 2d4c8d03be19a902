"""Adaptive clipping: the clipping norm follows a quantile of the records' norms.

The style and its arithmetic; `adaptive_mechanism.py` makes the release.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dpopt import arguments, clipping, validation
from keras_dpopt.clipping_styles import (
    MOST_CLIP,
    ClippingStyle,
    FlatClipping,
    joint_bound,
    set_fields,
)

# See `arguments.check_clip`.
_LEAST_CLIP = 1e-20


@keras.saving.register_keras_serializable("keras_dpopt")
@dataclasses.dataclass(frozen=True)
class AdaptiveClipping(ClippingStyle):
    """Flat clipping to a C that follows a quantile of the records' norms, privately.

    Andrew et al., "Differentially Private Learning with Adaptive Clipping" (NeurIPS
    2021), Algorithm 1: each step also counts the records of norm n_i <= C, with noise,
    and moves C towards the quantile q of the norms:

        b_i = 1 if n_i <= C, else 0
        b~  = 1/2 + (1/B) * (sum_i (b_i - 1/2) + N(0, s_b^2))
        C  <- C * exp(-eta_C * (b~ - q))

    The new C is that of the next step: this one clips and noises with the old one. The
    optimizer's `l2_norm_clip` is the first C. The noise multiplier of the gradient is
    raised, so that gradient and count together cost what z = `noise_multiplier` costs
    (Theorem 1):

        z_D = (z^-2 - (2 s_b)^-2)^(-1/2),    z < 2 s_b

    Args:
        target_quantile: q in (0, 1), the part of the records that C is to leave whole.
            Defaults to 0.5, the median.
        learning_rate: eta_C > 0. Defaults to 0.2.
        count_noise_stddev: s_b > 0, the standard deviation of the noise on the count;
            0 only without any privacy, at z = 0. `None` takes B/20.

    Raises:
        ValueError: if an argument is out of its range.

    Privacy:
        Removing a record moves the clipped sum by at most C and the centred count by
        1/2 at the same time. Noise of z_D*C and s_b makes the two one Gaussian release
        of noise multiplier z. The ledger gets the pair (z_D, 2 s_b). C is a function of
        released counts, so it is as public as they are. A record with an entry that is
        not finite counts as one above C.

    Deviations from the paper:
        The expected batch size B stands for the paper's number of samples m: it is
        constant, and the realised one would be another release. b~ may leave [0, 1] by
        its noise, as in the paper; TF Privacy cuts it there. C stays within 1e-20 and
        1e15, where float32 can square the noise and the update. Both are
        post-processing.

    Example:
        >>> style = AdaptiveClipping(count_noise_stddev=10.0)
        >>> z_d, count = style.noise_multipliers(1.1, expected_batch_size=256)
        >>> print(f"{z_d:.4f} {count}")
        1.1017 20.0
    """

    name = "adaptive"

    target_quantile: float = 0.5
    learning_rate: float = 0.2
    count_noise_stddev: float | None = None

    def __post_init__(self):
        stddev = self.count_noise_stddev
        if stddev is not None:
            stddev = validation.check_non_negative("count_noise_stddev", stddev)
        set_fields(
            self,
            target_quantile=arguments.check_fraction(
                "target_quantile", self.target_quantile, above_zero=True, below_one=True
            ),
            learning_rate=validation.check_positive(
                "learning_rate", self.learning_rate
            ),
            count_noise_stddev=stddev,
        )

    def check(self, l2_norm_clip, noise_multiplier):
        """Raises where C or z is out of range, as far as that is known without B."""
        super().check(l2_norm_clip, noise_multiplier)
        if self.count_noise_stddev is not None:
            self.noise_multipliers(noise_multiplier, None)

    def clip_and_count(
        self, record: Sequence[Any], l2_norm_clip: Any
    ) -> tuple[tuple[tf.Tensor, ...], tf.Tensor]:
        """Clips one record, and tells on which side of C its norm is.

        Returns:
            The record clipped to C, and b_i - 1/2, float32.
        """
        norm = clipping.norm_upper_bound(record)
        limit = clipping.exact_limit(l2_norm_clip)
        factor = clipping.abadi_factor(norm.bound, limit)
        # A comparison with NaN is false, and so is one of infinity with C.
        below = norm.bound <= limit
        centred = tf.where(below, tf.constant(0.5), tf.constant(-0.5))
        return tuple(clipping.apply_factor(norm, factor)), centred

    def factors_and_counts(
        self, bounds: Any, l2_norm_clip: Any
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """As `clip_and_count`, from bounds of the parts' norms, `[m, parts]`.

        Returns:
            The factors of all parts, float64 `[m, parts]`, and b_i - 1/2, `[m]`.
        """
        joint = joint_bound(bounds)
        limit = clipping.exact_limit(l2_norm_clip)
        factors = FlatClipping().factors(bounds, limit, None)
        return factors, tf.where(joint <= limit, 0.5, -0.5)

    def count_stddev(self, expected_batch_size: Any) -> Any:
        """Returns s_b, for a number or a tensor B."""
        if self.count_noise_stddev is not None:
            return self.count_noise_stddev
        return expected_batch_size / 20

    def noise_multipliers(
        self, noise_multiplier: float, expected_batch_size: int | float | None
    ) -> tuple[float, float]:
        """Returns the pair (z_D, 2 s_b) that costs what z costs, on the host.

        Args:
            noise_multiplier: z >= 0; z_D is 0 where it is 0.
            expected_batch_size: B, or `None` where s_b is given.

        Raises:
            ValueError: if neither B nor s_b is known, or z is not below 2 s_b.
        """
        if self.count_noise_stddev is None and expected_batch_size is None:
            raise ValueError(
                "Adaptive clipping takes B/20 for the noise on its count, and no batch "
                "size B is known yet. Give the optimizer an expected_batch_size, or "
                "AdaptiveClipping a count_noise_stddev."
            )
        count = 2.0 * float(self.count_stddev(expected_batch_size))
        if noise_multiplier == 0:
            return 0.0, count
        if not noise_multiplier < count:
            raise ValueError(
                f"The count of adaptive clipping has noise multiplier {count:g}, and "
                f"alone would cost more than noise_multiplier={noise_multiplier:g} "
                "allows for both. Give AdaptiveClipping a larger count_noise_stddev "
                f"(above {noise_multiplier / 2:g}; by default it is the batch size / "
                "20), or take a smaller noise_multiplier."
            )
        return gradient_noise_multiplier(noise_multiplier, count), count

    def next_clip(self, clip: Any, noised_count: Any, expected_batch_size: Any) -> Any:
        """Returns the C of the next step, from the noised sum of b_i - 1/2."""
        fraction = 0.5 + noised_count / expected_batch_size
        factor = tf.exp(-self.learning_rate * (fraction - self.target_quantile))
        return tf.clip_by_value(clip * factor, _LEAST_CLIP, MOST_CLIP)


def gradient_noise_multiplier(noise_multiplier: float, count_multiplier: Any) -> Any:
    """Returns z_D = (z^-2 - m^-2)^(-1/2), the rest of z beside a count of m = 2 s_b.

    Args:
        noise_multiplier: z > 0, below m.
        count_multiplier: m, a number or a float64 tensor.

    Returns:
        z_D, of the type of m. NaN or infinity where m is a tensor that is not above z.
    """
    # 1 - ratio^2 as a product keeps its digits where z is close to m.
    ratio = noise_multiplier / count_multiplier
    return noise_multiplier * ((1.0 - ratio) * (1.0 + ratio)) ** -0.5

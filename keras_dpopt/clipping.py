"""Clipping of one record: a list of tensors whose joint L2 norm has to be bounded.

The guarantee needs norm(clipped record) <= C in exact arithmetic, whatever the record
holds, because the noise is sized by C. So a record is scaled by an upper bound of its
norm and never by the computed value, and everything that may be wrong by rounding is
rounded to the safe side.

Clipping is three steps: `norm_upper_bound` measures the record, a function of the norm
gives the factor (`abadi_factor`, `automatic_factor`), and `apply_factor` scales by it.
`clipping_styles.py` puts them together in the ways that an optimizer offers.

All functions are for one record and hold only operations that `tf.vectorized_map`
converts; they give the same bound, to rounding, eagerly, in graphs and under XLA.
"""

import dataclasses
import numbers
from collections.abc import Sequence

import tensorflow as tf

_UNIT_ROUNDOFF = 2.0**-24  # Largest relative error of one float32 operation.
_TINY = 2.0**-126  # Smallest normal float32; below it, hardware may flush to zero.
_LEAST_CLIP = 1e-20  # Far below it, float32 factors would leave the normal range.
_LONGEST_CHAIN = 256  # Most terms that are added up in float32.
# From a record's largest entry on: the scale. Ordinary gradients have scale 1.
_SCALES = (
    (2.0**-90, 2.0**60),
    (2.0**-30, 1.0),
    (2.0**30, 2.0**-60),
    (2.0**90, 2.0**-120),
)
_LARGEST_SCALE = 2.0**120


@dataclasses.dataclass(frozen=True)
class RecordNorm:
    """One record, and an upper bound of its norm.

    Attributes:
        values: The record's tensors, in float32.
        scaled: `values * scale`, the largest entry between 2^-30 and 2^30 (below it
            only where all entries are below 2^-126).
        scale: Float32 scalar, a power of two, so that scaling does not round.
        bound: Float64 scalar >= the exact joint L2 norm of `values`, above it by less
            than 2e-5 of it plus 2**-126 * sqrt(number of entries). Not finite exactly
            where the record has an entry that is not finite.
    """

    values: tuple[tf.Tensor, ...]
    scaled: tuple[tf.Tensor, ...]
    scale: tf.Tensor
    bound: tf.Tensor


def norm_upper_bound(record: Sequence[tf.Tensor]) -> RecordNorm:
    """Bounds the joint L2 norm of a record from above.

    With a power of two s that brings max|x| to between 2^-30 and 2^30, the bound is

        n = (1 + (L/2 + 8) u) * sqrt(sum (s x)^2) / s + 2^-126 sqrt(d),    u = 2^-24,

    where d is the number of entries and L <= 256 the most terms that are summed up in
    float32. The scale keeps squares of 1e30 from overflowing and squares of 1e-30 from
    vanishing. A sum of L terms of one sign has a relative error of at most (L-1) u in
    ANY order of summation (Higham, "Accuracy and Stability of Numerical Algorithms",
    section 4.2), so the proof does not lean on what a compiler makes of the sum. The
    sums of L are then added up in float64, whose error at 2^31 terms is below 4 u;
    the change of type also keeps XLA from merging the two sums into one long float32
    chain. The square root halves these errors, and 8 u cover the other operations,
    those of `apply_factor` included. The last term stands for entries below the normal
    range, which some hardware reads as 0.

    Args:
        record: Tensors of any static shapes, at least one; float16 and bfloat16 are
            computed in float32, and so is float64 (what counts is the rounded value).

    Returns:
        The record in float32 with the bound of its norm.

    Raises:
        ValueError: `record` has no tensors.

    Privacy:
        A bound below the true norm would let a crafted record through at more than C.

    Example:
        >>> norm = norm_upper_bound([tf.constant([3e30, 0.0]), tf.constant(4e30)])
        >>> print(f"{norm.bound:.3g}")
        5e+30
    """
    values = tuple(tf.cast(tf.convert_to_tensor(value), tf.float32) for value in record)
    if not values:
        raise ValueError(
            "A record needs at least one tensor. Is every variable of the model frozen?"
        )
    # Maximum and minimum, because tf.abs would write a copy of the record.
    extremes = [tf.reduce_max(value) for value in values]
    extremes += [-tf.reduce_min(value) for value in values]
    # The zero is for tensors without entries, whose maximum is -inf. A NaN that gets
    # lost in a maximum comes back in the sum.
    scale = _scale(tf.reduce_max(tf.stack([*extremes, 0.0])))
    scaled = tuple(value * scale for value in values)
    entries = tf.add_n([tf.size(value, tf.int64) for value in values])
    root = tf.sqrt(tf.add_n([_sum_of_squares(value) for value in scaled]))
    slack = 1.0 + (_LONGEST_CHAIN / 2 + 8) * _UNIT_ROUNDOFF
    lost = _TINY * tf.sqrt(tf.cast(entries, tf.float64))
    bound = root * slack / tf.cast(scale, tf.float64) + lost
    return RecordNorm(values, scaled, scale, bound)


def exact_limit(l2_norm_clip: float | tf.Tensor) -> tf.Tensor:
    """Returns C as a float64 scalar, without rounding it.

    Args:
        l2_norm_clip: C, a number or a scalar tensor.

    Raises:
        ValueError: `l2_norm_clip` is a Python number below 1e-20 or NaN.
    """
    if not isinstance(l2_norm_clip, numbers.Real):
        return tf.cast(l2_norm_clip, tf.float64)
    if not float(l2_norm_clip) >= _LEAST_CLIP:
        raise ValueError(
            f"`l2_norm_clip` must be at least {_LEAST_CLIP}, not {l2_norm_clip}. "
            "Pass the largest L2 norm that one record may contribute, or infinity "
            "for no clipping."
        )
    # tf.cast would take a Python number through float32, and float32(0.1) is larger
    # than 0.1.
    return tf.constant(float(l2_norm_clip), tf.float64)


def abadi_factor(bound: tf.Tensor, l2_norm_clip: float | tf.Tensor) -> tf.Tensor:
    """Returns the clipping factor min(1, C/n) (Abadi et al., CCS 2016).

    Args:
        bound: Float64 tensor of any shape, the upper bound n of the records' norms.
        l2_norm_clip: C, a number or a scalar tensor, at least 1e-20; infinity stands
            for no clipping.

    Returns:
        Float64 tensor in the shape of `bound`, in [0, 1]; 0 where n is not finite.

    Raises:
        ValueError: `l2_norm_clip` is a Python number below 1e-20 or NaN.

    Example:
        >>> abadi_factor(tf.constant([0.5, 4.0, float("inf")], tf.float64), 1.0).numpy()
        array([1.  , 0.25, 0.  ])
    """
    limit = exact_limit(l2_norm_clip)
    # Where n is zero (no entries at all) nothing has to be clipped.
    ratio = tf.where(bound <= limit, tf.ones_like(bound), limit / bound)
    return tf.where(tf.math.is_finite(bound), ratio, tf.zeros_like(bound))


def automatic_factor(
    bound: tf.Tensor, l2_norm_clip: float | tf.Tensor, stability: float
) -> tf.Tensor:
    """Returns the factor C/(n + stability) of AUTO-S (Bu et al., NeurIPS 2023).

    Args:
        bound: Float64 tensor of any shape, the upper bound n of the records' norms.
        l2_norm_clip: C, a number or a scalar tensor, from 1e-20 to 1e15.
        stability: gamma > 0.

    Returns:
        Float64 tensor in the shape of `bound`, at least 0 and at most C/gamma; 0 where
        n is not finite. Its product with n is below C.

    Raises:
        ValueError: `l2_norm_clip` is a Python number below 1e-20 or NaN.

    Example:
        >>> bound = tf.constant([0.0, 1.0, float("inf")], tf.float64)
        >>> automatic_factor(bound, 1.0, stability=0.25).numpy()
        array([4. , 0.8, 0. ])
    """
    factor = exact_limit(l2_norm_clip) / (bound + stability)
    return tf.where(tf.math.is_finite(bound), factor, tf.zeros_like(bound))


def apply_factor(norm: RecordNorm, factor: tf.Tensor) -> list[tf.Tensor]:
    """Scales a record by a factor: 1 keeps every bit of it, 0 removes it.

    Both are selections. Multiplying by 0 would keep NaN and infinity (NaN * 0 = NaN),
    and multiplying by 1 may flush what is below the normal range.

    Args:
        norm: What `norm_upper_bound` returned.
        factor: Float64 scalar >= 0, 0 where `norm.bound` is not finite.

    Returns:
        Float32 tensors in the shapes of the record. Their exact joint norm is at most
        factor * norm.bound, rounding included, for factor * norm.bound >= 1e-20.

    Example:
        >>> norm = norm_upper_bound([tf.constant([float("nan"), 1.0])])
        >>> apply_factor(norm, tf.constant(0.0, tf.float64))[0].numpy()
        array([0., 0.], dtype=float32)
    """
    # Of the scaled entries, so that the factor is in range when theirs is extreme.
    rest = tf.cast(factor / tf.cast(norm.scale, tf.float64), tf.float32)
    unchanged = tf.equal(factor, 1.0)
    # tf.where (SelectV2) does the same and takes three times as long on a CPU.
    # multiply_no_nan selects 0 where its second argument is 0.
    return [
        tf.raw_ops.Select(
            condition=unchanged, x=value, y=tf.math.multiply_no_nan(scaled, rest)
        )
        for value, scaled in zip(norm.values, norm.scaled, strict=True)
    ]


def clip_record(
    record: Sequence[tf.Tensor], l2_norm_clip: float | tf.Tensor
) -> list[tf.Tensor]:
    """Clips a record to the joint L2 norm C.

    clip(x) = x * min(1, C/n), where n is the `norm_upper_bound` of x, at most 2e-5
    of it above the norm of x, so that norm(clip(x)) <= C holds exactly.

    Args:
        record: Tensors of any static shapes, at least one: one example's gradient for
            all trainable variables.
        l2_norm_clip: C, a number or a scalar tensor, at least 1e-20; infinity stands
            for no clipping.

    Returns:
        Float32 tensors in the shapes of the record: the record itself, bit for bit,
        where n <= C, zeros where an entry is infinite or NaN.

    Raises:
        ValueError: `record` is empty or `l2_norm_clip` is a Python number below
            1e-20 or NaN.

    Privacy:
        One record's contribution to the sum of clipped records is at most C in the L2
        norm over all tensors jointly. The float32 sum over records has rounding errors
        of its own.

    Example:
        >>> clipped = clip_record([tf.constant([3.0, 0.0]), tf.constant(4.0)], 1.0)
        >>> print(f"{clipped[0][0]:.4f} {clipped[1]:.4f}")
        0.6000 0.8000
    """
    norm = norm_upper_bound(record)
    return apply_factor(norm, abadi_factor(norm.bound, l2_norm_clip))


def _scale(largest: tf.Tensor) -> tf.Tensor:
    """Returns the scale of a record from the absolute value of its largest entry.

    A table of powers of two: multiplying by them does not round, and a division could
    give a reciprocal below the normal range, which hardware may flush to zero, and so
    make a huge record a zero record. tf.where because tf.bitcast, the other way to a
    power of two, has no converter for tf.vectorized_map.
    """
    scale = tf.constant(_LARGEST_SCALE)
    for least, other in _SCALES:
        scale = tf.where(largest >= least, other, scale)
    return scale


def _sum_of_squares(value: tf.Tensor) -> tf.Tensor:
    """Sums up squares: runs of at most _LONGEST_CHAIN in float32, these in float64."""
    size = value.shape.num_elements()
    # A static size that is prime, or an unknown one, is summed in float64 alone.
    length = _largest_divisor(size) if size else 1
    runs = tf.reduce_sum(tf.square(tf.reshape(value, [-1, length])), axis=1)
    return tf.reduce_sum(tf.cast(runs, tf.float64))


def _largest_divisor(size: int) -> int:
    """Returns the largest divisor of size that is at most _LONGEST_CHAIN."""
    lengths = range(min(size, _LONGEST_CHAIN), 0, -1)
    return next(length for length in lengths if size % length == 0)

"""Clipping styles: what an optimizer's argument `clipping` chooses from.

Every style bounds what one record adds to the sum by the clipping norm C, all tensors
jointly, so that the noise is the same for all of them:

    "flat"       u * min(1, C/n)                          `FlatClipping`
    "automatic"  u * C/(n + gamma)                        `AutomaticClipping`
    "per_layer"  u_l * min(1, C/(sqrt(L) n_l))            `PerLayerClipping`
    "adaptive"   as "flat", with a C that follows         `AdaptiveClipping`, in
                 a quantile of the norms, privately       `adaptive_clipping.py`

n is the `clipping.norm_upper_bound` of the record u, and n_l that of its part in layer
l. A record with an entry that is not finite contributes zero.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import keras
import tensorflow as tf

from keras_dpopt import clipping, validation

MOST_CLIP = 1e15
"""The largest C of the styles but "flat": far above it, squares leave float32."""


@dataclasses.dataclass(frozen=True)
class ClippingStyle:
    """Base class of the styles: frozen values with pure functions.

    Attributes:
        name: The string that stands for the style with its default arguments.
    """

    name: ClassVar[str]

    def clip(
        self, record: Sequence[Any], l2_norm_clip: Any, groups: tuple[int, ...] | None
    ) -> list[tf.Tensor]:
        """Clips one record.

        Args:
            record: Tensors of static shapes, one example's gradient.
            l2_norm_clip: C, a number or a scalar tensor.
            groups: For each tensor of the record, the number of its layer; `None`
                where nobody has told.

        Returns:
            Float32 tensors in the shapes of the record, of a joint exact norm of at
            most C.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not clip by itself. Use "
            "`mechanisms.make`, which chooses the mechanism that can."
        )

    def factors(self, bounds: Any, l2_norm_clip: Any, groups: Any) -> tf.Tensor:
        """Returns what the parts of records are to be multiplied by.

        Args:
            bounds: Float64 `[m, parts]`, upper bounds of the norms of the parts.
            l2_norm_clip: C, a number or a scalar tensor.
            groups: As in `clip`.

        Returns:
            Float64 in the shape of `bounds`, or `[m, 1]`: one factor for all parts. A
            record multiplied by them has an exact norm of at most C; one with a bound
            that is not finite gets zeros.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no factors for norms. Clip whole records."
        )

    def check(self, l2_norm_clip: float, noise_multiplier: float) -> None:
        """Raises where the style cannot serve this C and sigma."""
        del noise_multiplier
        if not l2_norm_clip <= MOST_CLIP:
            raise ValueError(
                f"{type(self).__name__} takes no l2_norm_clip above {MOST_CLIP:g}, and "
                f"it is {l2_norm_clip}. Pass a smaller one, say 1.0, or "
                'clipping="flat", which takes infinity for no clipping.'
            )

    def argument(self) -> Any:
        """Returns the style as an optimizer's configuration has it.

        Returns:
            The name of the style where all arguments have their defaults; otherwise a
            dict for `keras.saving.deserialize_keras_object`.

        Example:
            >>> AutomaticClipping().argument()
            'automatic'
            >>> AutomaticClipping(1e-3).argument()["config"]
            {'stability': 0.001}
        """
        if self == type(self)():
            return self.name
        return keras.saving.serialize_keras_object(self)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "ClippingStyle":
        """Makes the style from what `get_config` returned."""
        return cls(**config)


@keras.saving.register_keras_serializable("keras_dpopt")
@dataclasses.dataclass(frozen=True)
class FlatClipping(ClippingStyle):
    """One clip of the whole record to C, the default.

    Abadi et al., "Deep Learning with Differential Privacy" (CCS 2016), Algorithm 1:

        clip(u) = u * min(1, C/n)

    Privacy:
        The sum of clipped records has L2 sensitivity C under the removal of one record.

    Example:
        >>> style = FlatClipping()
        >>> clipped = style.clip([tf.constant([3.0, 4.0])], 1.0, None)
        >>> print([round(float(x), 3) for x in clipped[0]])
        [0.6, 0.8]
    """

    name = "flat"

    def clip(self, record, l2_norm_clip, groups):
        """See `ClippingStyle.clip`; the layers do not matter."""
        del groups
        return clipping.clip_record(record, l2_norm_clip)

    def factors(self, bounds, l2_norm_clip, groups):
        """See `ClippingStyle.factors`; the layers do not matter."""
        del groups
        joint = joint_bound(bounds)
        return clipping.abadi_factor(joint, l2_norm_clip)[:, tf.newaxis]

    def check(self, l2_norm_clip, noise_multiplier):
        """Takes every C that `arguments.check_clip` takes."""


@keras.saving.register_keras_serializable("keras_dpopt")
@dataclasses.dataclass(frozen=True)
class AutomaticClipping(ClippingStyle):
    """AUTO-S: every record is normalized, so that C has not to be tuned.

    Bu et al., "Automatic Clipping: Differentially Private Deep Learning Made Easier and
    Stronger" (NeurIPS 2023):

        clip(u) = u * C/(n + gamma)

    A short record is made longer: its norm is C*n/(n + gamma), which is below C and
    goes to 0 with n. C scales the gradient and the noise alike; under an update rule
    that is invariant to such a factor (Adam with a tiny epsilon) it has no effect, and
    otherwise it can be taken for a part of the learning rate.

    Args:
        stability: gamma > 0: the norm at which a record is scaled to half of C.
            Defaults to 0.01, as in the paper.

    Raises:
        ValueError: if `stability` is not positive and finite.

    Privacy:
        The sum of clipped records has an L2 sensitivity below C under the removal of
        one record.

    Example:
        >>> style = AutomaticClipping(stability=5.0)
        >>> clipped = style.clip([tf.constant([3.0, 4.0])], 1.0, None)
        >>> print([round(float(x), 3) for x in clipped[0]])
        [0.3, 0.4]
    """

    name = "automatic"

    stability: float = 0.01

    def __post_init__(self):
        set_fields(
            self, stability=validation.check_positive("stability", self.stability)
        )

    def clip(self, record, l2_norm_clip, groups):
        """See `ClippingStyle.clip`; the layers do not matter."""
        del groups
        norm = clipping.norm_upper_bound(record)
        factor = clipping.automatic_factor(norm.bound, l2_norm_clip, self.stability)
        return clipping.apply_factor(norm, factor)

    def factors(self, bounds, l2_norm_clip, groups):
        """See `ClippingStyle.factors`; the layers do not matter."""
        del groups
        joint = joint_bound(bounds)
        factor = clipping.automatic_factor(joint, l2_norm_clip, self.stability)
        return factor[:, tf.newaxis]


@keras.saving.register_keras_serializable("keras_dpopt")
@dataclasses.dataclass(frozen=True)
class PerLayerClipping(ClippingStyle):
    """One clip for the part of each layer, to C/sqrt(L) each.

    McMahan et al., "Learning Differentially Private Recurrent Language Models" (ICLR
    2018), per-layer clipping with equal norms: with L layers and the part u_l of the
    record in layer l, of norm n_l,

        clip(u)_l = u_l * min(1, C/(sqrt(L) n_l))

    L parts of at most C/sqrt(L) are together at most C long. The noise is sigma*C in
    every coordinate, as for the other styles.

    Privacy:
        The sum of clipped records has L2 sensitivity C, all layers jointly, under the
        removal of one record. A record with an entry that is not finite contributes
        zero to all layers.

    Example:
        >>> style = PerLayerClipping()
        >>> record = [tf.constant([30.0, 40.0]), tf.constant(0.1)]
        >>> clipped = style.clip(record, 2**0.5, groups=(0, 1))
        >>> print([round(float(x), 3) for x in [*clipped[0], clipped[1]]])
        [0.6, 0.8, 0.1]
    """

    name = "per_layer"

    def clip(self, record, l2_norm_clip, groups):
        """See `ClippingStyle.clip`.

        Raises:
            ValueError: if `groups` is `None`, or not as long as the record.
        """
        record = tuple(record)
        groups = _checked_groups(groups, len(record))
        numbers = sorted(set(groups))
        norms = [
            clipping.norm_upper_bound(
                [
                    value
                    for value, group in zip(record, groups, strict=True)
                    if group == n
                ]
            )
            for n in numbers
        ]
        share = _equal_share(l2_norm_clip, len(numbers))
        bounds = tf.stack([norm.bound for norm in norms])
        # One bad entry removes the whole record: each layer by itself would drop its
        # own part only.
        finite = tf.reduce_all(tf.math.is_finite(bounds))
        parts = {}
        for n, norm in zip(numbers, norms, strict=True):
            factor = clipping.abadi_factor(norm.bound, share)
            factor = tf.where(finite, factor, tf.zeros_like(factor))
            parts[n] = iter(clipping.apply_factor(norm, factor))
        return [next(parts[group]) for group in groups]

    def factors(self, bounds, l2_norm_clip, groups):
        """See `ClippingStyle.factors`."""
        groups = _checked_groups(groups, bounds.shape[1])
        numbers = sorted(set(groups))
        share = _equal_share(l2_norm_clip, len(numbers))
        of_layer = {}
        for n in numbers:
            own = [i for i, group in enumerate(groups) if group == n]
            joint = joint_bound(tf.gather(bounds, own, axis=1))
            of_layer[n] = clipping.abadi_factor(joint, share)
        factors = tf.stack([of_layer[group] for group in groups], axis=1)
        finite = tf.reduce_all(tf.math.is_finite(bounds), axis=1, keepdims=True)
        return tf.where(finite, factors, tf.zeros_like(factors))


def joint_bound(bounds: Any) -> tf.Tensor:
    """Bounds the norm of records from the bounds of their parts, `[m, parts]`."""
    # The sum and the root are each wrong by at most parts * 2^-53 of it.
    slack = 1.0 + (bounds.shape[1] + 4) * 2.0**-53
    return tf.sqrt(tf.reduce_sum(tf.square(bounds), axis=1)) * slack


def _checked_groups(groups: tuple[int, ...] | None, parts: int) -> tuple[int, ...]:
    if groups is None:
        raise ValueError(
            "Per-layer clipping has not been told which tensors of a record make "
            "a layer. Use the mechanism that `built_for(groups)` returns."
        )
    if len(groups) != parts:
        raise ValueError(
            f"The record has {parts} tensors, and the layers of {len(groups)} are "
            "known. Build the mechanism for this record."
        )
    return groups


def _equal_share(l2_norm_clip: Any, groups: int) -> tf.Tensor:
    """Returns C/sqrt(L) in float64, rounded to the safe side."""
    limit = clipping.exact_limit(l2_norm_clip)
    if groups == 1:
        return limit
    # The root, the quotient and the product are each wrong by at most 2^-53 of it.
    return limit * ((1.0 - 2.0**-50) / math.sqrt(groups))


def set_fields(style: ClippingStyle, **values: Any) -> None:
    """Sets fields of a frozen style while it is made."""
    for name, value in values.items():
        object.__setattr__(style, name, value)

"""Mechanisms: a clipped sum goes in, a privatized gradient comes out.

The choice among them; see the modules of each for what they do.
"""

from typing import Any

import keras

from keras_dpopt.adaptive_clipping import AdaptiveClipping
from keras_dpopt.adaptive_mechanism import AdaptiveMechanism
from keras_dpopt.clipping_styles import (
    AutomaticClipping,
    ClippingStyle,
    FlatClipping,
    PerLayerClipping,
)
from keras_dpopt.foreign_mechanism import ForeignMechanism
from keras_dpopt.gaussian_mechanism import GaussianMechanism, GaussianSumQuery
from keras_dpopt.types import ClippedSum

__all__ = [
    "AdaptiveMechanism",
    "ClippedSum",
    "ForeignMechanism",
    "GaussianMechanism",
    "GaussianSumQuery",
    "make",
    "resolve_clipping",
]

_STYLES = {
    style.name: style
    for style in (
        FlatClipping(),
        AutomaticClipping(),
        PerLayerClipping(),
        AdaptiveClipping(),
    )
}


def resolve_clipping(clipping: Any) -> ClippingStyle:
    """Returns the style that an optimizer's argument `clipping` names.

    Args:
        clipping: "flat", "automatic", "per_layer" or "adaptive" for the style with its
            default arguments; a style; or a style as a saved configuration has it.

    Raises:
        ValueError: on another string.
        TypeError: on anything else.

    Example:
        >>> resolve_clipping("automatic")
        AutomaticClipping(stability=0.01)
    """
    names = ", ".join(map(repr, _STYLES))
    if isinstance(clipping, str):
        if clipping not in _STYLES:
            raise ValueError(f"clipping={clipping!r} is unknown. Use one of {names}.")
        return _STYLES[clipping]
    if isinstance(clipping, dict):
        clipping = keras.saving.deserialize_keras_object(clipping)
    if not isinstance(clipping, ClippingStyle):
        raise TypeError(
            f"`clipping` must be a clipping style, not {clipping!r}. Use one of "
            f"{names}, or an instance like `AdaptiveClipping(target_quantile=0.7)`."
        )
    return clipping


def make(
    l2_norm_clip: float | None,
    noise_multiplier: float | None,
    dp_sum_query: Any = None,
    clipping: Any = "flat",
    rescale_to_unit_norm: bool = False,
) -> Any:
    """Returns the mechanism that an optimizer's arguments ask for.

    Args:
        l2_norm_clip: C > 0; the first one with adaptive clipping.
        noise_multiplier: sigma >= 0.
        dp_sum_query: A TF Privacy query in place of all the others.
        clipping: See `resolve_clipping`.
        rescale_to_unit_norm: Whether the gradient is divided by C.

    Raises:
        TypeError: on an argument of the wrong kind.
        ValueError: on one out of its range, or one that another excludes.

    Example:
        >>> make(1.0, 1.1, clipping="automatic").get_config()["clipping"]
        'automatic'
    """
    style = resolve_clipping(clipping)
    if dp_sum_query is not None:
        if l2_norm_clip is not None or noise_multiplier is not None:
            raise ValueError(
                "dp_sum_query brings its own clipping and noise. Leave out "
                "l2_norm_clip and noise_multiplier, or leave out dp_sum_query."
            )
        if style != FlatClipping() or rescale_to_unit_norm:
            raise ValueError(
                "dp_sum_query clips by itself. Leave out clipping and "
                "rescale_to_unit_norm, or leave out dp_sum_query."
            )
        return ForeignMechanism(dp_sum_query)
    if isinstance(style, AdaptiveClipping):
        return AdaptiveMechanism(
            l2_norm_clip, noise_multiplier, style, rescale_to_unit_norm
        )
    return GaussianMechanism(
        l2_norm_clip, noise_multiplier, style, rescale_to_unit_norm
    )

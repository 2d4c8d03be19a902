"""Checks of the arguments of optimizers, and of the kinds of data."""

import math
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from keras_dpopt import argument_names, validation

_CALIBRATE = (
    "calibrate with `keras_dpopt.noise_multiplier(target_epsilon=...)` and pass the "
    "result as `noise_multiplier`; `keras_dpopt.PrivacyBudget(target_epsilon, delta)` "
    "ends the training in time"
)

# Names of other libraries, and what to write here.
_FOREIGN_NAMES = {
    "max_grad_norm": "write `l2_norm_clip`",
    "clip_norm": "write `l2_norm_clip`",
    "clipping_norm": "write `l2_norm_clip`",
    "max_norm": "write `l2_norm_clip`",
    "sigma": "write `noise_multiplier`",
    "stddev": "write `noise_multiplier`, which is stddev / l2_norm_clip",
    "target_epsilon": _CALIBRATE,
    # Reaches here where the class has no epsilon of Adam's.
    "epsilon": f"if it is the epsilon of the privacy, {_CALIBRATE}",
    "delta": "pass `delta` to `PrivacyBudget` and `privacy_statement`",
    "target_delta": "pass `delta` to `PrivacyBudget` and `privacy_statement`",
    "num_microbatches": "each record is clipped alone; `microbatch_size` bounds the "
    "memory and never changes the result",
    "batch_size": "write `expected_batch_size`",
    "lr": "write `learning_rate`",
    "betas": "write `beta_1` and `beta_2`",
    "eps": "write `epsilon`",
}

# Keras arguments that act inside `apply`, so after the noise.
_REFUSED = {
    "clipnorm": "it would clip the noised gradient; use `l2_norm_clip`",
    "clipvalue": "it would clip the noised gradient; use `l2_norm_clip`",
    "global_clipnorm": "it would clip the noised gradient; use `l2_norm_clip`",
    "gradient_accumulation_steps": "it would add noise at each micro-step; use "
    "`logical_batch_steps`, or bound the memory with `microbatch_size`",
    "loss_scale_factor": "the training step scales float16 losses itself",
}

_ENGINES = ("auto", "bookkeeping", "vectorized", "loop")

# Below it the noise and the update, float32, come out as 0 or lose their bits.
_SMALLEST_CLIP = 1e-20


def check_unknown_arguments(
    class_name: str, unknown: dict[str, Any], known: Iterable[str] = ()
) -> None:
    """Raises on arguments that no private optimizer takes, and says what to do.

    Args:
        class_name: Of the optimizer.
        unknown: The arguments.
        known: Names of those that it takes, to find what a misspelled one means.
    """
    for name, value in unknown.items():
        if name in _REFUSED:
            if value is not None:
                raise ValueError(
                    f"{class_name} does not take `{name}`: {_REFUSED[name]}."
                )
        elif name in _FOREIGN_NAMES:
            raise TypeError(
                f"{class_name} does not know `{name}`: {_FOREIGN_NAMES[name]}."
            )
        else:
            meant = argument_names.closest(name, known)
            hint = f"Did you mean `{meant}`? " if meant else ""
            raise TypeError(
                f"{class_name} does not know the argument `{name}`. {hint}See "
                f"help(keras_dpopt.{class_name}) for its arguments."
            )


def refuse_for_own_mechanism(
    class_name: str, dp_sum_query=None, clipping="flat", rescale_to_unit_norm=False, **_
) -> None:
    """Refuses what changes the mechanism of an optimizer that has one of its own."""
    if dp_sum_query is not None or clipping != "flat" or rescale_to_unit_norm:
        raise ValueError(
            f"{class_name} clips and noises in a way of its own. Leave out "
            "dp_sum_query, clipping and rescale_to_unit_norm."
        )


def check_clip(l2_norm_clip: Any, noise_multiplier: float) -> float:
    """Returns the clipping norm: at least 1e-20; infinity only without noise."""
    if l2_norm_clip == math.inf:
        if noise_multiplier == 0:
            return math.inf
        raise ValueError(
            "l2_norm_clip=inf bounds nothing, so no noise can hide a record. Pass a "
            "finite clipping norm, say 1.0."
        )
    clip = validation.check_positive("l2_norm_clip", l2_norm_clip)
    if clip < _SMALLEST_CLIP:
        raise ValueError(
            f"l2_norm_clip={clip:g} is below {_SMALLEST_CLIP:g}, where float32 rounds "
            "the noise and the update to 0. Pass a larger clipping norm, say 1.0."
        )
    return clip


def check_learning_rate(learning_rate: Any) -> Any:
    """Returns a float, a schedule or a callable that Keras' optimizers take."""
    if isinstance(learning_rate, keras.optimizers.schedules.LearningRateSchedule):
        return learning_rate
    if isinstance(learning_rate, dict):  # a schedule in a saved configuration
        return keras.saving.deserialize_keras_object(learning_rate)
    if callable(learning_rate):
        return learning_rate
    return validation.check_non_negative("learning_rate", learning_rate)


def check_weight_decay(weight_decay: Any) -> float | None:
    """Returns the weight decay or `None`."""
    if weight_decay is None or weight_decay is False:
        return None
    return validation.check_non_negative("weight_decay", weight_decay)


def check_optional_size(name: str, value: Any) -> int | None:
    """Returns a positive int, or `None`."""
    return None if value is None else validation.check_positive_integer(name, value)


def check_engine_name(name: str) -> str:
    """Returns the name of a gradient engine."""
    if name not in _ENGINES:
        raise ValueError(
            f"gradient_engine={name!r} is unknown. Use one of "
            f"{', '.join(map(repr, _ENGINES))}."
        )
    return name


def check_seed(seed: Any) -> int | None:
    """Returns the seed as an int, or `None`."""
    if seed is None:
        return None
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise TypeError(
            f"`seed` must be an int or None, not {seed!r}. Leave it out for keys from "
            "the operating system."
        )
    return seed.__index__()


def check_choice(name: str, value: Any, choices: tuple) -> Any:
    """Returns a value that is one of `choices`, or raises."""
    if any(value is c or (isinstance(c, str) and value == c) for c in choices):
        return value
    raise ValueError(
        f"{name}={value!r} is unknown. Use one of {', '.join(map(repr, choices))}."
    )


def check_flag(name: str, value: Any) -> bool:
    """Returns a bool, or raises."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False, not {value!r}.")
    return value


def check_fraction(
    name: str, value: Any, above_zero: bool = False, below_one: bool = False
) -> float:
    """Returns a number of [0, 1], without its ends where asked.

    Args:
        name: Of the argument, for the message.
        value: The number.
        above_zero: Whether 0 itself is refused.
        below_one: Whether 1 itself is refused.
    """
    number = validation.check_non_negative(name, value)
    if number > 1 or (above_zero and number == 0) or (below_one and number == 1):
        low, high = "(" if above_zero else "[", ")" if below_one else "]"
        raise ValueError(
            f"`{name}` must be in {low}0, 1{high}, not {number}. Pass such a number."
        )
    return number


def resolve_batch_size(
    expected: int | None, given: int | None, takes_batch_size: bool = True
) -> int:
    """Returns the one batch size that the constructor and `fit` agree on.

    Args:
        expected: The optimizer's `expected_batch_size`, or `None`.
        given: The `batch_size` of `fit`, or `None`.
        takes_batch_size: Whether the caller could have given it: with arrays alone.
    """
    if given is not None:
        given = validation.check_positive_integer("batch_size", given)
    if expected is None and given is None:
        remedy = "Pass `expected_batch_size` to the optimizer."
        if takes_batch_size:
            remedy = f"Pass `batch_size` to `fit`, or {remedy[5:]}"
        raise ValueError(
            "No batch size is known, and the noised sum of gradients is divided by it. "
            f"{remedy}"
        )
    if expected is not None and given is not None and expected != given:
        raise ValueError(
            f"batch_size={given} differs from the optimizer's expected_batch_size="
            f"{expected}, the constant that its noise is scaled for. Pass the same "
            "number, or compile with a new optimizer."
        )
    return expected or given  # type: ignore[return-value]


def refuse_other_kinds(arrays: Any) -> None:
    """Raises on inputs that are not rows in memory of one shape."""
    for leaf in keras.tree.flatten(arrays):
        if hasattr(leaf, "__next__"):
            raise TypeError(
                f"An iterator ({type(leaf).__name__}) can be read once, and rows are "
                "drawn at random. Pass arrays, a tf.data.Dataset, a PyDataset or a "
                "generator."
            )
        if type(leaf).__module__.startswith("scipy.sparse"):
            _refuse_ragged(type(leaf).__name__)
        if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
            _refuse_ragged(type(leaf).__name__)


def refuse_lists(**parts: Any) -> None:
    """Raises on Python numbers and strings where arrays should be.

    To Keras a list is a structure of several inputs, not one array.

    Args:
        **parts: x, y and sample_weight, by name.
    """
    for name, part in parts.items():
        for leaf in keras.tree.flatten(part):
            if leaf is not None and not hasattr(leaf, "__array__"):
                raise TypeError(
                    f"`{name}` must be arrays, and there is a {type(part).__name__} "
                    f"with a {type(leaf).__name__} in it. Convert it: "
                    f"`np.asarray({name})`."
                )


def _refuse_ragged(kind: str) -> None:
    raise TypeError(
        f"Rows must be dense and of one shape, and there is a {kind}. Convert it: "
        "`ragged.to_tensor()`, `tf.sparse.to_dense(sparse)` or, of SciPy, "
        "`sparse.toarray()`; in a data set with `map`."
    )


def refuse_other_specs(specs: Any) -> None:
    """Raises on specs of batches that are not dense."""
    for spec in tf.nest.flatten(specs):
        if not isinstance(spec, tf.TensorSpec):
            _refuse_ragged(type(spec).__name__.removesuffix("Spec"))

"""Checks of the arguments of optimizers and of `fit`."""

import math
from typing import Any

import keras

from keras_dpopt import validation

# Names of other libraries, and what to write here.
_FOREIGN_NAMES = {
    "max_grad_norm": "write `l2_norm_clip`",
    "clip_norm": "write `l2_norm_clip`",
    "clipping_norm": "write `l2_norm_clip`",
    "max_norm": "write `l2_norm_clip`",
    "sigma": "write `noise_multiplier`",
    "stddev": "write `noise_multiplier`, which is stddev / l2_norm_clip",
    "target_epsilon": "calibrate with "
    "`keras_dpopt.noise_multiplier(target_epsilon=...)` and pass the result as "
    "`noise_multiplier`",
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
    "gradient_accumulation_steps": "it would add noise at each micro-step; give `fit` "
    "the whole `batch_size` and bound the memory with `microbatch_size`",
    "loss_scale_factor": "the training step scales float16 losses itself",
}

_ENGINES = ("auto", "vectorized", "loop")


def check_unknown_arguments(class_name: str, unknown: dict[str, Any]) -> None:
    """Raises on arguments that no private optimizer takes, and says what to do."""
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
            raise TypeError(
                f"{class_name} does not know the argument `{name}`. See "
                f"help(keras_dpopt.{class_name}) for its arguments."
            )


def check_clip(l2_norm_clip: Any, noise_multiplier: float) -> float:
    """Returns the clipping norm; infinity is legal only without noise."""
    if l2_norm_clip == math.inf:
        if noise_multiplier == 0:
            return math.inf
        raise ValueError(
            "l2_norm_clip=inf bounds nothing, so no noise can hide a record. Pass a "
            "finite clipping norm, say 1.0."
        )
    return validation.check_positive("l2_norm_clip", l2_norm_clip)


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


def resolve_batch_size(expected: int | None, given: int | None) -> int:
    """Returns the one batch size that the constructor and `fit` agree on."""
    if given is not None:
        given = validation.check_positive_integer("batch_size", given)
    if expected is None and given is None:
        raise ValueError(
            "No batch size is known, and the noised sum of gradients is divided by it. "
            "Pass `batch_size` to `fit`, or `expected_batch_size` to the optimizer."
        )
    if expected is not None and given is not None and expected != given:
        raise ValueError(
            f"batch_size={given} differs from the optimizer's expected_batch_size="
            f"{expected}, the constant that its noise is scaled for. Pass the same "
            "number, or compile with a new optimizer."
        )
    return expected or given  # type: ignore[return-value]


def check_training_metric_callbacks(callbacks: Any, acknowledged: bool) -> list[str]:
    """Refuses callbacks that decide on raw training data (DESIGN rule 14).

    Args:
        callbacks: As given to `fit`.
        acknowledged: Whether the user has said that they know.

    Returns:
        The names of such callbacks, for the ledger.
    """
    deciding = (
        keras.callbacks.EarlyStopping,
        keras.callbacks.ReduceLROnPlateau,
        keras.callbacks.ModelCheckpoint,
    )
    found = []
    for callback in _flat_callbacks(callbacks):
        monitor = str(getattr(callback, "monitor", "val_"))
        saves_all = isinstance(callback, keras.callbacks.ModelCheckpoint) and not (
            callback.save_best_only
        )
        on_training = not monitor.startswith("val_")
        if isinstance(callback, deciding) and not saves_all and on_training:
            found.append(f"{type(callback).__name__}(monitor={monitor!r})")
    if found and not acknowledged:
        raise ValueError(
            f"{', '.join(found)} decides on a metric of the raw training data, which "
            "the epsilon does not cover. Monitor a `val_` metric, or pass "
            "acknowledge_training_metrics=True to `fit`; the statement then lists it."
        )
    return found


def _flat_callbacks(callbacks: Any) -> list:
    """The callbacks in lists, and in Keras' `CallbackList`s."""
    flat = []
    for callback in keras.tree.flatten(callbacks):
        inside = getattr(callback, "callbacks", None)
        flat += [callback] if inside is None else _flat_callbacks(inside)
    return flat


def refuse(given: str, **values: Any) -> None:
    """Raises on arguments of `fit` that do not go with what it was given.

    Args:
        given: "arrays" or "a data set".
        **values: The arguments; one that is not falsy is refused.
    """
    remedies = {
        "shuffle": "batches are drawn at random, as the accounting assumes; pass a "
        "data set to keep an order of your own",
        "batch_size": "the data set is batched already; give the optimizer its "
        "`expected_batch_size`",
        "sampler": "its batches are made already; pass arrays to have them drawn",
    }
    for name, value in values.items():
        if value is None or value is False or (isinstance(value, float) and not value):
            continue
        remedy = remedies.get(name, "leave it out, or pass the other kind of data")
        shown = "shuffle=False" if name == "shuffle" else f"`{name}`"
        raise ValueError(f"With {given}, `fit` does not take {shown}: {remedy}.")


def check_assumptions(
    assume: str | None,
    train_size: int | None,
    once_per_epoch: bool,
    steps_per_epoch: int | None,
) -> None:
    """Checks what the caller of `fit` says of a data set (DESIGN rule 13)."""
    if assume not in (None, "poisson"):
        raise ValueError(
            f"assume={assume!r} is unknown. Use assume='poisson', or leave it out."
        )
    if assume == "poisson" and train_size is None:
        raise ValueError(
            "assume='poisson' needs the number of records. Pass train_size."
        )
    if assume == "poisson" and once_per_epoch:
        raise ValueError(
            "A Poisson sample may hold a record in two batches of an epoch. Pass "
            "either assume='poisson' or once_per_epoch=True."
        )
    if once_per_epoch and steps_per_epoch is not None:
        raise ValueError(
            "With steps_per_epoch, one epoch may reach into a second pass over the "
            "data, so once_per_epoch cannot hold. Leave steps_per_epoch out."
        )

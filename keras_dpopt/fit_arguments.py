"""Checks of what `fit` and `train_on_batch` are given, and of who calls them."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dpopt import keras_compat
from keras_dpopt.dp_optimizer import check_private_optimizer

_STRATEGIES = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
)


def check_ready(model: Any, compiled_optimizer: Any) -> None:
    """Raises unless the model was compiled to train privately, as it stands.

    Args:
        model: The private model.
        compiled_optimizer: The optimizer it was compiled with.
    """
    if not model.compiled:
        raise ValueError(
            "The model is not compiled. Call `compile(optimizer=..., loss=...)` with a "
            "private optimizer first."
        )
    check_private_optimizer(model.optimizer)
    if model.optimizer is not compiled_optimizer:
        raise ValueError(
            "The model's optimizer is not the one it was compiled with, whose steps "
            "would go uncounted. Compile the model with the new one."
        )
    _check_strategy(model)


def _check_strategy(model: Any) -> None:
    """Raises unless noise is drawn once under the strategy, and all is made for it."""
    strategy = model.distribute_strategy
    if strategy.num_replicas_in_sync == 1:
        return
    if not isinstance(strategy, _STRATEGIES):
        raise ValueError(
            f"{type(strategy).__name__} is not supported: nothing shows that its "
            "replicas would draw noise once. Use tf.distribute.MirroredStrategy."
        )
    if any(other is not strategy for other in keras_compat.strategies_of(model)):
        raise ValueError(
            "The model or its optimizer was made outside the scope of the strategy, so "
            "the replicas would not have copies of it. Make and compile the model in "
            "`with strategy.scope():`."
        )
    if keras_compat.overrides_compute_loss(model):
        raise ValueError(
            "The model has a compute_loss of its own, and Keras divides what it gives "
            "by the number of replicas. Pass the loss to `compile`."
        )
    if model.optimizer.mechanism.clip_factors is None:
        raise ValueError(
            "A dp_sum_query runs on one replica: nothing shows that another library's "
            "query draws its noise once. Use the optimizer's own mechanism."
        )


def check_targets(model: Any, row_specs: dict[str, Any]) -> None:
    """Raises if the loss of `compile` has no targets to compare with.

    Args:
        model: The private model.
        row_specs: Of its data, a dict with "x" and, where given, "y".
    """
    own = keras_compat.overrides_compute_loss(model)
    if keras_compat.compiled_losses(model) and not own and "y" not in row_specs:
        raise ValueError(
            "The loss needs targets, and there are none. Pass `y` to `fit`, or a data "
            "set of pairs (x, y)."
        )


def whole_batches(name: str, number: int | None, parts: int) -> int | None:
    """Returns how many logical batches a number of physical ones is.

    Args:
        name: What the number is, for the message.
        number: Of physical batches, or `None`.
        parts: How many of them a logical one has.

    Raises:
        ValueError: if the last logical batch is not whole.
    """
    if number is None:
        return None
    if number % parts:
        raise ValueError(
            f"{name}={number} is no multiple of logical_batch_steps={parts}, so the "
            "last logical batch would not be whole. Use a multiple."
        )
    return number // parts


def check_parts_of_one_pass(number: int | None, parts: int) -> None:
    """Raises if a logical batch could have parts of two passes over a data set.

    Args:
        number: How many batches it has; `None` where that is not known or endless.
        parts: How many of them are a logical batch.
    """
    if parts > 1 and number is None:
        raise ValueError(
            "logical_batch_steps needs a data set that tells how many batches one pass "
            "has: in one without end, a record could be twice in a logical batch and "
            "get past the clip. Leave `repeat` out, and use `assert_cardinality`."
        )
    whole_batches("The number of batches of the data set", number, parts)


def check_variables(model: Any) -> None:
    """Raises if the optimizer was built for other trainable variables."""
    known = keras_compat.optimizer_variables_of(model.optimizer)
    if [id(v) for v in known] != [id(v) for v in model.trainable_variables]:
        raise ValueError(
            "The model's trainable variables are not those that the optimizer was "
            "built for. Compile the model again, with a new optimizer."
        )


def check_training_metric_callbacks(
    callbacks: Any, acknowledged: bool, x: Any = None, validation_data: Any = None
) -> list[str]:
    """Refuses callbacks that decide on raw training data.

    Args:
        callbacks: As given to `fit`.
        acknowledged: Whether the user has said that they know.
        x: As given to `fit`.
        validation_data: As given to `fit`; where it holds the memory of `x`, a metric
            of it is one of the training data.

    Returns:
        The names of such callbacks, for the ledger.
    """
    deciding = (
        keras.callbacks.EarlyStopping,
        keras.callbacks.ReduceLROnPlateau,
        keras.callbacks.ModelCheckpoint,
    )
    found = []
    validates_on_training = _shares_rows(x, validation_data)
    for callback in _flat_callbacks(callbacks):
        if isinstance(callback, keras.callbacks.TerminateOnNaN):
            found.append(f"{type(callback).__name__}(monitor='loss')")
        monitor = str(getattr(callback, "monitor", "val_"))
        saves_all = isinstance(callback, keras.callbacks.ModelCheckpoint) and not (
            callback.save_best_only
        )
        validates = monitor.startswith("val_")
        on_training = validates_on_training if validates else monitor != "epsilon"
        if isinstance(callback, deciding) and not saves_all and on_training:
            rows = " of the training rows" if validates else ""
            found.append(f"{type(callback).__name__}(monitor={monitor!r}{rows})")
    if found and not acknowledged:
        raise ValueError(
            f"{', '.join(found)} decides on a metric of the raw training data, which "
            "the epsilon does not cover. Monitor a `val_` metric of other rows, or "
            "pass acknowledge_training_metrics=True to `fit`; the statement then lists "
            "it."
        )
    return found


def _shares_rows(x: Any, validation_data: Any) -> bool:
    """Whether the inputs of `validation_data` are those of `x`, in whole or in part."""
    if x is None or validation_data is None:
        return False
    held = validation_data
    if isinstance(held, tuple | list) and held:
        held = held[0]
    if held is x:
        return True
    arrays, others = (
        [leaf for leaf in keras.tree.flatten(part) if hasattr(leaf, "shape")]
        for part in (x, held)
    )
    return any(_same_memory(a, b) for a in arrays for b in others)


def _same_memory(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)):
        return False
    try:
        return np.shares_memory(a, b, max_work=10**6)
    except np.exceptions.TooHardError:
        return True  # their bounds overlap


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
    other = "a data set" if given == "arrays" else "arrays"
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
        remedy = remedies.get(name, f"leave it out, or pass {other}")
        shown = "shuffle=False" if name == "shuffle" else f"`{name}`"
        raise ValueError(f"With {given}, `fit` does not take {shown}: {remedy}.")


def check_assumptions(
    assume: str | None,
    train_size: int | None,
    once_per_epoch: bool,
    steps_per_epoch: int | None,
) -> None:
    """Checks what the caller of `fit` says of a data set."""
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


def check_ends(x: Any) -> None:
    """Raises on a data set without an end, whose epoch passes a record many times."""
    if isinstance(x, keras.utils.PyDataset):
        endless = x.num_batches is None
    else:
        endless = (
            isinstance(x, tf.data.Dataset)
            and x.cardinality() == tf.data.INFINITE_CARDINALITY
        )
    if endless:
        raise ValueError(
            "The data set has no end or no known length, so once_per_epoch=True cannot "
            "hold. Leave out `repeat()`, give a PyDataset its `__len__`, or leave out "
            "once_per_epoch."
        )

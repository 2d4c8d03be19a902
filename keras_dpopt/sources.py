"""Where the batches of one fit come from, and what the ledger says of them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_dpopt import (
    accounting,
    arguments,
    data,
    fit_arguments,
    keras_compat,
    planned_fit,
    preprocessing,
    tried_rows,
)
from keras_dpopt.ledger import Phase


@dataclasses.dataclass(frozen=True)
class Source:
    """The batches of one fit.

    Attributes:
        batches: Data set of batches, not yet cut into microbatches.
        phase: What the ledger records.
        start: Variable that an iteration over `batches` reads as it starts: the number
            of the release that its first batch is for.
        adapter: Keras' data adapter, for its hooks at the ends of epochs; or `None`.
        rows: The rows drawn from; or `None`.
        validation_data: What was held out of the arrays; or `None`.
        notes: Sentences for the ledger.
        some_rows: Returns a few rows as the model gets them, or `None` where looking at
            them would take them away.
    """

    batches: tf.data.Dataset
    phase: Phase
    start: tf.Variable
    adapter: Any = None
    rows: data.Rows | None = None
    validation_data: Any = None
    notes: tuple[str, ...] = ()
    some_rows: Callable[[], dict | None] = lambda: None


def drawn(
    optimizer,
    preprocess,
    arrays,
    *,
    batch_size,
    class_weight,
    held_out,
    sampler,
    steps_per_epoch,
    epochs,
    refused,
) -> Source:
    """Batches that a sampler draws from rows in memory.

    Args:
        optimizer: The private optimizer.
        preprocess: Of a model with a preprocessor, or `None`.
        arrays: `(x, y, sample_weight)`, as given to `fit`.
        batch_size: As given to `fit`.
        class_weight: As given to `fit`.
        held_out: `validation_split` of `fit`.
        sampler: A sampler, or `None` for the one that the mechanism is accounted for.
        steps_per_epoch: Or `None` for ceil(N / batch size).
        epochs: How many epochs the fit has.
        refused: Arguments of `fit` that do not go with arrays.
    """
    fit_arguments.refuse("arrays", **refused)
    arguments.refuse_other_kinds(arrays)
    if preprocess is None:
        x, y, sample_weight = arrays
        arguments.refuse_lists(x=x, y=y, sample_weight=sample_weight)
    validation_data, notes = None, ()
    if held_out:
        if preprocess is not None:
            arrays = data.tensors(arrays)  # Keras does not split strings
        arrays, validation_data = keras_compat.train_validation_split(arrays, held_out)
        notes = (
            f"validation_split={held_out} held rows back; they are not protected.",
        )
    x, y, sample_weight = arrays
    rows = data.rows_in_memory(
        x, y, sample_weight, class_weight, preprocess is not None
    )
    if preprocess is not None:
        notes += preprocessing.check(preprocess, rows.values)
    batch_size = arguments.resolve_batch_size(optimizer.expected_batch_size, batch_size)
    epoch = accounting.steps_per_epoch(rows.size, batch_size)  # refuses more than N
    optimizer.resolve_sizes(batch_size, rows.size)
    parts = optimizer.logical_batch_steps
    steps = fit_arguments.whole_batches("steps_per_epoch", steps_per_epoch, parts)
    steps = steps or epoch
    plan = optimizer.plan_run(steps * epochs, rows.size, drawn=True)
    sampler = planned_fit.sampler_of(optimizer, plan, sampler)
    start = _start()

    def draw(step):
        # The key is read when the batch is drawn: a restored run has another one than
        # there was when the data set was made.
        return sampler.indices(optimizer.keys.sampler, step, rows.size, batch_size)

    batches = data.drawn_batches(rows, draw, start, steps, preprocess, parts)
    phase = planned_fit.phase_of(
        optimizer, plan, batch_size, sampling=sampler.kind, train_size=rows.size
    )
    some_rows = functools.partial(tried_rows.of_rows, rows.values, preprocess)
    return Source(batches, phase, start, None, rows, validation_data, notes, some_rows)


def given(
    optimizer,
    preprocess,
    x,
    *,
    class_weight,
    shuffle,
    steps_per_epoch,
    epochs,
    steps_per_execution,
    once_per_epoch,
    assume,
    train_size,
    refused,
) -> Source:
    """Batches that the caller made; every record may be in each of them.

    Args:
        optimizer: The private optimizer.
        preprocess: Of a model with a preprocessor, or `None`.
        x: `tf.data.Dataset`, `PyDataset`, generator or loader.
        class_weight: As given to `fit`.
        shuffle: As given to `fit`; for the order of a `PyDataset`.
        steps_per_epoch: As given to `fit`.
        epochs: How many epochs the fit has.
        steps_per_execution: Of the model.
        once_per_epoch: The caller's word that no record comes twice in an epoch; an
            epoch must have an end.
        assume: "poisson" is the caller's word that batches are Poisson samples.
        train_size: N, or `None`.
        refused: Arguments of `fit` that do not go with a data set.
    """
    fit_arguments.refuse("a data set", **refused)
    fit_arguments.check_assumptions(assume, train_size, once_per_epoch, steps_per_epoch)
    if once_per_epoch:
        fit_arguments.check_ends(x)
    optimizer.resolve_sizes(None, train_size)
    adapter = keras_compat.data_adapter(x, class_weight, shuffle)
    notes = () if preprocess is None else _check_given(preprocess, x, adapter)
    start = _start()
    number, parts = adapter.num_batches, optimizer.logical_batch_steps
    fit_arguments.check_parts_of_one_pass(number, parts)
    batches = data.given_batches(
        adapter.get_tf_dataset(), start, preprocess, number, parts
    )
    fit_arguments.whole_batches("steps_per_epoch", steps_per_epoch, parts)
    steps = steps_per_epoch or number
    if steps:  # Keras makes whole executions of an endless data set
        steps = -(-steps // steps_per_execution) * steps_per_execution // parts
    plan = optimizer.plan_run(steps and steps * epochs, train_size, drawn=False)
    phase = planned_fit.phase_of(
        optimizer,
        plan,
        optimizer.expected_batch_size,
        sampling="caller",
        train_size=train_size,
        once_per_epoch=once_per_epoch,
        assume=assume,
    )
    some_rows = functools.partial(tried_rows.of_data_set, x, adapter, preprocess)
    return Source(batches, phase, start, adapter, notes=notes, some_rows=some_rows)


def single(optimizer) -> Phase:
    """What the ledger records of `train_on_batch`: batches that the caller made."""
    plan = optimizer.plan_run(1, None, drawn=False)
    return planned_fit.phase_of(
        optimizer, plan, optimizer.expected_batch_size, sampling="caller"
    )


def _check_given(preprocess, x, adapter) -> tuple[str, ...]:
    """Tries the preprocessing on a batch, where looking at it takes none away."""
    looked_at = tried_rows.elements(x, adapter)
    if looked_at is None:
        return (preprocessing.UNCHECKED,)
    for element in looked_at:
        rows = data.element_rows(element)
        if preprocessing.number_of_rows(rows) > 1:
            return preprocessing.check(preprocess, rows)
    return ()


def _start() -> tf.Variable:
    return tf.Variable(0, dtype=tf.int64, trainable=False, name="first_release")

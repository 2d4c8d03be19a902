"""Where the batches of one fit come from, and what the ledger says of them."""

import dataclasses
from typing import Any

import tensorflow as tf

from keras_dpopt import accounting, data, keras_compat
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
    """

    batches: tf.data.Dataset
    phase: Phase
    start: tf.Variable
    adapter: Any = None
    rows: data.Rows | None = None


def drawn(optimizer, rows, sampler, steps, preprocess=None) -> Source:
    """Batches that `sampler` draws from rows in memory.

    Args:
        optimizer: The private optimizer; its batch size is resolved.
        rows: `data.Rows`.
        sampler: A sampler, or `None` for the one that the mechanism is accounted for.
        steps: Steps in an epoch, or `None` for ceil(N / batch size).
        preprocess: Of a model with a preprocessor, or `None`.
    """
    batch_size = optimizer.expected_batch_size
    sampler = sampler or optimizer.mechanism.sampler
    steps = steps or accounting.steps_per_epoch(rows.size, batch_size)
    start = _start()

    def draw(step):
        # The key is read when the batch is drawn: a restored run has another one than
        # there was when the data set was made.
        return sampler.indices(optimizer.keys.sampler, step, rows.size, batch_size)

    batches = data.drawn_batches(rows, draw, start, steps, preprocess)
    phase = _phase(optimizer, sampling=sampler.kind, train_size=rows.size)
    return Source(batches, phase, start, rows=rows)


def given(
    optimizer, x, class_weight, once_per_epoch, assume, train_size, preprocess=None
) -> Source:
    """Batches that the caller made; every record may be in each of them.

    Args:
        optimizer: The private optimizer; its batch size is resolved.
        x: `tf.data.Dataset`, `PyDataset`, generator or loader.
        class_weight: As in Keras.
        once_per_epoch: The caller's word that no record comes twice in an epoch.
        assume: "poisson" is the caller's word that batches are Poisson samples.
        train_size: N, or `None`.
        preprocess: Of a model with a preprocessor, or `None`.
    """
    adapter = keras_compat.data_adapter(x, class_weight)
    start = _start()
    batches = data.given_batches(adapter.get_tf_dataset(), start, preprocess)
    phase = _phase(
        optimizer,
        sampling="caller",
        train_size=train_size,
        once_per_epoch=once_per_epoch,
        assume=assume,
    )
    return Source(batches, phase, start, adapter=adapter)


def single(optimizer) -> Phase:
    """What the ledger records of `train_on_batch`: batches that the caller made."""
    return _phase(optimizer, sampling="caller", train_size=None)


def _start() -> tf.Variable:
    return tf.Variable(0, dtype=tf.int64, trainable=False, name="first_release")


def _phase(optimizer, **sampling) -> Phase:
    return Phase(
        optimizer=type(optimizer).__name__,
        noise_multipliers=optimizer.noise_multipliers(),
        l2_norm_clip=optimizer.mechanism.l2_norm_clip,
        expected_batch_size=optimizer.expected_batch_size,
        seeded=optimizer.keys.seeded,
        **sampling,
    )

"""From the user's data to logical batches: padded microbatches and their count.

A logical batch, or one part of `logical_batch_steps` of it, is a dict of

    "rows":  {"x": ..., "y": ..., "sample_weight": ...}, leaves of shape [k, m, ...]
    "count": int32 scalar, the records in it; the rows behind them are padding
    "step":  int64 scalar, the number of the release that it is for
    "part":  int64 scalar, which of the physical batches of the logical one it is

with k = ceil(count / m) microbatches of m records (none for an empty batch). The batch
for step t is a function of (sampler key, t), so prefetching changes nothing.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dpopt import arguments, keras_compat, preprocessing

# Memory that the record gradients of one microbatch may take where the user leaves
# `microbatch_size` to us, and the size above which more records gain no speed.
_MICROBATCH_BYTES = 2**28
_LARGEST_MICROBATCH = 128


@dataclasses.dataclass(frozen=True)
class Rows:
    """Training data in memory: a dict of `[N, ...]` structures, and N."""

    values: dict[str, Any]
    size: int


def rows_in_memory(x, y, sample_weight, class_weight, preprocessed: bool) -> Rows:
    """Standardizes arrays as `fit` of Keras does.

    Args:
        x: Arrays, data frames or tensors, or a structure of them.
        y: Targets, or `None`.
        sample_weight: Weights, or `None`.
        class_weight: Dict from class to weight, or `None`; becomes `sample_weight`.
        preprocessed: Whether a preprocessor of the model follows, which takes strings
            and lists as they are.
    """
    arguments.refuse_other_kinds((x, y, sample_weight))
    if preprocessed and class_weight is None:
        x, y, sample_weight = tensors((x, y, sample_weight))
    else:
        arguments.refuse_lists(x=x, y=y, sample_weight=sample_weight)
        x, y, sample_weight = keras_compat.arrays_in_memory(
            x, y, sample_weight, class_weight
        )
    # To `tf.data` a list is one tensor, as in Keras' own adapters.
    values = keras.tree.lists_to_tuples(preprocessing.record(x, y, sample_weight))
    sizes = {int(leaf.shape[0]) for leaf in tf.nest.flatten(values)}
    if len(sizes) != 1:
        raise ValueError(
            f"x, y and sample_weight have different numbers of rows: {sorted(sizes)}. "
            "Pass arrays of one length."
        )
    return Rows(values, sizes.pop())


def tensors(arrays: tuple) -> tuple:
    """Converts arrays, or lists of strings, for a model with a preprocessor."""
    return tuple(_map_leaves(_as_tensor, part) for part in arrays)


def _map_leaves(fn, structure):
    """As `tf.data` reads inputs: dicts and tuples nest, a list is one tensor."""
    if isinstance(structure, dict):
        return {key: _map_leaves(fn, value) for key, value in structure.items()}
    if isinstance(structure, tuple):
        return tuple(_map_leaves(fn, value) for value in structure)
    return None if structure is None else fn(structure)


def _as_tensor(leaf):
    if isinstance(leaf, tf.Tensor | tf.RaggedTensor | tf.SparseTensor):
        return leaf
    array = np.asarray(leaf)
    if array.dtype == np.float64:
        array = array.astype(keras.config.floatx())
    return tf.constant(array.tolist() if array.dtype == object else array)


def drawn_batches(
    rows: Rows,
    draw: Callable[[tf.Tensor], tf.Tensor],
    start: tf.Variable,
    steps: int,
    preprocess: Callable | None = None,
    parts: int = 1,
) -> tf.data.Dataset:
    """Batches that are drawn from rows in memory, not yet cut into microbatches.

    Args:
        rows: The rows.
        draw: `step -> indices`, int64 `[n]`, of the logical batch for that step.
        start: Variable read when an iteration starts: the step of its first batch.
        steps: Logical batches in one iteration.
        preprocess: `(x, y, sample_weight) -> packed`, of a model with a preprocessor.
        parts: Physical batches of a logical one; part j of k has its indices j, j + k,
            j + 2k, ...
    """
    tensors = tf.nest.map_structure(tf.convert_to_tensor, rows.values)

    def drawn(step):
        return {"step": step, "part": tf.zeros_like(step), "indices": draw(step)}

    def in_parts(logical):
        # Of one draw, whatever becomes of the key before the last of them is taken: a
        # record in the parts of two draws would count twice in their sum.
        numbers = tf.data.Dataset.range(parts)
        return numbers.map(
            lambda j: logical | {"part": j, "indices": logical["indices"][j::parts]}
        )

    def batch(drawn):
        indices = drawn.pop("indices")
        if preprocess is None:
            taken = tf.nest.map_structure(lambda t: tf.gather(t, indices), tensors)
            return {"rows": taken, **drawn}
        # A tokenizer may fail on no rows at all: an empty batch borrows row 0.
        some = tf.cond(
            tf.size(indices) > 0, lambda: indices, lambda: tf.zeros([1], tf.int64)
        )
        taken = tf.nest.map_structure(lambda t: tf.gather(t, some), tensors)
        taken = preprocessing.run(preprocess, taken)
        count = tf.size(indices)
        return {"rows": tf.nest.map_structure(lambda t: t[:count], taken), **drawn}

    parallel = {"num_parallel_calls": tf.data.AUTOTUNE, "deterministic": True}
    logical = _numbers_from(start, 1).take(steps).map(drawn, **parallel)
    if parts > 1:
        logical = logical.flat_map(in_parts)
    batches = logical.map(batch, **parallel).apply(
        tf.data.experimental.assert_cardinality(steps * parts)
    )
    arguments.refuse_other_specs(batches.element_spec)
    return batches


def given_batches(
    dataset: tf.data.Dataset,
    start: tf.Variable,
    preprocess: Callable | None = None,
    number: int | None = None,
    parts: int = 1,
) -> tf.data.Dataset:
    """Batches that the caller made: `parts` elements become one logical batch.

    Args:
        dataset: Data set of `x`, `(x, y)` or `(x, y, sample_weight)`.
        start: As in `drawn_batches`.
        preprocess: As in `drawn_batches`.
        number: How many elements there are, where that is known.
        parts: As in `drawn_batches`.
    """

    def batch(number, *element):
        element = element[0] if len(element) == 1 else element
        taken = preprocessing.record(*keras_compat.unpack_x_y_sample_weight(element))
        taken = preprocessing.run(preprocess, taken)
        return {"rows": taken, "step": number // parts, "part": number % parts}

    batches = tf.data.Dataset.zip(_numbers_from(start, parts), dataset).map(batch)
    arguments.refuse_other_specs(batches.element_spec)
    if number is None:
        return batches
    return batches.apply(tf.data.experimental.assert_cardinality(number))


def single_batch(x, y, sample_weight, class_weight, preprocess=None) -> dict:
    """One batch of arrays, for `train_on_batch`; the caller adds "step"."""
    rows = rows_in_memory(x, y, sample_weight, class_weight, preprocess is not None)
    taken = tf.nest.map_structure(tf.convert_to_tensor, rows.values)
    if preprocess is None:
        return {"rows": taken}
    preprocessing.check(preprocess, taken)
    return {"rows": preprocessing.run(preprocess, taken)}


def preprocessed_batches(given, batch_size: int, preprocess) -> tf.data.Dataset:
    """Batches for evaluation or prediction by a model with a preprocessor.

    Args:
        given: A batched data set, or a tuple `(x, y, sample_weight)` of rows.
        batch_size: Of the rows.
        preprocess: `(x, y, sample_weight) -> packed`.
    """
    if keras_compat.is_data_set(given) and not isinstance(given, tf.data.Dataset):
        raise TypeError(
            "A model with a preprocessor takes arrays or a tf.data.Dataset for "
            f"evaluation, got {type(given).__name__}. Convert it, or preprocess the "
            "data before."
        )
    if not isinstance(given, tf.data.Dataset):
        x, y, sample_weight = keras_compat.unpack_x_y_sample_weight(given)
        rows = rows_in_memory(x, y, sample_weight, None, preprocessed=True)
        given = tf.data.Dataset.from_tensor_slices(
            keras.utils.pack_x_y_sample_weight(
                rows.values["x"], rows.values.get("y"), rows.values.get("sample_weight")
            )
        ).batch(batch_size)
    return given.map(preprocess, num_parallel_calls=tf.data.AUTOTUNE)


def microbatch_size(parameters: int, batch_size: int) -> int:
    """Returns how many records to hold at a time, for a model of that many weights."""
    by_memory = max(1, _MICROBATCH_BYTES // (4 * max(1, parameters)))
    return min(by_memory, _LARGEST_MICROBATCH, max(1, batch_size))


def in_microbatches(batch: dict, microbatch_size: int) -> dict:
    """Pads a batch to whole microbatches: makes the logical batch of the module."""
    rows = batch["rows"]
    count = tf.shape(tf.nest.flatten(rows)[0])[0]
    microbatches = -(-count // microbatch_size)
    # Padding with copies of the last row: values that every layer accepts.
    positions = tf.minimum(tf.range(microbatches * microbatch_size), count - 1)

    def split(t):
        shape = tf.concat([[microbatches, microbatch_size], tf.shape(t)[1:]], axis=0)
        padded = tf.reshape(tf.gather(t, positions), shape)
        return tf.ensure_shape(padded, [None, microbatch_size, *t.shape[1:]])

    return {
        **batch,
        "rows": tf.nest.map_structure(split, rows),
        "count": count,
        "step": tf.cast(batch["step"], tf.int64),
        "part": tf.cast(batch.get("part", 0), tf.int64),
    }


def _numbers_from(start: tf.Variable, parts: int) -> tf.data.Dataset:
    """An endless count from `parts * start`, read as the iteration starts.

    Read element by element, the variable would race with the training step.
    """
    return tf.data.Dataset.range(1).flat_map(
        lambda _: tf.data.Dataset.range(parts * start.read_value(), tf.int64.max)
    )


def element_rows(element) -> dict[str, Any]:
    """The rows of an element of a data set, as tensors."""
    return preprocessing.record(
        *tensors(keras_compat.unpack_x_y_sample_weight(element))
    )

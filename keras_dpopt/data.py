"""From the user's data to logical batches: padded microbatches and their count.

A logical batch is a dict of

    "rows":  {"x": ..., "y": ..., "sample_weight": ...}, leaves of shape [k, m, ...]
    "count": int32 scalar, the records in it; the rows behind them are padding
    "step":  int64 scalar, the number of the release that it is for

with k = ceil(count / m) microbatches of m records (none for an empty batch). The batch
for step t is a function of (sampler key, t), so prefetching changes nothing.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dpopt import arguments, keras_compat
from keras_dpopt.types import UnsupportedModelError

# Memory that the record gradients of one microbatch may take where the user leaves
# `microbatch_size` to us, and the size above which more records gain no speed.
_MICROBATCH_BYTES = 2**28
_LARGEST_MICROBATCH = 128

# Rows, and runs of them, that a preprocessing is tried on.
_TRIED_ROWS, _TRIED_RUNS = 8, 4
_TOLERANCE = 1e-6

UNCHECKED = (
    "The preprocessing is given batches that cannot be read again; it was not checked "
    "for mixing records."
)
_RANDOM = "The preprocessing is random; it was not checked for mixing records."


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
    values = keras.tree.lists_to_tuples(_record(x, y, sample_weight))
    sizes = {int(leaf.shape[0]) for leaf in tf.nest.flatten(values)}
    if len(sizes) != 1:
        raise ValueError(
            f"x, y and sample_weight have different numbers of rows: {sorted(sizes)}. "
            "Pass arrays of one length."
        )
    return Rows(values, sizes.pop())


def _record(x, y, sample_weight) -> dict[str, Any]:
    parts = {"x": x, "y": y, "sample_weight": sample_weight}
    return {name: part for name, part in parts.items() if part is not None}


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
) -> tf.data.Dataset:
    """Batches that are drawn from rows in memory, not yet cut into microbatches.

    Args:
        rows: The rows.
        draw: `step -> indices`, int64 `[n]`, of the batch for that step.
        start: Variable read when an iteration starts: the step of its first batch.
        steps: Batches in one iteration.
        preprocess: `(x, y, sample_weight) -> packed`, of a model with a preprocessor.
    """
    tensors = tf.nest.map_structure(tf.convert_to_tensor, rows.values)

    def batch(step):
        indices = draw(step)
        if preprocess is None:
            taken = tf.nest.map_structure(lambda t: tf.gather(t, indices), tensors)
            return {"rows": taken, "step": step}
        # A tokenizer may fail on no rows at all: an empty batch borrows row 0.
        some = tf.cond(
            tf.size(indices) > 0, lambda: indices, lambda: tf.zeros([1], tf.int64)
        )
        taken = tf.nest.map_structure(lambda t: tf.gather(t, some), tensors)
        taken = _preprocessed(preprocess, taken)
        count = tf.size(indices)
        return {
            "rows": tf.nest.map_structure(lambda t: t[:count], taken),
            "step": step,
        }

    batches = (
        _steps_from(start)
        .take(steps)
        .map(batch, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        .apply(tf.data.experimental.assert_cardinality(steps))
    )
    arguments.refuse_other_specs(batches.element_spec)
    return batches


def given_batches(
    dataset: tf.data.Dataset,
    start: tf.Variable,
    preprocess: Callable | None = None,
    number: int | None = None,
) -> tf.data.Dataset:
    """Batches that the caller made: each element becomes one logical batch.

    Args:
        dataset: Data set of `x`, `(x, y)` or `(x, y, sample_weight)`.
        start: As in `drawn_batches`.
        preprocess: As in `drawn_batches`.
        number: How many elements there are, where that is known.
    """

    def batch(step, *element):
        element = element[0] if len(element) == 1 else element
        taken = _record(*keras_compat.unpack_x_y_sample_weight(element))
        if preprocess is not None:
            taken = _preprocessed(preprocess, taken)
        return {"rows": taken, "step": step}

    batches = tf.data.Dataset.zip(_steps_from(start), dataset).map(batch)
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
    check_preprocessing(preprocess, taken)
    return {"rows": _preprocessed(preprocess, taken)}


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
    }


def _steps_from(start: tf.Variable) -> tf.data.Dataset:
    """An endless count from `start`, whose value is read as the iteration starts.

    Read element by element, the variable would race with the training step.
    """
    return tf.data.Dataset.range(1).flat_map(
        lambda _: tf.data.Dataset.range(start.read_value(), tf.int64.max)
    )


def _preprocessed(preprocess, taken):
    packed = preprocess(taken["x"], taken.get("y"), taken.get("sample_weight"))
    return _record(*keras_compat.unpack_x_y_sample_weight(packed))


# --- does a preprocessing mix records? ---------------------------------------------


def element_rows(element) -> dict[str, Any]:
    """The rows of an element of a data set, as tensors."""
    return _record(*tensors(keras_compat.unpack_x_y_sample_weight(element)))


def preprocessed_rows(rows: dict, preprocess: Callable | None) -> dict:
    """Rows as a model with this preprocessor gets them."""
    return rows if preprocess is None else _preprocessed(preprocess, rows)


def number_of_rows(rows: dict) -> int:
    """How many rows there are."""
    return int(tf.nest.flatten(rows)[0].shape[0])


def check_preprocessing(preprocess, rows: dict) -> tuple[str, ...]:
    """Refuses a preprocessing in which a row depends on the others of its batch.

    It runs on a few rows together and on each alone, and must give the same. Nothing
    but whether the model is supported follows from it.

    Args:
        preprocess: `(x, y, sample_weight) -> packed`.
        rows: Rows to take some of.

    Returns:
        Notes for the ledger.

    Raises:
        UnsupportedModelError: if rows are mixed.
    """
    if any(isinstance(t, tf.SparseTensor) for t in tf.nest.flatten(rows)):
        return (UNCHECKED,)
    # Spread over all of them: neighbours are often alike.
    places = np.linspace(0, number_of_rows(rows) - 1, _TRIED_ROWS)
    alone = [
        tf.nest.map_structure(lambda t, i=i: tf.convert_to_tensor(t[i : i + 1]), rows)
        for i in sorted({int(place) for place in places})
    ]
    if len(alone) < 2:
        return ()
    together = tf.nest.map_structure(lambda *t: tf.concat(t, axis=0), *alone)
    runs = [_outputs(preprocess, together) for _ in range(2)]
    if _same(*runs) and _same(
        runs[0], _joined([_outputs(preprocess, row) for row in alone])
    ):
        return ()
    runs += [_outputs(preprocess, together) for _ in range(_TRIED_RUNS)]
    if _vary(runs):
        # Random. Where every row varies in company and none alone, it is the company.
        mixed = all(
            _vary([[leaf[i : i + 1] for leaf in run] for run in runs])
            and not _vary([_outputs(preprocess, row) for _ in range(_TRIED_RUNS)])
            for i, row in enumerate(alone)
        )
        if not mixed:
            return (_RANDOM,)
    raise UnsupportedModelError(
        "The model's preprocessing makes something else of a record alone than "
        "among others, so clipping does not bound what one record changes. Give "
        "the preprocessor a fixed sequence length, or preprocess the data record "
        "by record before `fit`."
    )


def _outputs(preprocess, rows) -> list[np.ndarray]:
    leaves = tf.nest.flatten(_preprocessed(preprocess, rows))
    arguments.refuse_other_kinds(leaves)
    return [np.asarray(leaf) for leaf in leaves]


def _joined(parts: list[list[np.ndarray]]) -> list[np.ndarray]:
    """Concatenates row by row; nothing where the rows do not fit together."""
    try:
        return [np.concatenate(leaves) for leaves in zip(*parts, strict=True)]
    except ValueError:
        return []


def _vary(runs: list[list[np.ndarray]]) -> bool:
    return not all(_same(runs[0], run) for run in runs[1:])


def _same(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    return len(first) == len(second) and all(map(_equal, first, second))


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    if a.shape != b.shape or a.dtype.kind != "f":
        return np.array_equal(a, b)
    return np.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)

"""What a model's own preprocessing makes of rows, and whether it mixes records."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dpopt import arguments, keras_compat
from keras_dpopt.types import UnsupportedModelError

# Rows, and runs of them, that a preprocessing is tried on.
_TRIED_ROWS, _TRIED_RUNS = 8, 4
_TOLERANCE = 1e-6

UNCHECKED = (
    "The preprocessing is given batches that cannot be read again; it was not checked "
    "for mixing records."
)
_RANDOM = "The preprocessing is random; it was not checked for mixing records."


def record(x, y, sample_weight) -> dict[str, Any]:
    """Returns the parts that are there, by name."""
    parts = {"x": x, "y": y, "sample_weight": sample_weight}
    return {name: part for name, part in parts.items() if part is not None}


def run(preprocess: Callable | None, rows: dict) -> dict[str, Any]:
    """Returns rows as a model with this preprocessing gets them.

    Args:
        preprocess: `(x, y, sample_weight) -> packed`, or `None`.
        rows: A dict of `record`.
    """
    if preprocess is None:
        return rows
    packed = preprocess(rows["x"], rows.get("y"), rows.get("sample_weight"))
    return record(*keras_compat.unpack_x_y_sample_weight(packed))


def number_of_rows(rows: dict) -> int:
    """How many rows there are."""
    return int(tf.nest.flatten(rows)[0].shape[0])


def check(preprocess, rows: dict) -> tuple[str, ...]:
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
    leaves = tf.nest.flatten(run(preprocess, rows))
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

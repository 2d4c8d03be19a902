"""The trial that the book-keeping engine has to pass on a model before it is used.

It evaluates the records of a batch together, so it is right only for a model that keeps
them apart, and only where its rules follow what the model does. Neither is taken on
trust. On a few records, at weights near the model's, it must give

    the gradient and the clipped gradient of the loop engine, record by record, and
    the same contribution of a record whatever the other records of its batch are.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dpopt import clipping
from keras_dpopt.clipping_styles import FlatClipping
from keras_dpopt.engines import base
from keras_dpopt.engines.operation_rules import NoRule

# Records that are tried.
RECORDS = 3

# No clipping at all, and clipping of every record.
_CLIPS = (1e12, 1e-8)

# Relative differences by rounding: between batches of other sizes, in full and in half
# precision, and between batches of one size.
_ROUNDING, _HALF_ROUNDING, _SAME_SHAPE = 1e-3, 5e-2, 1e-4


class CoupledRecordsError(NoRule):
    """What the model makes of a record depends on the others of its batch."""


def bookkeeping(
    engine, problem: Callable, rows: Any, seeds: Any, half: bool, check: Callable
) -> None:
    """Tries the book-keeping engine.

    Args:
        engine: The engine.
        problem: Function from `(preprocess, clip_factors)` to a `GradientProblem`.
        rows: Records, `[RECORDS, ...]`.
        seeds: Their seeds, `[RECORDS, number of seed generators, 2]`.
        half: Whether the model computes in half precision.
        check: Gets each graph before it is run, and raises on one that must not be.

    Raises:
        NoRule: if the engine cannot serve the model.
        UnsupportedModelError: if no engine can.
    """
    trial = _Trial(engine, problem, rows, seeds, check)
    rounding = _HALF_ROUNDING if half else _ROUNDING
    for i in range(RECORDS):
        for clip in _CLIPS:
            here, alone = trial.together([i], [i], 0, clip), trial.alone(i, clip)
            if _difference(here, alone) > rounding:
                raise NoRule("its gradient of a record is not that of the loop")
        others = [j for j in range(RECORDS) if j != i]
        for order, place in (([i, *others], 0), ([*others, i], len(others))):
            among = trial.together(order, order, place, clip)
            again = trial.together([i] * RECORDS, order, place, clip)
            if _difference(among, again) > _SAME_SHAPE:
                raise CoupledRecordsError(
                    "what the model makes of a record depends on the others"
                )
            # Random layers draw row after row, so the first row draws what a record
            # draws alone, and the others something else.
            comparable = place == 0 or not trial.is_random(i, clip)
            if comparable and _difference(among, alone) > rounding:
                raise CoupledRecordsError(
                    "a record is something else in a batch of one"
                )


class _Trial:
    def __init__(self, engine, problem, rows, seeds, check):
        self._rows, self._seeds = rows, seeds
        self._known: dict = {}

        def made(clip):
            style = FlatClipping()
            return problem(
                lambda record: tuple(clipping.clip_record(record, clip)),
                lambda bounds: (style.factors(bounds, clip, None), _only_sums),
            )

        def together(rows, seeds, count, clip):
            return engine.clipped_sum(made(clip), rows, seeds, count)

        def alone(row, seeds, clip):
            return base.clipped_record(made(clip), row, seeds)

        clip = tf.TensorSpec([], tf.float64)
        spec = lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype)  # noqa: E731
        one = lambda t: tf.TensorSpec(t.shape[1:], t.dtype)  # noqa: E731
        self._together = tf.function(together, autograph=False).get_concrete_function(
            tf.nest.map_structure(spec, rows),
            spec(seeds),
            tf.TensorSpec([], tf.int32),
            clip,
        )
        self._alone = tf.function(alone, autograph=False).get_concrete_function(
            tf.nest.map_structure(one, rows), one(seeds), clip
        )
        check(self._together.graph)
        check(self._alone.graph)

    def alone(self, i: int, clip: float, seeds: int | None = None) -> dict:
        """Gradient and outputs of record i by itself, with its or another's seeds."""
        row = tf.nest.map_structure(lambda t: t[i], self._rows)
        states = self._seeds[i if seeds is None else seeds]
        values, outputs = self._alone(row, states, tf.constant(clip, tf.float64))
        return _found(values, outputs, clip)

    def together(self, records, seeds, place: int, clip: float) -> dict:
        """Gradient and outputs of the record at `place` of a batch of these records."""
        key = (tuple(records), tuple(seeds), place, clip)
        if key not in self._known:
            upto, outputs = self._sum(records, seeds, place + 1, clip)
            if place:
                before, _ = self._sum(records, seeds, place, clip)
                upto = [a - b for a, b in zip(upto, before, strict=True)]
            outputs = tf.nest.map_structure(lambda t: t[place], outputs)
            self._known[key] = _found(upto, outputs, clip)
        return self._known[key]

    def is_random(self, i: int, clip: float) -> bool:
        """Whether record i is another with other seeds."""
        other = self.alone(i, clip, seeds=(i + 1) % RECORDS)
        return _difference(other, self.alone(i, clip)) > _SAME_SHAPE

    def _sum(self, records, seeds, count, clip):
        take = lambda t, of: tf.gather(t, of)  # noqa: E731
        rows = tf.nest.map_structure(lambda t: take(t, records), self._rows)
        return self._together(
            rows,
            take(self._seeds, seeds),
            tf.constant(count),
            tf.constant(clip, tf.float64),
        )


def _only_sums(sums, mask):
    del mask
    return tuple(sums)


def _found(values, outputs, clip) -> dict:
    """Gradients in units of the clip, loss and outputs, as NumPy."""
    flat = [outputs["loss"], *tf.nest.flatten(outputs["y_pred"])]
    return {
        "gradients": [np.asarray(v, np.float64) / min(clip, 1.0) for v in values],
        "outputs": [np.asarray(t, np.float64) for t in flat],
    }


def _difference(first: dict, second: dict) -> float:
    """The largest relative difference of two results."""
    a, b = first["gradients"], second["gradients"]
    whole = np.sqrt(sum(np.sum(v**2) for v in b))
    found = [
        np.linalg.norm(x - y) / (np.linalg.norm(y) + 1e-2 * whole + 1e-30)
        for x, y in zip(a, b, strict=True)
    ]
    for x, y in zip(first["outputs"], second["outputs"], strict=True):
        if x.shape != y.shape:
            return np.inf
        same = np.isclose(x, y, rtol=0.0, atol=0.0, equal_nan=True)
        gap = np.abs(np.where(same, 0.0, x - y)).max(initial=0.0)
        found.append(gap / (np.abs(y).max(initial=0.0, where=np.isfinite(y)) + 1e-30))
    return float(np.max(np.nan_to_num(found, nan=np.inf)))

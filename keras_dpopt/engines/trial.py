"""The trial that the book-keeping engine has to pass on a model before it is used.

It evaluates the records of a batch together, so it is right only for a model that keeps
them apart, and only where its rules follow what the model does. Neither is taken on
trust. On a few records, at weights near the model's, it must give

    the gradient and the clipped gradient of the loop engine, record by record,
    the same contribution of a record whatever the other records of its batch are, and
    the same at the first and the last place as in a batch of one.

Random layers draw row after row, so at the first place a record gets the draw that it
gets alone; for another place the trial runs the model as in inference.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dpopt import clipping
from keras_dpopt.clipping_styles import FlatClipping
from keras_dpopt.engines import base
from keras_dpopt.engines.record_axis import NoRule

# Records that are tried.
RECORDS = 4

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
        problem: Function from `(preprocess, clip_factors, training)` to a
            `GradientProblem`.
        rows: Records, `[RECORDS, ...]`.
        seeds: Their seeds, `[RECORDS, number of seed generators, 2]`.
        half: Whether the model computes in half precision.
        check: Gets each graph before it is run, and raises on one that must not be.

    Raises:
        NoRule: if the engine cannot serve the model.
        UnsupportedModelError: if no engine can.
    """
    rounding = _HALF_ROUNDING if half else _ROUNDING
    trial = _Trial(engine, problem, rows, seeds, check)
    clip = _CLIPS[-1]
    for i in range(RECORDS):
        for each in _CLIPS:
            if _difference(trial.among([i], 0, each), trial.alone(i, each)) > rounding:
                raise NoRule("its gradient of a record is not that of the loop")
        for order, place in _places(i):
            among = trial.among(order, place, clip)
            again = trial.among(order, place, clip, instead=[i] * RECORDS)
            if _difference(among, again) > _SAME_SHAPE:
                raise CoupledRecordsError(
                    "what the model makes of a record depends on the others"
                )
        order, place = _places(i)[0]
        _compare_place(trial, order, place, clip, rounding)
    if trial.is_random(0, clip):
        trial = _Trial(engine, problem, rows, seeds, check, training=False)
    if not trial.is_random(0, clip):
        for order, place in _places(0):
            _compare_place(trial, order, place, clip, rounding)


def _places(i: int) -> tuple:
    """Batches with record i at the first place, and at the last."""
    others = [j for j in range(RECORDS) if j != i]
    return ([i, *others], 0), ([*others, i], len(others))


def _compare_place(trial, order, place: int, clip: float, rounding: float) -> None:
    """Compares what a record adds at this place with what it adds alone."""
    among, alone = trial.among(order, place, clip), trial.alone(order[place], clip)
    if _difference(among, alone) > rounding:
        raise CoupledRecordsError("a record is something else in a batch of one")


class _Trial:
    def __init__(self, engine, problem, rows, seeds, check, training=True):
        self._rows, self._seeds = rows, seeds
        self._known: dict = {}

        def made(clip):
            style = FlatClipping()
            return problem(
                lambda record: tuple(clipping.clip_record(record, clip)),
                lambda bounds: (style.factors(bounds, clip, None), _only_sums),
                training,
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

    def among(
        self, records: list, place: int, clip: float, instead: list | None = None
    ) -> dict:
        """Gradient and outputs of the record at `place` of a batch of these records.

        Args:
            records: Numbers of the records, whose seeds the batch has.
            place: In the batch.
            clip: The clipping norm.
            instead: Other records, with the same seeds.
        """
        key = (tuple(records), place, clip, tuple(instead or ()))
        if key not in self._known:
            batch = (instead or records, records)
            upto, outputs = self._sum(*batch, place + 1, clip)
            if place:
                before, _ = self._sum(*batch, place, clip)
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

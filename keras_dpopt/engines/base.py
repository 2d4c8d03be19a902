"""What a gradient engine is, and the reference record that all engines must equal.

An engine gets the records of one microbatch and returns the sum of their clipped
records, and the outputs of the model on them. It never returns a single record.
"""

import abc
import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_dpopt.engines.notes import EngineNotes
from keras_dpopt.queries import GradientQuery, Point
from keras_dpopt.types import UnsupportedModelError


@dataclasses.dataclass(frozen=True)
class GradientProblem:
    """What is asked of an engine, for one step.

    Attributes:
        evaluate: `(weights, seeds, record) -> RecordOutputs`.
        preprocess: `record gradient -> clipped record`, of the mechanism.
        points: Evaluation points of the query; the outputs are of the last.
        query: The query, whose `record` makes the record gradient.
        loss_scale: Power of two that the loss is multiplied by before the derivative
            and each record divided by before its norm: float16 would underflow.
        names: Of the weights, for messages; without them they are numbered.
        evaluate_batch: `(weights, seeds, rows) -> RecordOutputs` of all rows together,
            with one state for each seed generator.
        clip_factors: `(bounds [m, parts]) -> (factors [m, parts], finish)`, of the
            mechanism: from upper bounds of the norms of a record's parts the factors
            that clip it, and the function that makes a sum of preprocessed records of
            the sums of its parts. `None` where the mechanism wants records.
        static_shapes: Whether the shapes of all tensors have to be known.
        notes: Is told how the weights are handled, by an engine that chooses.
    """

    evaluate: Callable[..., Any]
    preprocess: Callable[..., Any]
    points: tuple[Point, ...]
    query: GradientQuery = GradientQuery()  # noqa: RUF009 - it is frozen
    loss_scale: float = 1.0
    names: tuple[str, ...] = ()
    evaluate_batch: Callable[..., Any] | None = None
    clip_factors: Callable[..., Any] | None = None
    static_shapes: bool = True
    notes: EngineNotes = dataclasses.field(default_factory=EngineNotes)


class GradientEngine(abc.ABC):
    """An engine: microbatch in, sum of clipped records out."""

    name: str

    @abc.abstractmethod
    def clipped_sum(self, problem: GradientProblem, rows, seeds, count):
        """Sums the clipped records of one microbatch.

        Args:
            problem: The `GradientProblem`.
            rows: Structure of tensors `[m, ...]`, the records, padded at the end.
            seeds: `[m, number of seed generators, 2]`.
            count: int32 scalar: the first `count` rows are records.

        Returns:
            `(sum, outputs)`: the sum over the first `count` rows, in the structure of a
            preprocessed record; and a dict of "loss" `[m]`, "y_pred" `[m, ...]` and
            "masks", whose rows from `count` on mean nothing.
        """


class RecordGradient:
    """The gradient of one record's loss as a function of the weights.

    A weight that the loss does not depend on has a gradient of zeros, and is named in a
    warning: noise alone would move it.

    Args:
        problem: The `GradientProblem`.
        record: The record, without a batch axis.
        seeds: States of the seed generators: the same at all points of the record.

    Attributes:
        outputs: Of the last evaluation that was to be reported.
    """

    def __init__(self, problem: GradientProblem, record, seeds):
        self._problem = problem
        self._record, self._seeds = record, seeds
        self._missing = set(range(len(problem.points[0].weights)))
        self.outputs: Any = None

    def __call__(self, weights, report: bool = True) -> list:
        """Returns the gradients at `weights`, float32.

        Args:
            weights: One tensor for each trainable variable.
            report: Whether the outputs are those of the step, for the metrics.
        """
        scaled = self._scaled(weights, report)
        return [g / self._problem.loss_scale for g in scaled]

    def with_hessian_product(self, weights, direction: Callable) -> tuple[list, list]:
        """Returns the gradients g, and the Hessian times `direction(g)`; reports.

        Args:
            weights: As in `__call__`.
            direction: From g to a constant vector, in the same structure.
        """
        scale = self._problem.loss_scale
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(weights)
            scaled = self._scaled(weights, report=True)
            gradient = [g / scale for g in scaled]
            along = [tf.stop_gradient(d) for d in direction(gradient)]
            product = tf.add_n(
                [tf.reduce_sum(g * d) for g, d in zip(scaled, along, strict=True)]
            )
        curvature = tape.gradient(product, weights, unconnected_gradients="zero")
        return gradient, [
            _dense(h, w) / scale for h, w in zip(curvature, weights, strict=True)
        ]

    def _scaled(self, weights, report: bool) -> list:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(weights)
            outputs = self._problem.evaluate(weights, self._seeds, self._record)
            scaled = outputs.loss * self._problem.loss_scale
        gradients = tape.gradient(scaled, weights)
        if report:
            self.outputs = outputs
        self._missing &= {i for i, g in enumerate(gradients) if g is None}
        return [
            tf.zeros(w.shape, tf.float32) if g is None else _dense(g, w)
            for g, w in zip(gradients, weights, strict=True)
        ]

    def report_missing(self) -> None:
        """Says which weights the loss does not depend on.

        Raises:
            UnsupportedModelError: if it depends on none at all.
        """
        size = len(self._problem.points[0].weights)
        report_missing(sorted(self._missing), size, self._problem.names)


def _dense(gradient, weight):
    # A product over a sequence of unknown length forgets the weight's shape.
    dense = tf.cast(tf.convert_to_tensor(gradient), tf.float32)
    return tf.ensure_shape(dense, weight.shape)


def clipped_record(problem: GradientProblem, record, seeds):
    """Evaluates, differentiates and clips one record.

        u = the query's record, say sum_j c_j * grad l(theta_j);    one clip of u

    Returns:
        `(preprocessed record, outputs)` without a batch axis.

    Raises:
        UnsupportedModelError: if the loss depends on no weight at all.
    """
    gradient = RecordGradient(problem, record, seeds)
    values = problem.query.record(gradient, problem.points)
    gradient.report_missing()
    drop_batch = lambda t: t[0]  # noqa: E731
    outputs = gradient.outputs
    return problem.preprocess(tuple(values)), {
        "loss": outputs.loss,
        "y_pred": tf.nest.map_structure(drop_batch, outputs.y_pred),
        "masks": tf.nest.map_structure(drop_batch, outputs.masks),
    }


def report_missing(missing: Sequence[int], weights: int, names: Sequence[str]):
    """Says, as the step is traced, which weights the loss does not depend on."""
    if not missing:
        return
    remedy = (
        "A `call` decorated with @tf.function gives none: take the decorator off. "
        "Layers that the loss does not use want `trainable = False` before `compile`."
    )
    if len(missing) == weights:
        raise UnsupportedModelError(
            "Gradients do not exist for any trainable variable, so noise alone would "
            f"move the weights. {remedy}"
        )
    shown = ", ".join(repr(names[i]) if names else f"number {i}" for i in missing)
    warnings.warn(
        f"Gradients do not exist for variables [{shown}] when minimizing the loss: "
        f"noise alone moves them. {remedy}",
        stacklevel=2,
    )

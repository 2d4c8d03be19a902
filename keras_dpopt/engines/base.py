"""What a gradient engine is, and the reference record that all engines must equal.

An engine gets the records of one microbatch and returns the sum of their clipped
records, and the outputs of the model on them. It never returns a single record.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_dpopt.queries import Point


@dataclasses.dataclass(frozen=True)
class GradientProblem:
    """What is asked of an engine, for one step.

    Attributes:
        evaluate: `(weights, seeds, record) -> RecordOutputs`.
        preprocess: `record gradient -> clipped record`, of the mechanism.
        points: Evaluation points of the query; the outputs are of the last.
        loss_scale: Power of two that the loss is multiplied by before the derivative
            and each record divided by before its norm: float16 would underflow.
    """

    evaluate: Callable[..., Any]
    preprocess: Callable[..., Any]
    points: tuple[Point, ...]
    loss_scale: float = 1.0


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


def clipped_record(problem: GradientProblem, record, seeds):
    """Evaluates, differentiates and clips one record.

        u = sum_j c_j * grad l(theta_j),        then one clip of u

    Returns:
        `(preprocessed record, outputs)` without a batch axis.
    """
    total: list = []
    for point in problem.points:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(point.weights)
            outputs = problem.evaluate(point.weights, seeds, record)
            scaled = outputs.loss * problem.loss_scale
        gradients = tape.gradient(
            scaled, point.weights, unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        gradients = [
            # A product over a sequence of unknown length forgets the weight's shape.
            tf.ensure_shape(tf.cast(tf.convert_to_tensor(g), tf.float32), w.shape)
            / problem.loss_scale
            for g, w in zip(gradients, point.weights, strict=True)
        ]
        if point.coefficient != 1.0:
            gradients = [point.coefficient * g for g in gradients]
        total = (
            [a + b for a, b in zip(total, gradients, strict=True)]
            if total
            else gradients
        )
    drop_batch = lambda t: t[0]  # noqa: E731
    return problem.preprocess(tuple(total)), {
        "loss": outputs.loss,
        "y_pred": tf.nest.map_structure(drop_batch, outputs.y_pred),
        "masks": tf.nest.map_structure(drop_batch, outputs.masks),
    }

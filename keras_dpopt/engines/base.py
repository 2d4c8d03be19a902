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

from keras_dpopt.queries import Point
from keras_dpopt.types import UnsupportedModelError


@dataclasses.dataclass(frozen=True)
class GradientProblem:
    """What is asked of an engine, for one step.

    Attributes:
        evaluate: `(weights, seeds, record) -> RecordOutputs`.
        preprocess: `record gradient -> clipped record`, of the mechanism.
        points: Evaluation points of the query; the outputs are of the last.
        loss_scale: Power of two that the loss is multiplied by before the derivative
            and each record divided by before its norm: float16 would underflow.
        names: Of the weights, for messages; without them they are numbered.
    """

    evaluate: Callable[..., Any]
    preprocess: Callable[..., Any]
    points: tuple[Point, ...]
    loss_scale: float = 1.0
    names: tuple[str, ...] = ()


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

    A weight that the loss does not depend on has a gradient of zeros, and is named in a
    warning: noise alone would move it.

    Returns:
        `(preprocessed record, outputs)` without a batch axis.

    Raises:
        UnsupportedModelError: if the loss depends on no weight at all.
    """
    total: list = []
    missing = set(range(len(problem.points[0].weights)))
    for point in problem.points:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(point.weights)
            outputs = problem.evaluate(point.weights, seeds, record)
            scaled = outputs.loss * problem.loss_scale
        gradients = tape.gradient(scaled, point.weights)
        missing &= {i for i, g in enumerate(gradients) if g is None}
        gradients = [
            # A product over a sequence of unknown length forgets the weight's shape.
            tf.zeros(w.shape, tf.float32)
            if g is None
            else tf.ensure_shape(tf.cast(tf.convert_to_tensor(g), tf.float32), w.shape)
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
    _report_missing(sorted(missing), len(total), problem.names)
    drop_batch = lambda t: t[0]  # noqa: E731
    return problem.preprocess(tuple(total)), {
        "loss": outputs.loss,
        "y_pred": tf.nest.map_structure(drop_batch, outputs.y_pred),
        "masks": tf.nest.map_structure(drop_batch, outputs.masks),
    }


def _report_missing(missing: Sequence[int], weights: int, names: Sequence[str]):
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

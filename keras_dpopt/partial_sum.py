"""The clipped sum of a logical batch that comes as several physical ones."""

from typing import Any

import tensorflow as tf


class PartialSum:
    """Adds up the clipped sums of the parts of a logical batch.

        s_j = s_{j-1} + clipped sum of part j,   j = 1, ..., k;   s_0 = 0

    s_k is what noise is added to, once. Until then the sums are raw data: they are in
    variables that neither Keras nor TensorFlow tracks, so that no checkpoint has them.

    Args:
        parts: k, how many physical batches a logical one has.
        zero: The sum over no records, a structure of tensors.
    """

    def __init__(self, parts: int, zero: Any):
        self._parts = parts
        with tf.init_scope():
            self._sums = tf.nest.map_structure(_variable, zero)
            self._count = _variable(tf.constant(0, tf.int64))

    @property
    def count(self) -> Any:
        """int64 scalar: how many parts of the next logical batch have come."""
        return self._count.read_value()

    def add(self, part: Any) -> tuple[Any, Any]:
        """Adds the clipped sum of a part; the last one empties the variables.

        Returns:
            The sum so far, and whether it is that of the whole logical batch.
        """
        total = tf.nest.map_structure(
            lambda new, kept: new + kept.read_value(), part, self._sums
        )
        count = self.count + 1
        complete = count >= self._parts
        # Not longer than needed, and never a NaN times zero.
        tf.nest.map_structure(
            lambda kept, new: kept.assign(tf.where(complete, tf.zeros_like(new), new)),
            self._sums,
            total,
        )
        self._count.assign(tf.where(complete, tf.zeros_like(count), count))
        return total, complete

    def drop(self) -> None:
        """Forgets a logical batch that will not be completed; nothing was released."""
        for variable in self.variables().values():
            variable.assign(tf.zeros_like(variable))

    def variables(self) -> dict[str, Any]:
        """Returns the variables, which `BackupAndRestore` alone may write."""
        sums = {f"partial.{i}": v for i, v in enumerate(tf.nest.flatten(self._sums))}
        return {**sums, "partial.count": self._count}


def _variable(value: Any) -> tf.Variable:
    return tf.Variable(
        value,
        trainable=False,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        name="secret",
    )

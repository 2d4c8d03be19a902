"""The vectorized engine: all records of a microbatch at once, as TF Privacy does."""

import functools

import tensorflow as tf

from keras_dpopt.engines import base
from keras_dpopt.engines.mapping import vectorized_map


class VectorizedEngine(base.GradientEngine):
    """Evaluates the records of a microbatch in a `tf.vectorized_map`.

    It holds one gradient a record: `microbatch_size` times the trainable weights.
    """

    name = "vectorized"

    def clipped_sum(self, problem, rows, seeds, count):
        """See `GradientEngine.clipped_sum`."""
        records, outputs = vectorized_map(
            lambda args: base.clipped_record(problem, *args), (rows, seeds)
        )
        size = tf.nest.flatten(rows)[0].shape[0]
        mask = tf.range(size) < count
        return tf.nest.map_structure(
            functools.partial(_masked_sum, mask), records
        ), outputs


def _masked_sum(mask, values):
    """Sums over the rows of `mask` by select, so that padding leaves nothing behind."""
    shape = [-1] + [1] * (values.shape.rank - 1)
    return tf.reduce_sum(
        tf.where(tf.reshape(mask, shape), values, tf.zeros([], values.dtype)), axis=0
    )

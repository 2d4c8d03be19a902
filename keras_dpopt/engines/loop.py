"""The loop engine: one record after the other. The reference, and the fallback."""

import functools

import tensorflow as tf

from keras_dpopt.engines import base


class LoopEngine(base.GradientEngine):
    """Evaluates the records one by one in a `tf.while_loop`.

    It holds one record's gradient at a time, and takes whatever TensorFlow can
    differentiate; it is slow.
    """

    name = "loop"

    def clipped_sum(self, problem, rows, seeds, count):
        """See `GradientEngine.clipped_sum`."""
        size = tf.nest.flatten(rows)[0].shape[0]
        # The body is traced once, ahead, for the structure and the shapes of its
        # outputs; the loop then calls that trace.
        body = tf.function(
            functools.partial(base.clipped_record, problem), autograph=False
        )
        row = lambda i: tf.nest.map_structure(lambda t: t[i], rows)  # noqa: E731
        spec = lambda t: tf.TensorSpec(t.shape[1:], t.dtype)  # noqa: E731
        traced = body.get_concrete_function(
            tf.nest.map_structure(spec, rows), spec(seeds)
        )
        record_spec, output_spec = traced.structured_outputs
        sums = tf.nest.map_structure(lambda t: tf.zeros(t.shape, t.dtype), record_spec)
        arrays = tf.nest.map_structure(
            lambda t: tf.TensorArray(t.dtype, size, element_shape=t.shape), output_spec
        )

        def step(i, sums, arrays):
            record, outputs = body(row(i), seeds[i])
            sums = tf.nest.map_structure(tf.add, sums, record)
            arrays = tf.nest.map_structure(lambda a, o: a.write(i, o), arrays, outputs)
            return i + 1, sums, arrays

        _, sums, arrays = tf.while_loop(
            lambda i, *_: i < count, step, (0, sums, arrays), parallel_iterations=1
        )
        return sums, tf.nest.map_structure(lambda a: a.stack(), arrays)

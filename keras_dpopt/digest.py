"""Digests of weights: has anything assigned them since?"""

import tensorflow as tf


def weights_digest(weights) -> tf.Tensor:
    """Returns an int64 digest of weights.

    A sum of the bit patterns, each times an odd number of its position. A change of one
    weight always changes it, and changes of several cancel with a chance of about
    2^-64: it notices assignments, and is no defence against an adversary.
    """
    total = tf.constant(0, tf.int64)
    for i, weight in enumerate(weights):
        flat = tf.reshape(tf.cast(weight, tf.float32), [-1])
        bits = tf.cast(tf.bitcast(flat, tf.int32), tf.int64)
        factors = 2 * tf.range(tf.size(flat, tf.int64), dtype=tf.int64) + (2 * i + 1)
        total += tf.reduce_sum(bits * factors) * (2 * i + 1)
    return total

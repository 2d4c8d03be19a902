"""Digests of weights: has anything assigned them since?"""

import hashlib
from typing import Any

import numpy as np
import tensorflow as tf

# Columns of the matrices that weights are summed up as.
_COLUMNS = 1024


def weights_digest(weights) -> tf.Tensor:
    """Returns an int64 digest of weights.

    A sum of the bit patterns, each times an odd number of its position. A change of one
    weight always changes it, and changes of several cancel with a chance of about
    2^-64: it notices assignments, and is no defence against an adversary.
    """
    total = tf.constant(0, tf.int64)
    for i, weight in enumerate(weights):
        flat = tf.reshape(tf.cast(weight, tf.float32), [-1])
        size = flat.shape.num_elements()
        bits = tf.bitcast(flat, tf.int32)
        whole = size - size % _COLUMNS
        if whole:
            # int64 for every weight would take four times as long. One change by d
            # moves the sum of its row by d modulo 2^32, and so the lower half.
            table = tf.reshape(bits[:whole], [-1, _COLUMNS])
            columns, rows = tf.reduce_sum(table, 0), tf.reduce_sum(table, 1)
            total += (_weighed(columns, i) * 2**32 + _weighed(rows, i)) * (2 * i + 1)
        total += _weighed(bits[whole:], i) * (2 * i + 1)
    return total


def _weighed(values, i: int) -> tf.Tensor:
    odd = 2 * tf.range(tf.size(values, tf.int64), dtype=tf.int64) + (2 * i + 1)
    return tf.reduce_sum(tf.cast(values, tf.int64) * odd)


def content_digest(variable: Any) -> str:
    """Returns a digest of a variable's value, by a cryptographic hash, on the host."""
    content = np.ascontiguousarray(variable.numpy())
    return hashlib.blake2b(content.tobytes(), digest_size=8).hexdigest()

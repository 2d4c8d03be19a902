"""Digests of weights: has anything assigned them since?"""

import hashlib
from typing import Any

import numpy as np
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


def content_digest(variable: Any) -> str:
    """Returns a digest of a variable's value, by a cryptographic hash, on the host."""
    content = np.ascontiguousarray(variable.numpy())
    return hashlib.blake2b(content.tobytes(), digest_size=8).hexdigest()

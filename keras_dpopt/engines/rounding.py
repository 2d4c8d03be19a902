"""Sums of squares whose rounding errors are known.

Squares are summed in runs of at most 64 in float32 and these in float64. A sum of n
terms of one sign errs by at most n u of it in any order, u = 2^-24 (Higham, "Accuracy
and Stability of Numerical Algorithms", section 4.2).
"""

import math
from typing import Any

import tensorflow as tf

UNIT = 2.0**-24
"""u, the largest relative error of one float32 operation."""

SMALLEST = 2.0**-126
"""The smallest normal float32: below it, squares may be flushed to zero."""

_RUN = 64

SLACK = 1.0 + (_RUN / 2 + 8) * UNIT
"""What covers a sum of squares in runs, its root and a few roundings around it."""


def squares(tensor: Any, keep: int) -> Any:
    """Sums squares over all axes but the first `keep`: float64.

    Entries below the normal range count as the largest of them.
    """
    size = math.prod(tensor.shape[keep:])
    shape = tf.shape(tensor)
    run = next(n for n in range(min(size, _RUN), 0, -1) if size % n == 0) if size else 1
    runs = tf.concat([shape[:keep], [-1 if size else 0, run]], 0)
    if not size:
        return tf.zeros(shape[:keep], tf.float64)
    if size <= _RUN:
        sums = tf.cast(
            tf.reduce_sum(tf.square(tf.reshape(tensor, runs)), -1), tf.float64
        )
        return tf.squeeze(sums, -1) + size * SMALLEST
    if run < 8:  # a prime size, say
        tensor, runs = tf.cast(tensor, tf.float64), runs
    sums = tf.reduce_sum(tf.square(tf.reshape(tensor, runs)), -1)
    return tf.reduce_sum(tf.cast(sums, tf.float64), -1) + size * SMALLEST

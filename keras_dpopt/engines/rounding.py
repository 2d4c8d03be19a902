"""Rounding errors: sums of squares, and products of matrices on other devices.

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


# Relative errors of a product of two numbers of which a device keeps 10 or 7 digits
# behind the first: by cutting them off, which is worse than by rounding.
_TF32, _BFLOAT16 = 2.0**-9 * (1.0 + 2.0**-9), 2.0**-6 * (1.0 + 2.0**-6)


def product_error() -> float:
    """Returns how wrong a product may be within a product of float32 matrices.

    Its sums are of float32, but the factors may be cut before: to TF32 on a GPU, unless
    `tf.config.experimental.enable_tensor_float_32_execution(False)` forbids it, and to
    bfloat16 on a TPU. Zero on a CPU.
    """
    if tf.config.list_physical_devices("TPU"):
        return _BFLOAT16
    if not tf.config.experimental.tensor_float_32_execution_enabled():
        return 0.0
    return _TF32 if tf.config.list_physical_devices("GPU") else 0.0


def squares(tensor: Any, keep: int) -> Any:
    """Sums squares over all axes but the first `keep`: float64.

    Entries below the normal range count as the largest of them.
    """
    kept, summed = tensor.shape[:keep], tensor.shape[keep:]
    size = math.prod(summed)
    known = kept[1:].is_fully_defined()
    outer = [-1, *kept[1:]] if known else tf.shape(tensor)[:keep]
    if not size:
        return tf.zeros(tf.shape(tensor)[:keep], tf.float64)
    run = next(n for n in range(min(size, _RUN), 0, -1) if size % n == 0)
    if run < 8 and size > _RUN:  # a prime size, say
        tensor = tf.cast(tensor, tf.float64)
    inner = [run] if run == size else [size // run, run]
    shape = [*outer, *inner] if known else tf.concat([outer, inner], 0)
    sums = tf.reduce_sum(tf.square(tf.reshape(tensor, shape)), -1)
    sums = tf.cast(sums, tf.float64)
    if run < size:
        sums = tf.reduce_sum(sums, -1)
    return sums + size * SMALLEST

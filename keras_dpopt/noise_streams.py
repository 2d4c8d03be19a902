"""Streams of correlated noise: w = C^{-1} z, one step after the other.

A stream is the recursion of a strategy of `toeplitz.py` on tensors: `next` makes the
noise of a step, for one variable, from normal draws and buffers of earlier noise.
Buffers give the noise away: they are kept where the keys are.
"""

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dpopt import toeplitz


@dataclasses.dataclass(frozen=True)
class BandedStream:
    """The stream of a `BandedToeplitz` strategy.

        w_t = (z_t - sum_{j=1}^{b-1} c_j * w_{t-j}) / c_0

    Attributes:
        bands: b.
    """

    bands: int

    @property
    def buffers(self) -> int:
        """How many tensors in the shape of a variable are kept."""
        return self.bands - 1

    def rounded(self, strategy: toeplitz.BandedToeplitz) -> toeplitz.BandedToeplitz:
        """Returns the strategy that `next` follows in float32, with c_0 = 1.

        Noise times sensitivity does not depend on the scale of c. A c_0 near the ends
        of float32 would make all noise zero.
        """
        c = np.divide(strategy.coefficients, strategy.coefficients[0])
        return toeplitz.BandedToeplitz(tuple(c.astype(np.float32).tolist()))

    def parameters(self, strategy: toeplitz.BandedToeplitz) -> np.ndarray:
        """Returns c, at its full length."""
        c = np.zeros(self.bands, np.float32)
        c[: strategy.bands] = strategy.coefficients
        return c

    def next(self, c, buffers, draw, step) -> tuple[Any, Any]:
        """Returns w_t and the next buffers.

        Args:
            c: What `parameters` returned, a float32 tensor.
            buffers: `[buffers, *shape]`, the newest noise first.
            draw: Function from k to z_{t-k}, `[*shape]`, standard normal.
            step: int64 scalar t, from 0 on.
        """
        del step
        z = draw(0)
        if not self.buffers:
            return z / c[0], buffers
        noise = (z - _weighted_sum(c[1:], buffers)) / c[0]
        return noise, tf.concat([noise[tf.newaxis], buffers[:-1]], axis=0)


@dataclasses.dataclass(frozen=True)
class BufferedLinearStream:
    """The stream of a `BufferedLinearToeplitz` strategy.

        w_t = z_t - sum_i scale_i * buf_i;      buf_i = decay_i * buf_i + w_t

    Attributes:
        buffers: How many there are.
    """

    buffers: int

    def rounded(
        self, strategy: toeplitz.BufferedLinearToeplitz
    ) -> toeplitz.BufferedLinearToeplitz:
        """Returns the strategy that `next` follows in float32.

        A decay close to 1 is raised to a power as high as the number of steps.
        """
        return toeplitz.BufferedLinearToeplitz(
            _float32_below(strategy.decays), _float32_below(strategy.scales)
        )

    def parameters(self, strategy: toeplitz.BufferedLinearToeplitz) -> np.ndarray:
        """Returns decays and scales, `[2, buffers]`."""
        return np.array([strategy.decays, strategy.scales], np.float32)

    def next(self, parameters, buffers, draw, step) -> tuple[Any, Any]:
        """See `BandedStream.next`."""
        del step
        decays, scales = parameters[0], parameters[1]
        noise = draw(0) - _weighted_sum(scales, buffers)
        return noise, _along_first(decays, buffers) * buffers + noise


@dataclasses.dataclass(frozen=True)
class TreeStream:
    """The stream of tree aggregation: the prefix sums are those of a binary tree.

    Step t, the t+1st of its tree, makes one new node, of level l: the number of zero
    bits at the end of t+1. In the prefix sum it takes the place of those below it,
    which steps t-1, t-2, t-4, .. have made:

        w_t = z_t - sum_{m<l} z_{t - 2^m}

    Earlier draws are functions of (key, step), so they are drawn again: one a step on
    average, and nothing is kept.
    """

    buffers = 0

    def next(self, period, buffers, draw, step) -> tuple[Any, Any]:
        """See `BandedStream.next`; the parameter is the number of steps of a tree."""
        number = tf.cast(step, tf.int64) % period + 1
        lowest = tf.bitwise.bitwise_and(number, -number)  # 2^l

        def subtract(back, noise):
            return 2 * back, noise - draw(back)

        _, noise = tf.while_loop(
            lambda back, noise: back < lowest,
            subtract,
            (tf.constant(1, tf.int64), draw(tf.constant(0, tf.int64))),
            parallel_iterations=1,
        )
        return noise, buffers


def _weighted_sum(weights, buffers):
    # As a matrix product, some GPUs would do it with 10 bits of mantissa.
    return tf.reduce_sum(_along_first(weights, buffers) * buffers, axis=0)


def _along_first(weights, buffers):
    return tf.reshape(weights, [-1] + [1] * (buffers.shape.rank - 1))


def _float32_below(values) -> tuple[float, ...]:
    """Rounds down, so that what is below 1 stays so."""
    rounded = np.asarray(values, np.float32)
    below = np.nextafter(rounded, np.float32(0.0))
    return tuple(np.where(rounded > values, below, rounded).tolist())

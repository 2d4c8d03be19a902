"""The Gaussian noise of a release: tensor i of the sum gets that of its own stream."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_dpopt import prng


@dataclasses.dataclass(frozen=True)
class DrawnNoise:
    """Standard normals of a release that were drawn before its sum was there.

    They depend on no record, so they can be drawn while the gradients are computed,
    which costs less than one after the other. On several replicas, those of the first
    are used, and the graph drops the others.

    Attributes:
        key: int64 scalar, the noise key.
        step: int64 scalar, the number of the release.
        first_stream: The stream of the first one.
        values: One for each tensor of the sum.
    """

    key: Any
    step: Any
    first_stream: int
    values: tuple[Any, ...]


def draw(
    shapes: Sequence[Any], key: Any, step: Any, first_stream: int = 0
) -> DrawnNoise:
    """Draws the standard normals of a release: tensor i, of stream first_stream + i."""
    values = tuple(
        prng.standard_normal(key, step, stream, shape)
        for stream, shape in enumerate(shapes, start=first_stream)
    )
    return DrawnNoise(key, step, first_stream, values)


def add_noise(
    values: Sequence[Any],
    stddev: Any,
    key: Any,
    step: Any,
    first_stream: int = 0,
    drawn: DrawnNoise | None = None,
) -> list[tf.Tensor]:
    """Adds the noise of release `step`.

    Args:
        values: Tensors, the sum of clipped records.
        stddev: Number or scalar, the standard deviation of each coordinate's noise.
        key: int64 scalar, the noise key.
        step: int64 scalar, the number of the release.
        first_stream: Other than 0 where one step releases several sums, which may not
            share their noise.
        drawn: The normals, if they are there already.

    Raises:
        ValueError: if `drawn` was drawn for other tensors or streams.
        tf.errors.InvalidArgumentError: in a step whose number or key is not that of
            `drawn`.
    """
    shapes = [value.shape for value in values]
    if drawn is None:
        drawn = draw(shapes, key, step, first_stream)
    if drawn.first_stream != first_stream or shapes != [z.shape for z in drawn.values]:
        raise ValueError(
            "The noise was drawn for another sum. Draw it with the specs of this one."
        )
    checks = [
        tf.debugging.assert_equal(
            tf.cast(ours, tf.int64), tf.cast(theirs, tf.int64), "Noise of another step."
        )
        for ours, theirs in ((drawn.key, key), (drawn.step, step))
        if ours is not theirs
    ]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return [
            value + stddev * z for value, z in zip(values, drawn.values, strict=True)
        ]

"""Queries that look for a flat minimum: the gradient where the loss has been raised.

The weights are raised once a step, as values: the model's variables stay at theta, so
there is nothing to restore and nothing that depends on microbatches.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import tensorflow as tf

from keras_dpopt import arguments, validation
from keras_dpopt.queries import GradientQuery, Point, StepState

# Below it a direction is zero: a float32 square of a shorter one may vanish.
_LEAST_NORM = 1e-15


@dataclasses.dataclass(frozen=True)
class AscentQuery(GradientQuery):
    """The gradient after an ascent along what an earlier step has released (DP-SAT).

        e_t = rho * p_t / ||p_t||,           u_i = grad l_i(theta_t + e_t)

    with p_t the previous privatized gradient, or minus the last change of the weights
    ("last_update"), and e_t = 0 where p_t = 0 (before the first step, say).

    Attributes:
        rho: Length of the ascent, non-negative; 0 is no ascent.
        direction: "last_gradient" or "last_update".
    """

    rho: float
    direction: str = "last_gradient"

    def __post_init__(self):
        validation.check_non_negative("rho", self.rho)
        arguments.check_choice(
            "direction", self.direction, ("last_gradient", "last_update")
        )

    @property
    def slots(self) -> tuple[str, ...]:  # type: ignore[override]
        """What the direction is made of."""
        return (self.direction,) if self.rho else ()

    def points(self, state: StepState) -> tuple[Point, ...]:
        """Returns the raised weights."""
        if not self.rho:
            return (Point(1.0, state.weights),)
        sign = 1.0 if self.direction == "last_gradient" else -1.0
        along = state.slots[self.direction]
        return (Point(1.0, _raised(state.weights, along, sign * self.rho)),)


@dataclasses.dataclass(frozen=True)
class DoubleQuery(GradientQuery):
    """Sharpness-aware minimization with two releases in a step (DP-SAM).

        p_t = the privatized gradient at theta_t
        u_i = grad l_i(theta_t + rho * p_t / ||p_t||)

    Both are of the same batch.

    Attributes:
        rho: Length of the ascent, positive.
    """

    rho: float

    stages: ClassVar[int] = 2

    def __post_init__(self):
        validation.check_positive("rho", self.rho)

    def points(self, state: StepState) -> tuple[Point, ...]:
        """Returns theta, then the weights raised along what was released there."""
        if not state.released:
            return (Point(1.0, state.weights),)
        return (Point(1.0, _raised(state.weights, state.released[0], self.rho)),)


@dataclasses.dataclass(frozen=True)
class PerExampleAscentQuery(GradientQuery):
    """The gradient of the loss plus its own gradient norm (BAM).

        u_i = grad l_i + lambda * H_i g_i / ||g_i||                              (exact)
        u_i = (1-alpha) * g_i + alpha * grad l_i(theta + r * g_i / ||g_i||)    (approx.)

    with g_i = grad l_i(theta) and H_i its Hessian, both of one example, and
    alpha = lambda / r. It is g_i where g_i = 0. The ascent is each example's own, so
    the record is no sum over points that all examples share.

    Attributes:
        lambda_: Weight of the gradient norm, non-negative; 0 is the plain gradient.
        radius: r, positive; of the approximate form.
        exact: Which of the two forms.
    """

    lambda_: float
    radius: float
    exact: bool = False

    linear: ClassVar[bool] = False

    def __post_init__(self):
        validation.check_non_negative("lambda_", self.lambda_)
        validation.check_positive("radius", self.radius)
        arguments.check_flag("exact", self.exact)

    def record(self, gradient, points: Sequence[Point]) -> tuple:
        """Returns the record of one example."""
        weights = points[0].weights
        if not self.lambda_:
            return tuple(gradient(weights))
        if self.exact:
            here, curvature = gradient.with_hessian_product(weights, _unit)
            return tuple(
                g + self.lambda_ * h for g, h in zip(here, curvature, strict=True)
            )
        here = gradient(weights)
        raised = tuple(
            w + self.radius * d for w, d in zip(weights, _unit(here), strict=True)
        )
        there = gradient(raised, report=False)
        alpha = self.lambda_ / self.radius
        return tuple(
            (1.0 - alpha) * g + alpha * h for g, h in zip(here, there, strict=True)
        )


def _raised(weights, along, length: float) -> tuple:
    return tuple(w + length * d for w, d in zip(weights, _unit(along), strict=True))


def _unit(values) -> list:
    """The direction of a vector, or zero where it has none.

    Scaled by the largest entry, because float32 squares of 1e20 overflow; by select,
    because a gradient of zero or infinite length must not become NaN here and there.
    """
    largest = tf.reduce_max(tf.stack([tf.reduce_max(tf.abs(v)) for v in values]))
    sound = (largest > _LEAST_NORM) & tf.math.is_finite(largest)
    safe = tf.where(sound, largest, 1.0)
    scaled = [v / safe for v in values]
    norm = tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(v)) for v in scaled]))
    factor = tf.where(sound, 1.0 / tf.where(sound, norm, 1.0), 0.0)
    return [tf.where(sound, v * factor, 0.0) for v in scaled]

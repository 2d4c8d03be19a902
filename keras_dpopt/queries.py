"""Queries: where is the gradient of a record taken?

A query writes the record of example i as a sum

    u_i = sum_j c_j * grad l_i(theta_j)

over points theta_j that are the same for all examples. An engine evaluates the points
and clips the sum u_i once, so the sensitivity of the clipped sum is C whatever the
coefficients are.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from keras_dpopt import arguments, validation


@dataclasses.dataclass(frozen=True)
class Point:
    """One evaluation point: the coefficient c_j and the weights theta_j."""

    coefficient: float
    weights: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class GradientQuery:
    """The gradient at the current weights: u_i = grad l_i(theta)."""

    uses_last_update = False

    def points(
        self, weights: Sequence[Any], last_update: Any = None
    ) -> tuple[Point, ...]:
        """Returns the evaluation points; the last one is at theta if any is."""
        del last_update
        return (Point(1.0, tuple(weights)),)

    def record_specs(self, weights: Sequence[Any]) -> Sequence[Any]:
        """Returns tensors or specs with the shapes of the record's parts."""
        return weights


@dataclasses.dataclass(frozen=True)
class TwoPointQuery(GradientQuery):
    """The two-point observation of DiSK and FiBeR.

        a = (1 - kappa) / (kappa * gamma)
        u_i = a * grad l_i(theta + gamma*d) + (1 - a) * grad l_i(theta)

    with d the change that the last update made (zero before the first). Both gradients
    are of the same example under the same layer randomness, and are combined before the
    one clip. At a = 1 or a = 0 one of the two has no weight and is not evaluated.

    Attributes:
        kappa: In (0, 1].
        gamma: Look-ahead, positive.
    """

    kappa: float
    gamma: float

    def __post_init__(self):
        arguments.check_fraction("kappa", self.kappa, above_zero=True)
        validation.check_positive("gamma", self.gamma)

    @property
    def weight(self) -> float:
        """The look-ahead's weight a; an `a` within 1e-9 of 1 is taken as 1."""
        a = (1.0 - self.kappa) / (self.kappa * self.gamma)
        return 1.0 if abs(a - 1.0) < 1e-9 else a

    @property
    def uses_last_update(self) -> bool:  # type: ignore[override]
        """Whether the look-ahead is evaluated at all."""
        return self.weight != 0.0

    def points(self, weights, last_update: Any = None) -> tuple[Point, ...]:
        """Returns the look-ahead (if a != 0), then theta (if a != 1)."""
        a, weights = self.weight, tuple(weights)
        points = ()
        if a != 0.0:
            ahead = tuple(
                w + self.gamma * d for w, d in zip(weights, last_update, strict=True)
            )
            points += (Point(a, ahead),)
        if a != 1.0:
            points += (Point(1.0 - a, weights),)
        return points

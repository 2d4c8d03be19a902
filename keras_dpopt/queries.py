"""Queries: where is the gradient of a record taken?

A query writes the record of example i as a sum

    u_i = sum_j c_j * grad l_i(theta_j)                                     (linear)

over points theta_j that are the same for all examples. An engine evaluates the points
and clips the sum u_i once, so the sensitivity of the clipped sum is C whatever the
coefficients are. A query whose points are different for each example overrides
`record` and says `linear = False`; what it returns is clipped in the same way.

Points depend on the weights, on what earlier steps have released and on random numbers
that know no data.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from keras_dpopt import arguments, prng, validation


@dataclasses.dataclass(frozen=True)
class Point:
    """One evaluation point, and what its gradient counts for.

    Attributes:
        coefficient: c_j.
        weights: theta_j.
        scales: For each further view of the record, a factor for each weight,
            elementwise: the record is then the concatenation of

                sum_j c_j * g_j,  sum_j c_j * scales_j[0] * g_j,  ...
    """

    coefficient: float
    weights: tuple[Any, ...]
    scales: tuple[tuple[Any, ...], ...] = ()


class StepState:
    """What a query may look at: nothing in it comes from a record of this step.

    Args:
        weights: Values of the trainable variables, theta.
        slots: By name, the optimizer's slots that the query reads: a value a variable.
        key: int64 scalar, the key of the draws.
        number: int64 scalar, the number of the release that the step makes.
        train_size: float32 scalar N, or `None` where no part has asked for it.
        released: What earlier stages of this very step have released: the values of
            their privatized gradients.
    """

    def __init__(self, weights, slots, key, number, train_size=None, released=()):
        self.weights = tuple(weights)
        self.slots = slots
        self.key, self.number = key, number
        self.train_size = train_size
        self.released = tuple(released)

    def draw(self, j: int, i: int):
        """Returns the j-th standard normal draw of the step for the variable i.

        One draw serves all records: it is a function of (key, step, variable, j), and
        made anew at each call, because the calls of a step are in several graphs.
        """
        weights = self.weights
        stream = j * len(weights) + i
        return prng.standard_normal(self.key, self.number, stream, weights[i].shape)

    def draws(self, j: int) -> tuple:
        """Returns `draw` for all variables."""
        return tuple(self.draw(j, i) for i in range(len(self.weights)))

    def tensors(self) -> tuple:
        """Returns the arguments of the constructor, to be passed into a function."""
        return (
            self.weights,
            self.slots,
            self.key,
            self.number,
            self.train_size,
            self.released,
        )


@dataclasses.dataclass(frozen=True)
class GradientQuery:
    """The gradient at the current weights: u_i = grad l_i(theta).

    Attributes:
        slots: Slots that the optimizer keeps for the query: "last_update", the change
            that the last update made (zero before the first, and after anything else
            has assigned the weights), and "last_gradient", the last privatized one
            (weight regularizers included).
        reads: Slots of the update rule that it looks at.
        uses_train_size: Whether it needs N.
        stages: Releases in one step, each on the records of the same batch.
        views: How many gradients long the record is.
        linear: Whether `points` says all about the record.
    """

    slots: ClassVar[tuple[str, ...]] = ()
    reads: ClassVar[tuple[str, ...]] = ()
    uses_train_size: ClassVar[bool] = False
    stages: ClassVar[int] = 1
    views: ClassVar[int] = 1
    linear: ClassVar[bool] = True

    def points(self, state: StepState) -> tuple[Point, ...]:
        """Returns the evaluation points; the last one is at theta if any is."""
        return (Point(1.0, state.weights),)

    def record(self, gradient: Callable, points: Sequence[Point]) -> tuple:
        """Returns the unclipped record of one example.

        Args:
            gradient: Function from weights to the example's gradients (see
                `engines.base.RecordGradient`); a plain call reports its outputs.
            points: What `points` returned.
        """
        return linear_record(gradient, points)

    def record_specs(self, weights: Sequence[Any]) -> Sequence[Any]:
        """Returns tensors or specs with the shapes of the record's parts."""
        return tuple(weights) * self.views


def linear_record(gradient: Callable, points: Sequence[Point]) -> tuple:
    """Returns the record of a linear query."""
    total: list = []
    for point in points:
        values = gradient(point.weights)
        if point.coefficient != 1.0:
            values = [point.coefficient * g for g in values]
        parts = list(values)
        for scales in point.scales:
            parts += [s * g for s, g in zip(scales, values, strict=True)]
        total = [a + b for a, b in zip(total, parts, strict=True)] if total else parts
    return tuple(total)


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
    def slots(self) -> tuple[str, ...]:  # type: ignore[override]
        """The last update, where the look-ahead is evaluated at all."""
        return ("last_update",) if self.weight != 0.0 else ()

    def points(self, state: StepState) -> tuple[Point, ...]:
        """Returns the look-ahead (if a != 0), then theta (if a != 1)."""
        a, points = self.weight, ()
        if a != 0.0:
            ahead = tuple(
                w + self.gamma * d
                for w, d in zip(state.weights, state.slots["last_update"], strict=True)
            )
            points += (Point(a, ahead),)
        if a != 1.0:
            points += (Point(1.0 - a, state.weights),)
        return points

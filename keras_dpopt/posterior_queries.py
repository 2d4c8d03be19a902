"""Queries at weights that are sampled from a Gaussian posterior.

One draw serves all records of a step. It depends on earlier releases alone, so it costs
no privacy.
"""

import dataclasses
from typing import ClassVar

from keras import ops

from keras_dpopt import validation
from keras_dpopt.queries import GradientQuery, Point, StepState


@dataclasses.dataclass(frozen=True)
class PrecisionQuery(GradientQuery):
    """The gradient at a sample of IVON's posterior, averaged over a few samples.

        theta_s = m + e_s / sqrt(ess * (h + delta)),   e_s ~ N(0, I),   s = 1..S
        u_i     = (1/S) * sum_s grad l_i(theta_s)

    and with `products` the record is joint with (1/S) * sum_s e_s * grad l_i(theta_s),
    under the same clip: what Price's estimator of the Hessian needs of several samples.

    Attributes:
        ess: Effective sample size, positive; `None` takes N.
        samples: S.
        products: Whether the record has its second half.
    """

    ess: float | None
    samples: int
    products: bool = False

    reads: ClassVar[tuple[str, ...]] = ("precision",)

    def __post_init__(self):
        if self.ess is not None:
            validation.check_positive("ess", self.ess)
        validation.check_positive_integer("mc_samples", self.samples)

    @property
    def uses_train_size(self) -> bool:  # type: ignore[override]
        """Whether `ess` is to be N."""
        return self.ess is None

    @property
    def views(self) -> int:  # type: ignore[override]
        """The gradient, and its product with the draws."""
        return 2 if self.products else 1

    def points(self, state: StepState) -> tuple[Point, ...]:
        """Returns S points, one for each sample."""
        ess = state.train_size if self.ess is None else self.ess
        stddevs = [ops.rsqrt(ess * p) for p in state.slots["precision"]]
        points = ()
        for s in range(self.samples):
            draws = state.draws(s)
            weights = tuple(
                m + e * stddev
                for m, e, stddev in zip(state.weights, draws, stddevs, strict=True)
            )
            scales = (draws,) if self.products else ()
            points += (Point(1.0 / self.samples, weights, scales),)
        return points


@dataclasses.dataclass(frozen=True)
class ReparametrizedQuery(GradientQuery):
    """The gradient with respect to mean and scale of a Gaussian over the weights.

        w   = mu + softplus(rho) * e,    e ~ N(0, I)
        u_i = (grad l_i(w),  grad l_i(w) * e * sigmoid(rho))

    The record has twice the length of the weights, and one clip.
    """

    reads: ClassVar[tuple[str, ...]] = ("rho",)
    views: ClassVar[int] = 2

    def points(self, state: StepState) -> tuple[Point, ...]:
        """Returns the one sampled point."""
        draws, rhos = state.draws(0), state.slots["rho"]
        weights = tuple(
            mu + ops.softplus(rho) * e
            for mu, rho, e in zip(state.weights, rhos, draws, strict=True)
        )
        scales = tuple(e * ops.sigmoid(rho) for rho, e in zip(rhos, draws, strict=True))
        return (Point(1.0, weights, (scales,)),)

"""The types that mark the privacy line of one training step.

Above the line a value depends on single records; below it, everything is
post-processing of a Gaussian release. A `ClippedSum` is above the line and never
leaves the step. A `PrivatizedGradient` is below it, and only a mechanism can make one.
"""

import dataclasses
from typing import Any

# What a mix-in for a Keras class derives from: nothing, which a type checker takes for
# anything, because the Keras class that comes behind it has the attributes it uses.
MixIn: Any = object

# Only the mechanisms pass this object on. A flag could be left open by an exception
# in the middle of a trace; a value that must be at hand to construct the type cannot.
MECHANISM_TOKEN = object()


@dataclasses.dataclass(frozen=True)
class ClippedSum:
    """Sum over the records of a logical batch of their clipped records.

    Attributes:
        values: Structure of tensors, the sums; for a Gaussian mechanism a tuple in the
            order of the record.
        sensitivity: L2 sensitivity of `values`, all tensors jointly, to the removal of
            one record, or `None` where a foreign query keeps it to itself.
    """

    values: Any
    sensitivity: Any


class PrivatizedGradient:
    """The noised sum of clipped records divided by the expected batch size.

    Attributes:
        values: Tuple of float32 tensors in the order of the record.
        noise_stddev: Scalar, the standard deviation of the noise in each coordinate of
            `values` (on the mean, not on the sum) at this very step: sigma*C/B.
            `None` where a foreign query does not tell it.
        is_correlated: Whether the noise depends on that of other steps.
    """

    __slots__ = ("is_correlated", "noise_stddev", "values")

    def __init__(
        self, values, noise_stddev, *, token: object = None, is_correlated: bool = False
    ):
        if token is not MECHANISM_TOKEN:
            raise TypeError(
                "A PrivatizedGradient is made by a mechanism alone, because its "
                "values must have been clipped and noised. Train with `fit` or "
                "`train_on_batch` of a `keras_dpopt.DPModel`."
            )
        self.values = tuple(values)
        self.noise_stddev = noise_stddev
        self.is_correlated = is_correlated


@dataclasses.dataclass(frozen=True)
class RuleInput:
    """What an update rule gets for one variable; all of it is below the line.

    Attributes:
        filtered: The filtered gradient.
        raw: The filter's input: the privatized gradient, weight regularizers included.
        views: The further views of the record (see `queries.Point`), unfiltered.
        weight: The variable's value.
        draws: Function from j to the j-th standard normal draw of this step for this
            variable, the same that the query got.
    """

    filtered: Any
    raw: Any
    views: tuple[Any, ...] = ()
    weight: Any = None
    draws: Any = None


@dataclasses.dataclass(frozen=True)
class StepScalars:
    """What all variables share in one step.

    Attributes:
        step: k = t + 1, the number of this update.
        noise_variance: Of the noise in the gradient that the rule gets, as its
            correction wants it.
        train_size: float32 scalar N, or `None` where no part has asked for it.
    """

    step: Any
    noise_variance: Any = None
    train_size: Any = None


class UnsupportedModelError(ValueError):
    """The model cannot be trained privately as it is; says what to change."""

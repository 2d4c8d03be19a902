"""Privacy events: what one release is, in the words of dp_accounting.

One release is one noisy sum: a Gaussian mechanism, or several at once, on a batch
drawn in some way. Two neighboring relations occur:
  - zero-out (`ZERO_OUT`): one record's contribution is removed, the number N of
    records stays and is public. One record moves a clipped sum by at most C, so the
    analysis is that of adding or removing one record.
  - replace-one (`REPLACE_ONE`): one record is replaced with any other, which moves
    the sum by up to 2C. Only fixed-size sampling needs it.
"""

import math
from collections.abc import Sequence

import dp_accounting

from keras_dpopt import validation

ZERO_OUT = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE_ONE = dp_accounting.NeighboringRelation.REPLACE_ONE


def check_sizes(train_size: int, batch_size: int) -> tuple[int, int]:
    """Returns both sizes as ints, or raises when they do not fit together.

    Args:
        train_size: N, the number of training examples, at least 1.
        batch_size: b, the expected batch size, 1 to N.

    Returns:
        The pair (N, b).

    Raises:
        ValueError: One is below 1, or the batch is larger than the training set.
        TypeError: One is not a whole number.
    """
    train_size = validation.check_positive_integer("train_size", train_size)
    batch_size = validation.check_positive_integer("batch_size", batch_size)
    if batch_size > train_size:
        raise ValueError(
            f"A batch of {batch_size} is larger than the training set of {train_size} "
            f"examples. Pass a batch size of at most {train_size}."
        )
    return train_size, batch_size


def group_size(train_size: int, batch_size: int, bands: int) -> int:
    """Returns the size of the groups that take turns in banded sampling.

    Args:
        train_size: N, the number of training examples, at least 1.
        batch_size: The expected batch size, 1 to floor(N / bands).
        bands: The number of groups, at least 1.

    Returns:
        floor(N / bands), that of the smallest group.

    Raises:
        ValueError: A size is below 1, or the batch is larger than a group.
        TypeError: One is not a whole number.

    Example:
        >>> group_size(1003, 50, bands=10)
        100
    """
    train_size, batch_size = check_sizes(train_size, batch_size)
    size = train_size // validation.check_positive_integer("bands", bands)
    if batch_size > size:
        raise ValueError(
            f"A batch of {batch_size} is larger than a group: {train_size} examples in "
            f"{bands} groups are {size} each. Use a smaller batch or fewer bands."
        )
    return size


def effective_noise_multiplier(noise_multipliers: Sequence[float]) -> float:
    """Returns the noise multiplier of several Gaussian mechanisms on one batch.

        sigma = (sum_j sigma_j^-2)^(-1/2)

    Gaussians released together on the same batch are one Gaussian on the stacked,
    rescaled vector (McMahan et al., arXiv:1812.06210, section 3).

    Args:
        noise_multipliers: One value per Gaussian, each finite and at least 0.

    Returns:
        The effective noise multiplier; 0 when any is 0.

    Raises:
        ValueError: There is none, or one is negative or not finite.

    Example:
        >>> round(effective_noise_multiplier((1.25, 2.0)), 4)
        1.06
    """
    values = [
        validation.check_non_negative("noise_multiplier", v) for v in noise_multipliers
    ]
    if not values:
        raise ValueError(
            "A release without any noise multiplier cannot be accounted for. "
            "Pass one per Gaussian mechanism; 0 stands for no noise."
        )
    # Scaled by the smallest, or the squares leave the range of float64.
    least = min(values)
    if least == 0.0:
        return 0.0
    return least / math.sqrt(math.fsum((least / v) ** 2 for v in values))


def noise_multipliers_of_event(event: dp_accounting.DpEvent) -> tuple[float, ...]:
    """Returns the noise multipliers of what a TF Privacy query says it released.

    Args:
        event: A GaussianDpEvent, or a ComposedDpEvent or SelfComposedDpEvent of such
            (as QuantileAdaptiveClipSumQuery returns). A NonPrivateDpEvent counts as a
            Gaussian without noise. Its numbers must be concrete: read it eagerly.

    Returns:
        One noise multiplier per Gaussian event, in order. k repetitions of sigma count
        as one Gaussian of sigma / sqrt(k), which is the same release.

    Raises:
        ValueError: The event holds anything else.

    Example:
        >>> gaussian = dp_accounting.GaussianDpEvent
        >>> noise_multipliers_of_event(
        ...     dp_accounting.ComposedDpEvent([gaussian(1.5), gaussian(20.0)]))
        (1.5, 20.0)
    """
    match event:
        case dp_accounting.GaussianDpEvent(noise_multiplier=sigma):
            try:
                return (validation.check_non_negative("noise_multiplier", sigma),)
            except TypeError:
                raise ValueError(
                    f"The noise multiplier of {event!r} is no concrete number. "
                    "Read the event eagerly, outside tf.function."
                ) from None
        case dp_accounting.NonPrivateDpEvent():
            return (0.0,)
        case dp_accounting.ComposedDpEvent(events=events) if events:
            return tuple(s for e in events for s in noise_multipliers_of_event(e))
        case dp_accounting.SelfComposedDpEvent(event=inner, count=count) if count > 0:
            return tuple(
                s / math.sqrt(count) for s in noise_multipliers_of_event(inner)
            )
    raise ValueError(
        f"The query's event {event!r} is neither Gaussian nor composed of Gaussians, "
        "so its epsilon cannot be accounted for. Use a query that adds Gaussian noise."
    )


def poisson_event(
    noise_multipliers: Sequence[float], train_size: int, batch_size: int
) -> dp_accounting.DpEvent:
    """Returns the event of one release on a Poisson batch, under zero-out.

    Args:
        noise_multipliers: As `effective_noise_multiplier`.
        train_size: N, the number of training examples, at least 1.
        batch_size: The expected batch size, 1 to N; q = batch_size / N.

    Returns:
        A PoissonSampledDpEvent, or at q = 1 the GaussianDpEvent that it then is.

    Raises:
        ValueError: An argument is out of its range.
    """
    train_size, batch_size = check_sizes(train_size, batch_size)
    gaussian = unsampled_event(noise_multipliers)
    if batch_size == train_size:
        return gaussian
    return dp_accounting.PoissonSampledDpEvent(batch_size / train_size, gaussian)


def banded_event(
    noise_multipliers: Sequence[float], train_size: int, batch_size: int, bands: int
) -> dp_accounting.DpEvent:
    """Returns the event of one turn of all groups in banded sampling, under zero-out.

    The records are in `bands` groups, whatever is in them, and the groups take turns:
    step t draws each record of group t mod `bands` with probability
    batch_size / floor(N / bands). With a strategy matrix of at most `bands` bands, the
    steps that can hold one record do not overlap in it, so that each turn is one
    Poisson-subsampled Gaussian (Choquette-Choo et al., arXiv:2306.08153).

    Args:
        noise_multipliers: As `effective_noise_multiplier`, relative to the largest
            column norm of the strategy matrix times the clipping norm.
        train_size: N, the number of training examples, at least 1.
        batch_size: The expected batch size, 1 to floor(N / bands).
        bands: The number of groups, no less than the matrix has bands.

    Returns:
        As `poisson_event`.

    Raises:
        ValueError: An argument is out of its range.
    """
    size = group_size(train_size, batch_size, bands)
    return poisson_event(noise_multipliers, size, batch_size)


def fixed_size_event(
    noise_multipliers: Sequence[float], train_size: int, batch_size: int
) -> dp_accounting.DpEvent:
    """Returns the event of one release on a batch drawn without replacement.

    Args:
        noise_multipliers: As `effective_noise_multiplier`, in units of the clipping
            norm.
        train_size: N, the number of training examples, at least 1.
        batch_size: The exact batch size, 1 to N.

    Returns:
        A SampledWithoutReplacementDpEvent, which is accounted under replace-one. Its
        noise multiplier is in units of the sensitivity 2C, hence sigma / 2.

    Raises:
        ValueError: An argument is out of its range.
    """
    train_size, batch_size = check_sizes(train_size, batch_size)
    gaussian = unsampled_event(noise_multipliers, REPLACE_ONE)
    return dp_accounting.SampledWithoutReplacementDpEvent(
        source_dataset_size=train_size, sample_size=batch_size, event=gaussian
    )


def unsampled_event(
    noise_multipliers: Sequence[float],
    relation: dp_accounting.NeighboringRelation = ZERO_OUT,
) -> dp_accounting.GaussianDpEvent:
    """Returns the event of one release in which every record may take part.

    It bounds a release on a batch drawn in whatever way, as long as the draw does not
    depend on the records: given the draw, one record moves the sum by at most C (or
    2C), and divergences are quasi-convex, so not knowing the draw makes none larger.

    Args:
        noise_multipliers: As `effective_noise_multiplier`, in units of the clipping
            norm.
        relation: `ZERO_OUT` (sensitivity C) or `REPLACE_ONE` (sensitivity 2C, hence
            half the noise multiplier).

    Returns:
        A GaussianDpEvent.

    Raises:
        ValueError: A noise multiplier is out of its range.

    Example:
        >>> unsampled_event((1.0,), REPLACE_ONE)
        GaussianDpEvent(noise_multiplier=0.5)
    """
    sigma = effective_noise_multiplier(noise_multipliers)
    return dp_accounting.GaussianDpEvent(
        sigma / 2 if relation is REPLACE_ONE else sigma
    )

"""Calibration: the least noise multiplier whose epsilon is within a target."""

import math
from collections.abc import Callable

# A calibrated noise multiplier stays below the target epsilon by less than this.
_TOLERANCE = 1e-5

# More noise than any training survives; the accountants' numbers overflow further up.
_MOST_NOISE = 1e12

# Below it, PLD is not to be trusted (see composition.py).
_PLD_LEAST_DELTA = 1e-12


def least_noise(
    epsilon_at: Callable[[float, str], float],
    target: float,
    delta: float,
    accountant: str,
) -> float:
    """Returns the least sigma whose epsilon is within the target, and close to it.

    Args:
        epsilon_at: Epsilon by sigma and the name of an accountant; falls with sigma.
        target: The target epsilon, above 0 and finite.
        delta: The delta that epsilon is for, for the message.
        accountant: "rdp" or "pld".

    Raises:
        ValueError: if none comes close: epsilon jumps there, or stays above the target.
    """
    sigma, reached, above = _search(lambda s: epsilon_at(s, "rdp"), target, 1.0, 2.0)
    if accountant == "pld":
        # PLD is slow and needs a little less noise than RDP: it starts from there,
        # unless RDP has no answer.
        start, factor = (1.0, 2.0) if reached > target else (sigma, 1.1)
        sigma, reached, above = _search(
            lambda s: epsilon_at(s, "pld"), target, start, factor
        )
    if not 0.99 * target <= reached <= target:
        raise ValueError(_unreachable(target, delta, accountant, reached, above))
    return sigma


def _unreachable(
    target: float, delta: float, accountant: str, reached: float, above: float
) -> str:
    """Why no noise multiplier serves, and what to pass instead."""
    cause = (
        f"it stays above {above:.3g}, whatever the noise"
        if reached > target
        else f"it jumps from {above:.3g} to {reached:.3g}"
    )
    remedy = f"Pass a target_epsilon of {1.1 * above:.2g} or more, or a larger delta"
    if accountant == "rdp" and delta >= _PLD_LEAST_DELTA:
        remedy += ", or accountant='pld', which resolves smaller ones"
    return (
        f"No noise multiplier gives target_epsilon={target:g} at delta={delta:g}: the "
        f"{accountant.upper()} accountant cannot resolve an epsilon as small, {cause}. "
        f"{remedy}."
    )


def _search(
    epsilon_at: Callable[[float], float], target: float, start: float, factor: float
) -> tuple[float, float, float]:
    """Returns the least sigma within the target, its epsilon, and one above the target.

    The last one is of a sigma that is a hair smaller. Where no sigma is within the
    target, both are that of the largest tried.

    A bracket is sought from `start` in steps of `factor`. Epsilon falls with sigma
    roughly like a power, so interpolation between the logarithms of both converges in
    a few evaluations; every third one halves the bracket, which keeps the worst case
    short (a jump, or an infinite epsilon).
    """
    low, high = 0.0, start
    at_low, at_high = math.inf, epsilon_at(start)
    while at_high > target:
        if high > _MOST_NOISE:
            return high, at_high, at_high
        low, at_low = high, at_high
        high *= factor
        at_high = epsilon_at(high)
    while low == 0.0:
        at_middle = epsilon_at(high / factor)
        if at_middle > target:
            low, at_low = high / factor, at_middle
        else:
            high, at_high = high / factor, at_middle

    aim = math.log(target * (1 - _TOLERANCE / 2))
    rounds = 0
    while at_high < target * (1 - _TOLERANCE) and high - low > 1e-9 * high:
        rounds += 1
        middle = math.sqrt(low * high)
        if rounds % 3 and at_high > 0 and math.isfinite(at_low):
            share = (math.log(at_low) - aim) / (math.log(at_low) - math.log(at_high))
            guess = low * (high / low) ** share
            middle = guess if low < guess < high else middle
        at_middle = epsilon_at(middle)
        if at_middle > target:
            low, at_low = middle, at_middle
        else:
            high, at_high = middle, at_middle
    return high, at_high, at_low

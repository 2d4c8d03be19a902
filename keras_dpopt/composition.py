"""Composition: from (event, number of releases) to epsilon, quickly and safely.

dp_accounting computes the Renyi divergences and the privacy loss distributions. What
a training run needs on top is here: a cache per event, so that epsilon at another
step count takes a fraction of a millisecond with RDP; safe answers where the float64
formulas of dp_accounting leave their range; a bound on the time that PLD takes; and
the largest number of steps within a target.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence

import dp_accounting
import numpy as np
from dp_accounting import rdp
from dp_accounting.pld import privacy_loss_distribution

from keras_dpopt import validation
from keras_dpopt.dp_events import REPLACE_ONE, ZERO_OUT

ACCOUNTANTS = ("rdp", "pld")
"""The accountants by name: Renyi DP, and privacy loss distributions."""

Release = tuple[dp_accounting.DpEvent, int]
"""An event, and how many times it was released."""

_ORDERS = rdp.RdpAccountant().orders

# dp_accounting takes logarithms of 1 + O((q/sigma)^2) (Poisson) and differences of
# exponents of O(1/sigma^2) (fixed size). Above these noise multipliers float64 has no
# digits left for them: the results come out zero or negative, or raise. Below the
# least one its series and squares leave the range of float64.
_POISSON_NOISE_LIMIT = 1e4
_POISSON_RATIO_LIMIT = 3e6
_FIXED_SIZE_NOISE_LIMIT = 1e5
_LEAST_NOISE = 1e-6

# The PLD accountant's default grid, and what keeps its time to seconds.
_PLD_GRID = 1e-4
_PLD_MAX_STEPS = 10**6
_PLD_MAX_EPSILON = 1e7
_PLD_NOISE_LIMIT = 1e6
# It drops tails of mass 1e-15, and its convolutions round at 1e-16 an entry: with a
# delta near those it answers infinity, or a number that hangs on the rounding.
_PLD_LEAST_DELTA = 1e-12


def check_accountant(accountant: str) -> str:
    """Returns `accountant`, or raises a ValueError that names the known ones."""
    if accountant not in ACCOUNTANTS:
        raise ValueError(
            f"Unknown accountant {accountant!r}. Use one of "
            f"{', '.join(map(repr, ACCOUNTANTS))}."
        )
    return accountant


def compose_epsilon(
    releases: Iterable[Release],
    delta: float,
    accountant: str = "rdp",
    neighboring_relation: dp_accounting.NeighboringRelation = ZERO_OUT,
) -> float:
    """Returns the epsilon of all the releases together.

    "rdp": the Renyi divergences of all releases added up order by order, over
    dp_accounting's default orders, then converted as dp_accounting does (Canonne,
    Kamath & Steinke, arXiv:2004.00010, proposition 12).

    "pld": the privacy loss distributions convolved on dp_accounting's grid. RDP
    bounds the same quantity, so the smaller of both is returned. RDP's is returned
    alone where PLD is not to be trusted (a delta below 1e-12) or would take minutes
    (over a million Poisson steps, or an epsilon above 1e7).

    Args:
        releases: Pairs of an event made by the functions of dp_events.py and the number
            of its releases, at least 0. Equal events are counted together.
        delta: The delta of the guarantee, in (0, 1).
        accountant: "rdp" or "pld".
        neighboring_relation: `ZERO_OUT` or `REPLACE_ONE`; Poisson events need the
            first, fixed-size events the second.

    Returns:
        Epsilon, at least 0: 0 without any release, infinity without noise.

    Raises:
        ValueError: `delta` is out of range, the accountant is unknown, or it cannot
            account for an event under this relation.

    Example:
        >>> event = dp_accounting.GaussianDpEvent(10.0)
        >>> round(compose_epsilon([(event, 3), (event, 1)], delta=1e-5), 4)
        0.7945
    """
    delta = validation.check_delta(delta)
    check_accountant(accountant)
    counts: dict[dp_accounting.DpEvent, int] = {}
    for event, count in releases:
        if count < 0:
            raise ValueError(
                f"{event!r} was released {count} times. Pass a count of at least 0."
            )
        if count:
            counts[event] = counts.get(event, 0) + count
    if not counts:
        return 0.0
    divergences = sum(n * _rdp(e, neighboring_relation) for e, n in counts.items())
    by_rdp = float(rdp.compute_epsilon(_ORDERS, divergences, delta)[0])
    if accountant == "rdp":
        return by_rdp
    return min(by_rdp, _pld_epsilon(counts, delta, by_rdp))


def max_steps(
    prior_releases: Sequence[Release],
    event: dp_accounting.DpEvent,
    target_epsilon: float,
    delta: float,
    accountant: str = "rdp",
    neighboring_relation: dp_accounting.NeighboringRelation = ZERO_OUT,
    limit: int = 10**9,
) -> int:
    """Returns how many more releases of `event` keep epsilon within the target.

    Args:
        prior_releases: What was released already, as `compose_epsilon`.
        event: The event of one more release.
        target_epsilon: The epsilon not to exceed, above 0 and finite.
        delta: The delta of the guarantee, in (0, 1).
        accountant: "rdp" or "pld".
        neighboring_relation: As `compose_epsilon`.
        limit: The largest answer of interest, at least 0.

    Returns:
        The largest n, 0 to `limit`, with epsilon(prior, n times event) <= target; 0
        when not even one more fits, or the target is exceeded already.

    Raises:
        ValueError: As `compose_epsilon`.

    Example:
        >>> event = dp_accounting.GaussianDpEvent(10.0)
        >>> max_steps([(event, 3)], event, target_epsilon=0.8, delta=1e-5)
        1
    """
    target = validation.check_positive("target_epsilon", target_epsilon)

    def fits(name: str, count: int) -> bool:
        releases = [*prior_releases, (event, count)]
        return compose_epsilon(releases, delta, name, neighboring_relation) <= target

    check_accountant(accountant)
    most = _last_that_fits(functools.partial(fits, "rdp"), 0, limit)
    if accountant == "pld":
        # PLD is slow and never allows less than RDP: it starts from RDP's answer.
        most = _last_that_fits(functools.partial(fits, "pld"), most, limit)
    return most


def _last_that_fits(fits: Callable[[int], bool], low: int, limit: int) -> int:
    """Returns the last count for which `fits` holds; `low` where none above does."""
    stride = max(1, low // 8)
    high = low + stride
    while high <= limit and fits(high):
        low, stride = high, 2 * stride
        high = low + stride
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


@functools.lru_cache(maxsize=1024)
def _rdp(
    event: dp_accounting.DpEvent, relation: dp_accounting.NeighboringRelation
) -> np.ndarray:
    """Returns the Renyi divergences of one release, one for each of `_ORDERS`.

    dp_accounting's own, lowered (not raised) by three facts that hold for every
    release: no sampling makes it worse than the unsampled Gaussian,
    alpha / (2 sigma^2); no divergence is negative; none is above that of a higher
    order. The fixed-size bound (Wang et al., arXiv:1808.00087, theorem 27) needs the
    first for large batches: at b = 0.9 N it is three times the unsampled one.
    """
    match event:
        case dp_accounting.GaussianDpEvent(noise_multiplier=sigma):
            inner, limit = event, math.inf
        case dp_accounting.PoissonSampledDpEvent(
            event=dp_accounting.GaussianDpEvent(noise_multiplier=sigma) as inner,
            sampling_probability=q,
        ) if relation is ZERO_OUT:
            limit = min(_POISSON_NOISE_LIMIT, _POISSON_RATIO_LIMIT * q)
        case dp_accounting.SampledWithoutReplacementDpEvent(
            event=dp_accounting.GaussianDpEvent(noise_multiplier=sigma) as inner
        ) if relation is REPLACE_ONE:
            limit = _FIXED_SIZE_NOISE_LIMIT
        case _:
            raise ValueError(
                f"{event!r} cannot be accounted for under {relation.name}. Use "
                "Poisson batches under ZERO_OUT, fixed-size batches under REPLACE_ONE, "
                "or unsampled Gaussian noise."
            )
    with np.errstate(divide="ignore", over="ignore"):
        unsampled = _ORDERS / (2.0 * np.square(np.float64(sigma)))
    if inner is event or sigma < _LEAST_NOISE:
        return unsampled

    accountant = rdp.RdpAccountant(neighboring_relation=relation)
    noise = dp_accounting.GaussianDpEvent(min(sigma, limit))
    if isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent):
        # Beyond the limit: more noise never costs more than the limit's.
        sampled = dp_accounting.SampledWithoutReplacementDpEvent(
            event.source_dataset_size, event.sample_size, noise
        )
        values = accountant.compose(sampled).rdp
    else:
        sampled = dp_accounting.PoissonSampledDpEvent(q, noise)
        values = accountant.compose(sampled).rdp
        if sigma > limit:
            # At an integer order (alpha - 1) RDP is log sum_i w_i exp(s (i^2 - i) / 2)
            # in s = 1 / sigma^2, with sum_i w_i = 1: convex in s and zero at s = 0,
            # hence at most in proportion to s below any point.
            values = values * (limit / sigma) ** 2
            values[np.floor(_ORDERS) != _ORDERS] = np.inf
    values = np.clip(np.fmin(values, unsampled), 0.0, None)
    return np.minimum.accumulate(values[::-1])[::-1]


def _pld_epsilon(
    counts: dict[dp_accounting.DpEvent, int], delta: float, by_rdp: float
) -> float:
    """Returns PLD's epsilon, or infinity where it cannot give one."""
    least_noise, sampled_steps = math.inf, 0
    for event, count in counts.items():
        match event:
            case dp_accounting.GaussianDpEvent(noise_multiplier=sigma):
                least_noise = min(least_noise, sigma / math.sqrt(count))
            case dp_accounting.PoissonSampledDpEvent():
                least_noise = min(least_noise, event.event.noise_multiplier)
                sampled_steps += count
            case _:
                raise ValueError(
                    f"The PLD accountant cannot account for {event!r}. Use "
                    "accountant='rdp' with fixed-size sampling, or sample by Poisson."
                )
    if (
        delta < _PLD_LEAST_DELTA
        or by_rdp > _PLD_MAX_EPSILON
        or sampled_steps > _PLD_MAX_STEPS
    ):
        return math.inf
    # A loss spans about 1/(2 sigma^2) in one step and epsilon in all of them. Where
    # that is large, a coarser grid (in tenfold steps, so that the cache is of use)
    # keeps the number of its points, and hence the time, in bounds.
    excess = max(1.0, (0.3 / least_noise) ** 2, by_rdp / 500.0)
    grid = _PLD_GRID * 10.0 ** math.ceil(math.log10(excess))
    total = privacy_loss_distribution.identity(value_discretization_interval=grid)
    for event, count in counts.items():
        total = total.compose(_pld(event, count, grid))
    return float(total.get_epsilon_for_delta(delta))


@functools.lru_cache(maxsize=16)
def _pld(
    event: dp_accounting.DpEvent, count: int, grid: float
) -> privacy_loss_distribution.PrivacyLossDistribution:
    """Returns the privacy loss distribution of `count` releases of `event`."""
    if isinstance(event, dp_accounting.GaussianDpEvent):
        # n Gaussians of sigma on all records are one of sigma / sqrt(n).
        noise, q = event.noise_multiplier / math.sqrt(count), 1.0
    elif count > 1:
        return _pld(event, 1, grid).self_compose(count)
    else:
        noise, q = event.event.noise_multiplier, event.sampling_probability
    # Less noise than there is gives an upper bound; squares of more would overflow.
    return privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=min(noise, _PLD_NOISE_LIMIT),
        value_discretization_interval=grid,
        sampling_prob=q,
    )

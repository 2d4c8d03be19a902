"""Composition: from (event, number of releases) to epsilon, quickly and safely.

dp_accounting computes the Renyi divergences (see renyi.py) and the privacy loss
distributions. What a training run needs on top is here: a cache per event, so that
epsilon at another step count takes a fraction of a millisecond with RDP; a bound on the
time that PLD takes; and the largest number of steps within a target.
"""

import functools
import math
from collections.abc import Callable, Iterable

import dp_accounting
from dp_accounting import rdp
from dp_accounting.pld import privacy_loss_distribution

from keras_dpopt import renyi, validation
from keras_dpopt.dp_events import ZERO_OUT

ACCOUNTANTS = ("rdp", "pld")
"""The accountants by name: Renyi DP, and privacy loss distributions."""

Release = tuple[dp_accounting.DpEvent, int]
"""An event, and how many times it was released."""

# The PLD accountant's default grid, and what keeps its time to seconds.
_PLD_GRID = 1e-4
_PLD_MAX_STEPS = 10**6
_PLD_MAX_EVENTS = 20
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
    (over a million Poisson steps, over 20 different Poisson events, or an epsilon above
    1e7).

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
    divergences = sum(
        n * renyi.divergences(e, neighboring_relation) for e, n in counts.items()
    )
    by_rdp = float(rdp.compute_epsilon(renyi.ORDERS, divergences, delta)[0])
    if accountant == "rdp":
        return by_rdp
    return min(by_rdp, _pld_epsilon(counts, delta, by_rdp))


def max_steps(
    releases_after: Callable[[int], Iterable[Release]],
    target_epsilon: float,
    delta: float,
    accountant: str = "rdp",
    neighboring_relation: dp_accounting.NeighboringRelation = ZERO_OUT,
    limit: int = 10**9,
) -> int:
    """Returns how many more steps keep epsilon within the target.

    Args:
        releases_after: Returns all that is released once n more steps have been made,
            as `compose_epsilon` takes it, for any n of at least 1. It must not cost
            less for a larger n.
        target_epsilon: The epsilon not to exceed, above 0 and finite.
        delta: The delta of the guarantee, in (0, 1).
        accountant: "rdp" or "pld".
        neighboring_relation: As `compose_epsilon`.
        limit: The largest answer of interest, at least 0.

    Returns:
        The largest n, 0 to `limit`, whose epsilon is at most the target; 0 when not
        even one more step fits, or the target is exceeded already.

    Raises:
        ValueError: As `compose_epsilon`.

    Example:
        >>> event = dp_accounting.GaussianDpEvent(10.0)
        >>> max_steps(lambda n: [(event, 3 + n)], target_epsilon=0.8, delta=1e-5)
        1
    """
    target = validation.check_positive("target_epsilon", target_epsilon)

    # Cached, for many steps may be one release: then most answers are asked again.
    @functools.lru_cache(maxsize=16)
    def is_within(releases: tuple[Release, ...], name: str) -> bool:
        return compose_epsilon(releases, delta, name, neighboring_relation) <= target

    def fits(name: str, count: int) -> bool:
        return is_within(tuple(releases_after(count)), name)

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


def _pld_epsilon(
    counts: dict[dp_accounting.DpEvent, int], delta: float, by_rdp: float
) -> float:
    """Returns PLD's epsilon, or infinity where it cannot give one."""
    gaussians: list[tuple[float, int]] = []
    sampled: list[Release] = []
    for event, count in counts.items():
        match event:
            case dp_accounting.GaussianDpEvent(noise_multiplier=sigma):
                gaussians.append((sigma, count))
            case dp_accounting.PoissonSampledDpEvent():
                sampled.append((event, count))
            case _:
                raise ValueError(
                    f"The PLD accountant cannot account for {event!r}. Use "
                    "accountant='rdp' with fixed-size sampling, or sample by Poisson."
                )
    if (
        delta < _PLD_LEAST_DELTA
        or by_rdp > _PLD_MAX_EPSILON
        or sum(count for _, count in sampled) > _PLD_MAX_STEPS
        or len(sampled) > _PLD_MAX_EVENTS
    ):
        return math.inf
    least_noise = min(
        (event.event.noise_multiplier for event, _ in sampled), default=math.inf
    )
    if gaussians:
        # Gaussians on all records are one Gaussian, whose squared noise multiplier is
        # the inverse of the sum of their inverses. It comes last, so that more of
        # them leave `_composed` of the others in its cache.
        least = min(sigma for sigma, _ in gaussians)
        inverse = math.fsum(n * (least / sigma) ** 2 for sigma, n in gaussians)
        together = dp_accounting.GaussianDpEvent(least / math.sqrt(inverse))
        least_noise = min(least_noise, together.noise_multiplier)
        sampled.append((together, 1))
    # A loss spans about 1/(2 sigma^2) in one step and epsilon in all of them. Where
    # that is large, a coarser grid (in tenfold steps, so that the cache is of use)
    # keeps the number of its points, and hence the time, in bounds.
    excess = max(1.0, (0.3 / least_noise) ** 2, by_rdp / 500.0)
    grid = _PLD_GRID * 10.0 ** math.ceil(math.log10(excess))
    return float(_composed(tuple(sampled), grid).get_epsilon_for_delta(delta))


@functools.lru_cache(maxsize=32)
def _composed(
    releases: tuple[Release, ...], grid: float
) -> privacy_loss_distribution.PrivacyLossDistribution:
    """Returns the privacy loss distribution of all the releases.

    Cached by all the first ones, for it is the last that grows in a training.
    """
    if not releases:
        return privacy_loss_distribution.identity(value_discretization_interval=grid)
    event, count = releases[-1]
    return _composed(releases[:-1], grid).compose(_pld(event, count, grid))


@functools.lru_cache(maxsize=32)
def _pld(
    event: dp_accounting.DpEvent, count: int, grid: float
) -> privacy_loss_distribution.PrivacyLossDistribution:
    """Returns the privacy loss distribution of `count` releases of `event`."""
    if isinstance(event, dp_accounting.GaussianDpEvent):
        noise, q = event.noise_multiplier, 1.0
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

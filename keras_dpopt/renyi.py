"""Renyi divergences of one release.

They are dp_accounting's, with what a training run needs on top: a cache; those of
integer order without its loops, which tell where the noise differs from step to step;
and safe answers where its float64 formulas leave their range.
"""

import functools
import math

import dp_accounting
import numpy as np
from dp_accounting import rdp

from keras_dpopt.dp_events import REPLACE_ONE, ZERO_OUT

ORDERS = rdp.RdpAccountant().orders
"""The orders of all divergences, rising: dp_accounting's default."""

_IS_INTEGER = np.floor(ORDERS) == ORDERS

# dp_accounting takes logarithms of 1 + O((q/sigma)^2) (Poisson) and differences of
# exponents of O(1/sigma^2) (fixed size). Above these noise multipliers float64 has no
# digits left for them: the results come out zero or negative, or raise. Below the
# least one its series and squares leave the range of float64.
_POISSON_NOISE_LIMIT = 1e4
_POISSON_RATIO_LIMIT = 3e6
_FIXED_SIZE_NOISE_LIMIT = 1e5
_LEAST_NOISE = 1e-6


@functools.lru_cache(maxsize=8192)
def divergences(
    event: dp_accounting.DpEvent, relation: dp_accounting.NeighboringRelation
) -> np.ndarray:
    """Returns the Renyi divergences of one release, one for each of `ORDERS`.

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
        unsampled = ORDERS / (2.0 * np.square(np.float64(sigma)))
    if inner is event or sigma < _LEAST_NOISE:
        return unsampled

    noise = dp_accounting.GaussianDpEvent(min(sigma, limit))
    if isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent):
        # Beyond the limit: more noise never costs more than the limit's.
        sampled = dp_accounting.SampledWithoutReplacementDpEvent(
            event.source_dataset_size, event.sample_size, noise
        )
        accountant = rdp.RdpAccountant(neighboring_relation=relation)
        values = accountant.compose(sampled).rdp
    else:
        values = _poisson_rdp(q, noise)
        if sigma > limit:
            # At an integer order (alpha - 1) RDP is log sum_i w_i exp(s (i^2 - i) / 2)
            # in s = 1 / sigma^2, with sum_i w_i = 1: convex in s and zero at s = 0,
            # hence at most in proportion to s below any point.
            values = values * (limit / sigma) ** 2
            values[~_IS_INTEGER] = np.inf
    values = np.clip(np.fmin(values, unsampled), 0.0, None)
    return np.minimum.accumulate(values[::-1])[::-1]


def _poisson_rdp(q: float, noise: dp_accounting.GaussianDpEvent) -> np.ndarray:
    """Returns the Renyi divergences of a Poisson-subsampled Gaussian, for `ORDERS`.

    Those of fractional order are dp_accounting's. At an integer order it sums

        exp((alpha - 1) RDP) = sum_i C(alpha, i) (1 - q)^(alpha - i) q^i
                                     exp((i^2 - i) / (2 sigma^2))

    term by term in Python, which is most of its time; here is the same sum at once.
    (Mironov et al., arXiv:1908.10530, section 3.3.) Its weights add up to 1, so that
    the sum less 1 has expm1 in the place of exp: only positive terms, no cancellation.
    """
    event = dp_accounting.PoissonSampledDpEvent(q, noise)
    values = np.empty(len(ORDERS))
    fractional = rdp.RdpAccountant(ORDERS[~_IS_INTEGER])
    values[~_IS_INTEGER] = fractional.compose(event).rdp
    alpha, i, log_binomials = _binomials()
    exponents = (i * i - i) / (2.0 * noise.noise_multiplier**2)
    # The terms of i = 0 and 1 are zero, and small ones vanish beside the largest.
    with np.errstate(divide="ignore", under="ignore"):
        log_expm1 = exponents + np.log(-np.expm1(-exponents))
        log_terms = log_binomials + (alpha - i) * math.log1p(-q) + i * math.log(q)
        log_excess = np.logaddexp.reduce(log_terms + log_expm1, axis=1)
        values[_IS_INTEGER] = np.logaddexp(0.0, log_excess) / (alpha[:, 0] - 1.0)
    return values


@functools.cache
def _binomials() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the integer orders, as a column, i from 0 on, and log C(alpha, i)."""
    alpha = ORDERS[_IS_INTEGER][:, np.newaxis]
    i = np.arange(alpha.max() + 1.0)
    log_factorial = np.array([math.lgamma(n + 1.0) for n in i])
    rest = (alpha - i).astype(int)
    log_binomials = log_factorial[alpha.astype(int)] - log_factorial
    log_binomials = log_binomials - log_factorial[np.maximum(rest, 0)]
    return alpha, i, np.where(rest >= 0, log_binomials, -np.inf)

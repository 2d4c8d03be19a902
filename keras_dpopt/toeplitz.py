"""Correlated noise: the mathematics of matrix factorization and of DP-FTRL.

Independent noise adds up over a training run; correlated noise partly cancels. A
strategy C, lower triangular with a row for each of n = `steps` steps, makes it:

    w = C^{-1} z,    noise of step t = noise_multiplier * sensitivity * clip * w_t

for standard normal z. To whoever sees all steps this is the Gaussian mechanism on C g,
since g + s C^{-1} z = C^{-1} (C g + s z), even if gradients depend on earlier releases
(Denisov et al., arXiv:2202.08312). The sensitivity is the largest norm of
C g for one record, in units of the clip; a neighbor has zero in its place. It holds
only if the caller sees to it that a record's steps are at least `separation` apart (as
in a fixed order with that period), and at most `participations` if that is not `None`.

A Toeplitz strategy is C[t, s] = c_{t-s}, here with c_0 >= c_1 >= ... >= 0: so 1 / c(x)
has no pole inside the unit disc (Enestrom-Kakeya), and no noise grows exponentially.

In the weights of SGD with `momentum` in [0, 1) the noise is A C^{-1} z, where A adds up
the gradients. `error` "mean" is the root mean square of the row norms, "max" the last.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np
from scipy import optimize, signal

from keras_dpopt import validation

_ROUNDING = 1e-12  # by which coefficients that do not increase may, times c_0
# Of L-BFGS-B, which SciPy takes where there are bounds. Any end of it is private.
_SEARCH = {"maxiter": 1000, "ftol": 1e-11, "gtol": 1e-9}
_check_steps = functools.partial(validation.check_positive_integer, "steps")


@dataclasses.dataclass(frozen=True)
class BandedToeplitz:
    """A strategy with a finite number of coefficients, c_0 to c_{b-1}.

        w_t = (z_t - sum_{j=1}^{b-1} c_j * w_{t-j}) / c_0

    with w zero before the first step (arXiv:2306.08153); one coefficient is DP-SGD.

    Attributes:
        coefficients: c, with c_0 >= c_1 >= ... >= 0 and c_0 > 0, else a ValueError.
    """

    coefficients: tuple[float, ...]

    def __post_init__(self):
        column = _check_column(self.coefficients)
        object.__setattr__(self, "coefficients", tuple(column.tolist()))

    @property
    def bands(self) -> int:
        """The number b of coefficients; the recursion needs b - 1 earlier noises."""
        return len(self.coefficients)

    def coefficients_up_to(self, steps: int) -> np.ndarray:
        """Returns the first column of C for that many steps."""
        return _check_column(self.coefficients, steps)

    def inverse_up_to(self, steps: int) -> np.ndarray:
        """Returns the first column of C^{-1} for that many steps."""
        return inverse_coefficients(self.coefficients, steps)


@dataclasses.dataclass(frozen=True)
class BufferedLinearToeplitz:
    """A strategy whose coefficients are a sum of geometric series (BLT).

        c_0 = 1,    c_j = sum_i scale_i * decay_i^{j-1}
        w_t = z_t - sum_i scale_i * buffer_i,    buffer_i <- decay_i * buffer_i + w_t

    with the buffers zero before the first step (Dvijotham et al., arXiv:2404.16706).

    Attributes:
        decays: In [0, 1), one for each buffer, else a ValueError.
        scales: Positive, at most 1 in total so that c_1 <= c_0, else a ValueError.
    """

    decays: tuple[float, ...]
    scales: tuple[float, ...]

    def __post_init__(self):
        for name in ("decays", "scales"):
            object.__setattr__(self, name, tuple(map(float, getattr(self, name))))
        decays, scales = self.decays, self.scales
        in_range = all(0.0 <= d < 1.0 for d in decays) and all(s > 0.0 for s in scales)
        bounded = math.fsum(scales) <= 1.0 + _ROUNDING
        if not (0 < len(decays) == len(scales) and in_range and bounded):
            raise ValueError(
                f"The sensitivity for decays={decays} and scales={scales} is unknown. "
                "Pass decays in [0, 1) and as many positive scales of sum at most 1."
            )

    def coefficients_up_to(self, steps: int) -> np.ndarray:
        """Returns the first column of C for that many steps."""
        powers = np.vander(self.decays, _check_steps(steps) - 1, increasing=True)
        return np.append(1.0, np.asarray(self.scales) @ powers)

    def inverse_up_to(self, steps: int) -> np.ndarray:
        """Returns the first column of C^{-1} for that many steps."""
        # A step maps the buffers by D - 1 s', which with r = sqrt(s) is similar to the
        # symmetric D - r r'. Its eigenvalues give the powers without cancellation.
        roots = np.sqrt(self.scales)
        values, vectors = np.linalg.eigh(np.diag(self.decays) - np.outer(roots, roots))
        powers = np.vander(values, _check_steps(steps) - 1, increasing=True)
        return np.append(1.0, -np.square(roots @ vectors) @ powers)


Column = Sequence[float] | np.ndarray
Strategy = BandedToeplitz | BufferedLinearToeplitz


def square_root_coefficients(steps: int) -> np.ndarray:
    """Returns c of the square root of the prefix-sum matrix (arXiv:2202.11205)."""
    j = np.arange(1, _check_steps(steps))
    return np.append(1.0, np.cumprod((2 * j - 1) / (2 * j)))


def inverse_coefficients(c: Column, steps: int) -> np.ndarray:
    """Returns the first column of C^{-1}, the series of 1 / c(x); c of any sign."""
    column = _check_column(c, ordered=False)[:steps]
    return signal.lfilter([1.0], column, _check_column([1.0], steps))


def noise_row_norms(strategy: Strategy, steps: int) -> np.ndarray:
    """Returns the standard deviation of w_t for every step t, ||row t of C^{-1}||."""
    return np.sqrt(np.cumsum(np.square(strategy.inverse_up_to(steps))))


def sensitivity(
    c: Column, steps: int, separation: int, participations: int | None = None
) -> float:
    """Returns the sensitivity of C g in units of the clip.

        || sum_{j<k} C[:, j * separation] ||,    k = ceil(steps / separation)

    or `participations` if fewer (Kalinin & Lampert, arXiv:2405.13763).
    Columns p <= q have the inner product sum_{i<n-q} c_i c_{i+q-p}. It is at least 0,
    and falls as q or q - p grows, when c does not increase: the earliest and closest
    steps are the worst, all with the same contribution.

    Args:
        c: The coefficients, c_0 >= c_1 >= ... >= 0 and c_0 > 0; zero after the end.
        steps: The number of steps of the whole training run.
        separation: A record's steps are at least this far apart; `steps` for one.
        participations: The largest number of steps of a record.

    Raises:
        ValueError: The formula does not hold for c, or an argument is out of range.

    Example:
        >>> round(sensitivity([1.0, 0.5], steps=8, separation=4), 6)
        1.581139
    """
    schema = _check_schema(steps, separation, participations)
    return float(np.linalg.norm(_add_columns(_check_column(c, steps), *schema)))


def largest_column_norm(c: Column, steps: int, separation: int) -> float:
    """Returns ||c||, the sensitivity of one participation that meets no other.

    With no more bands than the separation, the columns of two participations have no
    step in common, whatever the signs of c: k of them have sqrt(k) times this, and
    each may be amplified by sampling for itself (arXiv:2306.08153). Else a ValueError.
    """
    column = _check_column(c, steps, ordered=False)
    separation, _ = _check_schema(steps, separation)
    if column[separation:].any():
        raise ValueError(f"More bands than the separation. Use at most {separation}.")
    return float(np.linalg.norm(column))


def prefix_sum_error(
    strategy: Strategy, steps: int, momentum: float = 0.0, error: str = "mean"
) -> float:
    """Returns the error of A C^{-1} z; sensitivity and noise multiplier scale it."""
    sums, weights = _sums_and_weights(strategy.inverse_up_to(steps), momentum, error)
    return math.sqrt(weights @ np.square(sums))


@functools.lru_cache(maxsize=64)
def optimize_banded(
    steps: int, bands: int, momentum: float = 0.0, error: str = "mean"
) -> BandedToeplitz:
    """Returns the `bands` coefficients of least ||c|| * error, with ||c|| = 1.

    They are best for any separation >= `bands`. The search is over the falls
    c_j - c_{j+1} >= 0, so the result cannot increase or become negative.
    """
    bands = validation.check_positive_integer("bands", bands)
    if bands > _check_steps(steps):
        raise ValueError(f"{bands} bands exceed {steps} steps. Pass at most {steps}.")

    def loss(falls):
        column = np.cumsum(falls[::-1])[::-1]
        inverse = inverse_coefficients(column, steps)
        sums, weights = _sums_and_weights(inverse, momentum, error)
        squared, norm_squared = weights @ np.square(sums), column @ column
        # d(1/c)/dc_j = -x^j / c^2: the sums change by -(sums / c), shifted by j.
        change = signal.lfilter([1.0], column, sums)
        weighted = signal.fftconvolve(weights * sums, change[::-1])[steps - 1 :]
        slopes = column / norm_squared - weighted[:bands] / squared
        return 0.5 * math.log(squared * norm_squared), np.cumsum(slopes)

    start = -np.diff(square_root_coefficients(bands), append=0.0)
    # The scale of c is free, so the tiny bound takes nothing but c = 0 away.
    bounds = [(1e-9, None)] + [(0.0, None)] * (bands - 1)
    end = optimize.minimize(loss, start, jac=True, bounds=bounds, options=_SEARCH)
    column = np.cumsum(end.x[::-1])[::-1]
    return BandedToeplitz(tuple(column / np.linalg.norm(column)))


@functools.lru_cache(maxsize=64)
def optimize_blt(
    steps: int,
    buffers: int = 3,
    separation: int | None = None,
    participations: int | None = None,
    momentum: float = 0.0,
    error: str = "mean",
) -> BufferedLinearToeplitz:
    """Returns the BLT of least sensitivity * error; no separation: one participation.

    The search is over log(1 - decay_i) and log(scale_i / (1 - sum of the scales)).
    """
    buffers = validation.check_positive_integer("buffers", buffers)
    separation = steps if separation is None else separation
    separation, participations = _check_schema(steps, separation, participations)

    def strategy(unknowns):
        ratios = np.exp(unknowns[buffers:])
        scales = ratios / (1.0 + np.sum(ratios))
        return BufferedLinearToeplitz(tuple(-np.expm1(unknowns[:buffers])), scales)

    def loss(unknowns):
        blt = strategy(unknowns)
        column = blt.coefficients_up_to(steps)
        norm = sensitivity(column, steps, separation, participations)
        return math.log(norm * prefix_sum_error(blt, steps, momentum, error))

    # As the square root: c_1 = 1/2, scales like sqrt(1 - decay) along log(1 - decay).
    gaps = -np.log(steps) * (np.arange(buffers) + 0.5) / buffers
    start = np.append(gaps, gaps / 2 - np.log(np.sum(np.exp(gaps / 2))))
    bounds = [(-np.log(steps) - 7.0, 0.0)] * buffers + [(-30.0, 10.0)] * buffers
    return strategy(optimize.minimize(loss, start, bounds=bounds, options=_SEARCH).x)


def tree_prefix_nodes(step: int) -> list[tuple[int, int]]:
    """Returns the nodes (level l, index i) whose noise is in the prefix sum at `step`.

    A node covers the steps [i * 2^l, (i+1) * 2^l), and the steps 0 to `step` are a
    node for each set bit of step + 1. Exactly one, the last of the list, is new:

        w_t = z_t - sum_{m < l} kept_m,    kept_l <- z_t,    ||row t||^2 = 1 + l

    with l its level (Kairouz et al., arXiv:2103.00039). Nodes with an odd index are in
    no released sum, so they cost no privacy.

    Example:
        >>> tree_prefix_nodes(5)
        [(2, 0), (1, 2)]
    """
    done = validation.check_positive_integer("step + 1", step + 1)
    levels = range(done.bit_length() - 1, -1, -1)
    return [(m, (done >> m) - 1) for m in levels if done >> m & 1]


def tree_matrices(steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns B and C of the tree, 0 or 1, with B C = A and w = C^{-1} z = A^{-1} B z.

    Node s is new at step s. B[t, s]: it is in prefix sum t; C[s, t]: it covers step t.
    """
    prefixes, covers = np.zeros((2, steps, steps))
    for step in range(steps):
        for level, index in tree_prefix_nodes(step):
            start, end = index << level, (index + 1) << level
            prefixes[step, end - 1] = covers[end - 1, start:end] = 1.0
    return prefixes, covers


def tree_sensitivity(steps: int, separation: int) -> float:
    """Returns the sensitivity of the tree for a fixed order with that period.

    A record is in the steps i, i + b, i + 2b, ... for one i < b = `separation`, or some
    of them; a min separation alone is NOT enough. The result is the largest sqrt(sum
    over nodes of (its steps in the node)^2): sqrt(floor(log2 steps) + 1) for one step.
    """
    separation, _ = _check_schema(steps, separation)
    squares = np.zeros(separation, np.int64)
    for size in (1 << level for level in range(int(steps).bit_length())):
        starts = np.arange(0, steps - size + 1, 2 * size)[:, np.newaxis]
        if size <= separation:
            # A node has a record at most once: count the steps of the nodes.
            covered = (starts + np.arange(size)).ravel() % separation
            squares += np.bincount(covered, minlength=separation)
        else:
            first = (np.arange(separation) - starts) % separation
            squares += np.sum(np.square((size - 1 - first) // separation + 1), axis=0)
    return math.sqrt(squares.max())


def _check_column(coefficients, steps: int | None = None, ordered: bool = True):
    """Returns c, checked, as an array; its first `steps`, with zeros after the end."""
    values = np.asarray(coefficients, np.float64)
    fits = values.ndim == 1 and np.isfinite(values).all() and (values[:1] > 0).any()
    if fits and ordered:
        rises = np.diff(values) > _ROUNDING * values[0]
        fits = not (rises.any() or (values < 0).any())
        # Where rounding let one rise, the earlier ones rise too: never less sensitive.
        values = np.maximum.accumulate(values[::-1])[::-1]
    if not fits:
        raise ValueError(
            "The coefficients do not give a known sensitivity. Pass finite ones, the "
            "first positive and, if columns overlap, none negative or increasing."
        )
    size = len(values) if steps is None else _check_steps(steps)
    return np.append(values, np.zeros(max(0, size - len(values))))[:size]


def _check_schema(steps, separation, participations=None) -> tuple[int, int]:
    """Returns the separation, at most `steps`, and the number of participations."""
    steps = _check_steps(steps)
    separation = validation.check_positive_integer("separation", separation)
    most = steps if participations is None else participations
    most = validation.check_positive_integer("participations", most)
    return min(separation, steps), min(most, -(-steps // separation))


def _add_columns(column: np.ndarray, separation: int, count: int) -> np.ndarray:
    """Returns sum_{j<count} C[:, j * separation], in time linear in the steps."""
    blocks = np.append(column, np.zeros(-len(column) % separation))
    sums = np.cumsum(blocks.reshape(-1, separation), axis=0)
    sums[count:] -= sums[:-count].copy()
    return sums.ravel()[: len(column)]


def _sums_and_weights(inverse, momentum, error) -> tuple[np.ndarray, np.ndarray]:
    """Returns A C^{-1}'s first column, and the weights of its squares in error^2."""
    if not validation.check_non_negative("momentum", momentum) < 1.0:
        raise ValueError(f"`momentum` is {momentum}. Pass a number in [0, 1).")
    if error not in ("mean", "max"):
        raise ValueError(f"Unknown error {error!r}. Use 'mean' or 'max'.")
    steps = len(inverse)
    weights = np.arange(steps, 0, -1) / steps if error == "mean" else np.ones(steps)
    return np.cumsum(signal.lfilter([1.0], [1.0, -momentum], inverse)), weights

"""Privacy accounting for users: steps, epsilon, and the noise multiplier for a target.

    epsilon(noise_multiplier=, delta=, train_size=, batch_size=, epochs=)
    noise_multiplier(target_epsilon=, delta=, train_size=, batch_size=, epochs=)

are inverses of each other. Both take accountant="rdp" (Renyi DP, the default) or
"pld" (privacy loss distributions). What they compose is built in dp_events.py and
composed in composition.py; the names that the ledger needs are passed on from there.

The module needs neither Keras nor TensorFlow.
"""

import functools
import math
from collections.abc import Callable

from keras_dpopt import validation
from keras_dpopt.composition import (
    ACCOUNTANTS,
    Release,
    check_accountant,
    compose_epsilon,
    max_steps,
)
from keras_dpopt.dp_events import (
    REPLACE_ONE,
    ZERO_OUT,
    banded_event,
    check_sizes,
    effective_noise_multiplier,
    fixed_size_event,
    group_size,
    noise_multipliers_of_event,
    poisson_event,
    unsampled_event,
)
from keras_dpopt.noise_plan import plan_of

__all__ = [
    "ACCOUNTANTS",
    "REPLACE_ONE",
    "ZERO_OUT",
    "Release",
    "banded_event",
    "check_accountant",
    "check_sizes",
    "compose_epsilon",
    "effective_noise_multiplier",
    "epsilon",
    "fixed_size_event",
    "group_size",
    "max_steps",
    "noise_multiplier",
    "noise_multipliers_of_event",
    "plan_of",
    "poisson_event",
    "steps_per_epoch",
    "training_steps",
    "unsampled_event",
]

# A calibrated noise multiplier stays below the target epsilon by less than this.
_CALIBRATION_TOLERANCE = 1e-5


def steps_per_epoch(train_size: int, batch_size: int) -> int:
    """Returns the number of steps of one epoch, ceil(N / b).

    Args:
        train_size: N, the number of training examples, at least 1.
        batch_size: b, the expected batch size, 1 to N.

    Returns:
        The number of steps, at least 1.

    Raises:
        ValueError: The batch is larger than the training set, or one is not positive.

    Example:
        >>> steps_per_epoch(60000, 256)
        235
    """
    train_size, batch_size = check_sizes(train_size, batch_size)
    return -(-train_size // batch_size)


def training_steps(train_size: int, batch_size: int, epochs: int) -> int:
    """Returns the number of steps of a fit, epochs * ceil(N / b).

    `epsilon` and `noise_multiplier` ask it; `fit` makes `steps_per_epoch` steps in each
    of its epochs, so that all three count alike.

    Args:
        train_size: N, the number of training examples, at least 1.
        batch_size: b, the expected batch size, 1 to N.
        epochs: The number of epochs, at least 1.

    Returns:
        The number of steps, at least 1.

    Raises:
        ValueError: The batch is larger than the training set, or one is not positive.

    Example:
        >>> training_steps(60000, 256, epochs=10)
        2350
    """
    epochs = validation.check_positive_integer("epochs", epochs)
    return epochs * steps_per_epoch(train_size, batch_size)


def epsilon(
    *,
    noise_multiplier: float,
    delta: float,
    train_size: int,
    batch_size: int,
    epochs: int,
    accountant: str = "rdp",
) -> float:
    """Returns the epsilon of a fit with Poisson batches and Gaussian noise.

    The composition of T = epochs * ceil(N / b) Poisson-subsampled Gaussian mechanisms
    with sampling probability q = b / N (Mironov et al., arXiv:1908.10530).

    Args:
        noise_multiplier: sigma, the noise's standard deviation on the sum of clipped
            gradients, in units of the clipping norm; 0 gives infinity.
        delta: The delta of the guarantee, in (0, 1); well below 1 / N.
        train_size: N, the number of training examples, at least 1.
        batch_size: b, the expected batch size, 1 to N.
        epochs: The number of epochs, at least 1.
        accountant: "rdp" (as TF Privacy's default) or "pld" (tighter, slower).

    Returns:
        Epsilon, at least 0; infinity without noise.

    Raises:
        ValueError: An argument is out of its range.

    Privacy:
        Holds for batches drawn by Poisson sampling, as `fit` on arrays draws them. For
        batches made in another way it is not a guarantee.

    Example:
        >>> round(epsilon(noise_multiplier=1.1, delta=1e-5, train_size=60000,
        ...               batch_size=256, epochs=10), 4)
        1.0997
    """
    delta = validation.check_delta(delta)
    steps = training_steps(train_size, batch_size, epochs)
    event = poisson_event((noise_multiplier,), train_size, batch_size)
    validation.warn_if_delta_is_large(delta, train_size)
    return compose_epsilon([(event, steps)], delta, accountant)


def noise_multiplier(
    *,
    target_epsilon: float,
    delta: float,
    train_size: int,
    batch_size: int,
    epochs: int,
    accountant: str = "rdp",
) -> float:
    """Returns the least noise multiplier that keeps a fit within `target_epsilon`.

    The inverse of `epsilon`. The target is met from below: epsilon of the result lies
    between 99.999 % and 100 % of the target.

    Args:
        target_epsilon: The epsilon that the fit may spend, above 0 and finite.
        delta: The delta of the guarantee, in (0, 1); well below 1 / N.
        train_size: N, the number of training examples, at least 1.
        batch_size: b, the expected batch size, 1 to N.
        epochs: The number of epochs, at least 1.
        accountant: "rdp" (as TF Privacy's default) or "pld" (tighter, slower).

    Returns:
        sigma, the noise's standard deviation over the clipping norm, above 0.

    Raises:
        ValueError: An argument is out of its range, or the accountant cannot resolve an
            epsilon as small as the target.

    Privacy:
        As `epsilon`: for batches drawn by Poisson sampling.

    Example:
        >>> sigma = noise_multiplier(target_epsilon=3.0, delta=1e-5, train_size=60000,
        ...                          batch_size=256, epochs=10)
        >>> round(sigma, 3)
        0.742
    """
    target = validation.check_positive("target_epsilon", target_epsilon)
    delta = validation.check_delta(delta)
    accountant = check_accountant(accountant)
    steps = training_steps(train_size, batch_size, epochs)
    validation.warn_if_delta_is_large(delta, train_size)

    def epsilon_at(sigma: float, by: str) -> float:
        event = poisson_event((sigma,), train_size, batch_size)
        return compose_epsilon([(event, steps)], delta, by)

    by_rdp = functools.partial(epsilon_at, by="rdp")
    sigma, reached = _calibrate(by_rdp, target, 1.0, 2.0)
    if accountant == "pld":
        # PLD is slow and needs a little less noise than RDP: it starts from there.
        by_pld = functools.partial(epsilon_at, by="pld")
        sigma, reached = _calibrate(by_pld, target, sigma, 1.1)
    if reached < 0.99 * target:
        raise ValueError(
            f"The {accountant.upper()} accountant cannot resolve an epsilon of "
            f"{target:g} at delta = {delta:g}: there it jumps. Use another target, or "
            "the other accountant."
        )
    return sigma


def _calibrate(
    epsilon_at: Callable[[float], float], target: float, start: float, factor: float
) -> tuple[float, float]:
    """Returns the least sigma with epsilon_at(sigma) <= target, and that epsilon.

    A bracket is sought from `start` in steps of `factor`. Epsilon falls with sigma
    roughly like a power, so interpolation between the logarithms of both converges in
    a few evaluations; every third one halves the bracket, which keeps the worst case
    short (a jump, or an infinite epsilon).
    """
    low, high = 0.0, start
    at_low, at_high = math.inf, epsilon_at(start)
    while at_high > target:
        low, at_low = high, at_high
        high *= factor
        at_high = epsilon_at(high)
    while low == 0.0:
        at_middle = epsilon_at(high / factor)
        if at_middle > target:
            low, at_low = high / factor, at_middle
        else:
            high, at_high = high / factor, at_middle

    aim = math.log(target * (1 - _CALIBRATION_TOLERANCE / 2))
    rounds = 0
    while at_high < target * (1 - _CALIBRATION_TOLERANCE) and high - low > 1e-9 * high:
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
    return high, at_high

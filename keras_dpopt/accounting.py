"""Privacy accounting for users: steps, epsilon, and the noise multiplier for a target.

    epsilon(noise_multiplier=, delta=, train_size=, batch_size=, epochs=)
    noise_multiplier(target_epsilon=, delta=, train_size=, batch_size=, epochs=)

are inverses of each other. Both take accountant="rdp" (Renyi DP, the default) or
"pld" (privacy loss distributions), and the sampler of the fit. An optimizer that costs
something else than one release a step tells its own cost to `noise_multiplier`. What
they compose is built in dp_events.py and composed in composition.py; the names that the
ledger needs are passed on from there.

The module needs neither Keras nor TensorFlow.
"""

from collections.abc import Callable
from typing import Any

import dp_accounting

from keras_dpopt import argument_names, noise_search, validation
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


@argument_names.explained(
    {
        **argument_names.PRIVACY_NAMES,
        "target_epsilon": "keras_dpopt.`noise_multiplier` takes it, the inverse",
    }
)
def epsilon(
    *,
    noise_multiplier: float,
    delta: float,
    train_size: int,
    batch_size: int,
    epochs: int,
    sampler: Any = None,
    accountant: str = "rdp",
) -> float:
    """Returns the epsilon of a fit on arrays with one Gaussian release a step.

    The composition of T = epochs * ceil(N / b) Poisson-subsampled Gaussian mechanisms
    with sampling probability q = b / N (Mironov et al., arXiv:1908.10530).

    Args:
        noise_multiplier: sigma, the noise's standard deviation on the sum of clipped
            gradients, in units of the clipping norm; 0 gives infinity.
        delta: The delta of the guarantee, in (0, 1); well below 1 / N.
        train_size: N, the number of training examples, at least 1.
        batch_size: b, the expected batch size, 1 to N.
        epochs: The number of epochs, at least 1.
        sampler: `FixedSizeSampler()` for batches of a fixed size, under the
            replace-one relation; `None` is Poisson sampling.
        accountant: "rdp" (as TF Privacy's default) or "pld" (tighter, slower; not with
            fixed-size batches).

    Returns:
        Epsilon, at least 0; infinity without noise.

    Raises:
        ValueError: An argument is out of its range.
        TypeError: An argument is unknown, missing or of the wrong type.

    Privacy:
        Holds for batches drawn by the sampler, as `fit` on arrays draws them, and for
        optimizers with one release a step: all but `DPSAM`, `DPSGLD`, `MFDPFTRL` and
        `DPFTRL`. `optimizer.planned_epsilon(...)` is right for these as well.

    Example:
        >>> round(epsilon(noise_multiplier=1.1, delta=1e-5, train_size=60000,
        ...               batch_size=256, epochs=10), 4)
        1.0997
    """
    delta = validation.check_delta(delta)
    steps = training_steps(train_size, batch_size, epochs)
    event, relation = _event(noise_multiplier, train_size, batch_size, sampler)
    validation.warn_if_delta_is_large(delta, train_size, stacklevel=4)
    return compose_epsilon([(event, steps)], delta, accountant, relation)


@argument_names.explained()
def noise_multiplier(
    *,
    target_epsilon: float,
    delta: float,
    train_size: int,
    batch_size: int,
    epochs: int,
    sampler: Any = None,
    accountant: str = "rdp",
    optimizer: Callable[[float], Any] | None = None,
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
        sampler: As `epsilon`.
        accountant: As `epsilon`.
        optimizer: A function that makes the optimizer of a noise multiplier, as
            `lambda sigma: DPFTRL(0.1, l2_norm_clip=1.0, noise_multiplier=sigma)`.
            `DPSAM`, `DPSGLD`, `MFDPFTRL` and `DPFTRL` need it, for they do not make one
            release a step of that multiplier; with the others it changes nothing.

    Returns:
        sigma, the noise's standard deviation over the clipping norm, above 0; 0 where
        the noise that `DPSGLD` has of its own is enough.

    Raises:
        ValueError: An argument is out of its range, or no noise multiplier comes close
            to the target from below.
        TypeError: An argument is unknown, missing or of the wrong type.

    Privacy:
        As `epsilon`; with `optimizer`, for that optimizer.

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
    validation.warn_if_delta_is_large(delta, train_size, stacklevel=4)

    def epsilon_at(sigma: float, by: str) -> float:
        if optimizer is None:
            event, relation = _event(sigma, train_size, batch_size, sampler)
            return compose_epsilon([(event, steps)], delta, by, relation)
        return _made_by(optimizer, sigma).planned_epsilon(
            delta=delta,
            train_size=train_size,
            batch_size=batch_size,
            epochs=epochs,
            sampler=sampler,
            accountant=by,
        )

    # Only noise of the optimizer's own keeps epsilon finite without any of ours.
    if optimizer is not None and epsilon_at(0.0, accountant) <= target:
        return 0.0
    return noise_search.least_noise(epsilon_at, target, delta, accountant)


def _event(
    sigma: float, train_size: int, batch_size: int, sampler: Any
) -> tuple[dp_accounting.DpEvent, dp_accounting.NeighboringRelation]:
    """One release on a batch of this sampler, and the relation it is stated under."""
    kind = "poisson" if sampler is None else getattr(sampler, "kind", None)
    if kind == "poisson":
        return poisson_event((sigma,), train_size, batch_size), ZERO_OUT
    if kind == "fixed_size":
        return fixed_size_event((sigma,), train_size, batch_size), REPLACE_ONE
    raise TypeError(
        f"sampler={sampler!r} is not one whose batches can be accounted. Pass "
        "PoissonSampler() or FixedSizeSampler()."
    )


def _made_by(make: Any, sigma: float) -> Any:
    """The private optimizer that a user's function makes of a noise multiplier."""
    is_function = callable(make) and not isinstance(make, type)
    made: Any = make(sigma) if is_function else None
    if not hasattr(made, "planned_epsilon"):
        raise TypeError(
            "`optimizer` must be a function of the noise multiplier that returns a "
            "private optimizer. Pass, say, `lambda sigma: keras_dpopt.DPFTRL(0.1, "
            "l2_norm_clip=1.0, noise_multiplier=sigma)`."
        )
    if made.noise_multiplier not in (None, sigma):  # None: a dp_sum_query has it
        raise ValueError(
            f"`optimizer` made an optimizer with noise_multiplier="
            f"{made.noise_multiplier:g} of the noise multiplier {sigma:g}. Let the "
            "function pass its argument on as `noise_multiplier`."
        )
    return made

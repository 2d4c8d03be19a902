"""Noise multipliers that change from step to step, as runs of equal ones.

A plan is a sequence of pairs (noise multiplier, number of steps), in the order of the
steps. Epsilon needs one computation for each distinct multiplier, and a learning-rate
schedule gives as many as there are steps; `plan_of` makes them few.
"""

import itertools
import math
from collections.abc import Iterable, Sequence

from keras_dpopt import validation

NoisePlan = tuple[tuple[float, int], ...]
"""Pairs of a noise multiplier and a number of steps, in the order of the steps."""


def plan_of(noise_multipliers: Iterable[float], resolution: float = 0.005) -> NoisePlan:
    """Returns the plan of steps with these noise multipliers, none of them raised.

    Multipliers that lie in one cell of a geometric grid are lowered to the least of
    them, so that epsilon comes out a little too large, never too small. A sequence of
    values that are equal, or further apart than the resolution, is kept as it is.

    Args:
        noise_multipliers: One for each planned step, each finite and at least 0.
        resolution: The relative width of a cell, above 0 and finite. A tenfold rise
            takes log(10) / log(1 + resolution) cells: 462 at the default.

    Returns:
        The plan.

    Raises:
        ValueError: There is no multiplier, or an argument is out of its range.
        TypeError: A multiplier is not a number.

    Example:
        >>> plan_of([2.015, 2.016, 2.015, 3.0])
        ((2.015, 3), (3.0, 1))
    """
    width = math.log1p(validation.check_positive("resolution", resolution))
    values = [
        validation.check_non_negative("noise_multiplier", v) for v in noise_multipliers
    ]
    if not values:
        raise ValueError(
            "A plan without any step has no noise multiplier. Pass one for each step."
        )
    cells = [-math.inf if v == 0 else math.floor(math.log(v) / width) for v in values]
    least: dict[float, float] = {}
    for cell, value in zip(cells, values, strict=True):
        least[cell] = min(value, least.get(cell, value))
    lowered = (least[cell] for cell in cells)
    return tuple((v, len(list(run))) for v, run in itertools.groupby(lowered))


def check_plan(plan: Iterable[Iterable]) -> NoisePlan:
    """Returns `plan` as tuples of plain numbers, or raises when it is none.

    Args:
        plan: Pairs of a noise multiplier, finite and at least 0, and a number of steps,
            at least 1; may be empty, and may be lists, as JSON has them.

    Returns:
        The plan.

    Raises:
        ValueError: A number is out of its range, or an entry is not a pair.
        TypeError: An entry holds anything but numbers.
    """
    checked = []
    for entry in plan:
        pair = tuple(entry)
        if len(pair) != 2:
            raise ValueError(
                f"A noise plan has pairs (noise multiplier, number of steps), not "
                f"{entry!r}. Make it with `plan_of`."
            )
        sigma = validation.check_non_negative("noise_multiplier", pair[0])
        steps = validation.check_positive_integer("steps of a noise plan", pair[1])
        checked.append((sigma, steps))
    return tuple(checked)


def first_steps(plan: Sequence[tuple[float, int]], steps: int) -> NoisePlan:
    """Returns the plan of the first `steps` steps.

    Args:
        plan: The plan, not empty.
        steps: How many of its steps were made, at least 0. Those beyond the plan have
            the least multiplier of it.

    Returns:
        A plan of exactly so many steps.

    Example:
        >>> first_steps(((2.0, 3), (3.0, 1)), 6)
        ((2.0, 3), (3.0, 1), (2.0, 2))
    """
    made = []
    for sigma, count in plan:
        if steps <= 0:
            break
        made.append((sigma, min(count, steps)))
        steps -= count
    if steps > 0:
        made.append((min(sigma for sigma, _ in plan), steps))
    return tuple(made)

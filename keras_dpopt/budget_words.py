"""What is said of a budget that allows no further step."""

import dataclasses
import math

from keras_dpopt.ledger import Ledger


def refusal(ledger: Ledger) -> str | None:
    """Returns why no step of the open phase can be made, or None where one can.

    Args:
        ledger: A ledger with an open phase.
    """
    budget = ledger.spent_budget()
    if budget is None:
        return None
    *others, phase = ledger.phases
    next_step = dataclasses.replace(
        phase, steps=phase.steps + 1, epochs_begun=phase.epochs_begun + 1
    )
    spent = ledger.epsilon(budget.delta, budget.accountant)
    after = Ledger([*others, next_step]).epsilon(budget.delta, budget.accountant)
    of_budget = (
        f"privacy budget (epsilon {budget.target_epsilon:g} at delta "
        f"{budget.delta:g}, by {budget.accountant.upper()})"
    )
    would = "would be unbounded" if math.isinf(after) else f"would be {after:.4g}"
    if phase.steps_per_release > 1:
        first = "the first step, which costs as much as the run that it begins"
    else:
        first = "the first step"
    if phase.noise_multiplier == 0:
        remedy = "Pass a noise_multiplier above 0"
    else:
        remedy = "Raise noise_multiplier"
    larger = "set a larger target for this delta and accountant with PrivacyBudget"
    if not ledger.total_steps:
        return (
            f"Nothing is spent, but the {of_budget} is too small for this fit: after "
            f"{first}, epsilon {would}. {remedy}, or {larger}."
        )
    if not phase.steps and spent < budget.target_epsilon / 2:
        return (
            f"The {of_budget} is too small for this fit: epsilon is {spent:.4g} now, "
            f"and after {first}, it {would}. {remedy}, or {larger}."
        )
    return (
        f"The {of_budget} is spent, so no further step can be made: epsilon is "
        f"{spent:.4g}, and after another step it {would}. Stop here, or {larger}."
    )

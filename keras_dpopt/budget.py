"""Budgets: an epsilon that a model may reach in all."""

import dataclasses
from collections.abc import Iterable

from keras_dpopt import accounting, validation


@dataclasses.dataclass(frozen=True)
class Budget:
    """An epsilon that the model may reach in all, at one delta.

    Attributes:
        target_epsilon: Above 0 and finite.
        delta: In (0, 1).
        accountant: "rdp" or "pld".
    """

    target_epsilon: float
    delta: float
    accountant: str = "rdp"

    def __post_init__(self):
        set_field = object.__setattr__  # the only way in a frozen dataclass
        target = validation.check_positive("target_epsilon", self.target_epsilon)
        set_field(self, "target_epsilon", target)
        set_field(self, "delta", validation.check_delta(self.delta))
        accounting.check_accountant(self.accountant)

    @property
    def key(self) -> tuple[float, str]:
        """What budgets must share for one to replace the other."""
        return self.delta, self.accountant


def smallest_by_key(budgets: Iterable[Budget]) -> dict[tuple[float, str], Budget]:
    """Returns the budget with the smallest target for each key, in order."""
    smallest: dict[tuple[float, str], Budget] = {}
    for budget in budgets:
        earlier = smallest.setdefault(budget.key, budget)
        if budget.target_epsilon < earlier.target_epsilon:
            smallest[budget.key] = budget
    return smallest

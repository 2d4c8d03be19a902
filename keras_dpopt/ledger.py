"""The privacy ledger: what was released about the training data, never forgotten.

A ledger is a list of phases (phase.py). Epsilon is a pure function of the ledger; the
order of the phases does not matter. It belongs to the model, and the number of steps in
it never shrinks.
"""

import dataclasses
import json
from collections.abc import Iterable
from typing import Any, NoReturn

import dp_accounting

from keras_dpopt import accounting
from keras_dpopt.phase import (
    ASSUMPTIONS,
    Budget,
    Phase,
    check_count,
    check_texts,
    relation_of,
    smallest_by_key,
)

__all__ = ["ASSUMPTIONS", "Budget", "Ledger", "Phase"]

_VERSION = 1
_NO_LIMIT = 10**9


class Ledger:
    """All phases of a model, with notes for the statement, and budgets.

    Args:
        phases: The phases; those without an identity get one.
        notes: Sentences that the statement prints.
        budgets: The budgets that further steps keep to, all of them.

    Example:
        >>> ledger = Ledger()
        >>> ledger.begin(Phase("DPSGD", "poisson", (1.1,), 1.0, 256, train_size=60000))
        >>> ledger.set_steps(2350)
        >>> round(ledger.epsilon(delta=1e-5), 4)
        1.0997
    """

    def __init__(
        self,
        phases: Iterable[Phase] = (),
        notes: Iterable[str] = (),
        budgets: Iterable[Budget] = (),
    ):
        self._phases = [phase if phase.identity else phase.named() for phase in phases]
        self._notes = list(dict.fromkeys(notes))
        self._budgets = smallest_by_key(budgets)
        # The phases that this very object counts, and may therefore go on with. One
        # that came from a file may go on elsewhere too, and the steps made there and
        # here would pass for the same.
        self._own: set[str] = set()
        self._epoch_is_new = True

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases; the last one is open."""
        return tuple(self._phases)

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes, each once, in the order in which they came."""
        return tuple(self._notes)

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """The budgets, at most one for each delta and accountant."""
        return tuple(self._budgets.values())

    @property
    def total_steps(self) -> int:
        """The number of releases in all phases."""
        return sum(phase.steps for phase in self._phases)

    @property
    def relation(self) -> dp_accounting.NeighboringRelation:
        """Zero-out, or replace-one as soon as a fixed-size batch was released."""
        return relation_of(self._phases)

    # --- recording -------------------------------------------------------------------

    def begin(self, phase: Phase, *, resume: bool = False) -> None:
        """Opens a phase, which goes on with an earlier one of the same kind.

        Args:
            phase: What the coming steps are like; without steps.
            resume: Go on even with a phase that was read from a file. Only right where
                the process that wrote the file is gone for good, as after an
                interruption.
        """
        if phase.steps or phase.epochs_begun:
            raise ValueError(
                f"A phase begins without steps, not with {phase.steps} of them. Use "
                "`combine` to take over what another ledger has recorded."
            )
        self._phases = [p for p in self._phases if p.steps]
        self._epoch_is_new = True
        for earlier in reversed(self._phases):
            if earlier.same_as(phase) and (resume or earlier.identity in self._own):
                self._phases.remove(earlier)
                self._epoch_is_new = not resume
                phase = earlier
                break
        else:
            phase = phase.named()
        self._phases.append(phase)
        self._own.add(phase.identity)

    def begin_epoch(self) -> None:
        """Counts the next step as the first of another epoch."""
        self._epoch_is_new = True

    def set_steps(self, steps: int) -> None:
        """Sets the number of steps of the open phase.

        Args:
            steps: All its steps, at least as many as it has.

        Raises:
            ValueError: The number would shrink.
            TypeError: It is no whole number.
            RuntimeError: No phase is open.
        """
        if not self._phases:
            raise RuntimeError("No phase is open. Call `begin` first.")
        phase = self._phases[-1]
        steps = check_count("steps", steps)
        if steps < phase.steps:
            raise ValueError(
                f"A ledger cannot forget: {phase.steps} steps were released, and "
                f"{steps} is less. Set a larger number, or begin another phase."
            )
        if steps > phase.steps:
            epochs = phase.epochs_begun + self._epoch_is_new
            self._epoch_is_new = False
            self._phases[-1] = dataclasses.replace(
                phase, steps=steps, epochs_begun=epochs
            )

    def note(self, text: str) -> None:
        """Adds a sentence for the statement, unless it is there already."""
        if text not in self._notes:
            self._notes.append(text)

    def set_budget(
        self, target_epsilon: float, delta: float, accountant: str = "rdp"
    ) -> None:
        """Sets the budget at one delta, by one accountant.

        It replaces the one that has both in common, and a larger target is noted. The
        others stay, and further steps keep to all of them.

        Args:
            target_epsilon: The epsilon not to exceed, above 0 and finite.
            delta: The delta of the guarantee, in (0, 1).
            accountant: "rdp" or "pld".
        """
        budget = Budget(target_epsilon, delta, accountant)
        earlier = self._budgets.get(budget.key, budget)
        if budget.target_epsilon > earlier.target_epsilon:
            self.note(
                f"The privacy budget at delta {delta:g} ({accountant.upper()}) was "
                f"raised from {earlier.target_epsilon:g} to {budget.target_epsilon:g}."
            )
        self._budgets[budget.key] = budget

    def combine(self, other: "Ledger") -> None:
        """Takes over all that another ledger knows; doing it twice changes nothing.

        A phase that both know counts once, with the larger number of steps; one that
        only the other knows is added.

        Args:
            other: An older or newer copy of this ledger, or that of a model whose
                weights this one holds. Of its and these budgets the smaller holds where
                delta and accountant are the same.
        """
        known = {phase.identity: i for i, phase in enumerate(self._phases)}
        added = []
        for theirs in (phase for phase in other.phases if phase.steps):
            i = known.get(theirs.identity)
            if i is None:
                added.append(theirs)
            else:
                mine = self._phases[i]
                self._phases[i] = dataclasses.replace(
                    mine,
                    steps=max(mine.steps, theirs.steps),
                    epochs_begun=max(mine.epochs_begun, theirs.epochs_begun),
                )
        self._phases = added + self._phases  # the open phase stays the last
        for text in other.notes:
            self.note(text)
        self._budgets = smallest_by_key([*self.budgets, *other.budgets])

    # --- asking ----------------------------------------------------------------------

    def epsilon(
        self, delta: float, accountant: str = "rdp", assumption: str | None = None
    ) -> float:
        """Returns the epsilon of all phases together.

        Args:
            delta: The delta of the guarantee, in (0, 1).
            accountant: "rdp" or "pld".
            assumption: None for the headline, which assumes of the caller's batches
                what the caller declared, by default nothing; or one of `ASSUMPTIONS`
                instead.

        Returns:
            Epsilon, at least 0: 0 before the first step, infinity without noise.

        Raises:
            ValueError: An argument is out of range, the PLD accountant meets fixed-size
                batches, or "poisson" is assumed where a train_size is unknown.

        Privacy:
            Under `relation`: fixed-size batches are accounted under replace-one, and
            the guarantee of the whole ledger is then stated so.
        """
        if assumption is not None and assumption not in ASSUMPTIONS:
            raise ValueError(
                f"Unknown assumption {assumption!r}. Use one of {ASSUMPTIONS}."
            )
        relation = self.relation
        releases = [p.release(relation, assumption) for p in self._phases if p.steps]
        return accounting.compose_epsilon(releases, delta, accountant, relation)

    def max_steps_within(
        self,
        target_epsilon: float,
        delta: float,
        accountant: str,
        phase: Phase,
        limit: int = _NO_LIMIT,
    ) -> int:
        """Returns how many more steps of a kind keep epsilon within a target.

        Args:
            target_epsilon: The epsilon not to exceed, above 0 and finite.
            delta: The delta of the guarantee, in (0, 1).
            accountant: "rdp" or "pld".
            phase: What the further steps are like.
            limit: The largest answer of interest.

        Returns:
            0 to `limit`. With once_per_epoch=True epochs cost, not steps: `limit` where
            one more epoch fits, else 0; ask again before the next epoch.

        Raises:
            ValueError: As `epsilon`.
        """
        one_more = dataclasses.replace(phase, steps=1, epochs_begun=1)
        relation = relation_of([*self._phases, one_more])
        prior = [p.release(relation) for p in self._phases if p.steps]
        event, _ = phase.release(relation)
        by_epoch = phase.assumption == "once_per_epoch"
        most = 1 if by_epoch else limit
        steps = accounting.max_steps(
            prior, event, target_epsilon, delta, accountant, relation, most
        )
        return limit * steps if by_epoch else steps

    def steps_left(self, limit: int = _NO_LIMIT) -> int:
        """Returns how many more steps of the open phase all budgets allow.

        Args:
            limit: The answer where there is no budget, and the largest answer of all.

        Returns:
            0 to `limit`. With once_per_epoch=True, 0 or `limit`: whether the epoch that
            is on may go on. Ask again after each `begin_epoch`.
        """
        if self._phases:
            for budget in self.budgets:
                limit = self._steps_within(budget, limit)
        return limit

    def spent_budget(self) -> Budget | None:
        """Returns a budget that allows no more step of the open phase, or None."""
        spent = (b for b in self.budgets if self._phases and not self._steps_within(b))
        return next(spent, None)

    def _steps_within(self, budget: Budget, limit: int = 1) -> int:
        target, delta, accountant = dataclasses.astuple(budget)
        phase = self._phases[-1]
        if phase.assumption == "once_per_epoch" and not self._epoch_is_new:
            # The epoch is paid for, if what was paid is within the target.
            return limit if self.epsilon(delta, accountant) <= target else 0
        return self.max_steps_within(target, delta, accountant, phase, limit)

    # --- saving ----------------------------------------------------------------------

    def to_json(self) -> str:
        """Returns the ledger as strict JSON, which `from_json` reads."""
        content = {
            "version": _VERSION,
            "phases": [phase.to_fields() for phase in self._phases],
            "notes": self._notes,
            "budgets": [dataclasses.asdict(budget) for budget in self.budgets],
        }
        return json.dumps(content, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "Ledger":
        """Returns the ledger that `to_json` wrote.

        Raises:
            ValueError: The text is no ledger, or one of a version that is not known.
        """
        try:
            content: dict[str, Any] = json.loads(text, parse_constant=_refuse)
            version = content.pop("version")
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ValueError(
                "This is no privacy ledger. Load a file that keras_dpopt has saved."
            ) from None
        if version != _VERSION:
            raise ValueError(
                f"The privacy ledger has version {version!r}, and this keras_dpopt "
                f"reads version {_VERSION}. Use the keras_dpopt that saved it."
            )
        try:
            phases, notes, budgets = map(content.pop, ("phases", "notes", "budgets"))
            if content:
                raise KeyError(f"unknown: {sorted(content)}")
            if not all(isinstance(part, list) for part in (phases, notes, budgets)):
                raise TypeError("a list is missing")
            return cls(
                [Phase.from_fields(fields) for fields in phases],
                check_texts("notes", notes),
                [Budget(**fields) for fields in budgets],
            )
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(
                f"The privacy ledger is damaged ({error}). Load an intact copy."
            ) from error


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")  # though Python writes and reads it

"""The privacy ledger: what was released about the training data, never forgotten.

A ledger is a list of phases (phase.py). Epsilon is a pure function of the ledger; the
order of the phases does not matter. It belongs to the model, and the number of steps in
it never shrinks.
"""

import dataclasses
from collections.abc import Iterable

import dp_accounting

from keras_dpopt import accounting, ledger_text, validation
from keras_dpopt.budget import Budget, smallest_by_key
from keras_dpopt.phase import ASSUMPTIONS, Phase, relation_of, releases_of

__all__ = ["ASSUMPTIONS", "Budget", "Ledger", "Phase"]

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

    def begin(self, phase: Phase, *, resume: bool = False, replays: str = "") -> None:
        """Opens a phase, which goes on with an earlier one of the same kind.

        A phase that is one run (`Phase.is_one_run`) goes on only in an exact replay.
        Anything else is another run, with a cost of its own.

        Args:
            phase: What the coming steps are like; without steps. A noise plan begins
                with the first of them.
            resume: Go on even with a phase that was read from a file. Only right where
                the process that wrote the file is gone for good, as after an
                interruption. It is then not known which step of a noise plan comes
                next, unless `replays` says so: all count at its least multiplier.
            replays: Identity of the phase that goes on as if nothing had happened: with
                the same keys, in the state that it had after some of the steps that are
                counted (`combine` comes first). Implies `resume`. Empty where the
                continuation is a fork.

        Raises:
            ValueError: The phase has steps.
        """
        if phase.steps or phase.epochs_begun:
            raise ValueError(
                f"A phase begins without steps, not with {phase.steps} of them. Use "
                "`combine` to take over what another ledger has recorded."
            )
        resume = resume or bool(replays)
        self._phases = [p for p in self._phases if p.steps]
        earlier = self._that_goes_on(phase, resume, replays)
        self._epoch_is_new = not (resume and earlier is not None)
        if earlier is not None:
            self._phases.remove(earlier)
            phase = earlier
        else:
            # Of a phase to replay that is not among them, no step has been made.
            is_known = any(p.identity == replays for p in self._phases)
            if resume and (is_known or not replays):
                phase = phase.without_plan()
            phase = phase.named()
        self._phases.append(phase)
        self._own.add(phase.identity)

    def _that_goes_on(self, phase: Phase, resume: bool, replays: str) -> Phase | None:
        """The earlier phase that the coming steps belong to, if there is one."""
        for earlier in reversed(self._phases):
            if replays or phase.is_one_run:
                may_go_on = earlier.identity == replays
            else:
                may_go_on = resume or earlier.identity in self._own
            if may_go_on and earlier.same_as(phase):
                return earlier
        return None

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
        steps = validation.check_count("steps", steps)
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
        releases = releases_of(self._phases, relation, assumption)
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
            phase: What the further steps are like, beginning with the first of a run.
            limit: The largest answer of interest.

        Returns:
            0 to `limit`. With once_per_epoch=True epochs cost, not steps: `limit` where
            one more epoch fits, else 0; ask again before the next epoch.

        Raises:
            ValueError: As `epsilon`.
        """
        budget = Budget(target_epsilon, delta, accountant)
        return _steps_within(budget, self._phases, phase.blank(), True, limit)

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
        *others, phase = self._phases
        return _steps_within(budget, others, phase, self._epoch_is_new, limit)

    # --- saving ----------------------------------------------------------------------

    def to_json(self) -> str:
        """Returns the ledger as strict JSON, which `from_json` reads."""
        return ledger_text.write(self._phases, self._notes, self.budgets)

    @classmethod
    def from_json(cls, text: str) -> "Ledger":
        """Returns the ledger that `to_json` wrote.

        Raises:
            ValueError: The text is no ledger, or one of a version that is not known.
        """
        return cls(*ledger_text.read(text))


def _steps_within(
    budget: Budget, others: list[Phase], phase: Phase, epoch_is_new: bool, limit: int
) -> int:
    """How many more steps of `phase` a budget allows, besides the other phases."""

    def after(steps: int) -> Phase:
        return dataclasses.replace(
            phase,
            steps=phase.steps + steps,
            epochs_begun=phase.epochs_begun + epoch_is_new,
        )

    relation = relation_of([*others, after(1)])
    prior = releases_of(others, relation)
    return accounting.max_steps(
        lambda steps: [*prior, *after(steps).releases(relation)],
        budget.target_epsilon,
        budget.delta,
        budget.accountant,
        relation,
        limit,
    )

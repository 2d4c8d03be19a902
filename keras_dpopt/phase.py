"""What a ledger holds: phases, of steps made in the same way, and budgets."""

import dataclasses
import math
import operator
import uuid
from collections.abc import Iterable
from typing import Any

import dp_accounting

from keras_dpopt import accounting, validation

SAMPLINGS = ("poisson", "fixed_size", "caller")
"""Who made the batches: the library in one of two ways, or the caller."""

ASSUMPTIONS = ("nothing", "once_per_epoch", "poisson")
"""What can be assumed of batches that the caller made, strictest first."""


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


@dataclasses.dataclass(frozen=True)
class Phase:
    """Steps that were all made in the same way.

    Attributes:
        optimizer: Name of the optimizer class, for the reader.
        sampling: How the batches came about: "poisson" and "fixed_size" (without
            replacement) were drawn by the library, "caller" by the caller.
        noise_multipliers: Of one release, one for each Gaussian mechanism in it: noise
            standard deviation over sensitivity, each finite and at least 0.
        l2_norm_clip: The (initial) clipping norm C, above 0; None where unknown.
            Infinity means no clipping, hence no privacy.
        expected_batch_size: B, at least 1.
        train_size: N, at least B; None where unknown (caller's batches only).
        once_per_epoch: The caller's word that no record comes twice in an epoch.
        assume: "poisson" is the caller's word that the batches are Poisson samples;
            needs a train_size. None assumes nothing.
        seeded: Whether the noise or the batches came from a seed that the user chose.
        notes: Facts that the statement prints.
        steps: Number of releases, at least 0.
        epochs_begun: Number of epochs in which a release was made; at least 1 if any.
        identity: Random name of the phase, by which two ledgers recognise that they
            know of the same releases. The ledger sets it.
    """

    optimizer: str
    sampling: str
    noise_multipliers: tuple[float, ...]
    l2_norm_clip: float | None
    expected_batch_size: int
    train_size: int | None = None
    once_per_epoch: bool = False
    assume: str | None = None
    seeded: bool = False
    notes: tuple[str, ...] = ()
    steps: int = 0
    epochs_begun: int = 0
    identity: str = ""

    def __post_init__(self):
        set_field = object.__setattr__  # the only way in a frozen dataclass
        if self.sampling not in SAMPLINGS:
            raise ValueError(
                f"Unknown sampling {self.sampling!r}. Use one of {SAMPLINGS}."
            )
        noise = tuple(self.noise_multipliers)
        accounting.effective_noise_multiplier(noise)  # lets only numbers pass
        set_field(self, "noise_multipliers", tuple(map(float, noise)))
        set_field(self, "notes", check_texts("notes", self.notes))
        check_texts("optimizer and identity", (self.optimizer, self.identity))
        for name in ("once_per_epoch", "seeded"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"`{name}` must be True or False, not {value!r}.")
        if self.l2_norm_clip is not None:
            clip = validation.check_positive(
                "l2_norm_clip", self.l2_norm_clip, allow_infinite=True
            )
            set_field(self, "l2_norm_clip", clip)
        if self.train_size is None:
            size = validation.check_positive_integer(
                "expected_batch_size", self.expected_batch_size
            )
        else:
            total, size = accounting.check_sizes(
                self.train_size, self.expected_batch_size
            )
            set_field(self, "train_size", total)
        set_field(self, "expected_batch_size", size)
        if self.sampling != "caller" and (self.once_per_epoch or self.assume):
            raise ValueError(
                "The library draws these batches itself, so `once_per_epoch` and "
                "`assume` cannot apply. Leave them out."
            )
        if self.assume not in (None, "poisson"):
            raise ValueError(
                f"Unknown assumption {self.assume!r}. Pass assume='poisson' or None."
            )
        if self.once_per_epoch and self.assume:
            raise ValueError(
                "`once_per_epoch` and `assume` are two different accounts of the same "
                "batches. Pass the one that is true."
            )
        if self.train_size is None and (self.assume or self.sampling != "caller"):
            raise ValueError(
                "Poisson and fixed-size sampling are accounted with the number of "
                "training examples, which is missing. Pass `train_size`."
            )
        for name in ("steps", "epochs_begun"):
            set_field(self, name, check_count(name, getattr(self, name)))
        if self.steps and not self.epochs_begun:
            raise ValueError(
                f"A phase cannot have {self.steps} steps in 0 epochs, for each step is "
                "in one. Pass the number of epochs in which a step was made."
            )

    @property
    def noise_multiplier(self) -> float:
        """The noise multiplier of the whole release; 0 without clipping, too."""
        if self.l2_norm_clip == math.inf:
            return 0.0
        return accounting.effective_noise_multiplier(self.noise_multipliers)

    @property
    def assumption(self) -> str:
        """What the headline assumes of the caller's batches; one of `ASSUMPTIONS`."""
        return "once_per_epoch" if self.once_per_epoch else self.assume or "nothing"

    def same_as(self, other: "Phase") -> bool:
        """Whether both phases are steps of the same kind, whatever their number."""
        return self.blank() == other.blank()

    def blank(self) -> "Phase":
        """Returns the phase without steps and identity: what kind it is."""
        return dataclasses.replace(self, steps=0, epochs_begun=0, identity="")

    def named(self) -> "Phase":
        """Returns the phase with a new random identity."""
        return dataclasses.replace(self, identity=uuid.uuid4().hex)

    def release(
        self,
        relation: dp_accounting.NeighboringRelation,
        assumption: str | None = None,
    ) -> accounting.Release:
        """Returns the event of this phase and how often it was released.

        Under replace-one, Poisson batches count as if every record were in each of
        them, which is an upper bound (see `accounting.unsampled_event`); dp_accounting
        has no tighter one for that relation.

        Args:
            relation: The relation under which the whole ledger is stated.
            assumption: One of `ASSUMPTIONS`, in place of what the caller declared.

        Returns:
            The pair (event, count).

        Raises:
            ValueError: "poisson" is assumed and train_size is unknown.
        """
        noise = (self.noise_multiplier,)
        train_size, batch_size = self.train_size, self.expected_batch_size
        sampling = self.sampling
        if sampling == "caller":
            sampling = assumption or self.assumption
        if sampling == "once_per_epoch":
            # In one epoch a record meets one release at most; the others do not depend
            # on it. A release needs a step, and a step is in some epoch.
            count = min(self.steps, max(1, self.epochs_begun))
            return accounting.unsampled_event(noise, relation), count
        if sampling == "nothing" or (
            sampling == "poisson" and relation is accounting.REPLACE_ONE
        ):
            return accounting.unsampled_event(noise, relation), self.steps
        if train_size is None:
            raise ValueError(
                "Poisson sampling cannot be assumed without the number of training "
                "examples. Pass `train_size` to fit."
            )
        if sampling == "fixed_size":
            event = accounting.fixed_size_event(noise, train_size, batch_size)
        else:
            event = accounting.poisson_event(noise, train_size, batch_size)
        return event, self.steps

    # --- saving ----------------------------------------------------------------------

    def to_fields(self) -> dict[str, Any]:
        """Returns the attributes as a dict that strict JSON can hold."""
        fields = dataclasses.asdict(self)
        if self.l2_norm_clip == math.inf:
            fields["l2_norm_clip"] = "inf"  # JSON has no infinity
        return fields

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "Phase":
        """Returns the phase whose `to_fields` this is."""
        infinite = fields["l2_norm_clip"] == "inf"
        return cls(**{**fields, "l2_norm_clip": math.inf} if infinite else fields)


def relation_of(phases: Iterable[Phase]) -> dp_accounting.NeighboringRelation:
    """Returns the neighboring relation under which phases are stated together."""
    if any(phase.sampling == "fixed_size" and phase.steps for phase in phases):
        return accounting.REPLACE_ONE
    return accounting.ZERO_OUT


def smallest_by_key(budgets: Iterable[Budget]) -> dict[tuple[float, str], Budget]:
    """Returns the budget with the smallest target for each key, in order."""
    smallest: dict[tuple[float, str], Budget] = {}
    for budget in budgets:
        earlier = smallest.setdefault(budget.key, budget)
        if budget.target_epsilon < earlier.target_epsilon:
            smallest[budget.key] = budget
    return smallest


def check_count(name: str, value: Any) -> int:
    """Returns `value` as an int, or raises when it is not a whole number, 0 or more.

    Raises:
        TypeError: `value` is no integer; bool is none either.
        ValueError: `value` is below 0.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"`{name}` must be a whole number, not {value!r}. Pass an int.")
    if (number := operator.index(value)) < 0:
        raise ValueError(f"`{name}` must be at least 0, not {number}. Pass a count.")
    return number


def check_texts(name: str, values: Iterable[Any]) -> tuple[str, ...]:
    """Returns `values` as a tuple, or raises a TypeError when not all are strings."""
    texts = tuple(values)
    if isinstance(values, str) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"`{name}` must be strings, not {values!r}.")
    return texts

"""What a ledger holds: phases, of steps made in the same way."""

import dataclasses
import math
import uuid
from collections.abc import Iterable
from typing import Any

import dp_accounting

from keras_dpopt import accounting, validation
from keras_dpopt.noise_plan import NoisePlan, check_plan, first_steps

SAMPLINGS = ("poisson", "fixed_size", "caller", "cyclic", "banded")
"""Who made the batches: the library in one of four ways, or the caller."""

ASSUMPTIONS = ("nothing", "once_per_epoch", "poisson")
"""What can be assumed of batches that the caller made, strictest first."""


# Fields that earlier versions of the library do not know, with their defaults.
_ADDED_LATER = {"steps_per_release": 1, "noise_plan": ()}


@dataclasses.dataclass(frozen=True)
class Phase:
    """Steps that were all made in the same way.

    Attributes:
        optimizer: Name of the optimizer class, for the reader.
        sampling: How the batches came about. "poisson" and "fixed_size" (without
            replacement) were drawn by the library, "caller" by the caller. "cyclic":
            the library takes ceil(N / B) fixed blocks in turn, in the same order in
            every epoch. "banded": it takes G = `steps_per_release` fixed groups in
            turn, and draws each record of the one whose turn it is with probability
            B / floor(N / G).
        noise_multipliers: Of one release, one for each Gaussian mechanism in it: noise
            standard deviation over sensitivity, each finite and at least 0. With a
            noise_plan one, the least of the plan.
        l2_norm_clip: The (initial) clipping norm C, above 0; None where unknown.
            Infinity means no clipping, hence no privacy.
        expected_batch_size: B, at least 1.
        train_size: N, at least B; None where unknown (caller's batches only).
        once_per_epoch: The caller's word that no record comes twice in an epoch.
        assume: "poisson" is the caller's word that the batches are Poisson samples;
            needs a train_size. None assumes nothing.
        seeded: Whether the noise or the batches came from a seed that the user chose.
        notes: Facts that the statement prints.
        steps_per_release: How many steps are one release together, at least 1: the
            release counts once for each begun group of so many steps. More than 1
            needs "cyclic" (the noise multiplier is then relative to the sensitivity of
            all these steps together, and noise is drawn afresh for the next) or
            "banded" (where it is the number of groups).
        noise_plan: For noise multipliers that change: pairs (noise multiplier, number
            of steps) for the planned steps, in order. Those made are the first of them;
            steps beyond the plan count at its least multiplier, and must not have less.
            Empty where all steps have `noise_multipliers`.
        steps: Number of steps made, at least 0.
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
    steps_per_release: int = 1
    noise_plan: NoisePlan = ()
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
                "Batches of the library, and Poisson sampling, are accounted with the "
                "number of training examples, which is missing. Pass `train_size`."
            )
        self._check_runs()
        for name in ("steps", "epochs_begun"):
            set_field(self, name, validation.check_count(name, getattr(self, name)))
        if self.steps and not self.epochs_begun:
            raise ValueError(
                f"A phase cannot have {self.steps} steps in 0 epochs, for each step is "
                "in one. Pass the number of epochs in which a step was made."
            )

    def _check_runs(self) -> None:
        """Checks the fields that make a phase one run, once the others are checked."""
        set_field = object.__setattr__
        per_release = validation.check_positive_integer(
            "steps_per_release", self.steps_per_release
        )
        set_field(self, "steps_per_release", per_release)
        if per_release > 1 and self.sampling not in ("cyclic", "banded"):
            raise ValueError(
                f"With {self.sampling!r} batches each step is a release of its own, so "
                f"`steps_per_release` cannot be {per_release}. Pass 1, or use cyclic "
                "or banded batches."
            )
        if self.sampling == "banded" and self.train_size is not None:
            accounting.group_size(
                self.train_size, self.expected_batch_size, per_release
            )
        plan = check_plan(self.noise_plan)
        set_field(self, "noise_plan", plan)
        if plan and per_release > 1:
            raise ValueError(
                "A noise plan has one noise multiplier a step, but here "
                f"{per_release} steps are one release. Pass one of both."
            )
        if plan and self.noise_multipliers != (least := min(plan)[0],):
            raise ValueError(
                f"The least noise multiplier of the plan is {least}, but "
                f"`noise_multipliers` is {self.noise_multipliers}. Pass ({least},)."
            )

    @property
    def noise_multiplier(self) -> float:
        """The (least) noise multiplier of a whole release; 0 without clipping, too."""
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

    @property
    def is_one_run(self) -> bool:
        """Whether these are the steps of one run, which no later fit goes on with.

        Half a run and half a run are two runs, and two releases; and a plan begins with
        the first step of a run.
        """
        return self.steps_per_release > 1 or bool(self.noise_plan)

    def without_plan(self) -> "Phase":
        """Returns the phase with each step at the least noise multiplier."""
        return dataclasses.replace(self, noise_plan=())

    def releases(
        self,
        relation: dp_accounting.NeighboringRelation,
        assumption: str | None = None,
    ) -> list[accounting.Release]:
        """Returns the events of this phase, and how often each was released.

        Under replace-one, Poisson batches count as if every record were in each of
        them, which is an upper bound (see `accounting.unsampled_event`); dp_accounting
        has no tighter one for that relation.

        Args:
            relation: The relation under which the whole ledger is stated.
            assumption: One of `ASSUMPTIONS`, in place of what the caller declared.

        Returns:
            Pairs (event, count). One more step, or epoch, never makes them cost less.

        Raises:
            ValueError: "poisson" is assumed and train_size is unknown.
        """
        sampling = self.sampling
        if sampling == "caller":
            sampling = assumption or self.assumption
        unbounded = self.l2_norm_clip == math.inf
        return [
            (self._event((0.0 if unbounded else sigma,), sampling, relation), count)
            for sigma, count in self._multipliers(sampling)
        ]

    def _multipliers(self, sampling: str) -> Iterable[tuple[float, int]]:
        """The noise multipliers that were used, each with its number of releases."""
        if sampling == "once_per_epoch":
            # In one epoch a record meets one release at most; the others do not depend
            # on it. A release needs a step, and a step is in some epoch. Which release
            # of a plan it meets is not known: that with the least noise, say.
            return [(self.noise_multiplier, min(self.steps, max(1, self.epochs_begun)))]
        if self.noise_plan:
            return first_steps(self.noise_plan, self.steps)
        # A group that is begun costs all of it: the noise was made for the whole.
        return [(self.noise_multiplier, -(-self.steps // self.steps_per_release))]

    def _event(
        self,
        noise: tuple[float],
        sampling: str,
        relation: dp_accounting.NeighboringRelation,
    ) -> dp_accounting.DpEvent:
        """The event of one release with this noise."""
        train_size, batch_size = self.train_size, self.expected_batch_size
        if sampling in ("nothing", "once_per_epoch", "cyclic") or (
            sampling != "fixed_size" and relation is accounting.REPLACE_ONE
        ):
            return accounting.unsampled_event(noise, relation)
        if train_size is None:
            raise ValueError(
                "Poisson sampling cannot be assumed without the number of training "
                "examples. Pass `train_size` to fit."
            )
        if sampling == "fixed_size":
            return accounting.fixed_size_event(noise, train_size, batch_size)
        if sampling == "banded":
            bands = self.steps_per_release
            return accounting.banded_event(noise, train_size, batch_size, bands)
        return accounting.poisson_event(noise, train_size, batch_size)

    # --- saving ----------------------------------------------------------------------

    @property
    def since_version(self) -> int:
        """The first version of the ledger's text that has such phases."""
        is_new = self.is_one_run or self.sampling in ("cyclic", "banded")
        return 2 if is_new else 1

    def to_fields(self) -> dict[str, Any]:
        """Returns the attributes as a dict that strict JSON can hold."""
        fields = dataclasses.asdict(self)
        for name, value in _ADDED_LATER.items():
            if fields[name] == value:
                del fields[name]  # so that earlier versions read what they understand
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


def releases_of(
    phases: Iterable[Phase],
    relation: dp_accounting.NeighboringRelation,
    assumption: str | None = None,
) -> list[accounting.Release]:
    """Returns what was released in all these phases; see `Phase.releases`."""
    return [r for p in phases if p.steps for r in p.releases(relation, assumption)]


def check_texts(name: str, values: Iterable[Any]) -> tuple[str, ...]:
    """Returns `values` as a tuple, or raises a TypeError when not all are strings."""
    texts = tuple(values)
    if isinstance(values, str) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"`{name}` must be strings, not {values!r}.")
    return texts

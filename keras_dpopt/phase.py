"""A phase: steps that were all made in the same way, as the ledger records them."""

import dataclasses
import math

import dp_accounting

from keras_dpopt import accounting, validation

SAMPLINGS = ("poisson", "fixed_size", "caller")
"""Who made the batches: the library in one of two ways, or the caller."""

ASSUMPTIONS = ("nothing", "once_per_epoch", "poisson")
"""What can be assumed of batches that the caller made, strictest first."""


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
        steps: Number of releases.
        epochs_begun: Number of epochs in which a release was made.
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
        set_field(self, "noise_multipliers", tuple(map(float, self.noise_multipliers)))
        accounting.effective_noise_multiplier(self.noise_multipliers)
        set_field(self, "notes", tuple(self.notes))
        if self.l2_norm_clip is not None:
            clip = validation.check_positive(
                "l2_norm_clip", self.l2_norm_clip, allow_infinite=True
            )
            set_field(self, "l2_norm_clip", clip)
        if self.train_size is None:
            validation.check_positive_integer(
                "expected_batch_size", self.expected_batch_size
            )
        else:
            accounting.check_sizes(self.train_size, self.expected_batch_size)
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
        if self.steps < 0 or self.epochs_begun < 0:
            raise ValueError(
                f"A phase cannot have {self.steps} steps in {self.epochs_begun} "
                "epochs. Pass counts of at least 0."
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

"""The ledger of a model while it trains: it reads the step counter and saves itself."""

import dataclasses
import json
import weakref
from typing import Any

import keras

from keras_dpopt import budget_words, keras_compat
from keras_dpopt.digest import content_digest
from keras_dpopt.ledger import Ledger, Phase
from keras_dpopt.ledger_saving import LedgerSaving

# What each trained variable carries.
_LEDGER_TAG = "_keras_dpopt_ledger"
_DIGEST_TAG = "_keras_dpopt_digest"

_CHANGED = (
    "The weights were changed outside the private training step; whatever data that "
    "change came from is not covered."
)
_PUBLIC = "The weights were pretrained on data declared public."


class ModelLedger(LedgerSaving):
    """Keeps the ledger of a model, beside its layers in every weights file.

    The ledger goes with the weights: each trained variable carries a reference to it,
    and a model that is built from such variables takes over what they have cost. It
    carries a digest of its value too, as private training left it.

    Args:
        model: The model.
    """

    def __init__(self, model: keras.Model):
        super().__init__()
        self.ledger = Ledger()
        self._model = weakref.ref(model)
        self._optimizer: Any = None
        self._first_release = 0
        self._is_broken = False
        self._steps_before = 0
        self._watch: Any = None
        self._frozen: list[str] = []
        # Whether steps in the ledger may be going on elsewhere, from the same file.
        self._is_copy = False

    # --- phases ----------------------------------------------------------------------

    def begin_phase(self, phase: Phase, optimizer: Any) -> None:
        """Opens a phase: from now on the optimizer's releases are its steps.

        Whoever opens it calls `limit_steps` before the first step, to raise if a budget
        is spent; the callbacks of a fit may set a larger one before.

        Raises:
            RuntimeError: if a phase is open.
        """
        self.refuse_if_open()
        owners = {getattr(variable, _LEDGER_TAG, None) for variable in self._weights()}
        if any(owner is not None and owner._optimizer is not None for owner in owners):
            raise RuntimeError(
                "Another private model trains the same weights at this moment, and "
                "neither could count the other's steps. Train one after the other."
            )
        self.sync()
        if self._is_copy and optimizer.keys.seeded:
            # Whoever else loads that file and takes the same seed would draw the same
            # noise for other weights.
            optimizer.keys.refresh()
            phase = dataclasses.replace(phase, seeded=False)
        # A seeded optimizer made anew for the same model must not draw again what the
        # last one drew: the count goes on where the ledger stands.
        optimizer.skip_releases(self.ledger.total_steps)
        self.ledger.begin(phase)
        self._open(optimizer)

    def refuse_if_open(self) -> None:
        """Raises if the model is training.

        Raises:
            RuntimeError: if a phase is open.
        """
        if self._optimizer is not None:
            raise RuntimeError(
                "The model is training already, and a training within a training would "
                "lose count of the steps. Train from outside of its callbacks."
            )

    def resume(
        self,
        text: str,
        phase: Phase,
        optimizer: Any,
        *,
        lost: int,
        repeated: int,
        replay: bool,
    ) -> None:
        """Reopens the phase of a backup.

        Args:
            text: The backup's `to_json`.
            phase: The phase of the fit that resumes.
            optimizer: The optimizer, restored.
            lost: Steps that were made after the backup, and that it does not count.
            repeated: How many steps that are counted will be made again, in an exact
                replay.
            replay: Whether the run goes on as if it had never stopped, under the keys
                of the backup.
        """
        self._optimizer = None
        saved = Ledger.from_json(json.loads(text)["ledger"])
        if lost:
            # They were made in the phase of the backup, which may cost more or less
            # than the one that comes now.
            saved.set_steps(saved.phases[-1].steps + lost)
        replays = saved.phases[-1].identity if replay else ""
        self.ledger.combine(saved)
        self.ledger.begin(phase, resume=True, replays=replays)
        # A replay with another plan (more epochs, say) is a run of its own as well.
        is_new_run = self.ledger.phases[-1].identity != replays
        self._open(optimizer, repeated, is_new_run)

    def _open(self, optimizer: Any, repeated: int = 0, is_new_run: bool = True) -> None:
        self._optimizer = optimizer
        self._is_broken = False
        optimizer.follow_schedule()
        if is_new_run:
            optimizer.restart_run()
        self._first_release = optimizer.releases_made()
        self._steps_before = self.ledger.phases[-1].steps - repeated
        self._set_limit()
        self._watch = getattr(
            getattr(self._model(), "private_step", None), "watch", None
        )
        if self._watch is not None:
            self._watch.start()
        self._frozen = self._frozen_digests()

    def sync(self) -> Ledger:
        """Brings the ledger up to date with the model, and returns it."""
        self._count()
        if self._optimizer is None:
            self.adopt()
            self._check_weights()
        return self.ledger

    def _count(self) -> Ledger:
        # In an exact replay, the steps made again are in the ledger already.
        if self._optimizer is not None and self.steps_to_repeat() < 0:
            self.ledger.set_steps(self._steps_made())
        return self.ledger

    def steps_to_repeat(self) -> int:
        """Returns how many steps are counted and will be made again, in a replay."""
        return self.ledger.phases[-1].steps - self._steps_made()

    def _steps_made(self) -> int:
        made = self._optimizer.releases_made() - self._first_release
        return self._steps_before + made

    def close_phase(self) -> None:
        """Ends the open phase, if there is one; remembers the weights it left."""
        if self._optimizer is None:
            return
        self._count()
        # A call of the train function outside of a phase would go uncounted.
        self._optimizer.limit_releases(0)
        if self._watch is not None:
            if not self._optimizer.use_ema:  # which Keras puts in at the end of a fit
                self._watch.compare()
            changed = self._watch.noticed() or self._frozen != self._frozen_digests()
            if changed and not self._is_public():
                self.ledger.note(_CHANGED)
        self._optimizer = None
        self.adopt()
        self.remember_weights()

    def remember_weights(self) -> None:
        """Takes the weights as they are for what the ledger covers."""
        for variable in self._weights():
            setattr(variable, _DIGEST_TAG, content_digest(variable))

    def set_budget(self, target_epsilon: float, delta: float, accountant: str) -> None:
        """Sets a budget that every further phase keeps to, besides those it has.

        It does not raise if no step is left, for another may be set to a larger target
        before the first step. `limit_steps` does.
        """
        self.ledger.set_budget(target_epsilon, delta, accountant)
        if self._optimizer is not None:
            self._set_limit()

    def limit_steps(self) -> None:
        """Sets the optimizer's step limit to what the budgets leave.

        Raises:
            RuntimeError: if one of them leaves nothing.
        """
        if self._optimizer is None or self._set_limit():
            return
        message = budget_words.refusal(self.ledger)
        if message is not None:
            raise RuntimeError(message)

    def _set_limit(self) -> int:
        left = self.sync().steps_left() + self.steps_to_repeat()
        left = 0 if self._is_broken else left
        self._optimizer.limit_releases(left)
        return left

    def note_public(self) -> None:
        """Notes that whatever the weights were trained on before is public."""
        self.ledger.note(_PUBLIC)

    def begin_epoch(self) -> None:
        """Counts an epoch, which matters where records come once an epoch."""
        self.sync().begin_epoch()
        if self.ledger.phases[-1].once_per_epoch and self.ledger.budgets:
            self._set_limit()

    # --- weights ---------------------------------------------------------------------

    def adopt(self) -> None:
        """Takes over the ledgers of other models whose variables this one has."""
        for variable in self._weights():
            other = getattr(variable, _LEDGER_TAG, None)
            if other is not None and other is not self:
                self.ledger.combine(other._count())
                self._is_copy |= other._is_copy
            if variable.trainable:
                setattr(variable, _LEDGER_TAG, self)

    def _is_public(self) -> bool:
        return _PUBLIC in self.ledger.notes and not self.ledger.total_steps

    def _frozen_digests(self) -> list[str]:
        return [content_digest(v) for v in self._weights() if not v.trainable]

    def _check_weights(self) -> None:
        """Notes it if anything but private training has changed the weights."""
        model: Any = self._model()
        public = model is None or _PUBLIC in self.ledger.notes
        if not public and keras_compat.steps_without_privacy(model):
            self.ledger.note(_CHANGED)
            return
        for variable in self._weights():
            owner = getattr(variable, _LEDGER_TAG, None)
            known = getattr(variable, _DIGEST_TAG, None)
            in_training = owner is not None and owner._optimizer is not None
            if (
                known is not None
                and not in_training
                and known != content_digest(variable)
            ):
                self.ledger.note(_CHANGED)
                return

    def _weights(self) -> list:
        model = self._model()
        return [] if model is None else model.weights

    # --- saving ----------------------------------------------------------------------

    def to_json(self) -> str:
        """Returns the ledger and the digests as JSON."""
        ledger = self.sync().to_json()
        digests = [
            getattr(variable, _DIGEST_TAG, None)
            if self._optimizer is None
            else content_digest(variable)
            for variable in self._weights()
        ]
        return json.dumps({"ledger": ledger, "digests": digests})

    def load_json(self, text: str) -> None:
        """Joins the ledger of a file to this one, which never shrinks.

        The file's old weights are here now, so the optimizer gets fresh keys.

        Raises:
            ValueError: if the text is damaged.
        """
        self._fork()
        try:
            saved = json.loads(text)
            ledger, digests = Ledger.from_json(saved["ledger"]), saved["digests"]
        except (ValueError, KeyError, TypeError):
            self.note_missing()
            raise
        self.ledger.combine(ledger)
        if ledger.total_steps:
            self._is_copy = True
            for variable in self._weights():
                setattr(variable, _LEDGER_TAG, self)
        self._tag(digests)
        if self._watch is not None:
            self._watch.forget()
            self._frozen = self._frozen_digests()
        if self._optimizer is not None:
            # Loaded by a callback: the phase goes on from here.
            self._steps_before = self.ledger.phases[-1].steps
            self._first_release = self._optimizer.releases_made()
            if self.ledger.budgets or self._is_broken:
                self._set_limit()

    def note_missing(self) -> None:
        """Notes that weights came without a ledger."""
        self._fork()
        self.ledger.note(
            "Weights were loaded from a file without a ledger; whatever data they were "
            "trained on is not covered."
        )
        self._tag([None] * len(self._weights()))

    def check_run(self) -> None:
        """Raises if the run that is on cannot go on.

        Raises:
            RuntimeError: if weights were loaded within it; no step was made since.
        """
        if self._is_broken:
            raise RuntimeError(
                "Weights were loaded within a run whose noise is planned as a whole, "
                "which cannot go on under other keys. Load them between two fits."
            )

    def _fork(self) -> None:
        # Keras makes a warning of what is raised while it loads: `check_run` raises.
        if self._optimizer is not None and self.ledger.phases[-1].is_one_run:
            self._is_broken = True
            self._optimizer.limit_releases(0)
        self._count()
        keys = getattr(getattr(self._model(), "optimizer", None), "keys", None)
        if keys is not None:
            keys.refresh()

    def _tag(self, digests: list) -> None:
        weights = self._weights()
        if len(digests) == len(weights):
            for variable, known in zip(weights, digests, strict=True):
                setattr(variable, _DIGEST_TAG, known)

"""The ledger of a model while it trains: it reads the step counter and saves itself."""

import json
import weakref
from typing import Any

import keras
import numpy as np

from keras_dpopt import digest, keras_compat
from keras_dpopt.ledger import Ledger, Phase

_KEY = "privacy_ledger"
_TAG = "_keras_dpopt_ledger"


class ModelLedger(keras_compat.KerasSaveable):
    """Keeps the ledger of a model, beside its layers in every weights file.

    The ledger goes with the weights: each trained variable carries a reference to it,
    and a model that is built from such variables takes over what they have cost.

    Args:
        model: The model.
    """

    def __init__(self, model: keras.Model):
        self.ledger = Ledger()
        self._model = weakref.ref(model)
        self._optimizer: Any = None
        self._first_release = 0
        self._steps_before = 0
        self._digest: tuple[int, int] | None = None

    # --- phases ----------------------------------------------------------------------

    def begin_phase(self, phase: Phase, optimizer: Any) -> None:
        """Opens a phase: from now on the optimizer's releases are its steps.

        Raises:
            RuntimeError: if a budget is set and already spent.
        """
        self.close_phase()
        self.adopt()
        self.check_weights()
        # A seeded optimizer made anew for the same model must not draw again what the
        # last one drew: the count goes on where the ledger stands.
        optimizer.skip_releases(self.ledger.total_steps)
        self.ledger.begin(phase)
        self._optimizer = optimizer
        self._first_release = optimizer.releases()
        self._steps_before = self.ledger.phases[-1].steps
        self.limit_steps()

    def resume(
        self, text: str, phase: Phase, optimizer: Any, first_release: int
    ) -> None:
        """Reopens the phase of a backup.

        Args:
            text: The backup's `to_json`.
            phase: The phase of the fit that resumes.
            optimizer: The optimizer, restored.
            first_release: The release count of the backup. The optimizer may have a
                higher one already: steps that were lost, and count.
        """
        self._optimizer = None
        self.from_json(text)
        at_backup = Ledger.from_json(json.loads(text)["ledger"])
        self.ledger.begin(phase, resume=True)
        continues = at_backup.phases and at_backup.phases[-1].same_as(phase)
        self._steps_before = at_backup.phases[-1].steps if continues else 0
        self._first_release = first_release
        self._optimizer = optimizer
        self.limit_steps()

    def sync(self) -> Ledger:
        """Brings the open phase up to date and returns the ledger."""
        if self._optimizer is not None:
            done = self._optimizer.releases() - self._first_release
            # In an exact replay, the steps made again are in the ledger already.
            recorded = self.ledger.phases[-1].steps
            self.ledger.set_steps(max(recorded, self._steps_before + done))
        return self.ledger

    def close_phase(self) -> None:
        """Ends the open phase, if there is one."""
        self.sync()
        self._optimizer = None

    def set_budget(self, target_epsilon: float, delta: float, accountant: str) -> None:
        """Sets the budget that every further phase keeps to."""
        self.ledger.set_budget(target_epsilon, delta, accountant)
        self.limit_steps()

    def limit_steps(self) -> None:
        """Sets the optimizer's step limit to what the budget leaves.

        Raises:
            RuntimeError: if it leaves nothing.
        """
        if self.ledger.budget is None or self._optimizer is None:
            return
        left = self.sync().steps_left()
        self._optimizer.limit_releases(left)
        if not left:
            budget = self.ledger.budget
            raise RuntimeError(
                f"The privacy budget (epsilon {budget.target_epsilon:g} at delta "
                f"{budget.delta:g}) is spent, so no further step can be made. Stop "
                "here, or set a larger target with PrivacyBudget."
            )

    def begin_epoch(self) -> None:
        """Counts an epoch, which matters where records come once an epoch."""
        self.sync().begin_epoch()
        if self.ledger.phases[-1].once_per_epoch and self.ledger.budget is not None:
            self._optimizer.limit_releases(self.ledger.steps_left())

    # --- weights ---------------------------------------------------------------------

    def adopt(self) -> None:
        """Takes over the ledgers of other models whose variables this one has."""
        model = self._model()
        for variable in [] if model is None else model.weights:
            other = getattr(variable, _TAG, None)
            if other is not None and other.ledger is not self.ledger:
                self.ledger.combine(other.sync())
            setattr(variable, _TAG, self)

    def remember_weights(self) -> None:
        """Keeps a digest of the weights as private training left them."""
        self._digest = self._weights_digest()

    def check_weights(self) -> None:
        """Notes it if anything else has changed the weights since."""
        now = self._weights_digest()
        if self._digest is None or self._digest[1] != now[1] or self._digest == now:
            return
        self.ledger.note(
            "The weights were changed outside the private training step; whatever data "
            "that change came from is not covered."
        )

    def _weights_digest(self) -> tuple[int, int]:
        model = self._model()
        weights = [] if model is None else model.weights
        return int(digest.weights_digest([w.value for w in weights])), len(weights)

    # --- saving ----------------------------------------------------------------------

    def to_json(self) -> str:
        """Returns the ledger and the digest as JSON."""
        return json.dumps({"ledger": self.sync().to_json(), "digest": self._digest})

    def from_json(self, text: str) -> None:
        """Joins a saved ledger to this one, which never shrinks."""
        saved = json.loads(text)
        self.ledger.combine(Ledger.from_json(saved["ledger"]))
        self._digest = saved["digest"] and tuple(saved["digest"])
        if self.ledger.total_steps:
            self.adopt()

    def save_own_variables(self, store: Any) -> None:
        """Implements Keras' saving."""
        store[_KEY] = np.frombuffer(self.to_json().encode(), dtype=np.uint8)

    def load_own_variables(self, store: Any) -> None:
        """Implements Keras' loading."""
        self.close_phase()
        if _KEY in store.keys():  # noqa: SIM118 - an H5 store is no dict
            self.from_json(bytes(np.asarray(store[_KEY])).decode())
            return
        self._digest = None
        self.ledger.note(
            "Weights were loaded from a file without a ledger; whatever data they were "
            "trained on is not covered."
        )

    def _obj_type(self):
        return "Loss"  # of Keras' types the one that has no state of its own to skip

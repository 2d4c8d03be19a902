"""What happens at the hooks of one fit."""

from typing import Any

import keras

from keras_dpopt.sources import Source


class FitRun(keras.callbacks.Callback):
    """Keeps data, optimizer and ledger in step during one fit; runs before the others.

    Args:
        source: The fit's `Source`.

    Attributes:
        applied_in_epoch: Batches of the current epoch that a restored run had applied.
        data_digest: Digest of the rows, once a backup has needed it.
        planned_steps: Steps that the fit is to make from its first epoch on; `None`
            where they are not known.
    """

    def __init__(self, source: Source):
        super().__init__()
        self.source = source
        self.applied_in_epoch = 0
        self._is_first_epoch = True
        self.data_digest: str | None = None
        self.planned_steps: int | None = None
        self._releases_before = 0

    def on_epoch_begin(self, epoch, logs=None):
        """Tells the data set at which release the epoch begins."""
        del logs
        model: Any = self.model
        model.privacy_ledger.check_run()
        if self._is_first_epoch:
            model.privacy_ledger.limit_steps()
            self._count_planned(epoch)
            self._is_first_epoch = False
        if self.source.adapter is not None:
            self.source.adapter.on_epoch_begin()
        optimizer, step = model.optimizer, model.private_step
        releases = optimizer.releases()
        applied = self.applied_in_epoch // optimizer.logical_batch_steps
        self.source.start.assign(releases - applied)
        if not self.applied_in_epoch:
            optimizer.drop_parts()
            model.privacy_ledger.begin_epoch()
        step.resume_place.assign(step.place(releases, optimizer.parts_come))
        if model.optimizer.at_limit():
            model.stop_training = True
        self.applied_in_epoch = 0

    def on_train_batch_end(self, batch, logs=None):
        """Follows the count, for an iterator made within an epoch; stops at the cap."""
        del batch, logs
        model: Any = self.model
        model.privacy_ledger.check_run()
        self.source.start.assign(model.optimizer.releases())
        if model.optimizer.at_limit():
            model.stop_training = True

    def on_epoch_end(self, epoch, logs=None):
        """Ends the training if no further epoch fits; tells a `PyDataset` of the end.

        Asked at the beginning of the next epoch, the budget would leave that epoch
        without a step, and its metrics zero.
        """
        del epoch, logs
        model: Any = self.model
        model.privacy_ledger.check_run()
        model.privacy_ledger.begin_epoch()
        if model.optimizer.at_limit():
            model.stop_training = True
        if self.source.adapter is not None:
            self.source.adapter.on_epoch_end()

    def _count_planned(self, epoch: int) -> None:
        self._releases_before = self.model.optimizer.releases_made()
        params = self.params or {}
        if params.get("steps"):
            parts = self.model.optimizer.logical_batch_steps
            planned = (params["epochs"] - epoch) * params["steps"] // parts
            self.planned_steps = planned - self.applied_in_epoch // parts

    def steps_made(self) -> int:
        """Returns how many steps were made from the first epoch on."""
        model: Any = self.model
        return model.optimizer.releases_made() - self._releases_before

    def ended_by_budget(self) -> bool:
        """Whether no step is allowed any more, before the last one that was planned."""
        model: Any = self.model
        return model.optimizer.at_limit() and self.steps_made() != self.planned_steps

    def before(self, callbacks: Any) -> Any:
        """Returns callbacks for `fit` of Keras, with this one first."""
        if isinstance(callbacks, keras.callbacks.CallbackList):
            others = [c for c in callbacks.callbacks if not isinstance(c, FitRun)]
            callbacks.callbacks[:] = [self, *others]
            self.set_model(callbacks.model)
            return callbacks
        return [self, *(keras.tree.flatten(callbacks) if callbacks else [])]

"""Backup of an interrupted private run, secret keys included."""

import contextlib
import dataclasses
import json
import os
import pathlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from keras_dpopt import digest, fingerprint
from keras_dpopt.journal import Journal

_STATE = "state.npz"
_JOURNAL = "journal"


class BackupAndRestore(keras.callbacks.Callback):
    """Backs up a private run and resumes it after an interruption.

    Use it in the place of `keras.callbacks.BackupAndRestore`. It keeps, besides
    weights, optimizer and ledger, the secret keys of the noise and the sampler, which
    no other file has: guard the directory as you guard the data. Files have mode 0600
    and are removed when the training has ended.

    A run that was interrupted at a backup continues as if nothing had happened: the
    same noise, the same Poisson batches, bit for bit. Steps made after the last backup
    are lost; they are made again exactly as they were if that can be guaranteed (same
    data, same configuration, `tf.config.experimental.enable_op_determinism()` on).
    Otherwise the run continues with fresh keys, and the lost steps count, because
    they may have been seen. Where noise is correlated, so that one `fit` is one run
    (`MFDPFTRL`, `DPFTRL`), that is a second run with a cost of its own; the same data
    and the same `fit` are needed to go on with the first.

    Args:
        backup_dir: Directory of the backup.
        save_freq: "epoch", or the number of batches between backups.
        delete_checkpoint: Whether to remove the backup when the training has ended.

    Privacy:
        The number of each step is written to a journal before it is made, so no draw of
        noise is ever used on anything but an exact repetition.

    Example:
        >>> BackupAndRestore("/tmp/backup", save_freq=100).save_freq
        100
    """

    def __init__(
        self, backup_dir, save_freq: str | int = "epoch", delete_checkpoint=True
    ):
        super().__init__()
        if save_freq != "epoch" and (
            isinstance(save_freq, bool)
            or not isinstance(save_freq, int)
            or save_freq < 1
        ):
            raise ValueError(
                f"save_freq={save_freq!r} is not legal. Use 'epoch' or a positive "
                "number of batches."
            )
        self.backup_dir = pathlib.Path(backup_dir)
        self.save_freq = save_freq
        self.delete_checkpoint = delete_checkpoint
        self._journal: Any = None
        self._fingerprint: str | None = None
        self._schedule = ""
        self._draws = ""
        self._metrics: list[np.ndarray] | None = None
        self._epoch = 0
        self._applied = 0
        self._since_save = 0

    # --- Keras' hooks ----------------------------------------------------------------

    def on_train_begin(self, logs=None):
        """Restores the backup, if there is one; else makes the first."""
        del logs
        model = self._private()
        strategy = model.distribute_strategy
        if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
            raise ValueError(
                "BackupAndRestore is for one host: several workers would all write the "
                "backup. Train on one host, or without it."
            )
        self._applied = self._since_save = 0
        self._metrics = None
        # Of the configuration as the user gave it: the state may bring another
        # learning rate, say.
        self._fingerprint = fingerprint.of_run(model)
        self._schedule = fingerprint.of_schedule(model)
        self._draws = fingerprint.of_draws(model)
        self.backup_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        state, journal = self.backup_dir / _STATE, self.backup_dir / _JOURNAL
        if not state.exists():
            journal.unlink(missing_ok=True)
        elif not journal.exists():
            raise ValueError(
                f"The journal of the backup in {self.backup_dir} is missing, so nobody "
                "knows which noise was used. Remove the backup and load a checkpoint."
            )
        self._journal = Journal(journal)
        if not state.exists() or not self._restore(state):
            self._save(model._initial_epoch or 0, self._applied)

    def on_epoch_begin(self, epoch, logs=None):
        """Remembers the epoch."""
        del logs
        self._epoch = epoch
        if self._metrics is not None:  # of the first part of this epoch
            for variable, value in zip(
                self._private().metrics_variables, self._metrics, strict=True
            ):
                variable.assign(value)
            self._metrics = None

    def on_train_batch_begin(self, batch, logs=None):
        """Writes down the steps that are about to be made."""
        del logs
        model = self._private()
        if batch + model.steps_per_execution <= self._applied:
            return
        parts = model.optimizer.logical_batch_steps
        number = (batch + model.steps_per_execution) // parts - batch // parts
        if (
            not number
        ):  # of releases: parts of a logical batch are kept, and that is all
            return
        first, state = model.optimizer.releases(), 0
        if self._fingerprint is not None:
            state = int(digest.weights_digest(_state(model)))
            known = self._journal.digest_at(first)
            if first < self._journal.found and state != known:
                self._journal.write_diverged()
                raise RuntimeError(
                    "The steps after the backup cannot be repeated as they were: a "
                    "callback or the code has changed. Start again: the training will "
                    "go on from the backup with fresh keys."
                )
        self._journal.write_steps(first, first + number, state)

    def on_train_batch_end(self, batch, logs=None):
        """Saves, every `save_freq` batches."""
        del logs
        if self.save_freq == "epoch" or batch < self._applied:
            return
        self._since_save += self._private().steps_per_execution
        if self._since_save >= self.save_freq:
            self._save(self._epoch, batch + 1)

    def on_epoch_end(self, epoch, logs=None):
        """Saves at the end of an epoch."""
        del logs
        self._applied = 0
        self._save(epoch + 1, 0)

    def on_train_end(self, logs=None):
        """Removes the backup with its keys."""
        del logs
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        if self.delete_checkpoint:
            for name in (_STATE, f"{_STATE}.tmp", _JOURNAL):
                (self.backup_dir / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty: it is the user's own
                self.backup_dir.rmdir()

    # --- saving ----------------------------------------------------------------------

    def _save(self, epoch: int, applied: int):
        """Writes the state: batch `applied` of `epoch` comes next."""
        model = self._private()
        optimizer, ledger = model.optimizer, model.privacy_ledger
        text = ledger.to_json()
        meta = {
            "epoch": epoch,
            "applied": applied,
            "releases": optimizer.releases(),
            "counted": optimizer.releases() + ledger.steps_to_repeat(),
            "keys": optimizer.keys.export(),
            "ledger": text,
            "fingerprint": self._fingerprint,
            "schedule": self._schedule,
            "draws": self._draws,
        }
        arrays = {name: _storable(v.numpy()) for name, v in _named(model).items()}
        arrays["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
        temporary = self.backup_dir / f"{_STATE}.tmp"
        temporary.unlink(missing_ok=True)  # it may have another mode
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.backup_dir / _STATE)
        _sync_directory(self.backup_dir)
        self._journal.write_saved(optimizer.releases())
        self._since_save = 0

    # --- restoring -------------------------------------------------------------------

    def _restore(self, path: pathlib.Path) -> bool:
        """Restores the state; returns whether the run goes on as if never stopped."""
        model, journal = self._private(), self._journal
        optimizer, run = model.optimizer, model.fit_run
        with np.load(path) as stored:
            saved = dict(stored)
        meta = json.loads(saved.pop("meta").tobytes().decode())
        values = self._values(model, saved, meta["applied"])
        known = optimizer.releases()
        made = max(journal.made, meta["counted"], known)
        # Under keys that this process has used since, an old number may be taken.
        # Correlated noise fits no other steps than those that it was planned for.
        same = meta.get("schedule", "") == self._schedule
        replay = (known <= meta["releases"] and same) and (
            made == meta["releases"]
            or (
                journal.may_replay
                and meta["fingerprint"] is not None
                and meta["fingerprint"] == self._fingerprint
            )
        )
        for variable, value in values:
            variable.assign(value)
        optimizer.set_releases(meta["releases"])
        applied, parts = meta["applied"], optimizer.logical_batch_steps
        if not (replay and self._draws and meta.get("draws") == self._draws):
            # Parts of another draw: a record could be in them and in those to come.
            optimizer.drop_parts()
            applied -= applied % parts
        if replay:
            optimizer.keys.restore(meta["keys"])
        else:
            optimizer.keys.refresh()
            optimizer.skip_releases(made)
        model.privacy_ledger.resume(
            meta["ledger"],
            # Of the keys that the steps are made with, not of this fit's argument.
            dataclasses.replace(run.source.phase, seeded=optimizer.keys.seeded),
            optimizer,
            lost=made - meta["counted"],
            repeated=made - meta["releases"] if replay else 0,
            replay=replay,
        )
        if not replay:
            logging.warning(
                "keras_dpopt: the run cannot go on exactly as it would have; %d steps "
                "after the last backup are lost and count, and training goes on with "
                "fresh keys.",
                made - meta["releases"],
            )
        if not replay or run.source.rows is None:
            # Batches that the caller made may come in another order now.
            model.privacy_ledger.begin_epoch()
        model._initial_epoch = meta["epoch"]
        self._epoch, self._applied = meta["epoch"], applied
        run.applied_in_epoch = applied
        return replay

    def _values(self, model, saved: dict[str, np.ndarray], applied: int) -> list:
        """Pairs of a variable and its saved value; metrics are put aside."""
        named = _named(model)
        metrics = [name for name in named if name.startswith("metric.")]
        fits = [
            name in saved and saved[name].shape == named[name].shape for name in named
        ]
        names = {name for name in saved if not name.startswith("metric.")}
        if names != set(named) - set(metrics) or not all(
            fit for name, fit in zip(named, fits, strict=True) if name in names
        ):
            raise ValueError(
                f"The backup in {self.backup_dir} is of another model or optimizer. "
                "Resume with the one it was made with, or remove the backup."
            )
        # Of a part of an epoch; other metrics than those of the backup start anew.
        if applied and all(fits):
            self._metrics = [_value(saved[name], named[name]) for name in metrics]
        return [(named[name], _value(saved[name], named[name])) for name in names]

    def _private(self) -> Any:
        if not hasattr(self.model, "privacy_ledger"):
            raise TypeError(
                "keras_dpopt.BackupAndRestore needs a private model. Use "
                "keras.callbacks.BackupAndRestore for others."
            )
        return self.model


def _named(model) -> dict[str, Any]:
    named = {f"model.{i}": v for i, v in enumerate(model.variables)}
    named |= {f"metric.{i}": v for i, v in enumerate(model.metrics_variables)}
    named |= {
        f"optimizer.{name}": v for name, v in model.optimizer.named_variables().items()
    }
    return named | {
        f"secret.{name}": v for name, v in model.optimizer.secret_variables().items()
    }


def _state(model) -> list:
    """All that a step depends on, besides data, keys and configuration."""
    variables = [
        *model.variables,
        *model.optimizer.named_variables().values(),
        *model.optimizer.secret_variables().values(),
    ]
    return [tf.convert_to_tensor(v) for v in variables]


def _storable(array: np.ndarray) -> np.ndarray:
    # NumPy cannot read back bfloat16 and its like.
    return array.view(f"u{array.itemsize}") if array.dtype.kind == "V" else array


def _value(stored: np.ndarray, variable: Any) -> np.ndarray:
    dtype = variable.numpy().dtype
    return stored.view(dtype) if dtype.kind == "V" else stored


def _sync_directory(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

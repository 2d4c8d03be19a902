"""Backup of an interrupted private run, secret keys included."""

import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from keras_dpopt import keras_compat

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
    they may have been seen.

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

    def __init__(self, backup_dir, save_freq="epoch", delete_checkpoint=True):
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
        self._journal: int | None = None
        self._epoch = 0
        self._since_save = 0

    # --- Keras' hooks ----------------------------------------------------------------

    def on_train_begin(self, logs=None):
        """Restores the backup, if there is one."""
        del logs
        self._private().privacy_ledger.sync()
        self.backup_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._since_save = 0
        if (self.backup_dir / _STATE).exists():
            self._restore()
        self._journal = os.open(
            self.backup_dir / _JOURNAL, os.O_RDWR | os.O_CREAT, mode=0o600
        )
        self._write_journal(self._private().optimizer.releases())

    def on_epoch_begin(self, epoch, logs=None):
        """Remembers the epoch."""
        del logs
        self._epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        """Writes down the steps that are about to be made."""
        del batch, logs
        model = self._private()
        self._write_journal(model.optimizer.releases() + model.steps_per_execution)

    def on_train_batch_end(self, batch, logs=None):
        """Saves, every `save_freq` batches."""
        del logs
        if self.save_freq == "epoch":
            return
        self._since_save += self._private().steps_per_execution
        if self._since_save >= self.save_freq:
            self._save(self._epoch, batch + 1)

    def on_epoch_end(self, epoch, logs=None):
        """Saves at the end of an epoch."""
        del logs
        self._save(epoch + 1, 0)

    def on_train_end(self, logs=None):
        """Removes the backup with its keys."""
        del logs
        if self._journal is not None:
            os.close(self._journal)
            self._journal = None
        if self.delete_checkpoint:
            for name in (_STATE, _JOURNAL):
                (self.backup_dir / name).unlink(missing_ok=True)

    # --- saving ----------------------------------------------------------------------

    def _save(self, epoch: int, applied: int):
        """Writes the state: batch `applied` of `epoch` comes next."""
        model = self._private()
        optimizer, run = model.optimizer, model.fit_run
        meta = {
            "epoch": epoch,
            "applied": applied,
            "releases": optimizer.releases(),
            "keys": optimizer.keys.export(),
            "ledger": model.privacy_ledger.to_json(),
            "fingerprint": _fingerprint(model, run),
        }
        arrays = {f"model.{i}": v.numpy() for i, v in enumerate(_variables(model))}
        arrays.update(
            (f"optimizer.{name}", v.numpy())
            for name, v in optimizer.named_variables().items()
        )
        arrays["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
        temporary = self.backup_dir / f"{_STATE}.tmp"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.backup_dir / _STATE)
        self._write_journal(optimizer.releases())
        self._since_save = 0

    def _write_journal(self, releases: int):
        if self._journal is not None:
            os.pwrite(self._journal, releases.to_bytes(8, "little"), 0)
            os.fdatasync(self._journal)

    # --- restoring -------------------------------------------------------------------

    def _restore(self):
        model: Any = self._private()
        optimizer, run = model.optimizer, model.fit_run
        with np.load(self.backup_dir / _STATE) as stored:
            saved = dict(stored)
        meta = json.loads(saved.pop("meta").tobytes().decode())
        named = optimizer.named_variables()
        current = _variables(model)
        expected = {f"model.{i}" for i in range(len(current))}
        if set(saved) != expected | {f"optimizer.{name}" for name in named}:
            raise ValueError(
                f"The backup in {self.backup_dir} is of another model or optimizer. "
                "Resume with the one it was made with, or remove the backup."
            )
        known = optimizer.releases()
        for i, variable in enumerate(current):
            variable.assign(saved[f"model.{i}"])
        for name, variable in named.items():
            variable.assign(saved[f"optimizer.{name}"])
        made = max(self._read_journal(), meta["releases"], known)
        lost = made - meta["releases"]
        replay = lost == 0 or _can_replay(meta, model, run)
        if replay:
            optimizer.keys.restore(meta["keys"])
        else:
            optimizer.keys.refresh()
            optimizer.skip_releases(made)
            logging.warning(
                "keras_dpopt: %d steps after the last backup are lost and cannot be "
                "repeated exactly; they count, and training goes on with fresh keys.",
                lost,
            )
        model.privacy_ledger.resume(
            meta["ledger"], run.source.phase, optimizer, meta["releases"]
        )
        if not replay:
            model.privacy_ledger.begin_epoch()
        model._initial_epoch = meta["epoch"]
        run.applied_in_epoch = meta["applied"]

    def _read_journal(self) -> int:
        path = self.backup_dir / _JOURNAL
        return int.from_bytes(path.read_bytes()[:8], "little") if path.exists() else 0

    def _private(self) -> Any:
        if not hasattr(self.model, "privacy_ledger"):
            raise TypeError(
                "keras_dpopt.BackupAndRestore needs a private model. Use "
                "keras.callbacks.BackupAndRestore for others."
            )
        return self.model


def _variables(model) -> list:
    return [*model.variables, *model.metrics_variables]


def _can_replay(meta: dict, model, run) -> bool:
    """Whether the steps after the backup can be made again exactly as they were."""
    return (
        run.source.rows is not None
        and model.optimizer.mechanism.supports_jit
        and keras_compat.is_op_determinism_enabled()
        and meta["fingerprint"] == _fingerprint(model, run)
    )


def _fingerprint(model, run) -> str:
    """A digest of all that a step depends on besides the state: data, configuration."""
    digest = hashlib.blake2b(digest_size=16)
    optimizer = model.optimizer
    configuration = {
        "compile": model.get_compile_config(),
        "sampler": dataclasses.asdict(run.source.phase),
        "batch": optimizer.expected_batch_size,
        "microbatch": optimizer.microbatch_size,
        "engine": model.private_step.engine.name,
        "versions": [tf.__version__, keras.__version__],
    }
    digest.update(json.dumps(configuration, sort_keys=True, default=str).encode())
    if run.source.rows is None:
        return digest.hexdigest()
    if run.data_digest is None:
        rows = hashlib.blake2b(digest_size=16)
        for leaf in tf.nest.flatten(run.source.rows.values):
            array = np.ascontiguousarray(leaf)
            rows.update(repr((array.shape, array.dtype)).encode())
            is_text = array.dtype.kind in "OSU"
            rows.update(repr(array.tolist()).encode() if is_text else array.data)
        run.data_digest = rows.hexdigest()
    digest.update(run.data_digest.encode())
    return digest.hexdigest()

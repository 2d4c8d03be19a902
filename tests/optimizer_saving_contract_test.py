"""What every private optimizer saves, and how its runs resume."""

import shutil
import zipfile

import contract
import h5py
import keras
import numpy as np
import runs
from contract import every_optimizer

import keras_dpopt

EPOCHS = 2


def _make(cls, seed=None, **arguments):
    given = {"bands": 3} if "bands" in contract.own_arguments(cls) else {}
    optimizer = contract.make(
        cls,
        0.05,
        whole=False,
        expected_batch_size=runs.BATCH,
        gradient_engine="loop",  # It is traced in half the time.
        seed=seed,
        **given,
        **arguments,
    )
    layer = keras.layers.Dense(
        runs.CLASSES, "softmax", kernel_initializer=keras.initializers.GlorotNormal(1)
    )
    model = keras_dpopt.DPSequential([keras.Input((runs.FEATURES,)), layer])
    model.compile(optimizer, "sparse_categorical_crossentropy")
    return model


def _content(path) -> list[bytes]:
    """The file, what is in the archive, and each array of it."""
    parts = [path.read_bytes()]
    files = [path] if path.suffix == ".h5" else []
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            parts += [archive.read(name) for name in archive.namelist()]
            files += [archive.open(n) for n in archive.namelist() if n.endswith(".h5")]
    for file in files:
        with h5py.File(file) as opened:
            opened.visititems(
                lambda _, item: (
                    parts.append(np.asarray(item).tobytes())
                    if isinstance(item, h5py.Dataset)
                    else None
                )
            )
    return parts


def _secrets(optimizer) -> list[bytes]:
    """Keys, and buffers of earlier noise."""
    keys = optimizer.keys.export()["keys"]
    found = [np.int64(key).tobytes() for key in keys]
    found += [str(key).encode() for key in keys]
    for variable in optimizer.secret_variables().values():
        if variable.numpy().size > 1:
            found += [one.tobytes() for one in variable.numpy()]
    return found


class _Keep(keras.callbacks.Callback):
    """Copies a backup after some steps: what a process that ends there leaves."""

    def __init__(self, backup, to, steps):
        super().__init__()
        self.backup, self.to, self.left = backup, to, steps

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            shutil.copytree(self.backup, self.to)


@every_optimizer
def test_state_is_saved_and_interrupted_runs_resume(cls, tmp_path):
    """One run, left in the middle of an epoch; the weights' average with it.

    A run and its twin would be traced twice: here the backup of the twin itself, as it
    was then, is resumed.
    """
    average = {"use_ema": True, "ema_momentum": 0.5}
    twin = _make(cls, seed=7, **average)
    backup, kept = tmp_path / "backup", tmp_path / "kept"
    callbacks = [
        keras_dpopt.BackupAndRestore(backup, save_freq=1),
        _Keep(backup, kept, steps=4),
    ]
    runs.fit(twin, epochs=EPOCHS, callbacks=callbacks)
    # Its own keys would be others: those of the backup are what it goes on with.
    resumed = _make(cls, seed=99, **average)
    assert resumed.optimizer.keys.export() != twin.optimizer.keys.export()
    runs.fit(resumed, epochs=EPOCHS, callbacks=[keras_dpopt.BackupAndRestore(kept)])
    assert not runs.different(runs.state(resumed), runs.state(twin))
    secret = [made.optimizer.secret_variables() for made in (resumed, twin)]
    for name, variable in secret[0].items():
        np.testing.assert_array_equal(variable.numpy(), secret[1][name].numpy())
    assert runs.steps(resumed) == runs.steps(twin) == 2 * runs.STEPS
    ledgers = [made.privacy_ledger.sync() for made in (resumed, twin)]
    assert ledgers[0].epsilon(1e-5) == ledgers[1].epsilon(1e-5)
    assert len(ledgers[0].phases) == len(ledgers[1].phases) == 1

    twin.save(tmp_path / "m.keras")
    twin.save_weights(tmp_path / "m.weights.h5")
    contents = _content(tmp_path / "m.keras") + _content(tmp_path / "m.weights.h5")
    for secret in _secrets(twin.optimizer):
        assert not any(secret in content for content in contents)
    # The search finds what is there.
    for name, array in runs.state(twin).items():
        assert any(array.tobytes() in content for content in contents), name

    loaded = keras.saving.load_model(tmp_path / "m.keras")
    other = _make(cls, **average)
    other.optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / "m.weights.h5")
    for again in (loaded, other):
        assert type(again.optimizer) is cls
        assert not runs.different(runs.state(again), runs.state(twin))
        assert again.optimizer.releases() == twin.optimizer.releases()
        keys = set(again.optimizer.keys.export()["keys"])
        assert not keys & set(twin.optimizer.keys.export()["keys"])
        for variable in again.optimizer.secret_variables().values():
            assert not np.any(variable.numpy())
        assert runs.steps(again) == 2 * runs.STEPS
    assert loaded.optimizer.get_config() == twin.optimizer.get_config()

"""BackupAndRestore: bitwise resumption, exact replay, and forks (rules 8 and 9)."""

import json
import os
import pathlib
import signal
import stat
import subprocess
import sys
from typing import Any

import keras
import numpy as np
import pytest
import runs
import tensorflow as tf

import keras_dpopt

EPOCHS = 3
BY_AUTO = {"momentum": 0.9, "gradient_engine": "auto"}


def _backup(path, **arguments):
    return keras_dpopt.BackupAndRestore(path / "backup", **arguments)


def _interrupted(model, path, interrupt, save_freq="epoch", callbacks=(), **arguments):
    """Trains until the interruption."""
    with pytest.raises(runs.Interrupted):
        runs.fit(
            model,
            epochs=EPOCHS,
            callbacks=[*callbacks, _backup(path, save_freq=save_freq), interrupt],
            **arguments,
        )
    return model


def _resumed(model, path, save_freq="epoch", callbacks=(), **arguments):
    history = runs.fit(
        model,
        epochs=EPOCHS,
        callbacks=[*callbacks, _backup(path, save_freq=save_freq)],
        **arguments,
    )
    return model, history.history


def _twin(make, **arguments):
    model = make()
    return model, runs.fit(model, epochs=EPOCHS, **arguments).history


def _meta(path):
    with np.load(path / "backup" / "state.npz") as saved:
        return json.loads(saved["meta"].tobytes().decode())


# ---------------------------------------------------- an interruption at a boundary


@pytest.mark.parametrize(
    ("make", "save_freq", "interrupt", "arguments"),
    [
        pytest.param(
            lambda seed: runs.model(runs.sgd(**BY_AUTO, seed=seed), dropout=0.3),
            "epoch",
            {"epochs": 2},
            {},
            id="momentum and dropout, an epoch",
        ),
        pytest.param(
            lambda seed: runs.model(runs.fiber(seed=seed, use_ema=True)),
            2,
            {"batches": 5},
            {},
            id="FiBeR and EMA, within an epoch",
        ),
        pytest.param(
            lambda seed: runs.model(
                runs.sgd(momentum=0.9, seed=seed), steps_per_execution=2
            ),
            2,
            {"batches": 4},  # an epoch is executed as 2 + 2 + 1
            {"batch_size": 6},
            id="several steps an execution, within an epoch",
        ),
    ],
)
def test_a_run_resumed_at_a_backup_equals_the_uninterrupted_one(
    tmp_path, make, save_freq, interrupt, arguments
):
    twin, history = _twin(lambda: make(7), **arguments)
    first = _interrupted(
        make(7), tmp_path, runs.Interrupt(**interrupt), save_freq, **arguments
    )
    assert 0 < first.optimizer.releases() < twin.optimizer.releases()
    assert first.optimizer.releases() == _meta(tmp_path)["releases"]
    # Its own keys would be others: those of the backup are what it goes on with.
    model, resumed = _resumed(make(None), tmp_path, save_freq, **arguments)
    assert not runs.different(runs.state(model), runs.state(twin))
    assert runs.steps(model) == runs.steps(twin) == twin.optimizer.releases()
    epsilon = [m.privacy_ledger.sync().epsilon(1e-5) for m in (model, twin)]
    assert epsilon[0] == epsilon[1]
    assert resumed["loss"] == history["loss"][-len(resumed["loss"]) :]
    assert resumed["accuracy"][-1] == history["accuracy"][-1]
    assert not (tmp_path / "backup").exists()
    # The next fit is a fit of its own.
    runs.fit(model, **arguments)
    assert runs.steps(model) > runs.steps(twin) and not runs.notes(model)


def test_the_same_model_goes_on_after_an_interruption_at_a_backup(tmp_path):
    twin, _ = _twin(lambda: runs.model(runs.sgd(seed=7)))
    model = runs.model(runs.sgd(seed=7))
    _interrupted(model, tmp_path, runs.Interrupt(epochs=1))
    _resumed(model, tmp_path)
    assert not runs.different(runs.state(model), runs.state(twin))
    assert runs.steps(model) == runs.steps(twin)


# ------------------------------------------------------------------ steps that are lost


def test_lost_steps_count_and_no_draw_comes_again(tmp_path):
    model = runs.noise_model(seed=7)
    lost = []

    class Record(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.before = self.model.get_weights()[0]

        def on_train_batch_end(self, batch, logs=None):
            lost.append(self.model.get_weights()[0] - self.before)

    _interrupted(model, tmp_path, runs.Interrupt(batches=5), callbacks=[Record()])
    seen, lost = lost, []
    # A seed that the new run has as well must not bring the draws back.
    resumed = runs.noise_model(seed=7)
    _resumed(resumed, tmp_path, callbacks=[Record()])
    assert len(seen) == 5 and len(lost) == 6
    assert not runs.repeats(seen, lost)
    assert runs.steps(resumed) == EPOCHS * runs.STEPS + 2
    assert resumed.optimizer.releases() == EPOCHS * runs.STEPS + 2


def test_lost_steps_count_at_their_own_cost(tmp_path):
    low, high = runs.sgd(noise_multiplier=0.5), runs.sgd(noise_multiplier=50.0)
    first = runs.model(low)
    _interrupted(first, tmp_path, runs.Interrupt(batches=5))
    made = first.privacy_ledger.sync()
    assert made.total_steps == 5
    resumed, _ = _resumed(runs.model(high), tmp_path)
    ledger = resumed.privacy_ledger.sync()
    assert ledger.total_steps == 5 + 2 * runs.STEPS
    assert [p.steps for p in ledger.phases] == [5, 2 * runs.STEPS]
    assert ledger.epsilon(1e-5) >= made.epsilon(1e-5)


def test_steps_lost_before_the_first_save_count(tmp_path):
    _interrupted(runs.model(), tmp_path, runs.Interrupt(batches=2))
    resumed, _ = _resumed(runs.model(), tmp_path)
    assert runs.steps(resumed) == EPOCHS * runs.STEPS + 2


def test_each_loss_counts_also_after_a_fork(tmp_path):
    for _ in range(2):
        _interrupted(runs.model(), tmp_path, runs.Interrupt(batches=2))
    resumed, _ = _resumed(runs.model(), tmp_path)
    assert runs.steps(resumed) == EPOCHS * runs.STEPS + 4


def test_what_the_model_did_by_itself_after_the_backup_counts(tmp_path):
    model = runs.model()
    _interrupted(model, tmp_path, runs.Interrupt(epochs=1))
    keys = _meta(tmp_path)["keys"]
    runs.fit(model)  # without the callback: the journal knows nothing of it
    _resumed(model, tmp_path)
    assert runs.steps(model) == (EPOCHS + 1) * runs.STEPS
    assert model.optimizer.keys.export() != keys


def test_a_budget_holds_after_a_resumption_in_either_order(tmp_path):
    budget = keras_dpopt.PrivacyBudget(1.0, 1e-5)
    model = runs.model(runs.sgd(noise_multiplier=4.0))
    _interrupted(model, tmp_path, runs.Interrupt(batches=5), callbacks=[budget])
    phase = model.privacy_ledger.sync().phases[-1]
    allowed = model.privacy_ledger.sync().max_steps_within(
        1.0, 1e-5, "rdp", phase.blank()
    )
    (tmp_path / "backup").rename(tmp_path / "kept")
    for first in (True, False):
        copy = tmp_path / str(first)
        copy.mkdir()
        subprocess.run(["cp", "-r", tmp_path / "kept", copy / "backup"], check=True)
        callbacks = [budget, _backup(copy)] if first else [_backup(copy), budget]
        resumed = runs.model(runs.sgd(noise_multiplier=4.0))
        runs.fit(resumed, epochs=1000, callbacks=callbacks)
        assert runs.steps(resumed) == 5 + allowed
        assert resumed.privacy_ledger.sync().epsilon(1e-5) <= 1.0


# ---------------------------------------------------------------- the caller's batches


def test_the_callers_batches_resume_and_epochs_count_conservatively(tmp_path):
    def fit(model, *callbacks):
        batches = tf.data.Dataset.from_tensor_slices(runs.data()).batch(runs.BATCH)
        model.fit(
            batches,
            epochs=EPOCHS,
            verbose=0,
            once_per_epoch=True,
            callbacks=[*callbacks],
        )
        return model

    def make(seed):
        return runs.model(runs.sgd(expected_batch_size=runs.BATCH, seed=seed))

    twin = fit(make(7))
    with pytest.raises(runs.Interrupted):
        fit(make(7), _backup(tmp_path, save_freq=1), runs.Interrupt(batches=5))
    resumed = fit(make(None), _backup(tmp_path))
    assert not runs.different(runs.state(resumed), runs.state(twin))
    assert runs.steps(resumed) == runs.steps(twin)
    # The rest of the second epoch may have been any records.
    epochs = [
        sum(phase.epochs_begun for phase in made.privacy_ledger.sync().phases)
        for made in (resumed, twin)
    ]
    assert epochs == [EPOCHS + 1, EPOCHS]


# --------------------------------------------------------------------------- the files


def test_files_are_private_and_removed_at_the_end(tmp_path):
    directory = tmp_path / "backup"
    directory.mkdir(mode=0o755)
    (directory / "state.npz.tmp").write_bytes(b"torn")  # killed while saving
    (directory / "state.npz.tmp").chmod(0o644)
    modes = {}

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            for path in directory.iterdir():
                modes[path.name] = stat.S_IMODE(path.stat().st_mode)

    runs.fit(runs.model(), callbacks=[_backup(tmp_path), Look()])
    assert modes == {"state.npz": 0o600, "journal": 0o600}
    assert not directory.exists()


def test_the_directory_is_private_and_stays_when_asked(tmp_path):
    model = runs.model()
    runs.fit(model, callbacks=[_backup(tmp_path, delete_checkpoint=False)])
    assert stat.S_IMODE((tmp_path / "backup").stat().st_mode) == 0o700
    assert {p.name for p in (tmp_path / "backup").iterdir()} == {"state.npz", "journal"}
    # The next fit goes on from it, as with Keras' callback.
    other = runs.model()
    runs.fit(other, epochs=2, callbacks=[_backup(tmp_path)])
    assert runs.steps(other) == 2 * runs.STEPS


def test_an_interruption_while_saving_keeps_the_last_backup(tmp_path, monkeypatch):
    saves = []

    def torn(file, **arrays):
        saves.append(arrays)
        if len(saves) == 3:
            file.write(b"torn")
            raise runs.Interrupted
        return savez(file, **arrays)

    savez = np.savez
    monkeypatch.setattr(np, "savez", torn)
    with pytest.raises(runs.Interrupted):
        runs.fit(runs.model(), epochs=EPOCHS, callbacks=[_backup(tmp_path)])
    monkeypatch.undo()
    assert (tmp_path / "backup" / "state.npz.tmp").exists()
    resumed, _ = _resumed(runs.model(), tmp_path)
    assert runs.steps(resumed) == (EPOCHS + 1) * runs.STEPS


@pytest.mark.parametrize("other", ["layers", "optimizer", "sizes"])
def test_a_backup_of_another_model_is_refused(tmp_path, other):
    _interrupted(runs.model(), tmp_path, runs.Interrupt(epochs=1))
    wrong = runs.model(runs.fiber() if other == "optimizer" else runs.sgd())
    if other != "optimizer":
        width = 6 if other == "sizes" else 5
        layers = [keras.layers.Dense(width), keras.layers.Dense(3)]
        layers = layers if other == "sizes" else [*layers, keras.layers.Dense(3)]
        wrong = keras_dpopt.DPSequential([keras.Input((runs.FEATURES,)), *layers])
        wrong.compile(runs.sgd(), loss="mse")
    before = wrong.get_weights()
    y = np.zeros((runs.N, 3)) if other != "optimizer" else runs.data()[1]
    with pytest.raises(ValueError, match="another model"):
        wrong.fit(runs.data()[0], y, batch_size=10, callbacks=[_backup(tmp_path)])
    assert all(map(np.array_equal, wrong.get_weights(), before))


def test_a_backup_without_its_journal_is_refused(tmp_path):
    _interrupted(runs.model(), tmp_path, runs.Interrupt(epochs=1))
    (tmp_path / "backup" / "journal").unlink()
    with pytest.raises(ValueError, match="journal"):
        _resumed(runs.model(), tmp_path)


def test_arguments_and_plain_models_are_checked(tmp_path):
    wrong: Any
    for wrong in (0, True, 1.5, "batch"):
        with pytest.raises(ValueError, match="save_freq"):
            keras_dpopt.BackupAndRestore(tmp_path, save_freq=wrong)
    plain = keras.Sequential([keras.layers.Dense(3)])
    plain.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(TypeError, match="private model"):
        runs.fit(plain, callbacks=[_backup(tmp_path)])


def test_without_op_determinism_nothing_is_repeated(tmp_path):
    _interrupted(runs.model(), tmp_path, runs.Interrupt(epochs=1))
    assert _meta(tmp_path)["fingerprint"] is None


# -------------------------------------------------------------------- other processes


def _process(program, *arguments):
    path = pathlib.Path(__file__).parent
    return subprocess.run(
        [sys.executable, path / "backup_process.py", program, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": f"{path.parent}:{path}"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_killed_process_resumes_in_another_one(tmp_path):
    killed = _process("killed", tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    # Killed after the journal was written and before the step was made.
    assert _meta(tmp_path)["releases"] == 4
    resumed, _ = _resumed(runs.model(), tmp_path)
    assert runs.steps(resumed) == EPOCHS * runs.STEPS + 1


def test_with_op_determinism_lost_steps_are_repeated_exactly_or_not_at_all(tmp_path):
    done = _process("replay", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr

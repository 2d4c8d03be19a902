"""Saving and loading: all comes back but the secrets, in every format (rule 8)."""

import copy
import json
import os
import pathlib
import pickle
import subprocess
import sys
import zipfile

import h5py
import keras
import numpy as np
import pytest
import runs
import save_process
import tensorflow as tf

import keras_dpopt

# ------------------------------------------------------------------- another process


def test_every_kind_of_model_comes_back_in_a_new_process(tmp_path):
    for name, make in save_process.MODELS.items():
        model = make()
        save_process.train(name, model)
        model.save(tmp_path / f"{name}.keras")
        expected = save_process.described(name, model)
        np.savez(tmp_path / f"{name}.npz", **save_process.arrays(name, model))
        (tmp_path / f"{name}.json").write_text(json.dumps(expected))
        assert expected["steps"] == runs.STEPS
    tests = pathlib.Path(__file__).parent
    done = subprocess.run(
        [sys.executable, tests / "save_process.py", tmp_path],
        env={**os.environ, "PYTHONPATH": f"{tests.parent}:{tests}"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# ----------------------------------------------------------------------- the secrets

SEED = 123456789123


def _content(folder):
    """Bytes of all files, and of what is within them."""
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        yield path.name, path.read_bytes()
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                for name in archive.namelist():
                    yield f"{path.name}:{name}", archive.read(name)
        if path.suffix == ".h5":
            with h5py.File(path) as file:
                found = []
                file.visititems(lambda name, item, to=found: to.append((name, item)))
                for name, item in found:
                    if isinstance(item, h5py.Dataset):
                        yield f"{path.name}:{name}", np.asarray(item).tobytes()


def _leaks(folder, secrets):
    leaks = []
    for name, content in _content(folder):
        for secret in secrets:
            forms = [str(secret).encode(), secret.to_bytes(8, "little", signed=True)]
            if any(form in content for form in forms):
                leaks.append((name, secret))
    return leaks


def test_no_secret_is_in_any_file_and_the_ledger_is(tmp_path):
    model = runs.model(runs.sgd(seed=SEED))
    secrets = [SEED, *model.optimizer.keys.export()["keys"]]
    path = tmp_path / "files"
    path.mkdir()
    callbacks = [
        keras.callbacks.ModelCheckpoint(path / "callback.keras"),
        keras.callbacks.ModelCheckpoint(
            path / "callback.weights.h5", save_weights_only=True
        ),
        keras.callbacks.BackupAndRestore(path / "keras", delete_checkpoint=False),
        keras.callbacks.CSVLogger(path / "log.csv"),
    ]
    runs.fit(model, callbacks=callbacks)
    assert model.optimizer.keys.export()["keys"] == secrets[1:]
    model.save(path / "model.keras")
    model.save_weights(path / "model.weights.h5")
    tf.train.Checkpoint(model=model).save(path / "model" / "checkpoint")
    tf.train.Checkpoint(optimizer=model.optimizer).save(path / "optimizer" / "c")
    tf.saved_model.save(model, path / "saved_model")
    model.export(path / "export", verbose=False)
    (path / "pickle").write_bytes(pickle.dumps(model))
    (path / "optimizer.pickle").write_bytes(pickle.dumps(model.optimizer))
    (path / "config.json").write_text(
        model.to_json() + str(keras.saving.serialize_keras_object(model.optimizer))
    )
    assert not _leaks(path, secrets)
    # The search finds what is there: the backup of our own callback has them all.
    # The seed is in no file at all.
    ours = tmp_path / "ours"
    runs.fit(
        model,
        callbacks=[keras_dpopt.BackupAndRestore(ours, delete_checkpoint=False)],
    )
    assert {secret for _, secret in _leaks(ours, secrets)} == set(secrets[1:])
    with_ledger = {name.split(":")[0] for name, c in _content(path) if b"phases" in c}
    for name in (
        "callback.keras",
        "callback.weights.h5",
        "latest.weights.h5",
        "model.keras",
        "model.weights.h5",
    ):
        assert name in with_ledger
    restored = runs.model()
    tf.train.Checkpoint(model=restored).restore(
        tf.train.latest_checkpoint(path / "model")
    )
    assert runs.steps(restored) == runs.STEPS
    for name in ("callback.keras", "model.keras"):
        assert runs.steps(keras.saving.load_model(path / name)) == runs.STEPS
    assert runs.steps(pickle.loads((path / "pickle").read_bytes())) == runs.STEPS


def test_a_format_without_room_for_the_ledger_is_refused(tmp_path):
    with pytest.raises(ValueError, match="HDF5"):
        runs.model().save(tmp_path / "old.h5")


# --------------------------------------------------------------- no draw comes again


def _loads(path):
    """Ways to come back to the weights that were saved."""

    def weights(seed):
        model = runs.noise_model(seed=seed)
        model.load_weights(path / "m.weights.h5")
        return model

    def weights_before_compile():
        model = runs.noise_model()
        fresh = keras_dpopt.DPSequential.from_config(model.get_config())
        fresh.load_weights(path / "m.weights.h5")
        fresh.compile(runs.sgd(learning_rate=1.0, seed=7), loss=runs.no_gradient)
        return fresh

    def checkpoint():
        model = runs.noise_model(seed=7)
        tf.train.Checkpoint(model=model).restore(str(path / "checkpoint-1"))
        return model

    return {
        "model": lambda: keras.saving.load_model(
            path / "m.keras", custom_objects={"no_gradient": runs.no_gradient}
        ),
        "weights": lambda: weights(7),
        "weights before compile": weights_before_compile,
        "checkpoint": checkpoint,
    }


def test_whatever_is_loaded_draws_anew_and_counts_on(tmp_path):
    model = runs.noise_model(seed=7)
    seen = runs.increments(model)
    model.save(tmp_path / "m.keras")
    model.save_weights(tmp_path / "m.weights.h5")
    tf.train.Checkpoint(model=model).save(tmp_path / "checkpoint")
    seen += runs.increments(model)
    for name, load in _loads(tmp_path).items():
        for _ in range(2 if name == "weights" else 1):
            loaded = load()
            assert runs.steps(loaded) == 2, name
            new = runs.increments(loaded)
            assert runs.steps(loaded) == 4, name
            assert not runs.repeats(seen, new), name
            assert not runs.notes(loaded), name
            seen += new


@pytest.mark.parametrize("how", ["weights", "checkpoint"])
def test_an_old_file_takes_nothing_back_in_the_model_it_came_from(tmp_path, how):
    model = runs.noise_model(seed=7)
    seen = runs.increments(model)
    saved = model.get_weights()
    model.save_weights(tmp_path / "m.weights.h5")
    checkpoint = tf.train.Checkpoint(model=model)
    path = checkpoint.save(tmp_path / "checkpoint")
    seen += runs.increments(model)
    if how == "weights":
        model.load_weights(tmp_path / "m.weights.h5")
    else:
        checkpoint.restore(path)
    assert all(map(np.array_equal, model.get_weights(), saved))
    assert runs.steps(model) == 4
    assert not runs.repeats(seen, runs.increments(model))
    assert runs.steps(model) == 6 and not runs.notes(model)


def test_the_file_of_another_model_adds_its_ledger(tmp_path):
    other, model = runs.model(), runs.model()
    runs.fit(other)
    runs.fit(model)
    other.save_weights(tmp_path / "o.weights.h5")
    for _ in range(2):
        model.load_weights(tmp_path / "o.weights.h5")
        assert runs.steps(model) == 2 * runs.STEPS


def test_copies_keep_the_ledger_and_have_fresh_keys():
    model = runs.model(runs.sgd(seed=7))
    runs.fit(model)
    copied = copy.deepcopy(model)
    assert runs.steps(copied) == runs.STEPS
    assert not runs.different(runs.state(copied), runs.state(model))
    mine, theirs = (m.optimizer.keys.export()["keys"] for m in (model, copied))
    assert not set(mine) & set(theirs)
    with pytest.raises((TypeError, ValueError)):
        clone = keras.models.clone_model(model)
        clone.compile(runs.sgd(), loss="sparse_categorical_crossentropy")
        runs.fit(clone)


# ------------------------------------------------------------------- files that differ


def test_weights_files_go_between_private_and_plain_models(tmp_path):
    private, path = runs.model(), tmp_path / "w.weights.h5"
    runs.fit(private)
    private.save_weights(path)
    plain = keras.Sequential([keras.Input((runs.FEATURES,)), *runs.layers()])
    plain.load_weights(path)
    assert all(map(np.array_equal, plain.get_weights(), private.get_weights()))
    plain.save_weights(path)
    back = runs.model()
    back.load_weights(path)
    assert all(map(np.array_equal, plain.get_weights(), back.get_weights()))
    assert "without a ledger" in runs.notes(back)


def test_a_damaged_ledger_is_noted_even_where_keras_only_warns(tmp_path):
    model, path = runs.model(), tmp_path / "w.weights.h5"
    model.save_weights(path)
    with h5py.File(path, "r+") as file:
        del file["privacy_ledger/vars/privacy_ledger"]
        file["privacy_ledger/vars/privacy_ledger"] = np.frombuffer(b"{", np.uint8)
    with pytest.warns(UserWarning):
        model.load_weights(path, skip_mismatch=True)
    assert "without a ledger" in runs.notes(model)


def test_state_of_another_optimizer_starts_anew_with_a_warning(tmp_path):
    model, path = runs.model(runs.sgd(momentum=0.9)), tmp_path / "w.weights.h5"
    runs.fit(model)
    model.save_weights(path)
    other = runs.model(runs.fiber(seed=7))
    before = other.optimizer.keys.export()
    with pytest.warns(UserWarning, match="does not fit"):
        other.load_weights(path)
    assert int(other.optimizer.iterations) == 0
    assert other.optimizer.keys.export() != before
    runs.fit(other)
    assert runs.steps(other) == 2 * runs.STEPS and not runs.notes(other)


# ------------------------------------------------------------------- Keras' callbacks


def test_keras_own_backup_loses_no_step_that_it_knows_of(tmp_path):
    def callback():
        return keras.callbacks.BackupAndRestore(tmp_path / "keras")

    model = runs.model(runs.sgd(seed=7))
    with pytest.raises(runs.Interrupted):
        runs.fit(model, epochs=3, callbacks=[callback(), runs.Interrupt(epochs=2)])
    keys = model.optimizer.keys.export()["keys"]
    resumed = runs.model(runs.sgd(seed=7))
    runs.fit(resumed, epochs=3, callbacks=[callback()])
    assert runs.steps(resumed) == 3 * runs.STEPS and not runs.notes(resumed)
    assert not set(keys) & set(resumed.optimizer.keys.export()["keys"])
    # In the model that was interrupted, too; and the next fit begins at its start.
    with pytest.raises(runs.Interrupted):
        runs.fit(resumed, callbacks=[callback(), runs.Interrupt(epochs=1)])
    runs.fit(resumed, epochs=2, callbacks=[callback()])
    assert runs.steps(resumed) == 5 * runs.STEPS
    runs.fit(resumed)
    assert runs.steps(resumed) == 6 * runs.STEPS

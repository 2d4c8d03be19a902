"""What tests/backup_test.py runs in processes of their own."""

import contextlib
import os
import pathlib
import shutil
import signal
import sys

import keras
import numpy as np
import runs
import tensorflow as tf

import keras_dpopt

EPOCHS = 3


def killed(path):
    """Dies in the second epoch, as its second step begins; saved at every second."""

    class Kill(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if self.model.optimizer.releases() == 4:
                os.kill(os.getpid(), signal.SIGKILL)

    backup = keras_dpopt.BackupAndRestore(path / "backup", save_freq=1)
    runs.fit(runs.model(), epochs=EPOCHS, callbacks=[backup, Kill()])


def replay(path):
    """With op determinism: exact replays, and forks when anything has changed."""
    tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(1)
    total = EPOCHS * runs.STEPS

    def model(seed=None, activation="softmax", **arguments):
        keras.utils.clear_session()  # names count up within a process
        kernel = keras.initializers.GlorotUniform(seed=1)
        layer = keras.layers.Dense(runs.CLASSES, activation, kernel_initializer=kernel)
        made = keras_dpopt.DPSequential([keras.Input((runs.FEATURES,)), layer])
        loss = "sparse_categorical_crossentropy"
        made.compile(runs.fiber(seed=seed, **arguments), loss, metrics=["accuracy"])
        return made

    def fit(made, directory, *callbacks, data=0, save_freq: str | int = 1, **arguments):
        backup = keras_dpopt.BackupAndRestore(directory / "backup", save_freq)
        callbacks = [backup, *callbacks]
        runs.fit(made, data, epochs=EPOCHS, callbacks=callbacks, **arguments)
        return made

    def copied(directory, name):
        shutil.copytree(directory, path / name)
        return path / name

    twin = model(7)
    runs.fit(twin, epochs=EPOCHS)
    assert runs.steps(twin) == total

    # Two steps after the backup at 3 are lost; made again exactly as they were.
    first = path / "first"
    with contextlib.suppress(runs.Interrupted):
        fit(model(7), first, runs.Interrupt(batches=5), save_freq="epoch")
    kept = [copied(first, f"copy{i}") for i in range(8)]
    exact = fit(model(), first)
    assert not runs.different(runs.state(exact), runs.state(twin))
    assert runs.steps(exact) == total == exact.optimizer.releases()

    def forks(made, directory, lost=2, **arguments):
        fit(made, directory, **arguments)
        assert runs.steps(made) == total + lost, (directory, runs.steps(made))
        assert made.optimizer.keys.seeded is False, directory
        assert runs.different(runs.state(made), runs.state(twin)), directory

    forks(model(), kept[0], data=1)
    forks(model(learning_rate=0.001), kept[1])
    forks(model(microbatch_size=2), kept[2])
    forks(model(activation="sigmoid"), kept[3])

    # Interrupted in the replay: what was lost first still counts, once.
    with contextlib.suppress(runs.Interrupted):
        fit(model(), kept[4], Stop(before=4))
    again = fit(model(), kept[4])
    assert runs.steps(again) == total
    assert not runs.different(runs.state(again), runs.state(twin))

    # ... also if the next run cannot repeat it.
    with contextlib.suppress(runs.Interrupted):
        fit(model(), kept[5], Stop(before=4))
    forks(model(), kept[5], data=1, lost=1)  # one of two was repeated

    # The budget neither pays twice for a replay nor stops it.
    target = keras_dpopt.epsilon(
        noise_multiplier=1.0,
        delta=1e-5,
        train_size=runs.N,
        batch_size=runs.BATCH,
        epochs=EPOCHS,
    )
    paid = fit(model(), kept[6], keras_dpopt.PrivacyBudget(target, 1e-5))
    assert runs.steps(paid) == total
    assert not runs.different(runs.state(paid), runs.state(twin))

    # A callback that changes what happens is found out before a draw is used.
    class Change(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            weight = self.model.trainable_variables[0]
            weight.assign(weight.value * 0.5)

    try:
        made = model()
        backup = keras_dpopt.BackupAndRestore(kept[7] / "backup")
        runs.fit(made, epochs=EPOCHS, callbacks=[Change(), backup])
    except RuntimeError as error:
        assert "cannot be repeated" in str(error)
        assert made.optimizer.releases() == 3
    else:
        raise AssertionError("not found out")
    made = model()
    fit(made, kept[7])
    assert runs.steps(made) == total + 2 and not made.optimizer.keys.seeded


class Stop(keras.callbacks.Callback):
    """Interrupts before a release."""

    def __init__(self, before):
        super().__init__()
        self.before = before

    def on_train_batch_begin(self, batch, logs=None):
        if self.model.optimizer.releases() >= self.before:
            raise runs.Interrupted


if __name__ == "__main__":
    np.seterr(all="raise")
    {"killed": killed, "replay": replay}[sys.argv[1]](pathlib.Path(sys.argv[2]))

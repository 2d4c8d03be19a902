"""Small runs on replicas, for tests and for their worker processes."""

import os

import contract
import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dpopt

STEPS, RECORDS, BATCH = 10, 12, 6


def mirrored(replicas: int):
    """One replica on each of so many GPUs, or of logical CPUs where there is no GPU."""
    if replicas == 1:
        return tf.distribute.get_strategy()
    kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    found = len(tf.config.list_logical_devices(kind))
    if found < replicas:
        pytest.skip(f"needs {replicas} {kind}s, and there are {found}")
    return tf.distribute.MirroredStrategy([f"{kind}:{i}" for i in range(replicas)])


def gpus_of_workers(workers: int) -> list[str]:
    """What each worker of this machine may see: a GPU of its own, or none."""
    found = len(tf.config.list_physical_devices("GPU"))
    if found < workers:
        return ["-1"] * workers
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (visible.split(",") if visible else [*map(str, range(found))])[:workers]


def rows(records: int = RECORDS):
    draw = np.random.default_rng(1)
    x = draw.normal(size=(records, 4)).astype("float32")
    return x, draw.normal(size=(records, 2)).astype("float32")


def classifier(name, strategy, dropout=0.5, compiled=None, **arguments):
    """A model with a random layer, compiled under a strategy."""
    arguments = {"expected_batch_size": BATCH, "seed": 5, **arguments}
    with strategy.scope():
        keras.utils.set_random_seed(2)
        layers = [
            keras.Input((4,)),
            keras.layers.Dense(3, "tanh"),
            keras.layers.Dropout(dropout),
            keras.layers.Dense(2),
        ]
        model = keras_dpopt.DPSequential(layers)
        optimizer = contract.make(
            helpers.OPTIMIZERS[name], 0.1, whole=False, **arguments
        )
        model.compile(optimizer, loss="mse", metrics=["mae"], **(compiled or {}))
    return model


def flat(values):
    """All values as one vector."""
    return np.concatenate([np.ravel(value) for value in values])


def check_equal(one, other):
    """Compares two runs; noise is in all of their gradients."""
    scale = np.abs(one[0]).max()
    np.testing.assert_allclose(other[0], one[0], atol=1e-5 * scale)
    assert np.linalg.matrix_rank(one[0]) == STEPS
    np.testing.assert_allclose(other[1], one[1], rtol=1e-3, atol=1e-4)
    for name, values in one[2].items():
        np.testing.assert_allclose(other[2][name], values, rtol=1e-4, err_msg=name)


def train(name, strategy, **arguments):
    """Ten steps; returns the privatized gradients, the weights and the history."""
    model = classifier(name, strategy, **arguments)
    batches = STEPS // 2 * model.optimizer.logical_batch_steps
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
    watch = contract.Watch(model, STEPS)
    history = model.fit(*rows(), steps_per_epoch=batches, epochs=2, verbose=0)
    gradients = np.stack([flat(watch.gradient(t)) for t in range(STEPS)])
    return gradients, flat(model.trainable_variables), history.history

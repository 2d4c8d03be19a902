"""Tiny models, data and optimizers for the tests of training."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_dpopt

FEATURES, CLASSES = 4, 3


def rows(size: int = 12, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns float32 features and int64 classes."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(size, FEATURES)).astype("float32")
    return x, draw.integers(CLASSES, size=size)


def private_sgd(learning_rate=0.1, **kwargs) -> Any:
    """Returns a seeded DPSGD with noise.

    What is counted, refused and noted does not depend on the engine: the loop is
    traced in little more than half the time that "auto" needs, which tries the other
    one first. Tests of what a model may do ask for "auto".
    """
    kwargs = {"gradient_engine": "loop", "seed": 3, **kwargs}
    kwargs = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, **kwargs}
    return keras_dpopt.DPSGD(learning_rate, **kwargs)


def exact_sgd(learning_rate=0.0, **kwargs) -> Any:
    """Returns a DPSGD that neither clips nor noises: what it does can be computed.

    By the vectorized engine: it must be able to do what Keras does.
    """
    kwargs = {"l2_norm_clip": 1e6, "noise_multiplier": 0.0, **kwargs}
    kwargs = {"gradient_engine": "vectorized", **kwargs}
    return private_sgd(learning_rate, **kwargs)


def softmax_layers() -> list:
    """Returns the layers of a two-layer classifier, with fixed initial weights."""
    kernel = lambda seed: keras.initializers.GlorotUniform(seed=seed)  # noqa: E731
    return [
        keras.layers.Dense(5, activation="tanh", kernel_initializer=kernel(1)),
        keras.layers.Dense(CLASSES, activation="softmax", kernel_initializer=kernel(2)),
    ]


def classifier(optimizer=None, **kwargs) -> Any:
    """Returns a compiled private classifier of `rows`."""
    model = keras_dpopt.DPSequential([keras.Input((FEATURES,)), *softmax_layers()])
    kwargs = {"loss": "sparse_categorical_crossentropy", **kwargs}
    model.compile(private_sgd() if optimizer is None else optimizer, **kwargs)
    return model


def fit(model, *data, **kwargs):
    """`model.fit` without output."""
    return model.fit(*data, **{"verbose": 0, **kwargs})


def steps(model) -> int:
    """Returns the number of steps that the statement says."""
    return model.privacy_statement(delta=1e-5).steps


def notes(model) -> str:
    """Returns the notes of the statement."""
    return " ".join(model.privacy_statement(delta=1e-5).notes)


def moved(before, after) -> bool:
    """Whether any weight differs."""
    return any(not np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def draws(optimizer, first: int, count: int, size: int, batch_size: int) -> list:
    """The rows that Poisson sampling must take at `count` steps from `first` on."""
    sampler, key = keras_dpopt.PoissonSampler(), optimizer.keys.sampler
    return [
        sampler.indices(key, step, size, batch_size).numpy().tolist()
        for step in range(first, first + count)
    ]


class StepSpy(keras.callbacks.Callback):
    """Records the steps that the ledger knows after each call of the train function."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append(steps(self.model))


class RowSpy(keras.metrics.Metric):
    """A metric that writes down, for each batch of records, their first target."""

    def __init__(self, name="row_spy"):
        super().__init__(name=name)
        self.seen: list = []

    def update_state(self, y_true, y_pred, sample_weight=None):
        del y_pred, sample_weight
        tf.py_function(lambda y: self.seen.append(y.numpy().ravel()), [y_true], [])

    def result(self):
        return tf.constant(0.0)

    def reset_state(self):
        pass

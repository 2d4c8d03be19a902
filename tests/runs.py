"""Small private runs that are saved, interrupted and resumed."""

from typing import Any

import keras
import numpy as np

import keras_dpopt

N, FEATURES, CLASSES, BATCH = 30, 4, 3, 10
STEPS = N // BATCH  # in an epoch


def data(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows and classes."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(N, FEATURES)).astype("float32")
    return x, draw.integers(CLASSES, size=N)


# What is saved and counted does not depend on the engine: the loop is traced in little
# more than half the time.
_COMMON = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, "gradient_engine": "loop"}


def sgd(**arguments) -> Any:
    """DP-SGD with momentum."""
    arguments = {**_COMMON, **arguments}
    return keras_dpopt.DPSGD(arguments.pop("learning_rate", 0.1), **arguments)


def fiber(**arguments) -> Any:
    """FiBeR."""
    return keras_dpopt.FiBeR(**{**_COMMON, **arguments})


def layers(dropout: float = 0.0, activation: str = "tanh") -> list:
    """Layers with the same initial weights each time."""
    init = [keras.initializers.GlorotUniform(seed=i) for i in range(2)]
    middle = [keras.layers.Dropout(dropout)] if dropout else []
    return [
        keras.layers.Dense(5, activation=activation, kernel_initializer=init[0]),
        *middle,
        keras.layers.Dense(CLASSES, activation="softmax", kernel_initializer=init[1]),
    ]


def model(
    optimizer=None, *, dropout=0.0, activation="tanh", **compile_arguments
) -> Any:
    """A compiled DPSequential."""
    made = keras_dpopt.DPSequential(
        [keras.Input((FEATURES,)), *layers(dropout, activation)]
    )
    compile_arguments = {
        "loss": "sparse_categorical_crossentropy",
        "metrics": ["accuracy"],
        **compile_arguments,
    }
    made.compile(optimizer or sgd(), **compile_arguments)
    return made


def no_gradient(y, y_pred):
    """A loss without a gradient: only the noise moves the weights."""
    del y
    return 0.0 * keras.ops.sum(y_pred, axis=-1)


def _zeros(units):
    return keras.layers.Dense(units, kernel_initializer="zeros")


def noise_model(**arguments) -> Any:
    """A model that only noise moves, at full length."""
    made = keras_dpopt.DPSequential([keras.Input((FEATURES,)), _zeros(3)])
    made.compile(sgd(learning_rate=1.0, **arguments), loss=no_gradient)
    return made


def increments(made, steps: int = 2, seed: int = 0) -> list[np.ndarray]:
    """Trains with a step an epoch; returns what each step did to the weights."""
    seen = [made.get_weights()[0]]

    class Record(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(self.model.get_weights()[0])

    fit(made, seed=seed, epochs=steps, steps_per_epoch=1, callbacks=[Record()])
    return [b - a for a, b in zip(seen, seen[1:], strict=False)]


def repeats(some: list[np.ndarray], others: list[np.ndarray]) -> bool:
    """Whether any of some increments is among others; weights round to about 1e-8."""
    return any(np.allclose(a, b, atol=1e-6) for a in some for b in others)


def fit(made, seed: int = 0, **arguments) -> Any:
    """`fit` on `data`, without output."""
    arguments = {"batch_size": BATCH, "verbose": 0, **arguments}
    return made.fit(*data(seed), **arguments)


def steps(made) -> int:
    """Steps in the ledger."""
    return made.privacy_ledger.sync().total_steps


def notes(made) -> str:
    """Notes in the ledger."""
    return " ".join(made.privacy_ledger.sync().notes)


class Interrupted(Exception):
    """What `Interrupt` raises."""


class Interrupt(keras.callbacks.Callback):
    """Raises after a number of calls of the train function, or at an epoch's end."""

    def __init__(self, batches: int | None = None, epochs: int | None = None):
        super().__init__()
        self.batches, self.epochs = batches, epochs

    def on_train_batch_end(self, batch, logs=None):
        if self.batches is not None:
            self.batches -= 1
            if not self.batches:
                raise Interrupted

    def on_epoch_end(self, epoch, logs=None):
        if self.epochs is not None:
            self.epochs -= 1
            if not self.epochs:
                raise Interrupted


def state(made) -> dict[str, np.ndarray]:
    """Weights and optimizer state."""
    arrays = {f"weight.{i}": w for i, w in enumerate(made.get_weights())}
    for name, variable in made.optimizer.named_variables().items():
        arrays[name] = variable.numpy()
    return arrays


def different(a: dict, b: dict) -> list[str]:
    """Names of arrays that are not bit for bit the same."""
    assert a.keys() == b.keys()
    return [name for name in a if not np.array_equal(a[name], b[name])]

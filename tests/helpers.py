"""Tiny models whose gradients are known, and what the tests of training share."""

import json
import pathlib

import keras
import numpy as np
import tensorflow as tf

import keras_dpopt
from keras_dpopt import optimizers, prng
from keras_dpopt.types import MECHANISM_TOKEN, PrivatizedGradient

ENGINES = ("vectorized", "loop")
OPTIMIZERS = {name: getattr(optimizers, name) for name in optimizers.__all__}


def golden() -> dict:
    """The reference's golden values, float64."""
    path = pathlib.Path(__file__).parent / "golden" / "golden.json"
    return json.loads(path.read_text())


# ----------------------------------------------------------------------- tiny models


class QuarticModel(keras_dpopt.DPModel):
    """The toy problem of the golden values: l_i(theta), three parameters.

    A row is (x, y) = (c_i, H_i); the loss of `quartic_loss(q)` on it is
    sum_j 0.5*H_ij*(th_j - c_ij)^2 + 0.25*q*(th_j - c_ij)^4.
    """

    def __init__(self, theta0):
        super().__init__()
        self.calls = 0
        self.theta = self.add_weight(
            shape=np.shape(theta0), initializer="zeros", name="theta"
        )
        self.theta.assign(theta0)

    def call(self, x):
        if not isinstance(x, keras.KerasTensor):
            self.calls += 1
        return self.theta - x


def quartic_loss(quartic):
    """The loss of the toy problem; see `QuarticModel`."""

    def loss(y, distance):
        terms = 0.5 * y * distance**2 + 0.25 * quartic * distance**4
        return keras.ops.sum(terms, axis=-1)

    return loss


class RowsModel(keras_dpopt.DPModel):
    """A model whose gradient for a record is the record, cut into the weights' shapes.

    Compile it with `loss=output_loss`. Weights are zero at first.
    """

    def __init__(self, *shapes):
        super().__init__()
        self.parts = [
            self.add_weight(shape=shape, initializer="zeros", name=f"part{i}")
            for i, shape in enumerate(shapes)
        ]

    @property
    def size(self):
        return sum(int(np.prod(part.shape)) for part in self.parts)

    def call(self, x):
        flat = [keras.ops.reshape(part, (-1,)) for part in self.parts]
        return keras.ops.sum(x * keras.ops.concatenate(flat), axis=-1, keepdims=True)

    def flat(self):
        """All weights as one float64 vector."""
        return np.concatenate([np.ravel(p.numpy()) for p in self.parts]).astype("f8")

    def reset(self):
        for part in self.parts:
            part.assign(np.zeros(part.shape))


def output_loss(y, y_pred):
    """The model's output itself: the loss is linear in the weights of a RowsModel."""
    del y
    return y_pred


def rows_model(optimizer, *shapes, **compile_arguments):
    """A compiled RowsModel."""
    model = RowsModel(*shapes)
    model.compile(optimizer=optimizer, loss=output_loss, **compile_arguments)
    return model


def targets(x):
    """Targets that `output_loss` ignores."""
    return np.zeros((len(x), 1), np.float32)


def clipped_rows(rows, clip):
    """Clipped records by float64 NumPy; a record that is not finite is zero."""
    rows = np.asarray(rows, np.float32).astype(np.float64)
    finite = np.isfinite(rows).all(axis=1, keepdims=True)
    rows = np.where(finite, rows, 0.0)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows * np.minimum(1.0, clip / np.maximum(norms, 1e-300))


def mlp(kind=keras_dpopt.DPSequential, **dense):
    """A small network with fixed weights; equal for every `kind`."""
    model = kind(
        [
            keras.Input((5,)),
            keras.layers.Dense(4, activation="tanh", **dense),
            keras.layers.Dense(3),
        ]
    )
    generator = np.random.default_rng(3)
    model.set_weights(
        [generator.normal(size=w.shape, scale=0.5) for w in model.get_weights()]
    )
    return model


def classes(n, seed=0):
    """Rows of five features in three classes."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(n, 5)).astype(np.float32)
    return x, generator.integers(0, 3, size=n)


CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


# ------------------------------------------------------------------------ optimizers


def make_optimizer(cls, learning_rate=0.1, **arguments):
    """Any private optimizer, clip 1 and noise 1 unless told otherwise."""
    arguments = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, **arguments}
    return cls(learning_rate, **arguments)


def slot(optimizer, name, index=0):
    """Value of a slot of the variable `index`."""
    return optimizer.named_variables()[f"{name}.{index}"].numpy()


def scalar_slot(optimizer, name):
    """Value of a scalar slot."""
    return float(optimizer.named_variables()[name].numpy())


def privatized(values, noise_stddev=0.0):
    """A PrivatizedGradient of given values, as only a mechanism could make it."""
    return PrivatizedGradient(
        [tf.constant(v, tf.float32) for v in values],
        tf.constant(noise_stddev, tf.float32),
        token=MECHANISM_TOKEN,
    )


def watch_gradients(model):
    """Variables that hold the privatized gradient of the last step, also in graphs."""
    optimizer = model.optimizer
    parts = list(model.trainable_variables) * optimizer.query.views
    seen = [tf.Variable(tf.zeros(part.shape)) for part in parts]
    apply = optimizer.apply

    def watching(grads, *args, **kwargs):
        for variable, value in zip(seen, grads.values, strict=True):
            variable.assign(value)
        return apply(grads, *args, **kwargs)

    object.__setattr__(optimizer, "apply", watching)
    return seen


def expected_noise(seed, step, index, shape):
    """z of release `step` and variable `index` under a seed (DESIGN, rule 2)."""
    key = prng.key_from_seed(seed, "noise")
    return prng.standard_normal(key, step, index, shape).numpy()

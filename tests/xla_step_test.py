"""The whole private step is one XLA program, as a TPU needs it.

No host is asked within it, and every shape of the gradient, the noise and the update is
static. What metrics take of a microbatch, its records without the padding, has a bound:
they alone may have shapes that XLA pads.
"""

import re

import contract
import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dpopt
from keras_dpopt import data
from keras_dpopt.private_step import PrivateStep

X = np.random.default_rng(0).normal(size=(6, 4)).astype("float32")
Y = X[:, :2]

# How HLO spells what leaves the device, and a dimension that has only a bound.
_HOST = re.compile(r"custom-call|infeed|outfeed|\bsend\(|\brecv\(")
_DYNAMIC = re.compile(r"\[[^\]]*<=")


def program(optimizer, loss="mse", metrics=()) -> str:
    """The HLO of a whole training step: record gradients, noise, filter, update."""
    layers = [keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(2)]
    model = keras_dpopt.DPSequential(layers)
    model.compile(optimizer, loss=loss, metrics=[*metrics], jit_compile=True)
    optimizer.resolve_sizes(6, 12)
    rows = data.single_batch(X, Y, None, None)["rows"]
    specs = tf.nest.map_structure(
        lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), rows
    )
    model._prepare(specs, lambda: rows)
    batch = data.in_microbatches({"rows": rows, "step": 0}, 4)
    step = tf.function(model.train_step, autograph=False, jit_compile=True)
    return step.experimental_get_compiler_ir(batch)(stage="hlo")


def make(name, **arguments):
    arguments = {"expected_batch_size": 6, "microbatch_size": 4, **arguments}
    return contract.make(helpers.OPTIMIZERS[name], 0.1, whole=False, **arguments)


@pytest.fixture
def without_metrics(monkeypatch):
    monkeypatch.setattr(PrivateStep, "_report", lambda *_: None)


@pytest.mark.usefixtures("without_metrics")
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *((name, {}) for name in helpers.OPTIMIZERS),
        ("DPSGD", {"gradient_engine": "vectorized"}),
        ("FiBeR", {"gradient_engine": "loop"}),
        ("FiBeR", {"logical_batch_steps": 2}),
    ],
)
def test_the_step_is_one_program_of_static_shapes_without_the_host(name, arguments):
    text = program(make(name, **arguments))
    assert text.count("HloModule") == 1
    assert not _HOST.findall(text) and not _DYNAMIC.findall(text)


def test_metrics_are_in_the_program_too():
    text = program(make("DPSGD"), metrics=["mae", "accuracy"])
    assert text.count("HloModule") == 1 and not _HOST.findall(text)
    assert _DYNAMIC.findall(text)  # so these shapes are seen where there are any


def test_a_step_that_asks_the_host_is_no_program():
    def asking(y, y_pred):
        return tf.numpy_function(lambda a, b: (a - b)[:, 0], (y, y_pred), tf.float32)

    with pytest.raises((tf.errors.InvalidArgumentError, ValueError, TypeError)):
        program(make("DPSGD", gradient_engine="loop"), loss=asking)

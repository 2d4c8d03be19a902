"""Engines: they agree with each other, and `auto` says why it falls back."""

import contextlib
import logging
import subprocess
import sys

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dpopt
from keras_dpopt import engines
from keras_dpopt.engines import matmul_converter


@contextlib.contextmanager
def _warnings():
    """The warnings that the library logs."""
    records = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("absl")
    logger.addHandler(handler)
    try:
        yield records
    finally:
        logger.removeHandler(handler)


def _text_model(**arguments):
    model = keras_dpopt.DPSequential(
        [
            keras.Input((4,), dtype="int32"),
            keras.layers.Embedding(5, 3, mask_zero=True),
            keras.layers.LSTM(2),
            keras.layers.Dense(1, **arguments),
        ]
    )
    return model, np.array([[1, 2, 0, 0], [3, 0, 0, 0], [4, 4, 2, 1]])


def _grouped_model():
    model = keras_dpopt.DPSequential(
        [
            keras.Input((4, 4, 2)),
            keras.layers.Conv2D(2, 3, groups=2),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    return model, np.random.default_rng(0).normal(size=(3, 4, 4, 2))


def _optimizer(cls=keras_dpopt.DPSGD, **arguments):
    arguments = {
        "l2_norm_clip": 0.1,
        "noise_multiplier": 0.0,
        "expected_batch_size": 3,
        **arguments,
    }
    return cls(0.1, **arguments)


def test_auto_falls_back_with_one_reason():
    model, x = _text_model(activity_regularizer="l2")
    model.compile(_optimizer(), loss="mse")
    with _warnings() as warnings:
        model.train_on_batch(x, np.ones((3, 1)))
        model.train_on_batch(x, np.ones((3, 1)))
        model.fit(x, np.ones((3, 1)), batch_size=3, verbose=0)
    assert len(warnings) == 1
    (warning,) = warnings
    assert "'loop'" in warning and "'vectorized'" in warning
    assert "'bookkeeping' cannot" in warning and "loss of its own" in warning
    assert model.name in warning and "Error: " in warning
    assert "\n" not in warning
    assert model.private_step.microbatch.engine is engines.ENGINES["loop"]


def test_auto_takes_the_bookkeeping_engine_silently():
    model = helpers.mlp()
    model.compile(_optimizer(), loss=helpers.CROSSENTROPY)
    with _warnings() as warnings:
        model.train_on_batch(*helpers.classes(3))
    assert not warnings
    assert model.private_step.microbatch.engine is engines.ENGINES["bookkeeping"]


@pytest.mark.parametrize("make", [_text_model, _grouped_model])
def test_auto_equals_the_loop(make):
    """A masked LSTM and a grouped convolution."""
    weights = make()[0].get_weights()
    after = []
    for engine in ("auto", "loop"):
        model, x = make()
        model.set_weights(weights)
        model.compile(_optimizer(gradient_engine=engine), loss="mse")
        model.train_on_batch(x, np.ones((3, 1)))
        after.append(model.get_weights())
    for a, b, start in zip(*after, weights, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-7)
        assert np.abs(a - start).max() > 1e-6


def test_an_engine_that_is_asked_for_is_not_replaced():
    model, x = _text_model()
    model.compile(_optimizer(gradient_engine="vectorized"), loss="mse")
    weights = model.get_weights()
    with pytest.raises(Exception):  # noqa: B017 - TensorFlow's own error.
        model.train_on_batch(x, np.ones((3, 1)))
    for a, b in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_refused_model_is_refused_by_auto_and_not_looped():
    model = keras_dpopt.DPSequential(
        [keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    )
    model.compile(_optimizer(), loss="mse")
    with (
        _warnings() as warnings,
        pytest.raises(keras_dpopt.UnsupportedModelError, match="GroupNormalization"),
    ):
        model.train_on_batch(np.ones((3, 3)), np.ones((3, 1)))
    assert not warnings


# ------------------------------------------------------------------ equal by all means


def _network():
    inputs = keras.Input((6, 6, 1))
    x = keras.layers.Conv2D(3, 3, activation="tanh")(inputs)
    x = keras.layers.LayerNormalization()(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    outputs = keras.layers.Dense(3)(x)
    model = keras_dpopt.DPModel(inputs, outputs)
    generator = np.random.default_rng(6)
    model.set_weights(
        [generator.normal(size=w.shape, scale=0.5) for w in model.get_weights()]
    )
    return model


def _gradient(engine, microbatch_size, jit_compile, cls=keras_dpopt.DPSGD, steps=1):
    model = _network()
    optimizer = _optimizer(cls, gradient_engine=engine, microbatch_size=microbatch_size)
    model.compile(optimizer, loss=helpers.CROSSENTROPY, jit_compile=jit_compile)
    gradient = helpers.watch_gradients(model)
    x = np.random.default_rng(7).normal(size=(7, 6, 6, 1))
    for _ in range(steps):
        model.train_on_batch(x, np.arange(7) % 3)
    return [g.numpy() for g in gradient]


@pytest.fixture(scope="module")
def reference():
    return _gradient("loop", 1, False)


@pytest.mark.parametrize(
    ("engine", "microbatch_size", "jit_compile"),
    [
        ("vectorized", 1, False),
        ("vectorized", 3, False),
        ("vectorized", 16, False),
        ("vectorized", 3, True),
        ("loop", 3, False),
        ("loop", 3, True),
    ],
)
def test_engines_agree(engine, microbatch_size, jit_compile, reference):
    """Sums of seven records of length 0.1, over B = 3: float32 rounds to 1e-7."""
    got = _gradient(engine, microbatch_size, jit_compile)
    assert max(np.abs(a).max() for a in reference) > 0.01
    for a, b in zip(got, reference, strict=True):
        np.testing.assert_allclose(a, b, atol=3e-7)


def test_sum_equals_records_one_by_one():
    """Against plain Keras gradients and float64 NumPy."""
    x = np.random.default_rng(7).normal(size=(7, 6, 6, 1))
    y = np.arange(7) % 3
    model = _network()
    twin = keras.Model(model.inputs, model.outputs)
    before = [w.copy() for w in twin.get_weights()]
    records = []
    twin.compile(keras.optimizers.SGD(1.0), loss=helpers.CROSSENTROPY)
    for i in range(7):
        twin.set_weights(before)
        twin.train_on_batch(x[i : i + 1], y[i : i + 1])
        change = [b - a for a, b in zip(twin.get_weights(), before, strict=True)]
        records.append(np.concatenate([np.ravel(c) for c in change]))
    want = helpers.clipped_rows(records, 0.1).sum(axis=0) / 3
    got = np.concatenate([np.ravel(g) for g in _gradient("vectorized", 4, False)])
    # Weights of size 1 before and after: a record is known to 1e-7, of 0.5.
    np.testing.assert_allclose(got, want, atol=2e-6)


# ---------------------------------------------------------------------------- dropout

WIDTH = 64


class MaskModel(keras_dpopt.DPModel):
    """Its gradient for record i is the dropout mask of record i, in row i."""

    def __init__(self, rows):
        super().__init__()
        self.theta = self.add_weight(shape=(rows, WIDTH), initializer="zeros")
        self.dropout = keras.layers.Dropout(0.5)

    def call(self, x, training=False):
        masks = self.dropout(keras.ops.ones_like(x[:, :1]) * np.ones(WIDTH, "f4"))
        del training
        return keras.ops.einsum("bi,bj,ij->b", x, masks, self.theta)[:, None]


def _masks(rows=6, steps=1, cls=keras_dpopt.DPSGD, seed=3, **arguments):
    """Masks [steps, rows, WIDTH], times 2, by the gradients of unclipped steps."""
    model = MaskModel(rows)
    optimizer = _optimizer(
        cls, l2_norm_clip=np.inf, expected_batch_size=1, seed=seed, **arguments
    )
    model.compile(optimizer, loss=helpers.output_loss)
    gradient = helpers.watch_gradients(model)
    masks = []
    for _ in range(steps):
        model.train_on_batch(np.eye(rows), np.zeros((rows, 1)))
        masks.append(gradient[0].numpy())
    return np.array(masks)


@pytest.mark.parametrize("engine", helpers.ENGINES)
def test_dropout_masks_differ_between_records_and_steps(engine):
    """Two independent masks of 64 are equal with probability 2^-64."""
    masks = _masks(steps=3, gradient_engine=engine)
    assert set(np.unique(masks)) == {0.0, 2.0}
    # 1152 coin tosses: 5 standard deviations, false-alarm rate 6e-7.
    assert abs(np.mean(masks > 0) - 0.5) < 5 * 0.5 / np.sqrt(masks.size)
    assert len({mask.tobytes() for mask in masks.reshape(-1, WIDTH)}) == 18


def test_dropout_masks_do_not_depend_on_engine_or_microbatch():
    first = _masks(steps=2, gradient_engine="loop", microbatch_size=1)
    for engine, size in (
        ("loop", 4),
        ("vectorized", 1),
        ("vectorized", 4),
        ("vectorized", 6),
    ):
        again = _masks(steps=2, gradient_engine=engine, microbatch_size=size)
        np.testing.assert_array_equal(first, again)
    assert (_masks(seed=4) != first[:1]).any()


@pytest.mark.parametrize("engine", helpers.ENGINES)
def test_dropout_masks_are_the_same_at_both_points(engine):
    """Otherwise u would mix two masks: values of 2a and 2(1-a) among 0 and 2."""
    masks = _masks(
        steps=3,
        cls=keras_dpopt.FiBeR,
        gradient_engine=engine,
        kappa=0.7,
        gamma=0.5,
        noise_correction=None,
    )
    kept = masks > 1.0
    np.testing.assert_allclose(masks, np.where(kept, 2.0, 0.0), atol=1e-6)
    assert 0.3 < kept.mean() < 0.7
    # And they are those of a one-point optimizer at the same steps.
    np.testing.assert_allclose(masks, _masks(steps=3), atol=1e-6)


# --- TensorFlow's batched matrix product ---------------------------------------------


@pytest.mark.parametrize("adjoint_b", [False, True])
@pytest.mark.parametrize(
    "x_shape, y_shape",
    [
        ((10, 1, 10, 8), (8, 8)),
        ((10, 1, 10, 8), (1, 8, 8)),
        ((10, 1, 10, 8), (1, 1, 8, 8)),
        ((3, 1, 2, 4, 8), (2, 8, 8)),
        ((4, 8), (5, 1, 8, 8)),
        ((2, 8, 8), (8, 8)),
    ],
)
def test_matmul_without_unit_axes_is_the_product(x_shape, y_shape, adjoint_b):
    # The first three are shapes that tf.matmul itself gets wrong, or crashes on, with
    # oneDNN in TensorFlow 2.21 (see matmul_converter.py): not called here.
    rng = np.random.default_rng(0)
    x = rng.normal(size=x_shape).astype("float32")
    y = rng.normal(size=y_shape).astype("float32")
    product = tf.function(matmul_converter.matmul)(x, y, adjoint_b=adjoint_b)
    expected = np.matmul(
        x.astype("float64"), np.swapaxes(y, -1, -2) if adjoint_b else y
    )
    assert product.shape == expected.shape
    np.testing.assert_allclose(product, expected, rtol=1e-5, atol=1e-5)


def test_the_detour_is_taken_back():
    registry = matmul_converter.pfor._pfor_converter_registry
    before = dict(registry)
    with pytest.raises(RuntimeError), matmul_converter.sound_matmul():
        assert registry != before
        raise RuntimeError
    assert registry == before


def test_attention_is_the_same_vectorized_and_looped():
    """In a process of its own: without the detour it ends in a segmentation fault."""
    code = """
import keras, numpy as np, keras_dpopt as kd
keras.utils.set_random_seed(0)
ends = []
for engine in ("vectorized", "loop"):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((10, 8))
    h = keras.layers.MultiHeadAttention(2, 4)(inputs, inputs)
    model = kd.DPModel(inputs, keras.layers.Dense(3)(h[:, 0]))
    model.compile(
        kd.DPSGD(1.0, l2_norm_clip=1.0, noise_multiplier=0.0, gradient_engine=engine,
                 expected_batch_size=5, microbatch_size=5), "mse")
    rng = np.random.default_rng(0)
    model.train_on_batch(rng.normal(size=(5, 10, 8)), rng.normal(size=(5, 3)))
    ends.append(np.concatenate([w.ravel() for w in model.get_weights()]))
print("largest difference", abs(ends[0] - ends[1]).max())
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert float(run.stdout.split()[-1]) < 1e-6

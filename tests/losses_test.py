"""Tests of the loss of one record: Keras' own loss of a batch of one, nothing else."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tiny
from keras import ops

import keras_dpopt

SPARSE = "sparse_categorical_crossentropy"
X, Y = tiny.rows(6)
RATE = 0.5


def ones(count, *shape):
    return np.random.default_rng(count).normal(size=(6, *shape)).astype("float32")


def record_losses(model, x, y, weights=None) -> np.ndarray:
    """Keras' loss of each row alone, as `evaluate` gives it."""
    row = lambda a, i: keras.tree.map_structure(lambda t: t[i : i + 1], a)  # noqa: E731
    out = []
    for i in range(len(keras.tree.flatten(x)[0])):
        weight = None if weights is None else row(weights, i)
        logs = model.test_on_batch(
            row(x, i), row(y, i), sample_weight=weight, return_dict=True
        )
        out.append(float(logs["loss"]))
    return np.array(out)


def logged_loss(model, x, y, **kwargs) -> float:
    """The loss that a fit on all rows logs, which changes nothing."""
    history = tiny.fit(model, x, y, batch_size=6, **kwargs)
    return history.history["loss"][0]


def change(model, x, y, **kwargs) -> list[np.ndarray]:
    """The change of the trainable weights by one exact step on all rows."""
    before = [w.numpy() for w in model.trainable_weights]
    tiny.fit(model, x, y, batch_size=6, **kwargs)
    return [w.numpy() - b for w, b in zip(model.trainable_weights, before, strict=True)]


def keras_change(model, x, y, **kwargs) -> list[np.ndarray]:
    """The same by Keras' SGD, on a clone of the model."""
    with tf.GradientTape() as tape:
        y_pred = model(x, training=True)
        loss = model.compute_loss(x=x, y=y, y_pred=y_pred, **kwargs)
    return [
        -RATE * ops.convert_to_numpy(g)
        for g in tape.gradient(loss, model.trainable_weights)
    ]


def assert_equal(changes, expected, tolerance=2e-6):
    for a, b in zip(changes, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance)


def compiled(model, loss, rate=RATE, **kwargs):
    model.compile(tiny.exact_sgd(rate), loss, **kwargs)
    return model


def regressor(*layers, units=2):
    return keras_dpopt.DPSequential(
        [
            keras.Input((4,)),
            *layers,
            keras.layers.Dense(units, kernel_initializer=keras.initializers.Ones()),
        ]
    )


# --- reductions ----------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean", "sum"])
@pytest.mark.parametrize("sequence", [False, True])
def test_loss_is_that_of_a_batch_of_one(reduction, sequence):
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    if sequence:
        layers = [keras.layers.RepeatVector(3)]
        y = ones(1, 3, 2)
    else:
        layers, y = [], ones(2, 2)
    model = compiled(regressor(*layers), loss, rate=0.0)
    expected = record_losses(model, X, y)
    assert logged_loss(model, X, y) == pytest.approx(expected.mean(), rel=1e-5)
    weight = np.linspace(0, 2, 6).astype("float32")
    assert logged_loss(model, X, y, sample_weight=weight) == pytest.approx(
        (weight * expected).mean(), rel=1e-5
    )


def test_weight_is_not_cancelled_by_the_mean_with_sample_weight():
    """Keras' reduction divides by the weights: in a batch of one they would cancel."""
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    y = ones(2, 2)
    model = compiled(regressor(), loss, rate=0.0)
    expected = record_losses(model, X, y)
    weight = np.linspace(0, 2, 6).astype("float32")
    assert logged_loss(model, X, y, sample_weight=weight) == pytest.approx(
        (weight * expected).mean(), rel=1e-5
    )


@pytest.mark.parametrize("reduction", [None, "none"])
def test_no_reduction_is_the_mean(reduction):
    y = ones(1, 3, 2)
    results = []
    for loss in (keras.losses.MeanSquaredError(reduction=reduction), "mse"):
        model = compiled(regressor(keras.layers.RepeatVector(3)), loss)
        results.append(change(model, X, y))
    assert_equal(*results)


def test_temporal_sample_weight():
    y, weight = ones(1, 3, 2), np.abs(ones(2, 3))
    model = compiled(regressor(keras.layers.RepeatVector(3)), "mse", rate=0.0)
    expected = record_losses(model, X, y, weight)
    assert logged_loss(model, X, y, sample_weight=weight) == pytest.approx(
        expected.mean(), rel=1e-5
    )
    model = compiled(regressor(keras.layers.RepeatVector(3)), "mse")
    expected_change = keras_change(model, X, y, sample_weight=weight)
    assert_equal(change(model, X, y, sample_weight=weight), expected_change)


@pytest.mark.parametrize(
    ("loss", "units", "y"),
    [
        ("mse", 1, X[:, 0]),
        ("mse", 1, X[:, :1]),
        ("binary_crossentropy", 1, (X[:, 0] > 0).astype("int64")),
        ("binary_crossentropy", 1, X[:, :1] > 0),
        (SPARSE, 3, Y[:, None]),
        ("categorical_crossentropy", 3, np.eye(3)[Y]),
        ("huber", 2, X[:, :2]),
        ("kl_divergence", 3, np.eye(3)[Y]),
        ("cosine_similarity", 2, X[:, :2]),
        (keras.losses.CategoricalCrossentropy(label_smoothing=0.2), 3, np.eye(3)[Y]),
        (keras.losses.SparseCategoricalCrossentropy(ignore_class=0), 3, Y),
        (lambda y, p: ops.square(y - p), 2, X[:, :2]),
        (lambda y, p: ops.mean(ops.abs(y - p), axis=-1), 2, X[:, :2]),
        (lambda y, p: ops.mean(ops.abs(y - p)), 2, X[:, :2]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_losses_of_all_shapes(loss, units, y):
    activation = keras.layers.Activation("softmax" if units > 1 else "sigmoid")
    model = keras_dpopt.DPSequential(
        [keras.Input((4,)), keras.layers.Dense(units), activation]
    )
    compiled(model, loss, rate=0.0)
    expected = record_losses(model, X, y)
    assert logged_loss(model, X, y) == pytest.approx(expected.mean(), rel=1e-4)


class OwnLoss(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return ops.mean(ops.abs(y_true - y_pred) ** 3, axis=-1)


class OwnCall(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return ops.mean(ops.abs(ops.cast(y_true, "float32") - y_pred) ** 3)


@pytest.mark.parametrize("loss", [OwnLoss(), OwnCall()])
def test_own_loss_classes(loss):
    model = compiled(regressor(), loss, rate=0.0)
    y, weight = ones(2, 2), np.linspace(0, 2, 6).astype("float32")
    expected = record_losses(model, X, y)
    assert logged_loss(model, X, y, sample_weight=weight) == pytest.approx(
        (weight * expected).mean(), rel=1e-5
    )


def test_loss_that_cannot_be_vectorized_falls_back():
    inputs = keras.Input((5, 4))
    outputs = keras.layers.Dense(4, activation="softmax")(inputs)
    model = keras_dpopt.DPModel(inputs, outputs)
    model.compile(tiny.private_sgd(), keras.losses.CTC())
    x, y = ones(3, 5, 4), np.array([[1, 2], [2, 3], [1, 3]] * 2)
    history = tiny.fit(model, x, y, batch_size=3)
    assert tiny.steps(model) == 2
    assert np.isfinite(history.history["loss"][0])
    step: Any = model.private_step
    assert step.engine.name == "loop"


# --- masks ---------------------------------------------------------------------------

TOKENS = np.array(
    [[1, 2, 0, 0], [3, 0, 0, 0], [1, 2, 3, 4], [4, 4, 0, 1], [2, 0, 0, 3], [1, 1, 1, 0]]
)
LABELS = (TOKENS + 1) % 3


def tagger(*layers, rate=0.0, **kwargs):
    model = keras_dpopt.DPSequential(
        [
            keras.Input((4,), dtype="int32"),
            keras.layers.Embedding(5, 3, mask_zero=True),
            *layers,
            keras.layers.TimeDistributed(keras.layers.Dense(3, activation="softmax")),
        ]
    )
    return compiled(model, SPARSE, rate, **kwargs)


@pytest.mark.parametrize("recurrent", [False, True])
def test_masked_sequences(recurrent):
    layers = [keras.layers.LSTM(3, return_sequences=True)] if recurrent else []
    model = tagger(*layers, metrics=["accuracy"], weighted_metrics=["accuracy"])
    expected = record_losses(model, TOKENS, LABELS)
    history = tiny.fit(model, TOKENS, LABELS, batch_size=6)
    assert history.history["loss"][0] == pytest.approx(expected.mean(), rel=1e-5)
    whole = model.evaluate(TOKENS, LABELS, verbose=0, return_dict=True)
    for name in set(whole) - {"loss"}:
        assert history.history[name][0] == pytest.approx(whole[name]), name


def test_masked_elements_move_nothing():
    changes = []
    for junk in (0, 1, 2):
        labels = np.where(TOKENS == 0, junk, LABELS)
        keras.utils.set_random_seed(1)
        changes.append(change(tagger(rate=RATE), TOKENS, labels))
    assert_equal(changes[0], changes[1], 0)
    assert_equal(changes[0], changes[2], 0)


def test_a_record_that_is_masked_altogether_is_finite():
    model = tagger(rate=RATE)
    tokens = np.concatenate([np.zeros((1, 4), "int64"), TOKENS[1:]])
    history = tiny.fit(model, tokens, LABELS, batch_size=6)
    assert np.isfinite(history.history["loss"][0])
    assert all(np.isfinite(w).all() for w in model.get_weights())


def test_mask_and_temporal_weight_together():
    model = tagger()
    weight = np.abs(ones(4, 4))
    expected = record_losses(model, TOKENS, LABELS, weight)
    loss = logged_loss(model, TOKENS, LABELS, sample_weight=weight)
    # Keras divides by the number of unmasked elements, as we do.
    assert loss == pytest.approx(expected.mean(), rel=1e-5)


# --- losses that do not come from `compile` ------------------------------------------


class Penalty(keras.layers.Layer):
    """Adds a loss of its inputs; per example it is the loss of a batch of one."""

    def call(self, inputs):
        self.add_loss(ops.mean(ops.sum(inputs**2, axis=-1)))
        return inputs


EXTRA = {
    "add_loss": lambda: [keras.layers.Dense(3), Penalty()],
    "activity_regularizer": lambda: [
        keras.layers.Dense(3, activity_regularizer=keras.regularizers.L2(0.3))
    ],
    "kernel_regularizer": lambda: [
        keras.layers.Dense(
            3,
            kernel_regularizer=keras.regularizers.L1L2(0.1, 0.3),
            bias_regularizer="l2",
        )
    ],
    "all": lambda: [
        keras.layers.Dense(3, kernel_regularizer="l2", activity_regularizer="l1"),
        Penalty(),
    ],
}


@pytest.mark.parametrize("kind", EXTRA)
def test_extra_losses(kind):
    y = ones(2, 2)
    model = compiled(regressor(*EXTRA[kind]()), "mse")
    expected_loss = model.evaluate(X, y, verbose=0)
    expected = keras_change(model, X, y)
    before = [w.numpy() for w in model.trainable_weights]
    history = tiny.fit(model, X, y, batch_size=6)
    assert history.history["loss"][0] == pytest.approx(expected_loss, rel=1e-5)
    after = [w.numpy() for w in model.trainable_weights]
    assert_equal([a - b for a, b in zip(after, before, strict=True)], expected)


def test_sample_weight_multiplies_the_compiled_loss_alone():
    """As in Keras: what a layer adds does not know the weight."""
    y, weight = ones(2, 2), np.linspace(0, 2, 6).astype("float32")
    model = compiled(regressor(*EXTRA["add_loss"]()), "mse")
    expected = keras_change(model, X, y, sample_weight=weight)
    assert_equal(change(model, X, y, sample_weight=weight), expected)


def test_a_weight_regularizer_is_neither_clipped_nor_noised():
    """At weights far out, a clip of 1e-3 leaves the decay as strong as it was."""
    layer = keras.layers.Dense(
        1,
        use_bias=False,
        kernel_initializer=keras.initializers.Constant(100.0),
        kernel_regularizer=keras.regularizers.L2(0.5),
    )
    model = keras_dpopt.DPSequential([keras.Input((4,)), layer])
    model.compile(tiny.exact_sgd(0.1, l2_norm_clip=1e-3), "mse")
    tiny.fit(model, X, X[:, :1], batch_size=6)
    np.testing.assert_allclose(layer.get_weights()[0], 90.0, atol=0.01)


def test_losses_of_layers_alone_train():
    inputs = keras.Input((4,))
    outputs = Penalty()(keras.layers.Dense(3)(inputs))
    model = keras_dpopt.DPModel(inputs, outputs)
    model.compile(tiny.exact_sgd(RATE))
    before = model.get_weights()
    tiny.fit(model, X, batch_size=6)
    assert tiny.moved(before, model.get_weights())
    assert tiny.steps(model) == 1


def test_a_model_without_any_loss_raises():
    model = regressor()
    model.compile(tiny.private_sgd())
    with pytest.raises(ValueError, match="loss"):
        tiny.fit(model, X, ones(2, 2), batch_size=6)
    assert tiny.steps(model) == 0


# --- compute_loss --------------------------------------------------------------------


class OwnComputeLoss(keras_dpopt.DPModel):
    """Twice the compiled loss, and a term of the input."""

    def __init__(self, regularizer=None):
        super().__init__()
        self.out = keras.layers.Dense(
            2, kernel_initializer="ones", kernel_regularizer=regularizer
        )

    def call(self, x):
        return self.out(x)

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return 2.0 * loss + ops.mean(ops.sum(x, axis=-1) * ops.sum(y_pred, axis=-1))


def test_compute_loss_of_a_subclass():
    y = ones(2, 2)
    model = compiled(OwnComputeLoss(), "mse")
    model(X)
    expected_loss = model.evaluate(X, y, verbose=0)
    expected = keras_change(model, X, y)
    before = [w.numpy() for w in model.trainable_weights]
    history = tiny.fit(model, X, y, batch_size=6)
    after = [w.numpy() for w in model.trainable_weights]
    assert_equal([a - b for a, b in zip(after, before, strict=True)], expected)
    assert history.history["loss"][0] == pytest.approx(expected_loss, rel=1e-5)


def test_compute_loss_weighs_records():
    y, weight = ones(2, 2), np.array([1, 0, 0, 0, 0, 0], "float32")
    model = compiled(OwnComputeLoss(), "mse")
    model(X)
    expected = [c / 6 for c in keras_change(model, X[:1], y[:1])]
    assert_equal(change(model, X, y, sample_weight=weight), expected)


def test_compute_loss_counts_a_weight_regularizer_once():
    """`super().compute_loss` has it in already, here twice: as Keras computes it."""
    y = ones(2, 2)
    model = compiled(OwnComputeLoss("l2"), "mse")
    model(X)
    expected_loss = model.evaluate(X, y, verbose=0)
    expected = keras_change(model, X, y)
    before = [w.numpy() for w in model.trainable_weights]
    history = tiny.fit(model, X, y, batch_size=6)
    after = [w.numpy() for w in model.trainable_weights]
    assert_equal([a - b for a, b in zip(after, before, strict=True)], expected)
    assert history.history["loss"][0] == pytest.approx(expected_loss, rel=1e-5)

"""Tests of the loss of one record: Keras' own loss of a batch of one, nothing else."""

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf
import tiny
from keras import ops

import keras_dpopt
from keras_dpopt import clipping, engines, keras_compat, losses, prng
from keras_dpopt.queries import Point

SPARSE = "sparse_categorical_crossentropy"
X, Y = tiny.rows(6)
RATE = 0.5


def ones(count, *shape):
    return np.random.default_rng(count).normal(size=(6, *shape)).astype("float32")


def evaluated(model, x, y, weights=None) -> float:
    """Keras' loss of these rows as one batch: what `evaluate` runs, without a graph."""
    model.reset_metrics()
    data = (x, y) if weights is None else (x, y, weights)
    logs = model.test_step(keras.tree.map_structure(ops.convert_to_tensor, data))
    return float(logs["loss"])


def record_losses(model, x, y, weights=None) -> np.ndarray:
    """Keras' loss of each row alone."""
    row = lambda a, i: keras.tree.map_structure(lambda t: t[i : i + 1], a)  # noqa: E731
    out = []
    for i in range(len(keras.tree.flatten(x)[0])):
        weight = None if weights is None else row(weights, i)
        out.append(evaluated(model, row(x, i), row(y, i), weight))
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


def compiled(model, loss, rate=RATE, engine="auto", **kwargs):
    model.compile(tiny.exact_sgd(rate, gradient_engine=engine), loss, **kwargs)
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


# Without a sequence, a batch of one has nothing to reduce.
@pytest.mark.parametrize(
    ("reduction", "sequence"),
    [
        ("sum_over_batch_size", False),
        ("sum_over_batch_size", True),
        ("mean", True),
        ("sum", True),
    ],
)
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


def test_no_reduction_is_the_mean():
    y = ones(1, 3, 2)
    results = []
    without = [keras.losses.MeanSquaredError(reduction=r) for r in (None, "none")]
    for loss in ("mse", *without):
        model = compiled(regressor(keras.layers.RepeatVector(3)), loss)
        results.append(change(model, X, y))
    for result in results[1:]:
        assert_equal(result, results[0])


def test_temporal_sample_weight():
    y, weight = ones(1, 3, 2), np.abs(ones(2, 3))
    model = compiled(regressor(keras.layers.RepeatVector(3)), "mse")
    expected = record_losses(model, X, y, weight)
    expected_change = keras_change(model, X, y, sample_weight=weight)
    before = model.get_weights()
    # The loss is logged at the weights before the step.
    loss = logged_loss(model, X, y, sample_weight=weight)
    assert loss == pytest.approx(expected.mean(), rel=1e-5)
    changes = [a - b for a, b in zip(model.get_weights(), before, strict=True)]
    assert_equal(changes, expected_change)


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


@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_loss_that_cannot_be_vectorized_trains(engine):
    inputs = keras.Input((5, 4))
    outputs = keras.layers.Dense(4, activation="softmax")(inputs)
    model = keras_dpopt.DPModel(inputs, outputs)
    model.compile(tiny.private_sgd(gradient_engine=engine), keras.losses.CTC())
    x, y = ones(3, 5, 4), np.array([[1, 2], [2, 3], [1, 3]] * 2)
    history = tiny.fit(model, x, y, batch_size=3)
    assert tiny.steps(model) == 2
    assert np.isfinite(history.history["loss"][0])


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
    engine = "auto" if recurrent else "vectorized"  # Recurrent layers are looped.
    metrics = {"metrics": ["accuracy"], "weighted_metrics": ["accuracy"]}
    model = tagger(*layers, engine=engine, **metrics)
    expected = record_losses(model, TOKENS, LABELS)
    history = tiny.fit(model, TOKENS, LABELS, batch_size=6)
    assert history.history["loss"][0] == pytest.approx(expected.mean(), rel=1e-5)
    whole = model.evaluate(TOKENS, LABELS, verbose=0, return_dict=True)
    for name in set(whole) - {"loss"}:
        assert history.history[name][0] == pytest.approx(whole[name]), name


def test_masked_elements_move_nothing():
    """By steps from the same weights: no noise, and all rows in each."""
    changes, model = [], tagger(rate=RATE)
    start = model.get_weights()
    for junk in (0, 1, 2):
        labels = np.where(TOKENS == 0, junk, LABELS)
        model.set_weights(start)
        changes.append(change(model, TOKENS, labels))
    assert_equal(changes[0], changes[1], 0)
    assert_equal(changes[0], changes[2], 0)
    other = np.where(TOKENS == 0, 0, (LABELS + 1) % 3)
    model.set_weights(start)
    assert np.abs(change(model, TOKENS, other)[0] - changes[0][0]).max() > 1e-3


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
    expected_loss = evaluated(model, X, y)
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
    expected_loss = evaluated(model, X, y)
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
    expected_loss = evaluated(model, X, y)
    expected = keras_change(model, X, y)
    before = [w.numpy() for w in model.trainable_weights]
    history = tiny.fit(model, X, y, batch_size=6)
    after = [w.numpy() for w in model.trainable_weights]
    assert_equal([a - b for a, b in zip(after, before, strict=True)], expected)
    assert history.history["loss"][0] == pytest.approx(expected_loss, rel=1e-5)


# --- copies of a record --------------------------------------------------------------


def values_of(variables):
    return [tf.convert_to_tensor(v.value) for v in variables]


def build(model, rows):
    """Builds a compiled model for such rows."""
    if not model.optimizer.built:
        spec = lambda v: tf.TensorSpec([None, *v.shape[1:]], v.dtype)  # noqa: E731
        keras_compat.build_for(model, tf.nest.map_structure(spec, rows))


def clipped_sum(model, rows, copies, engine="loop", clip=1e6):
    """The sum of the clipped records, and the outputs, as an engine returns them."""
    rows = tf.nest.map_structure(tf.convert_to_tensor, rows)
    build(model, rows)
    states = keras_compat.seed_states(model)
    seeds = {id(state) for state in states}
    other = [v for v in model.non_trainable_variables if id(v) not in seeds]
    record_loss = losses.RecordLoss(model, other, states, copies)
    problem = engines.GradientProblem(
        evaluate=lambda w, s, record: record_loss(w, values_of(other), s, record),
        preprocess=lambda record: tuple(clipping.clip_record(record, clip)),
        points=(Point(1.0, tuple(values_of(model.trainable_variables))),),
    )
    size = len(rows["x"])
    seeds = [prng.per_record_seeds(7, 0, tf.range(size), i) for i in range(len(states))]
    run = lambda: engines.ENGINES[engine].clipped_sum(  # noqa: E731
        problem, rows, tf.stack(seeds, axis=1), tf.constant(size)
    )
    total, outputs = tf.function(run, autograph=False)()
    return [t.numpy() for t in total], tf.nest.map_structure(
        lambda t: t.numpy(), outputs
    )


class Shift(keras.Layer):
    """Adds a multiple of the copy's number: what an augmentation does, but known."""

    def __init__(self, shift, modulus=None):
        super().__init__()
        self.shift, self.modulus = np.array(shift), modulus

    def call(self, x):
        number = ops.reshape(
            ops.cast(ops.arange(ops.shape(x)[0]), x.dtype), (-1,) + (1,) * (x.ndim - 1)
        )
        x = x + number * ops.cast(self.shift, x.dtype)
        return x if self.modulus is None else x % self.modulus

    def compute_mask(self, inputs, mask=None):
        return mask


class Quartic(keras.Model):
    """The toy problem of the golden values, of shifted copies."""

    def __init__(self, theta, shift):
        super().__init__()
        self.theta = self.add_weight(shape=(3,), initializer="zeros")
        self.theta.assign(theta)
        self.shift = Shift(shift)

    def call(self, x):
        return self.theta - self.shift(x)


@pytest.mark.parametrize("engine", helpers.ENGINES)
def test_copies_are_averaged_and_then_clipped(engine, monkeypatch):
    """Golden values `augmult`: two copies, the second one shifted."""
    monkeypatch.setattr(clipping, "_UNIT_ROUNDOFF", 0.0)  # No margin: golden_test.py.
    golden = helpers.golden()
    problem, entry = golden["problem"], golden["methods"]["augmult"]
    model = Quartic(problem["theta0"], entry["shift"])
    model.compile("sgd", helpers.quartic_loss(problem["quartic"]))
    rows = {"x": np.array(problem["centers"], "f4"), "y": np.array(problem["H"], "f4")}
    (total,), _ = clipped_sum(model, rows, 2, engine, clip=problem["clip_norm"])
    np.testing.assert_allclose(total, entry["avg_then_clip_sum"], rtol=1e-5)
    assert np.abs(total - entry["clip_then_avg_sum"]).max() > 1e-3


class PrivateQuartic(helpers.QuarticModel):
    def __init__(self, theta, shift):
        super().__init__(theta)
        self.shift = Shift(shift)

    def call(self, x):
        return super().call(self.shift(x))


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_training_step_with_copies(jit_compile):
    """The same golden values, by a step without noise; the loss is the mean of both."""
    golden = helpers.golden()
    problem, entry = golden["problem"], golden["methods"]["augmult"]
    optimizer = keras_dpopt.DPSGD(
        1.0,
        l2_norm_clip=problem["clip_norm"],
        noise_multiplier=0.0,
        expected_batch_size=4,
        augmentation_multiplicity=2,
    )
    model = PrivateQuartic(problem["theta0"], entry["shift"])
    loss = helpers.quartic_loss(problem["quartic"])
    model.compile(optimizer, loss, jit_compile=jit_compile)
    x, y = np.array(problem["centers"], "f4"), np.array(problem["H"], "f4")
    logged = model.train_on_batch(x, y, return_dict=True)["loss"]
    step = np.array(problem["theta0"]) - model.theta.numpy()
    np.testing.assert_allclose(4 * step, entry["avg_then_clip_sum"], rtol=5e-5)
    each = [
        loss(y, problem["theta0"] - x - k * np.array(entry["shift"])) for k in (0, 1)
    ]
    assert logged == pytest.approx(np.mean(each), rel=1e-5)


def assert_mean_of_copies(model, plain, rows, shifted, engine, atol=2e-6):
    """Copies give the mean of what the same records, shifted by hand, give alone.

    Args:
        model: Shifts its copies.
        plain: The same model without the shift.
        rows: The records.
        shifted: "x" of the records for each copy; that of the first is not shifted.
        engine: Of the copies; the records alone go through the loop.
        atol: Of the gradients, next to a relative 2e-5.
    """
    for unbuilt in (model, plain):
        build(unbuilt, tf.nest.map_structure(tf.convert_to_tensor, rows))
    plain.set_weights(model.get_weights())
    copies, size = len(shifted), len(rows["x"])
    total, outputs = clipped_sum(model, rows, copies, engine)
    alone = tf.nest.map_structure(lambda v: np.concatenate([v] * copies), rows)
    alone["x"] = np.concatenate(shifted)
    sums, want = clipped_sum(plain, alone, 1)
    for got, expected in zip(total, sums, strict=True):
        np.testing.assert_allclose(got, expected / copies, rtol=2e-5, atol=atol)
    each = want["loss"].reshape(copies, size)
    assert each.std(axis=0).max() > 1e-3  # The copies do differ.
    np.testing.assert_allclose(outputs["loss"], each.mean(axis=0), rtol=2e-5)
    reported = [tf.nest.flatten((o["y_pred"], o["masks"])) for o in (outputs, want)]
    for got, expected in zip(*reported, strict=True):
        np.testing.assert_allclose(got, expected[:size], rtol=2e-5, atol=2e-6)


def shifted_regressor(shift, loss, *layers):
    """A regressor of sequences of three, whose copies are shifted (or not: `None`)."""
    first = [] if shift is None else [Shift(shift)]
    model = keras.Sequential(
        [
            keras.Input((4,)),
            *first,
            keras.layers.RepeatVector(3),
            *layers,
            keras.layers.Dense(2, activation="tanh"),
        ]
    )
    model.compile("sgd", loss)
    return model


def scalar_sum(y, y_pred):
    return ops.sum(ops.square(y - y_pred))


COPY_LOSSES = {
    "mean": "mse",
    "sum": keras.losses.MeanSquaredError(reduction="sum"),
    "none": keras.losses.MeanSquaredError(reduction="none"),
    "own call": OwnCall(),
    "own class": OwnLoss(),
    "one scalar": scalar_sum,
}


@pytest.mark.parametrize(
    ("kind", "weights", "engine"),
    [
        ("mean", None, "loop"),
        ("mean", "record", "vectorized"),
        ("mean", "element", "loop"),
        ("sum", None, "vectorized"),
        ("sum", "record", "loop"),
        ("sum", "element", "vectorized"),
        ("none", None, "loop"),
        ("own call", "record", "loop"),
        ("own class", "record", "loop"),
        ("one scalar", "record", "vectorized"),
    ],
)
def test_loss_is_the_mean_over_copies(kind, weights, engine):
    shift = np.array([0.5, -0.25, 0.1, 0.3], "f4")
    models = [shifted_regressor(s, COPY_LOSSES[kind]) for s in (shift, None)]
    rows = {"x": X, "y": ones(1, 3, 2)}
    if weights == "record":
        rows["sample_weight"] = np.linspace(0.5, 2, 6).astype("f4")
    elif weights == "element":
        rows["sample_weight"] = np.abs(ones(2, 3))
    shifted = [X + k * shift for k in range(3)]
    assert_mean_of_copies(*models, rows, shifted, engine)


def shifted_tagger(shift, **kwargs):
    first = [] if shift is None else [Shift(shift, modulus=5)]
    model = keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            *first,
            keras.layers.Embedding(5, 3, mask_zero=True),
            keras.layers.TimeDistributed(keras.layers.Dense(3, activation="softmax")),
        ]
    )
    model.compile("sgd", SPARSE, **kwargs)
    return model


@pytest.mark.parametrize("engine", helpers.ENGINES)
def test_copies_whose_masks_differ_weigh_the_same(engine):
    """A mean over all elements would weigh a copy by its unmasked ones."""
    rows = {"x": TOKENS.astype("int32"), "y": LABELS}
    shifted = [(rows["x"] + k) % 5 for k in range(3)]
    counts = [(part != 0).sum(axis=1) for part in shifted]
    assert np.std(counts, axis=0).max() > 0
    models = [shifted_tagger(s) for s in (1, None)]
    assert_mean_of_copies(*models, rows, shifted, engine)


def two_outputs(shift):
    inputs = keras.Input((4,))
    x = inputs if shift is None else Shift(shift)(inputs)
    outputs = {name: keras.layers.Dense(2, name=name)(x) for name in ("a", "b")}
    model = keras.Model(inputs, outputs)
    losses = {"a": "mse", "b": keras.losses.MeanAbsoluteError(reduction="sum")}
    model.compile("sgd", losses, loss_weights={"a": 1.0, "b": 0.3})
    return model


def test_copies_with_several_outputs():
    rows = {"x": X, "y": {"a": ones(2, 2), "b": ones(3, 2)}}
    shifted = [X + np.float32(0.3) * k for k in range(2)]
    models = [two_outputs(s) for s in (0.3, None)]
    assert_mean_of_copies(*models, rows, shifted, "vectorized")


class OwnComputeLossOfCopies(keras.Model):
    """Twice the compiled loss, and a sum over the batch, as long as a batch is one."""

    def __init__(self, shift):
        super().__init__()
        self.shift = Shift(0.0 if shift is None else shift)
        self.out = keras.layers.Dense(2, kernel_regularizer="l2")

    def call(self, x):
        return self.out(self.shift(x))

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return 2.0 * loss + ops.sum(y_pred * y) + ops.sum(ops.square(y_pred))


@pytest.mark.parametrize("engine", helpers.ENGINES)
def test_copies_with_a_compute_loss(engine):
    models = [OwnComputeLossOfCopies(s) for s in (0.3, None)]
    for model in models:
        model.compile("sgd", "mse")
    rows = {
        "x": X,
        "y": ones(2, 2),
        "sample_weight": np.linspace(0.5, 2, 6, dtype="f4"),
    }
    shifted = [X + np.float32(0.3) * k for k in range(3)]
    assert_mean_of_copies(*models, rows, shifted, engine, atol=1e-5)


class Penalties(keras.Layer):
    """Adds losses of its inputs of every kind: a sum, a mean, one for each row."""

    def call(self, inputs):
        squares = ops.sum(inputs**2, axis=-1)
        self.add_loss(ops.sum(squares))
        self.add_loss(ops.mean(squares))
        return inputs


LAYER_LOSSES = {
    **EXTRA,
    "sum": lambda: [keras.layers.Dense(3), Penalties()],
    "activity in one": lambda: [keras.layers.ActivityRegularization(l2=0.1)],
}


@pytest.mark.parametrize(
    ("kind", "engine"),
    [("sum", "vectorized"), *((kind, "loop") for kind in LAYER_LOSSES)],
)
def test_losses_of_layers_do_not_grow_with_the_copies(kind, engine):
    """Equal copies: the loss and the gradient are those of one."""
    model = keras.Sequential(
        [keras.Input((4,)), *LAYER_LOSSES[kind](), keras.layers.Dense(2)]
    )
    model.compile("sgd", "mse")
    rows = {"x": X, "y": ones(2, 2)}
    once, outputs_once = clipped_sum(model, rows, 1)
    total, outputs = clipped_sum(model, rows, 3, engine)
    np.testing.assert_allclose(outputs["loss"], outputs_once["loss"], rtol=1e-5)
    for a, b in zip(total, once, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


class Linear(keras.Model):
    """The gradient of a record is the mean over its copies of what the layer makes."""

    def __init__(self, layer, shape):
        super().__init__()
        self.layer = layer
        self.theta = self.add_weight(shape=shape, initializer="zeros")

    def call(self, x, training=False):
        x = self.layer(x, training=training)
        # RandomCrop crops in training only.
        theta = self.theta[tuple(slice(size) for size in x.shape[1:])]
        return ops.sum(x * theta, axis=tuple(range(1, x.ndim)))[:, None]


RANDOM_LAYERS = {
    "flip": lambda: keras.layers.RandomFlip("horizontal"),
    "shift": lambda: keras.layers.RandomTranslation(0.5, 0.5, interpolation="nearest"),
    "crop": lambda: keras.Sequential([keras.layers.RandomCrop(6, 6)]),
    "dropout": lambda: keras.layers.Dropout(0.5),
}


@pytest.mark.parametrize("kind", RANDOM_LAYERS)
def test_random_layers_draw_for_each_copy(kind):
    """By the same numbers in both engines; and a mean of different draws is shorter."""
    x = np.random.default_rng(0).normal(size=(3, 8, 8, 2)).astype("f4")
    model = Linear(RANDOM_LAYERS[kind](), (8, 8, 2))
    model.compile("sgd", helpers.output_loss)
    rows = {"x": x, "y": np.zeros((3, 1), "f4")}
    (once,), _ = clipped_sum(model, rows, 1)
    (loop,), _ = clipped_sum(model, rows, 4, "loop")
    (vectorized,), _ = clipped_sum(model, rows, 4, "vectorized")
    np.testing.assert_allclose(vectorized, loop, atol=1e-5)
    # The draws are fixed by the key: nothing here is left to chance.
    assert 0.0 < np.linalg.norm(loop) < 0.9 * np.linalg.norm(once)


def test_dropout_of_copies():
    """A mean of four masks of 0 and 2 has five values, where all are independent."""
    model = Linear(keras.layers.Dropout(0.5), (400,))
    model.compile("sgd", helpers.output_loss)
    rows = {"x": np.ones((1, 400), "f4"), "y": np.zeros((1, 1), "f4")}
    (mask,), _ = clipped_sum(model, rows, 4)
    values, counts = np.unique(mask, return_counts=True)
    np.testing.assert_allclose(values, [0.0, 0.5, 1.0, 1.5, 2.0])
    expected = 400 * np.array([1, 4, 6, 4, 1]) / 16
    # Five standard deviations of each count.
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()


def test_copies_that_write_state_are_refused():
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
    )
    model.compile("sgd", "mse")
    with pytest.raises(keras_dpopt.UnsupportedModelError, match="GroupNormalization"):
        clipped_sum(model, {"x": X, "y": ones(2, 2)}, 2)


def test_an_output_without_a_row_for_each_copy_is_refused():
    class Merged(keras.Model):
        def __init__(self):
            super().__init__()
            self.out = keras.layers.Dense(2)

        def call(self, x):
            return ops.reshape(self.out(x), (1, -1))

    model = Merged()
    model.compile("sgd", helpers.output_loss)
    rows = {"x": X, "y": np.zeros((6, 1), "f4")}
    clipped_sum(model, rows, 1)
    with pytest.raises(keras_dpopt.UnsupportedModelError, match="row for each"):
        clipped_sum(model, rows, 2)


@pytest.mark.parametrize("copies", [0, -1])
def test_there_is_at_least_one_copy(copies):
    with pytest.raises(ValueError, match="at least 1"):
        losses.RecordLoss(tiny.classifier(), [], [], copies)

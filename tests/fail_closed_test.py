"""Tests that no road leads to training without privacy, or to a wrong step count."""

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tiny
from keras import ops

import keras_dpopt
from keras_dpopt import data

LOSS = "sparse_categorical_crossentropy"
X, Y = tiny.rows()


def weights_stay(model):
    """A context in which no weight of the model may change."""
    return _WeightsStay(model)


class _WeightsStay:
    def __init__(self, model):
        self.model = model

    def __enter__(self):
        self.before = self.model.get_weights()

    def __exit__(self, *exception):
        assert not tiny.moved(self.before, self.model.get_weights())


# --- optimizers ----------------------------------------------------------------------

NOT_PRIVATE = {
    "rmsprop": lambda: "rmsprop",
    "auto": lambda: "auto",
    "none": lambda: None,
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "class": lambda: keras_dpopt.DPSGD,
    "config": lambda: {"class_name": "SGD", "config": {"learning_rate": 0.1}},
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(tiny.private_sgd()),
}


def multi_optimizer():
    """A MultiOptimizer of Keras around a private one."""
    for arguments in (
        lambda: ([tiny.private_sgd()],),
        lambda: (tiny.private_sgd(),),
        lambda: ({"default": tiny.private_sgd()},),
    ):
        try:
            return keras.optimizers.MultiOptimizer(*arguments())
        except (TypeError, ValueError, AttributeError):
            continue
    raise AssertionError("MultiOptimizer takes its optimizers in another form now")


NOT_PRIVATE["multi"] = multi_optimizer


@pytest.fixture(scope="module")
def compiled():
    return tiny.classifier()


@pytest.mark.parametrize("kind", NOT_PRIVATE)
def test_compile_refuses_what_is_not_private(kind, compiled):
    optimizer, count = compiled.optimizer, tiny.steps(compiled)
    with pytest.raises(ValueError, match="DPSGD"):
        compiled.compile(NOT_PRIVATE[kind](), LOSS)
    # What was compiled before is still there, and private.
    assert compiled.optimizer is optimizer
    tiny.fit(compiled, X, Y, batch_size=4)
    assert tiny.steps(compiled) == count + 3 == optimizer.releases()


def test_compile_without_arguments_is_refused():
    with pytest.raises(ValueError, match="DPSGD"):
        keras_dpopt.make_private(keras.Sequential([keras.layers.Dense(3)])).compile()


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "loss_scale", "multi"])
def test_swapped_optimizer_is_refused(kind, trained):
    model = tiny.classifier(tiny.private_sgd(expected_batch_size=4))
    if trained:
        tiny.fit(model, X, Y)
    model.optimizer = NOT_PRIVATE[kind]()
    with weights_stay(model):
        for train in (
            lambda: tiny.fit(model, X, Y, batch_size=4),
            lambda: model.train_on_batch(X, Y),
            lambda: keras.Model.fit(model, X, Y, verbose=0),
            lambda: keras.Model.train_on_batch(model, X, Y),
        ):
            with pytest.raises((ValueError, RuntimeError)):
                train()
    assert tiny.steps(model) == (3 if trained else 0)


def test_compile_of_keras_itself_is_no_way_round():
    model = tiny.classifier()
    keras.Model.compile(model, "sgd", LOSS)
    with weights_stay(model), pytest.raises(ValueError, match="DPSGD"):
        tiny.fit(model, X, Y, batch_size=4)


def test_swapped_private_optimizer_does_not_lose_steps():
    """Its noise and its count would not be those of the step that was traced."""
    model = tiny.classifier(tiny.exact_sgd(0.1))
    tiny.fit(model, X, Y, batch_size=4)
    model.optimizer = tiny.private_sgd(noise_multiplier=50.0)
    before = model.get_weights()
    try:
        tiny.fit(model, X, Y, batch_size=4)
    except (ValueError, RuntimeError):
        assert not tiny.moved(before, model.get_weights())
        assert tiny.steps(model) == 3
    else:
        assert tiny.steps(model) == 6
        # sigma = 50 moves the weights by 0.1 * 50 / 4 a step.
        assert np.abs(model.get_weights()[0] - before[0]).max() > 1.0


@pytest.mark.parametrize(
    "make",
    [
        lambda **kwargs: keras_dpopt.DPSGD(0.1, **kwargs),
        lambda **kwargs: keras_dpopt.FiBeR(0.1, **kwargs),
    ],
)
def test_plain_model_refuses_a_private_optimizer(make):
    model = keras.Sequential([keras.Input((4,)), *tiny.softmax_layers()])
    model.compile(make(l2_norm_clip=1.0, noise_multiplier=1.0), LOSS)
    with weights_stay(model):
        for train in (
            lambda: model.fit(X, Y, verbose=0),
            lambda: model.train_on_batch(X, Y),
        ):
            with pytest.raises(TypeError, match="make_private"):
                train()


def test_one_optimizer_for_two_models_is_refused():
    optimizer = tiny.private_sgd()
    first, second = tiny.classifier(optimizer), tiny.classifier(optimizer)
    tiny.fit(first, X, Y, batch_size=4)
    with pytest.raises(ValueError, match="new optimizer"):
        tiny.fit(second, X, Y, batch_size=4)


# --- the training step ---------------------------------------------------------------


def test_roads_around_fit_raise():
    model = tiny.classifier(tiny.private_sgd(expected_batch_size=4))
    for _ in range(2):  # untrained, then trained: with a traced train function
        with weights_stay(model):
            for train in (
                lambda: model.train_step((X, Y)),
                lambda: model.train_step({"x": X, "y": Y}),
                lambda: keras.Model.fit(model, X, Y, verbose=0),
                lambda: keras.Model.fit(
                    model,
                    tf.data.Dataset.from_tensors({"x": X, "y": Y}),
                    verbose=0,
                ),
                lambda: keras.Model.train_on_batch(model, X, Y),
                lambda: (
                    model.make_train_function(force=True)
                    or model.train_function(iter([(X, Y)]))
                ),
                lambda: model.train_function(iter([{"x": X, "y": Y}])),
            ):
                with pytest.raises((RuntimeError, ValueError, TypeError)):
                    train()
        count = tiny.steps(model)
        tiny.fit(model, X, Y)
        assert tiny.steps(model) == count + 3


def test_a_step_outside_of_fit_is_refused_or_counted():
    """The train function is at hand, and so is the making of batches."""
    model = tiny.classifier()
    tiny.fit(model, X, Y, batch_size=4)
    before = model.get_weights()
    batch = {"rows": {"x": tf.constant(X), "y": tf.constant(Y)}}
    batch["step"] = tf.constant(model.optimizer.releases(), tf.int64)
    with contextlib.suppress(RuntimeError, ValueError, tf.errors.OpError):
        model.train_function(iter([data.in_microbatches(batch, 4)]))
    if tiny.moved(before, model.get_weights()):
        assert tiny.steps(model) == 4
    tiny.fit(model, X, Y, batch_size=4)
    made = int(model.optimizer.iterations)
    assert tiny.steps(model) == made


def test_uncompiled_model_raises():
    model = keras_dpopt.DPSequential([keras.Input((4,)), *tiny.softmax_layers()])
    with pytest.raises(ValueError, match="compile"):
        tiny.fit(model, X, Y, batch_size=4)
    with pytest.raises(ValueError, match="compile"):
        model.train_on_batch(X, Y)


def test_train_step_of_a_subclass_cannot_replace_ours_silently():
    """A user's own train_step is not private, so it must be refused."""

    class Own(keras_dpopt.DPModel):
        def __init__(self):
            super().__init__()
            self.hidden, self.out = tiny.softmax_layers()

        def call(self, x):
            return self.out(self.hidden(x))

        def train_step(self, data):
            x, y = data["rows"]["x"][0], data["rows"]["y"][0]
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x))
            gradients = tape.gradient(loss, self.trainable_variables)
            for w, g in zip(self.trainable_variables, gradients, strict=True):
                w.assign(w - 0.1 * g)
            return {"loss": loss}

    model = Own()
    with pytest.raises((ValueError, RuntimeError, TypeError)):
        model.compile(tiny.private_sgd(), LOSS)
        tiny.fit(model, X, Y, batch_size=4)


# --- state that would carry raw data out ---------------------------------------------


class Writer(keras.layers.Layer):
    """A layer that keeps something of its inputs, in one of several ways."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.mean: Any = keras.metrics.Mean() if way == "metric" else None
        self.raw: Any = tf.Variable([0.0, 0.0]) if "raw" in way else None

    def build(self, shape):
        del shape
        self.state = self.add_weight(shape=(2,), trainable=False, initializer="zeros")

    def call(self, inputs):
        value = ops.sum(inputs)
        if self.way == "weight":
            self.state.assign_add(ops.stack([value, value]))
        elif self.way == "metric":
            self.mean.update_state(value)
        elif self.way == "raw":
            self.raw.assign_add([value, value])
        elif self.way == "raw_slice":
            self.raw[0].assign(value)
        elif self.way == "raw_scatter":
            self.raw.scatter_nd_update([[0]], [value])
        elif self.way == "inner":
            self.state._value.assign_add([value, value])
        return inputs


WAYS = ["weight", "metric", "raw", "raw_slice", "raw_scatter", "inner"]


def with_layer(*layers, **kwargs):
    model = keras_dpopt.DPSequential(
        [keras.Input((4,)), *layers, *tiny.softmax_layers()]
    )
    optimizer = kwargs.pop("optimizer", None) or tiny.private_sgd(
        gradient_engine="auto"
    )
    model.compile(optimizer, LOSS, **kwargs)
    return model


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_layers_that_write_batch_data_are_refused(way, run_eagerly):
    layer = Writer(way)
    model = with_layer(layer, run_eagerly=run_eagerly)
    with pytest.raises(keras_dpopt.UnsupportedModelError, match="[Rr]emove|freeze"):
        tiny.fit(model, X, Y, batch_size=4)
    assert tiny.steps(model) == 0
    if layer.raw is not None:
        assert not layer.raw.numpy().any()
    assert not layer.state.numpy().any()


@pytest.mark.parametrize("engine", ["vectorized", "loop"])
@pytest.mark.parametrize("way", WAYS)
def test_no_engine_lets_a_write_pass(way, engine):
    layer = Writer(way)
    model = with_layer(layer, optimizer=tiny.private_sgd(gradient_engine=engine))
    with weights_stay(model), pytest.raises(keras_dpopt.UnsupportedModelError):
        tiny.fit(model, X, Y, batch_size=4)
    assert tiny.steps(model) == 0
    assert layer.raw is None or not layer.raw.numpy().any()


@pytest.mark.parametrize(
    "layer",
    [
        keras.layers.BatchNormalization(),
        keras.layers.SpectralNormalization(keras.layers.Dense(4)),
        keras.layers.Dropout(0.1),
        keras.layers.Normalization(mean=0.0, variance=1.0),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_normalization_layers(layer):
    model = with_layer(layer)
    if isinstance(layer, keras.layers.Dropout | keras.layers.Normalization):
        tiny.fit(model, X, Y, batch_size=4)
        assert tiny.steps(model) == 3
        return
    with (
        weights_stay(model),
        pytest.raises(keras_dpopt.UnsupportedModelError, match=type(layer).__name__),
    ):
        tiny.fit(model, X, Y, batch_size=4)
    assert tiny.steps(model) == 0


@pytest.mark.parametrize("nested", [False, True])
def test_frozen_batch_normalization_is_fine(nested):
    frozen = keras.layers.BatchNormalization(trainable=False)
    layer = keras.Sequential([frozen]) if nested else frozen
    model = with_layer(layer)
    before = frozen.get_weights()
    tiny.fit(model, X, Y, batch_size=4)
    assert tiny.steps(model) == 3
    assert not tiny.moved(before, frozen.get_weights())


def test_unfreezing_batch_normalization_is_noticed():
    layer = keras.layers.BatchNormalization(center=False, scale=False, trainable=False)
    model = with_layer(layer)
    tiny.fit(model, X, Y, batch_size=4)
    before = layer.get_weights()
    layer.trainable = True
    with contextlib.suppress(ValueError):
        tiny.fit(model, X, Y, batch_size=4)
    assert not tiny.moved(before, layer.get_weights())
    model.compile(tiny.private_sgd(gradient_engine="auto"), LOSS)
    with pytest.raises(keras_dpopt.UnsupportedModelError):
        tiny.fit(model, X, Y, batch_size=4)
    assert not tiny.moved(before, layer.get_weights())


def test_a_loss_that_writes_is_refused():
    kept = tf.Variable(0.0)

    def loss(y_true, y_pred):
        kept.assign_add(ops.sum(y_pred))
        return ops.mean((y_true - y_pred) ** 2)

    model = keras_dpopt.DPSequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(tiny.private_sgd(gradient_engine="auto"), loss)
    with pytest.raises(keras_dpopt.UnsupportedModelError):
        tiny.fit(model, X, X[:, :1], batch_size=4)


def test_a_model_that_writes_to_its_own_weight_is_refused():
    class Counting(keras_dpopt.DPModel):
        def __init__(self):
            super().__init__()
            self.out = keras.layers.Dense(3, activation="softmax")
            self.kept = self.add_weight(shape=(), trainable=False)

        def call(self, x, training=False):
            if training:
                self.kept.assign_add(ops.sum(x))
            return self.out(x)

    model = Counting()
    model.compile(tiny.private_sgd(gradient_engine="auto"), LOSS)
    with pytest.raises(keras_dpopt.UnsupportedModelError):
        tiny.fit(model, X, Y, batch_size=4)


def test_batches_do_not_couple():
    """A layer that subtracts the batch mean sees one record at a time."""

    class Centered(keras.layers.Layer):
        def call(self, inputs):
            return inputs - ops.mean(inputs, axis=0, keepdims=True)

    model = with_layer(Centered(), optimizer=tiny.exact_sgd(1.0, noise_multiplier=0.0))
    kernel = model.trainable_weights[0]
    before = kernel.numpy()
    tiny.fit(model, X, Y, batch_size=4)
    # Alone, every record is centered to zero, so the first kernel has no gradient.
    np.testing.assert_array_equal(kernel.numpy(), before)


# --- mixed precision -----------------------------------------------------------------


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_precision_policies_train(policy):
    keras.config.set_dtype_policy(policy)
    try:
        model = keras_dpopt.DPSequential([keras.Input((4,)), *tiny.softmax_layers()])
        model.compile(tiny.exact_sgd(0.5), LOSS, auto_scale_loss=True)
        assert isinstance(model.optimizer, keras_dpopt.DPSGD)
        tiny.fit(model, X, Y, batch_size=12)
        assert tiny.steps(model) == 1
    finally:
        keras.config.set_dtype_policy("float32")
    reference = tiny.classifier(tiny.exact_sgd(0.5))
    tiny.fit(reference, X, Y, batch_size=12)
    for a, b in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-2)


@pytest.mark.parametrize("policy", ["float64", "float16", "bfloat16"])
def test_weights_that_are_not_float32_are_refused(policy):
    model = keras_dpopt.DPSequential(
        [keras.Input((4,)), keras.layers.Dense(3, "softmax", dtype=policy)]
    )
    model.compile(tiny.private_sgd(), LOSS)
    with weights_stay(model), pytest.raises(ValueError, match="mixed_float16"):
        tiny.fit(model, X, Y, batch_size=4)
    assert tiny.steps(model) == 0


def test_float16_gradients_do_not_vanish():
    """Gradients of 1e-8 underflow in float16 unless the loss is scaled."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = keras_dpopt.DPSequential(
            [keras.Input((4,)), keras.layers.Dense(1, dtype="mixed_float16")]
        )
    finally:
        keras.config.set_dtype_policy("float32")
    model.compile(
        tiny.exact_sgd(1e6), lambda y, p: 1e-7 * ops.mean(ops.cast(p, "float32") * y)
    )
    before = model.get_weights()[0]
    tiny.fit(model, np.ones((4, 4)), np.ones((4, 1)), batch_size=4)
    np.testing.assert_allclose(model.get_weights()[0] - before, -0.1, rtol=0.05)


# --- budget --------------------------------------------------------------------------


def target(epochs: int, **kwargs) -> float:
    """The epsilon of this many epochs of 3 steps, and a hair."""
    return 1.000001 * keras_dpopt.epsilon(
        noise_multiplier=1.0,
        delta=1e-3,
        train_size=12,
        batch_size=4,
        epochs=epochs,
        **kwargs,
    )


def budget(epochs: int) -> keras_dpopt.PrivacyBudget:
    return keras_dpopt.PrivacyBudget(target(epochs), delta=1e-3)


@pytest.fixture(scope="module")
def four_epochs():
    reference = tiny.classifier()
    tiny.fit(reference, X, Y, batch_size=4, epochs=4)
    return reference.get_weights()


@pytest.mark.parametrize("steps_per_execution", [1, 8])
def test_no_step_beyond_the_budget(steps_per_execution, four_epochs):
    model = tiny.classifier(steps_per_execution=steps_per_execution)
    history = tiny.fit(
        model, X, Y, batch_size=4, steps_per_epoch=100, epochs=2, callbacks=[budget(4)]
    )
    assert tiny.steps(model) == 12
    assert int(model.optimizer.iterations) == 12
    assert len(history.epoch) == 1
    statement = model.privacy_statement(delta=1e-3)
    assert history.history["epsilon"][-1] == pytest.approx(statement.epsilon)
    assert statement.epsilon <= target(4)
    for a, b in zip(model.get_weights(), four_epochs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_a_spent_budget_runs_no_step_more():
    model = tiny.classifier()
    tiny.fit(model, X, Y, batch_size=4, epochs=9, callbacks=[budget(2)])
    assert tiny.steps(model) == 6
    with weights_stay(model):
        for train in (
            lambda: tiny.fit(model, X, Y, batch_size=4),
            lambda: tiny.fit(model, X, Y, batch_size=4, callbacks=[budget(2)]),
            lambda: model.train_on_batch(X, Y),
        ):
            with pytest.raises(RuntimeError, match="spent"):
                train()
        model.compile(tiny.private_sgd(), LOSS)
        with pytest.raises(RuntimeError, match="spent"):
            tiny.fit(model, X, Y, batch_size=4)
        other = keras_dpopt.make_private(model)
        other.compile(tiny.private_sgd(), LOSS)
        with pytest.raises(RuntimeError, match="spent"):
            tiny.fit(other, X, Y, batch_size=4)
    assert tiny.steps(model) == 6
    # A larger target opens it again.
    tiny.fit(model, X, Y, batch_size=4, epochs=9, callbacks=[budget(3)])
    assert tiny.steps(model) == 9


def test_later_fits_keep_to_the_budget_without_the_callback():
    model = tiny.classifier()
    tiny.fit(model, X, Y, batch_size=4, callbacks=[budget(3)])
    assert tiny.steps(model) == 3
    tiny.fit(model, X, Y, batch_size=4, epochs=9)
    assert tiny.steps(model) == 9


def test_the_budget_counts_what_was_before():
    model = tiny.classifier()
    tiny.fit(model, X, Y, batch_size=4, epochs=2)
    tiny.fit(model, X, Y, batch_size=4, epochs=9, callbacks=[budget(3)])
    assert tiny.steps(model) == 9
    assert model.privacy_statement(delta=1e-3).epsilon <= target(3)


def test_the_budget_holds_for_batches_of_the_caller():
    """Where every record may be in each step, one step costs as much as an epoch."""
    model = tiny.classifier(tiny.private_sgd(expected_batch_size=4))
    data_set = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    cost = keras_dpopt.epsilon(
        noise_multiplier=1.0, delta=1e-3, train_size=12, batch_size=12, epochs=2
    )
    callback = keras_dpopt.PrivacyBudget(1.0001 * cost, delta=1e-3)
    tiny.fit(model, data_set, epochs=3, callbacks=[callback])
    assert tiny.steps(model) == 2


@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_the_budget_holds_by_epochs_where_records_come_once(steps_per_execution):
    model = tiny.classifier(
        tiny.private_sgd(expected_batch_size=4), steps_per_execution=steps_per_execution
    )
    data_set = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    cost = keras_dpopt.epsilon(
        noise_multiplier=1.0, delta=1e-3, train_size=12, batch_size=12, epochs=2
    )
    callback = keras_dpopt.PrivacyBudget(1.0001 * cost, delta=1e-3)
    tiny.fit(model, data_set, epochs=5, once_per_epoch=True, callbacks=[callback])
    assert tiny.steps(model) == 6
    assert model.privacy_statement(delta=1e-3).epsilon <= 1.0001 * cost


def test_a_budget_too_small_for_one_step():
    model = tiny.classifier()
    callback = keras_dpopt.PrivacyBudget(1e-3, delta=1e-5)
    with weights_stay(model), pytest.raises(RuntimeError, match="spent|budget"):
        tiny.fit(model, X, Y, batch_size=4, callbacks=[callback])
    assert tiny.steps(model) == 0


def test_budget_on_a_plain_model_is_refused():
    model = keras.Sequential([keras.Input((4,)), *tiny.softmax_layers()])
    model.compile("sgd", LOSS)
    with pytest.raises(TypeError, match="make_private"):
        model.fit(X, Y, verbose=0, callbacks=[budget(1)])


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, float("nan")])
def test_delta_is_checked(delta):
    with pytest.raises(ValueError, match="delta"):
        keras_dpopt.PrivacyBudget(1.0, delta=delta)
    with pytest.raises(ValueError, match="delta"):
        tiny.classifier().privacy_statement(delta=delta)


def test_without_noise_epsilon_is_infinite():
    model = tiny.classifier(tiny.exact_sgd(0.1))
    tiny.fit(model, X, Y, batch_size=4)
    assert model.privacy_statement(delta=1e-5).epsilon == float("inf")


# --- callbacks that decide on training data ------------------------------------------

DECIDING = {
    "EarlyStopping": lambda m: keras.callbacks.EarlyStopping(monitor=m),
    "ReduceLROnPlateau": lambda m: keras.callbacks.ReduceLROnPlateau(monitor=m),
    "ModelCheckpoint": lambda m: keras.callbacks.ModelCheckpoint(
        "/tmp/unused.keras", monitor=m, save_best_only=True
    ),
}


@pytest.mark.parametrize("kind", DECIDING)
def test_deciding_on_training_metrics_is_refused(kind):
    model = tiny.classifier(metrics=["accuracy"])
    for metric in ("loss", "accuracy"):
        with pytest.raises(ValueError, match="acknowledge_training_metrics"):
            tiny.fit(model, X, Y, batch_size=4, callbacks=[DECIDING[kind](metric)])
    assert tiny.steps(model) == 0


def test_deciding_callbacks_do_not_hide_in_structures():
    model = tiny.classifier()
    stop = keras.callbacks.EarlyStopping(monitor="loss")

    class Own(keras.callbacks.EarlyStopping):
        pass

    for callbacks in (
        stop,
        (stop,),
        [[stop]],
        [Own(monitor="loss")],
        keras.callbacks.CallbackList([stop], model=model),
        [keras.callbacks.CallbackList([stop], model=model)],
    ):
        with pytest.raises(ValueError, match="acknowledge_training_metrics"):
            tiny.fit(model, X, Y, batch_size=4, callbacks=callbacks)


def test_acknowledged_training_metrics_are_listed():
    model = tiny.classifier()
    stop = keras.callbacks.EarlyStopping(monitor="loss")
    tiny.fit(
        model,
        X,
        Y,
        batch_size=4,
        callbacks=[stop],
        acknowledge_training_metrics=True,
    )
    assert "EarlyStopping" in tiny.notes(model)


def test_deciding_on_validation_data_is_fine(tmp_path):
    model = tiny.classifier()
    callbacks = [
        keras.callbacks.EarlyStopping(monitor="val_loss"),
        keras.callbacks.ReduceLROnPlateau(),
        keras.callbacks.ModelCheckpoint(tmp_path / "model.keras"),
    ]
    tiny.fit(
        model,
        X,
        Y,
        batch_size=4,
        validation_data=(X.copy(), Y.copy()),
        callbacks=callbacks,
    )
    assert tiny.steps(model) == 3


# --- interruptions -------------------------------------------------------------------


class Interrupting(keras.callbacks.Callback):
    def __init__(self, batch, error, hook="on_train_batch_end"):
        super().__init__()
        self.at, self.error = batch, error
        setattr(self, hook, self.interrupt)

    def interrupt(self, batch, logs=None):
        if batch >= self.at:
            raise self.error

    def on_train_batch_end(self, batch, logs=None):
        pass


@pytest.mark.parametrize(
    ("error", "steps_per_execution"),
    [(KeyboardInterrupt(), 1), (KeyboardInterrupt(), 2), (RuntimeError("stop"), 1)],
)
def test_an_interrupted_fit_counts_exactly_its_steps(error, steps_per_execution):
    model = tiny.classifier(steps_per_execution=steps_per_execution)
    with pytest.raises(type(error)):
        tiny.fit(
            model,
            X,
            Y,
            batch_size=4,
            steps_per_epoch=20,
            callbacks=[Interrupting(3, error)],
        )
    assert tiny.steps(model) == 4
    assert int(model.optimizer.iterations) == 4
    tiny.fit(model, X, Y, batch_size=4)
    assert tiny.steps(model) == 7
    assert "outside" not in tiny.notes(model)


def test_an_error_before_a_step_counts_no_step():
    model = tiny.classifier()
    with pytest.raises(RuntimeError, match="stop"):
        tiny.fit(
            model,
            X,
            Y,
            batch_size=4,
            callbacks=[Interrupting(2, RuntimeError("stop"), "on_train_batch_begin")],
        )
    assert tiny.steps(model) == 2
    assert model.optimizer.releases() == 2


def test_data_that_fails_midway():
    def batches():
        for i in range(5):
            if i == 3:
                raise OSError("no more data")
            yield X[:4], Y[:4]

    spec = (tf.TensorSpec([None, 4], tf.float32), tf.TensorSpec([None], tf.int64))
    data_set = tf.data.Dataset.from_generator(batches, output_signature=spec)
    model = tiny.classifier(tiny.private_sgd(expected_batch_size=4))
    with pytest.raises((tf.errors.OpError, OSError)):
        tiny.fit(model, data_set)
    assert tiny.steps(model) == int(model.optimizer.iterations) == 3
    tiny.fit(model, X, Y)
    assert tiny.steps(model) == 6


def test_a_failing_metric_does_not_lose_its_step():
    """The release is counted before the weights move; the count is never below."""

    class Failing(keras.metrics.Mean):
        def update_state(self, y_true, y_pred, sample_weight=None):
            tf.debugging.assert_less(tf.reduce_max(y_true), 100.0)
            return super().update_state(y_pred)

    y = np.array([[0.0]] * 7 + [[1000.0]])
    model = keras_dpopt.DPSequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(tiny.private_sgd(), "mse", metrics=[Failing()])
    before = model.get_weights()
    with pytest.raises(tf.errors.InvalidArgumentError):
        tiny.fit(model, X[:8], y, batch_size=8)
    if tiny.moved(before, model.get_weights()):
        assert tiny.steps(model) == 1


def test_training_within_a_callback_is_counted_or_refused():
    class Inner(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                self.model.train_on_batch(X, Y)

    model = tiny.classifier()
    with contextlib.suppress(RuntimeError, ValueError, tf.errors.OpError):
        tiny.fit(model, X, Y, batch_size=4, callbacks=[Inner()])
    assert tiny.steps(model) == int(model.optimizer.iterations)


def test_evaluating_within_a_callback_is_fine():
    class Inner(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.evaluate(X, Y, verbose=0)
            self.model.predict(X, verbose=0)

    model = tiny.classifier()
    tiny.fit(model, X, Y, batch_size=4, callbacks=[Inner()])
    assert tiny.steps(model) == 3

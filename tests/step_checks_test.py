"""Roads by which raw data would get past the clip and the noise: all are closed."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tiny

import keras_dpopt
from keras_dpopt import step_checks, weights_watch

X, Y = tiny.rows()
CHANGED = "changed outside the private training step"


def test_training_by_a_callback_on_the_same_layers_is_said():
    class TrainsPlainly(keras.callbacks.Callback):
        def __init__(self, model):
            super().__init__()
            self.plain = keras.Model(model.inputs, model.outputs)
            self.plain.compile("sgd", "sparse_categorical_crossentropy")

        def on_train_batch_end(self, batch, logs=None):
            self.plain.train_on_batch(X, Y)

    model = tiny.classifier()
    tiny.fit(model, X, Y, batch_size=4, callbacks=[TrainsPlainly(model)])
    assert CHANGED in tiny.notes(model)


@pytest.mark.parametrize(
    ("hook", "trainable"),
    [
        ("on_train_batch_end", True),
        ("on_train_batch_end", False),
        ("on_epoch_end", True),
        ("on_train_end", False),
    ],
)
def test_weights_written_by_a_callback_are_said(hook, trainable):
    def write(self, *args, **kwargs):
        kernel = self.model.layers[0 if trainable else 1].kernel
        kernel.assign(kernel + X[0, 0])

    callback = type("Writes", (keras.callbacks.Callback,), {hook: write})()
    model = keras_dpopt.DPSequential([keras.Input((4,)), *tiny.softmax_layers()])
    model.layers[1].trainable = False
    model.compile(tiny.private_sgd(), "sparse_categorical_crossentropy")
    tiny.fit(model, X, Y, batch_size=4, callbacks=[callback])
    assert CHANGED in tiny.notes(model)


@pytest.mark.parametrize("use_ema", [False, True])
def test_private_training_itself_is_not_said_to_be_outside(use_ema):
    optimizer = tiny.private_sgd(use_ema=use_ema, ema_overwrite_frequency=2)
    model = tiny.classifier(optimizer)
    tiny.fit(model, X, Y, batch_size=4, epochs=2, validation_data=(X, Y))
    tiny.fit(model, X, Y, batch_size=4)
    assert CHANGED not in tiny.notes(model)


class OwnTrainFunction(keras_dpopt.DPSequential):
    def make_train_function(self, force=False):
        self.train_function = lambda iterator: {"loss": 0.0}


def _with_instance_step():
    model = tiny.classifier()
    model.train_step = lambda data: {"loss": 0.0}
    return model


def _with_own_function():
    model = OwnTrainFunction([keras.Input((4,)), *tiny.softmax_layers()])
    model.compile(tiny.private_sgd(), "sparse_categorical_crossentropy")
    return model


def _with_foreign_function():
    model = tiny.classifier()
    model.train_function = lambda iterator: {"loss": 0.0}
    return model


@pytest.mark.parametrize(
    "make", [_with_instance_step, _with_own_function, _with_foreign_function]
)
def test_a_step_that_is_not_ours_is_refused(make):
    with pytest.raises(keras_dpopt.UnsupportedModelError, match="private one"):
        make().fit(X, Y, batch_size=4, verbose=0)


class KeepsCenters(keras_dpopt.DPModel):
    """As center losses and vector quantisation do: an average of raw features."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3, activation="softmax")
        self.center = self.add_weight(
            shape=(4,), trainable=False, name="center", initializer="zeros"
        )

    def call(self, x):
        return self.dense(x)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.center.assign(0.9 * self.center + 0.1 * keras.ops.mean(x, axis=0))
        return super().compute_metrics(x, y, y_pred, sample_weight)


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_metrics_write_to_metrics_only(run_eagerly):
    model = KeepsCenters()
    model.compile(
        tiny.private_sgd(gradient_engine="auto"),
        "sparse_categorical_crossentropy",
        run_eagerly=run_eagerly,
    )
    with pytest.raises(keras_dpopt.UnsupportedModelError, match="compute_metrics"):
        tiny.fit(model, X, Y, batch_size=4)
    assert not model.center.numpy().any()
    assert tiny.steps(model) == 0


def test_a_loss_does_not_read_a_metric():
    seen = keras.metrics.SparseCategoricalAccuracy(name="seen")

    def loss(y, p):
        return seen.total * keras.losses.sparse_categorical_crossentropy(y, p)

    optimizer = tiny.private_sgd(gradient_engine="auto")
    model = tiny.classifier(optimizer, loss=loss, metrics=[seen])
    with pytest.raises(keras_dpopt.UnsupportedModelError, match="reads the metric"):
        tiny.fit(model, X, Y, batch_size=4)
    assert tiny.steps(model) == 0


class Stateful(keras.layers.Layer):
    """Keeps raw data in something that is no variable."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.seen = kind, []
        self.queue = tf.queue.FIFOQueue(100, [tf.float32], [[]])

    def remember(self, x):
        self.seen.append(float(np.sum(x)))
        return np.float32(sum(self.seen))

    def call(self, x):
        if self.kind != "queue":
            stateful = self.kind == "numpy_function"
            total = tf.numpy_function(self.remember, [x], tf.float32, stateful)
            return x + tf.ensure_shape(total, [])
        with tf.control_dependencies([self.queue.enqueue(tf.reduce_sum(x))]):
            return x + tf.cast(self.queue.size(), tf.float32)


@pytest.mark.parametrize("kind", ["numpy_function", "said to be stateless", "queue"])
@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_state_in_whatever_form_is_refused(kind, engine):
    model = keras_dpopt.DPSequential(
        [keras.Input((4,)), Stateful(kind), *tiny.softmax_layers()]
    )
    optimizer = tiny.private_sgd(gradient_engine=engine)
    model.compile(optimizer, "sparse_categorical_crossentropy")
    with pytest.raises(keras_dpopt.UnsupportedModelError, match="keeps state"):
        tiny.fit(model, X, Y, batch_size=4)
    assert tiny.steps(model) == 0


def test_random_operations_and_reads_are_allowed():
    variable = tf.Variable(1.0)

    @tf.function
    def harmless(x):
        return x + tf.random.normal([2]) + variable

    step_checks.refuse_state(harmless.get_concrete_function(tf.ones(2)).graph)

    @tf.function
    def writes(x):
        return variable.assign_add(tf.reduce_sum(x))

    with pytest.raises(keras_dpopt.UnsupportedModelError, match="AssignAddVariableOp"):
        step_checks.refuse_state(writes.get_concrete_function(tf.ones(2)).graph)


def test_two_private_models_do_not_train_the_same_weights_at_once():
    base = keras.Sequential([keras.Input((4,)), *tiny.softmax_layers()])
    first, second = keras_dpopt.make_private(base), keras_dpopt.make_private(base)
    for model in (first, second):
        model.compile(tiny.private_sgd(), "sparse_categorical_crossentropy")

    class TrainsTheOther(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            tiny.fit(second, X, Y, batch_size=4)

    with pytest.raises(RuntimeError, match="at this moment"):
        tiny.fit(first, X, Y, batch_size=4, callbacks=[TrainsTheOther()])
    tiny.fit(second, X, Y, batch_size=4)
    assert tiny.steps(second) == 6


def test_all_zero_weights_are_watched_too():
    """Their digest must not pass for "unknown"."""
    variable = keras.Variable(np.zeros(3), dtype="float32")
    watch = weights_watch.WeightsWatch([variable])
    watch.start()
    watch.compare()
    assert not watch.noticed()
    variable.assign(np.ones(3))
    watch.compare()
    assert watch.noticed()

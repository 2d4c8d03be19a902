"""One test for each thing in keras_compat.py: it fails when Keras moves what is behind.

Each says what Keras does, independently of the library.
"""

import inspect
import pathlib
import subprocess
import sys

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf
import tiny

import keras_dpopt
from keras_dpopt import keras_compat, tensorflow_compat

X, Y = tiny.rows()


def plain(**kwargs):
    model = keras.Sequential([keras.Input((4,)), *tiny.softmax_layers()])
    if kwargs:
        model.compile("sgd", **kwargs)
    return model


def test_every_function_has_a_test():
    functions = {
        name
        for name, value in vars(keras_compat).items()
        if inspect.isfunction(value)
        and value.__module__ == keras_compat.__name__
        and not name.startswith("_")
    }
    text = pathlib.Path(__file__).read_text()
    missing = {name for name in functions if f"keras_compat.{name}(" not in text}
    assert not missing


# --- names ---------------------------------------------------------------------------


def test_classes_are_keras_own():
    inputs = keras.Input((2,))
    assert isinstance(keras.Model(inputs, inputs), keras_compat.Functional)
    assert keras_compat.Loss is keras.losses.Loss
    assert keras_compat.SeedGenerator is keras.random.SeedGenerator
    assert issubclass(keras.Layer, keras_compat.KerasSaveable)


def test_functional_init_arguments():
    detect = keras_compat.functional_init_arguments
    assert detect((1, 2), {})
    assert detect((1,), {"outputs": 2})
    assert detect((), {"inputs": 1, "outputs": 2})
    assert not detect((), {"name": "model"})


def test_pythonify_logs():
    logs = keras_compat.pythonify_logs({"loss": tf.constant(1.5)})
    assert logs == {"loss": 1.5} and type(logs["loss"]) is float


# --- data ----------------------------------------------------------------------------


def test_arrays_in_memory():
    weight = {0: 1.0, 1: 2.0, 2: 3.0}
    x, y, sample_weight = keras_compat.arrays_in_memory(
        {"a": X.astype("float64")}, Y, None, weight
    )
    assert x["a"].dtype == np.float32 and len(x["a"]) == 12
    np.testing.assert_array_equal(y, Y)
    np.testing.assert_allclose(sample_weight, [weight[c] for c in Y])
    x, y, weight = keras_compat.arrays_in_memory(
        X[:0].astype("float64"), Y[:0], None, weight
    )
    assert x.shape == (0, 4) and x.dtype == np.float32
    assert len(y) == len(weight) == 0


def test_unpack_x_y_sample_weight():
    for element, expected in (
        ((1,), (1, None, None)),
        ((1, 2), (1, 2, None)),
        ((1, 2, 3), (1, 2, 3)),
        ({"a": 1}, ({"a": 1}, None, None)),
    ):
        assert keras_compat.unpack_x_y_sample_weight(element) == expected


def test_train_validation_split():
    (x, y, w), (val_x, val_y, val_w) = keras_compat.train_validation_split(
        (X, Y, None), 0.25
    )
    np.testing.assert_array_equal(x, X[:9])
    np.testing.assert_array_equal(val_y, Y[9:])
    assert len(y) == 9 and len(val_x) == 3 and w is None and val_w is None


def test_is_data_set():
    class Items(keras.utils.PyDataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return X, Y

    data = tf.data.Dataset.from_tensor_slices(X)
    for thing in (data, data.batch(3), Items(), (x for x in X)):
        assert keras_compat.is_data_set(thing)
    for thing in (X, [X], {"a": X}, tf.constant(X), X.tolist(), None):
        assert not keras_compat.is_data_set(thing)


def test_data_adapter():
    class Items(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return X[:2] + index, Y[:2]

    adapter = keras_compat.data_adapter(Items(), {0: 1.0, 1: 1.0, 2: 1.0})
    elements = list(adapter.get_tf_dataset())
    assert len(elements) == 3 and len(elements[0]) == 3
    adapter.on_epoch_begin()
    adapter.on_epoch_end()


# --- models --------------------------------------------------------------------------


def test_build_for():
    model = keras.Sequential(tiny.softmax_layers())
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    specs = {
        "x": tf.TensorSpec([None, 4], tf.float32),
        "y": tf.TensorSpec([None], tf.int64),
    }
    keras_compat.build_for(model, specs)
    assert model.built and len(model.trainable_variables) == 4
    assert model.optimizer.built
    assert keras_compat.compiled_losses(model).built


def test_replace_base():
    """What Keras itself would do, it would do to the base class."""
    from keras.src.models import model as keras_model

    assert "cls.__bases__" in inspect.getsource(
        keras_model.inject_functional_model_class
    )

    class Base(keras.Model):
        pass

    class Functional(Base, keras_compat.Functional):
        pass

    class Mine(Base):
        def __init__(self):
            inputs = keras.Input((2,))
            keras_compat.replace_base(type(self), Base, Functional)
            super().__init__(inputs=inputs, outputs=keras.layers.Dense(1)(inputs))

    assert Mine()(np.ones((1, 2))).shape == (1, 1)
    assert Base.__bases__ == (keras.Model,)
    assert Mine.__bases__ == (Functional,)


def test_flat_layers():
    inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model = keras.Sequential([inner, keras.layers.Dense(1)])
    layers = list(keras_compat.flat_layers(model))
    assert {model, inner, inner.layers[0], model.layers[1]} <= set(layers)


def test_seed_states():
    dropout = keras.layers.Dropout(0.5)
    model = keras.Sequential([keras.Input((4,)), dropout, dropout])
    states = keras_compat.seed_states(model)
    assert len(states) == 2  # the layer's, and the global one
    assert states[0] is dropout.seed_generator.state
    before = states[1].numpy().copy()
    keras.random.uniform(())
    assert not np.array_equal(before, states[1].numpy())


def test_keras_mask():
    layer = keras.layers.Embedding(3, 2, mask_zero=True)
    out = layer(np.array([[1, 0]]))
    np.testing.assert_array_equal(keras_compat.keras_mask(out), [[True, False]])
    assert keras_compat.keras_mask(tf.constant(1.0)) is None


def test_set_keras_mask():
    tensor = tf.ones((1, 2, 3))
    keras_compat.set_keras_mask(tensor, tf.constant([[True, False]]))
    seen = []

    class Spy(keras.layers.Layer):
        def call(self, inputs, mask=None):
            seen.append(mask)
            return inputs

    Spy()(tensor)
    np.testing.assert_array_equal(seen[-1], [[True, False]])


def test_collected_losses():
    layer = keras.layers.ActivityRegularization(l2=1.0)
    with keras.StatelessScope(collect_losses=True) as scope:
        layer(tf.ones((1, 3)))
    assert [float(v) for v in keras_compat.collected_losses(scope)] == [3.0]


def test_state_of():
    variable = keras.Variable(1.0)
    with keras.StatelessScope([(variable, tf.constant(2.0))]) as scope:
        before = keras_compat.state_of(scope)
        variable.assign(3.0)
        after = keras_compat.state_of(scope)
    assert float(before[id(variable)]) == 2
    assert float(after[id(variable)]) == 3
    assert after[id(variable)] is not before[id(variable)]


def test_own_variables():
    class Layer(keras.Layer):
        def __init__(self):
            super().__init__()
            self.mean = keras.metrics.Mean()
            self.kept = self.add_weight(shape=())

    layer = Layer()
    own = {id(v) for v in keras_compat.own_variables(layer)}
    assert own == {id(v) for v in [layer.kept, *layer.mean.variables]}


def test_call_for_training():
    class Model(keras.Model):
        def call(self, x, training=None):
            return x + 1.0 if training else x

    class Without(keras.Model):
        def call(self, x):
            return x

    assert keras_compat.call_for_training(Model(), tf.zeros(())) == 1
    assert keras_compat.call_for_training(Without(), tf.zeros(())) == 0


def test_call_nested():
    class Model(keras.Model):
        def call(self, x, training=None, mask=None):
            return x + (10.0 if training else 0.0) + (0.0 if mask is None else mask)

    class Without(keras.Model):
        def call(self, x):
            return x

    one, nothing = tf.constant(1.0), tf.zeros(())
    assert keras_compat.call_nested(Model(), nothing, True, one) == 11
    assert keras_compat.call_nested(Model(), nothing, False, None) == 0
    assert keras_compat.call_nested(Without(), nothing, True, one) == 0


def test_overridden_training():
    class Step(keras.Model):
        def train_step(self, data):
            return {}

    class Both(Step):
        def compute_loss(self, *args, **kwargs):
            return 0.0

    assert keras_compat.overridden_training(plain()) == []
    assert keras_compat.overridden_training(Step()) == ["train_step"]
    assert keras_compat.overridden_training(Both()) == ["train_step", "compute_loss"]


def test_steps_without_privacy():
    model = plain(loss="sparse_categorical_crossentropy")
    whole = keras.Sequential([model, keras.layers.Dense(1)])
    assert keras_compat.steps_without_privacy(whole) == 0
    for _ in range(3):
        model.train_on_batch(X, Y)
    assert keras_compat.steps_without_privacy(model) == 3
    assert keras_compat.steps_without_privacy(whole) == 3
    private = tiny.classifier()
    tiny.fit(private, X, Y, batch_size=4)
    assert keras_compat.steps_without_privacy(private) == 0


def test_compute_loss_calls_an_override_as_keras_does():
    class Own(keras.Model):
        def call(self, x):
            return [x, 2 * x]

        def compute_loss(self, x, y, y_pred, sample_weight, training):
            assert sample_weight is None and training is True
            return 3 * super().compute_loss(x, y, y_pred, sample_weight, training)

    model = Own()
    model.compile("sgd", "mse")
    x = tf.ones((1, 1))
    model.train_on_batch(x, [x, x])
    compiled = model._compile_loss
    trackers = [float(metric.result()) for metric in compiled.metrics]
    value = keras_compat.compute_loss(model, x, [x, x], model(x))
    assert float(value) == 3.0  # 3 * ((1 - 1)^2 + (2 - 1)^2)
    assert model._compile_loss is compiled
    assert [float(metric.result()) for metric in compiled.metrics] == trackers


def test_overrides_compute_loss():
    class Own(keras_dpopt.DPModel):
        def compute_loss(self, *args, **kwargs):
            return 0.0

    assert keras_compat.overrides_compute_loss(Own())
    assert not keras_compat.overrides_compute_loss(plain())
    assert not keras_compat.overrides_compute_loss(tiny.classifier())


# --- compiled losses -----------------------------------------------------------------


def built(loss=("mse", "mse"), **kwargs):
    inputs = keras.Input((4,))
    outputs = [keras.layers.Dense(1)(inputs) for _ in range(2)]
    model = keras.Model(inputs, outputs)
    model.compile("sgd", list(loss), **kwargs)
    model.evaluate(X, (X[:, :1], X[:, 1:2]), verbose=0)
    return model


def test_compiled_losses():
    assert keras_compat.compiled_losses(plain()) is None
    model = built()
    y = (tf.zeros((1, 1)), tf.zeros((1, 1)))
    assert keras_compat.compiled_losses(model)(y, y) == 0


def test_record_loss():
    model = built(loss_weights=[1.0, 10.0])
    calls = []

    def loss(single, y_true, y_pred, sample_weight):
        del y_true, y_pred
        calls.append((single.name, sample_weight))
        return tf.constant(float(len(calls)))

    compiled = keras_compat.compiled_losses(model)
    trackers = [m.result() for m in compiled.metrics]
    replaced = keras_compat.record_loss(compiled, loss)
    y = [tf.zeros((1, 1)), tf.zeros((1, 1))]
    assert replaced(y, y, [1.0, 2.0]) == 1 * 1 + 10 * 2
    assert [weight for _, weight in calls] == [1.0, 2.0]
    assert [m.result() for m in compiled.metrics] == trackers
    assert len(trackers) == 2
    assert compiled(y, y) == 0  # the model's own is as it was


def test_update_loss_trackers():
    model = built()
    model.reset_metrics()
    y = (tf.zeros((2, 1)), tf.zeros((2, 1)))
    y_pred = [tf.ones((2, 1)), 2 * tf.ones((2, 1))]
    keras_compat.update_loss_trackers(
        model, tf.constant([3.0, 5.0]), y, y_pred, None, tf.constant(2)
    )
    # One record more: it weighs half as much as the two before.
    one = (tf.zeros((1, 1)), tf.zeros((1, 1)))
    off = [tf.fill((1, 1), 4.0), tf.fill((1, 1), 2.0)]
    keras_compat.update_loss_trackers(model, tf.constant([4.0]), one, off, None, 1)
    results = model.get_metrics_result()
    values = sorted(float(v) for v in results.values())
    assert values == [4.0, 4.0, 6.0]  # per output, and the mean of the records
    assert float(results["loss"]) == 4.0


# --- optimizers ----------------------------------------------------------------------


def test_update_moving_average():
    optimizer = keras.optimizers.SGD(
        1.0, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3
    )
    variable = keras.Variable([8.0])
    optimizer.build([variable])
    expected = []
    twin = keras.Variable([8.0])
    keras_own = keras.optimizers.SGD(
        1.0, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3
    )
    for _ in range(4):
        keras_own.apply([tf.constant([1.0])], [twin])
        expected.append(float(twin.numpy()[0]))
        variable.assign(variable - 1.0)
        keras_compat.update_moving_average(optimizer)
        optimizer.iterations.assign_add(1)
        assert float(variable.numpy()[0]) == expected[-1]
    assert expected != [7, 6, 5, 4]  # the overwriting did happen


def moving_averages(values, decay, compiled, first=0):
    """The averages after each of these values, with a warm-up."""
    optimizer = keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=decay)
    variables = [keras.Variable(0.0), keras.Variable([0.0, 0.0])]
    optimizer.build(variables)
    optimizer.iterations.assign(first)

    def step(value):
        for variable in variables:
            variable.assign(tf.fill(variable.shape, value))
        keras_compat.update_moving_average(optimizer, warmup=True)
        optimizer.iterations.assign_add(1)

    if compiled:
        step = tf.function(step, autograph=False)
    seen = []
    for value in values:
        step(tf.constant(value, tf.float32))
        averages = optimizer._model_variables_moving_average
        seen.append(float(averages[0].numpy()))
        np.testing.assert_array_equal(averages[1].numpy(), seen[-1])
    return seen


@pytest.mark.parametrize("compiled", [False, True])
def test_moving_average_warms_up(compiled):
    """Golden values; where the average starts is what the first update leaves."""
    entry = helpers.golden()["methods"]["param_ema_warmup"]
    assert entry["init"] == entry["values"][0]
    want = [row["ema"] for row in entry["trace"]]
    got = moving_averages(entry["values"], entry["decay"], compiled)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    # The decay is the limit: here from the third update on.
    got = moving_averages(entry["values"], 0.2, compiled)
    average, want = entry["init"], []
    for mu, value in zip([0.1, 2 / 11, 0.2, 0.2, 0.2], entry["values"], strict=True):
        average = mu * average + (1 - mu) * value
        want.append(average)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_warm_up_goes_on_where_iterations_are_restored():
    (got,) = moving_averages([2.0], 0.9999, True, first=7)
    np.testing.assert_allclose(got, 2.0 * (1 - 8 / 17), rtol=1e-6)  # from zero
    (got,) = moving_averages([2.0], 0.9999, True, first=10**9)
    np.testing.assert_allclose(got, 2e-4, rtol=1e-3)


def test_moving_average_without_use_ema():
    optimizer = keras.optimizers.SGD(1.0)
    variable = keras.Variable([8.0])
    optimizer.build([variable])
    keras_compat.update_moving_average(optimizer, warmup=True)
    assert float(variable.numpy()[0]) == 8.0


def test_moving_average_is_that_of_keras_to_the_last_bit():
    draws = np.random.default_rng(0).normal(size=(5, 3)).astype("float32")
    averages = []
    for own in (True, False):
        optimizer = keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.9999)
        variable = keras.Variable([0.0, 0.0, 0.0])
        optimizer.build([variable])
        for value in draws:
            variable.assign(value)
            if own:
                optimizer._update_model_variables_moving_average([variable])
            else:
                keras_compat.update_moving_average(optimizer)
            optimizer.iterations.assign_add(1)
        averages.append(optimizer._model_variables_moving_average[0].numpy())
    np.testing.assert_array_equal(*averages)


def test_uses_weight_decay():
    optimizer = keras.optimizers.SGD(1.0, weight_decay=0.1)
    kernel, bias = keras.Variable(1.0, name="kernel"), keras.Variable(1.0, name="bias")
    optimizer.exclude_from_weight_decay(var_list=[bias])
    assert keras_compat.uses_weight_decay(optimizer, kernel)
    assert not keras_compat.uses_weight_decay(optimizer, bias)


def test_optimizer_variables_of():
    optimizer = keras.optimizers.SGD(1.0)
    variables = [keras.Variable(1.0), keras.Variable(2.0)]
    optimizer.build(variables)
    known = keras_compat.optimizer_variables_of(optimizer)
    assert [id(v) for v in known] == [id(v) for v in variables]


# --- TensorFlow ----------------------------------------------------------------------


def test_eager_mode():
    with tf.Graph().as_default(), tensorflow_compat.eager_mode():
        assert tf.executing_eagerly()
        assert float(tf.constant(1.5).numpy()) == 1.5


def test_strategies_of():
    default = tf.distribute.get_strategy()
    assert keras_compat.strategies_of(tiny.classifier()) == (None, default)
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        assert keras_compat.strategies_of(tiny.classifier()) == (strategy, strategy)


def test_is_op_determinism_enabled():
    """In a process of its own: it cannot be turned off again for good."""
    program = """
import tensorflow as tf
from keras_dpopt import tensorflow_compat
assert not tensorflow_compat.is_op_determinism_enabled()
tf.config.experimental.enable_op_determinism()
assert tensorflow_compat.is_op_determinism_enabled()
"""
    subprocess.run([sys.executable, "-c", program], check=True)


# --- what the library relies on without touching it ----------------------------------


def test_fit_calls_what_private_training_overrides():
    """Keras' fit goes through these; where it does not, training is not private."""
    calls = []

    class Model(keras.Sequential):
        def make_train_function(self, force=False):
            calls.append("make_train_function")
            return super().make_train_function(force)

        def _maybe_symbolic_build(self, iterator=None, data_batch=None):
            calls.append("_maybe_symbolic_build")
            return super()._maybe_symbolic_build(iterator, data_batch)

        def train_step(self, data):
            calls.append("train_step")
            return super().train_step(data)

    for train in ("fit", "train_on_batch"):
        calls.clear()
        model = Model([keras.Input((4,)), *tiny.softmax_layers()])
        model.compile("sgd", "sparse_categorical_crossentropy")
        getattr(model, train)(X, Y)
        names = {"make_train_function", "_maybe_symbolic_build", "train_step"}
        assert set(calls) == names


def test_apply_gradients_goes_through_apply():
    """Where a private optimizer refuses raw gradients."""
    calls = []

    class Optimizer(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            calls.append("apply")
            return super().apply(grads, trainable_variables)

    variable = keras.Variable(1.0)
    Optimizer(1.0).apply_gradients([(tf.constant(1.0), variable)])
    assert calls == ["apply"]

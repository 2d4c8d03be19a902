"""Training as Keras users know it, where a private step could have made it differ."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
import tiny

import keras_dpopt
from keras_dpopt import data, sampling


def private_sgd(**options):
    options = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, **options}
    return keras_dpopt.DPSGD(options.pop("learning_rate", 0.1), **options)


@pytest.mark.parametrize("kind", ["DPModel", "DPSequential", "PrivateModel"])
@pytest.mark.parametrize(
    "method",
    ["fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "compile"],
)
def test_arguments_come_in_keras_order(kind, method):
    ours = inspect.signature(getattr(getattr(keras_dpopt, kind), method)).parameters
    theirs = inspect.signature(getattr(keras.Model, method)).parameters
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    expected = [n for n, p in theirs.items() if p.kind is positional]
    assert [n for n, p in ours.items() if p.kind is positional] == expected


class Scaled(keras.Model):
    """A model with a preprocessor, as keras_hub's tasks have one."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def preprocess_samples(self, x, y=None, sample_weight=None):
        return keras.utils.pack_x_y_sample_weight(10.0 * x, y, sample_weight)


def test_every_way_in_goes_through_the_preprocessor():
    model = keras_dpopt.make_private(Scaled())
    model.compile(private_sgd(expected_batch_size=4), "mse")
    x, y = tf.ones((4, 3)), tf.zeros((4, 1))
    model.train_on_batch(x, y)
    inside = np.asarray(model.base_model(10.0 * x))
    np.testing.assert_allclose(model.predict(x, 2, 0), inside, rtol=1e-6)
    np.testing.assert_allclose(model.predict_on_batch(x), inside, rtol=1e-6)
    loss = float(np.mean(inside**2))
    assert model.evaluate(x, y, 2, 0) == pytest.approx(loss, rel=1e-6)
    assert model.test_on_batch(x, y) == pytest.approx(loss, rel=1e-6)
    with pytest.raises(TypeError, match="tf.data.Dataset"):
        model.evaluate(batch for batch in [(x, y)])


@pytest.mark.parametrize("engine", ["vectorized", "loop"])
def test_sequences_of_unknown_length_train(engine):
    inputs = keras.Input((None, 2))
    outputs = keras.layers.GlobalAveragePooling1D()(keras.layers.Dense(3)(inputs))
    model = keras_dpopt.DPModel(inputs, outputs)
    optimizer = private_sgd(
        expected_batch_size=5, microbatch_size=4, gradient_engine=engine
    )
    model.compile(optimizer, "mse")
    lengths = tf.data.Dataset.from_tensor_slices([5, 2, 7, 3, 4])
    rows = lengths.map(lambda n: (tf.ones((n, 2)), tf.zeros((3,))))
    model.fit(rows.padded_batch(5, padded_shapes=([None, 2], [3])), verbose=0)
    assert model.privacy_ledger.sync().total_steps == 1


@pytest.mark.parametrize("wrapped", [False, True])
def test_float16_layers_have_gradients_of_their_own_range(wrapped):
    # 1e-8 is below the least float16; 2^10 times it is not.
    layers = [
        keras.Input((1,)),
        keras.layers.Dense(
            1, dtype="mixed_float16", use_bias=False, kernel_initializer="zeros"
        ),
    ]
    model = keras_dpopt.DPSequential(layers)
    if wrapped:
        model = keras_dpopt.make_private(keras.Sequential(layers))
    model.compile(
        private_sgd(learning_rate=1.0, noise_multiplier=0.0, expected_batch_size=1),
        loss=lambda y, p: 2e-8 * keras.ops.cast(p, "float32"),
    )
    before = model.get_weights()[0]
    model.train_on_batch(np.ones((1, 1)), np.ones((1, 1)))
    assert model.get_weights()[0] < before


def test_frozen_weights_do_not_shrink_the_microbatch():
    assert data.microbatch_size(20_000, 1024) == 128
    assert data.microbatch_size(100_000_000, 1024) == 1
    frozen = keras.layers.Dense(3000, trainable=False)
    model = keras_dpopt.DPSequential(
        [keras.Input((3000,)), frozen, keras.layers.Dense(1)]
    )
    optimizer = private_sgd(expected_batch_size=64, gradient_engine="vectorized")
    model.compile(optimizer, "mse")
    model.train_on_batch(np.ones((2, 3000)), np.ones((2, 1)))
    specs = {"x": tf.TensorSpec([None, 3000]), "y": tf.TensorSpec([None, 1])}
    assert model._prepare(specs, lambda: None) == 64


def test_a_stop_asked_for_before_the_first_batch_holds():
    class Stop(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.model.stop_training = True

    model = tiny.classifier()
    model.fit(*tiny.rows(), batch_size=4, epochs=3, verbose=0, callbacks=[Stop()])
    assert model.privacy_ledger.sync().total_steps == 1  # as Keras: one batch


def test_a_budget_by_epochs_ends_without_an_epoch_of_no_steps():
    model = keras_dpopt.DPSequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(private_sgd(noise_multiplier=3.0, expected_batch_size=4), "mse")
    rows = tf.data.Dataset.from_tensor_slices((np.ones((8, 2)), np.ones((8, 1))))
    budget = keras_dpopt.PrivacyBudget(target_epsilon=3.0, delta=1e-5)
    history = model.fit(
        rows.batch(4), epochs=50, verbose=0, once_per_epoch=True, callbacks=[budget]
    ).history
    epochs = len(history["loss"])
    assert 1 < epochs < 50
    assert model.privacy_ledger.sync().total_steps == 2 * epochs
    assert min(history["loss"]) > 0
    assert history["epsilon"][-1] <= 3.0


def test_a_loaded_file_does_not_change_the_batch_size_of_the_constructor(tmp_path):
    def model(size):
        model = keras_dpopt.DPSequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(private_sgd(expected_batch_size=size), "mse")
        return model

    first = model(16)
    first.train_on_batch(np.ones((2, 2)), np.ones((2, 1)))
    first.save_weights(tmp_path / "a.weights.h5")
    second = model(32)
    second.load_weights(tmp_path / "a.weights.h5")
    assert second.optimizer.expected_batch_size == 32
    third = model(None)
    third.load_weights(tmp_path / "a.weights.h5")
    assert third.optimizer.expected_batch_size == 16


def test_large_batch_sizes_are_exact():
    optimizer = private_sgd(expected_batch_size=20_000_003)
    assert optimizer.expected_batch_size == 20_000_003


class Liar(sampling.PoissonSampler):
    """Says Poisson and draws every row."""

    def indices(self, key, step, train_size, batch_size):
        return tf.range(train_size, dtype=tf.int64)


@pytest.mark.parametrize("sampler", ["poisson", keras_dpopt.PoissonSampler, Liar()])
def test_only_our_samplers_are_believed(sampler):
    model = tiny.classifier()
    with pytest.raises(TypeError, match=r"Pass PoissonSampler\(\)"):
        model.fit(*tiny.rows(), batch_size=4, sampler=sampler)
    assert not model.privacy_ledger.sync().total_steps


def test_a_pydataset_is_drawn_in_random_order_as_in_keras():
    class Numbers(keras.utils.PyDataset):
        def __len__(self):
            return 64

        def __getitem__(self, i):
            return np.full((1, 1), float(i)), np.zeros((1, 1))

    def losses(shuffle):
        class Seen(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                seen.append(logs["loss"])

        seen = []
        model = keras_dpopt.DPSequential(
            [keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")]
        )
        optimizer = private_sgd(learning_rate=0.0, expected_batch_size=1)
        model.compile(optimizer, loss=lambda y, p: p)
        model.fit(Numbers(), shuffle=shuffle, verbose=0, callbacks=[Seen()])
        return np.asarray(seen)

    running_mean = np.cumsum(np.arange(64.0)) / np.arange(1, 65)
    np.testing.assert_allclose(losses(False), running_mean, rtol=1e-5)
    assert not np.allclose(losses(True), running_mean)  # false alarm: 1 in 64!

"""Posterior prediction: closed forms of linear models, and what must not be touched.

The false-alarm rates of the statistical tests are beside their thresholds.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dpopt
from keras_dpopt import calibration, keys, prng
from keras_dpopt.posterior import posterior_predict
from keras_dpopt.posterior_samples import PosteriorSamples
from tests import helpers, tiny

layers = keras.layers


def linear(optimizer, features=6):
    """y = <w, x>, trained for a step."""
    model = helpers.rows_model(optimizer, (features,))
    x = np.random.default_rng(1).normal(size=(8, features)).astype("f4")
    tiny.fit(model, x, helpers.targets(x), batch_size=4)
    return model, x


def state(model):
    return [np.array(v) for v in model.variables]


def chi_square_bounds(samples, z=4.5):
    """Where (S-1) s^2 / sigma^2 / (S-1) lies, two-sided false-alarm rate 7e-6.

    By Wilson and Hilferty's normal approximation.
    """
    c = 2.0 / (9.0 * (samples - 1))
    return (1 - c - z * c**0.5) ** 3, (1 - c + z * c**0.5) ** 3


# --- Gaussian posteriors ------------------------------------------------------------


@pytest.mark.parametrize("name", ["DPIVON", "DPBayesByBackprop"])
def test_variance_of_a_linear_model_is_that_of_the_posterior(name):
    model, x = linear(helpers.make_optimizer(helpers.OPTIMIZERS[name]))
    # Different scales, so that a mixed-up coordinate shows.
    slot = "precision" if name == "DPIVON" else "rho"
    spread = np.linspace(0.5, 3.0, 6)
    model.optimizer.named_variables()[f"{slot}.0"].assign(spread)
    (scale,) = model.optimizer.posterior_scale()
    result = posterior_predict(model, x, num_samples=1000, seed=5, batch_size=8)
    wanted = (x**2 @ np.square(scale))[:, np.newaxis]
    ratio = result.variance / wanted
    low, high = chi_square_bounds(1000)  # 8 rows: 6e-5 in all
    assert (low < ratio).all() and (ratio < high).all()
    assert low > 0.79 and high < 1.22  # so 25 % more or less is noticed
    error = (result.mean - model.predict(x, verbose=0)) / np.sqrt(wanted / 1000)
    assert np.abs(error).max() < 5.0  # 5e-6


def test_draws_are_joint_over_the_rows_and_batches():
    """One weight sample serves all rows: outputs are linear in x within a sample."""
    model, x = linear(helpers.make_optimizer(keras_dpopt.DPBayesByBackprop))
    x = np.concatenate([x, x.sum(axis=0, keepdims=True)])
    kept = posterior_predict(model, x, 5, seed=1, batch_size=4, keep_samples=True)
    outputs = kept.samples
    assert outputs.shape == (5, 9, 1)
    np.testing.assert_allclose(outputs[:, :8].sum(axis=1), outputs[:, 8], atol=1e-5)
    assert len(np.unique(outputs[:, 0])) == 5  # drawn anew for each sample
    np.testing.assert_allclose(kept.mean, outputs.mean(axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        kept.variance, outputs.var(axis=0, ddof=1), rtol=1e-4, atol=1e-9
    )


def test_seeds_repeat_and_nothing_else_does():
    model, x = linear(helpers.make_optimizer(keras_dpopt.DPIVON))

    def predict(seed, size=8):
        return posterior_predict(model, x, 3, seed=seed, batch_size=size).mean

    assert np.array_equal(predict(1), predict(1))
    assert not np.array_equal(predict(1), predict(2))
    assert not np.array_equal(predict(None), predict(None))
    # Weights do not depend on the batches.
    np.testing.assert_allclose(predict(1), predict(1, 3), rtol=1e-5)


def test_no_secret_key_is_read_and_no_variable_written(monkeypatch):
    seed = 7
    model, x = linear(helpers.make_optimizer(keras_dpopt.DPIVON, seed=seed))
    secret = {int(k) for k in model.optimizer.keys.export()["keys"]}
    before, releases = state(model), model.optimizer.releases()
    slots = [np.array(v) for v in model.optimizer.variables]

    def refuse(self):
        raise AssertionError("a secret key was read")

    for purpose in ("noise", "sampler", "layers", "weights"):
        monkeypatch.setattr(keys.SecretKeys, purpose, property(refuse))
    used = []
    random_bits = prng.random_bits

    def spy(key, *args, **kwargs):
        used.append(int(key))
        return random_bits(key, *args, **kwargs)

    monkeypatch.setattr(prng, "random_bits", spy)
    # With the very seed of the optimizer.
    posterior_predict(model, x, 2, seed=seed)
    assert used and not secret & set(used)
    assert not tiny.moved(before, state(model))
    assert not tiny.moved(slots, [np.array(v) for v in model.optimizer.variables])
    assert model.optimizer.releases() == releases
    assert not model.privacy_statement(delta=1e-5).notes


def test_posterior_without_training_is_refused():
    optimizer = helpers.make_optimizer(keras_dpopt.DPIVON)
    model = helpers.rows_model(optimizer, (3,))
    with pytest.raises(ValueError, match="Call `fit`"):
        posterior_predict(model, np.ones((2, 3)))
    optimizer.build(model.trainable_variables)  # but N is not known
    with pytest.raises(ValueError, match="Call `fit`"):
        posterior_predict(model, np.ones((2, 3)))


# --- dropout ------------------------------------------------------------------------


def dropout_model(features=5):
    model = keras.Sequential(
        [
            keras.Input((features,)),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(1, use_bias=False),
        ]
    )
    model.layers[0].moving_mean.assign(np.linspace(-1, 1, features))
    model.layers[0].moving_variance.assign(np.linspace(0.5, 2, features))
    return model


def test_dropout_has_the_moments_of_a_linear_model():
    """Var = p/(1-p) * sum_j (w_j x_j)^2, after batch normalization by moving averages.

    The batch normalization in training mode would make equal rows zero.
    """
    model = dropout_model()
    x = np.repeat([np.linspace(0.5, 2.0, 5)], 400, axis=0).astype("f4")
    before = state(model)
    result = posterior_predict(model, x, 8, seed=3, batch_size=100, keep_samples=True)
    outputs = result.samples[:, :, 0]  # 8 samples of 400 equal rows
    normal = layers.BatchNormalization.call(model.layers[0], x[:1], training=False)
    terms = np.ravel(normal) * np.ravel(model.layers[-1].kernel)
    variance = 0.3 / 0.7 * np.sum(terms**2)
    n = outputs.size
    # 3200 independent draws; kurtosis of a sum of five is below 3.5: 5 sigma, 6e-7.
    assert abs(outputs.mean() - terms.sum()) < 5 * (variance / n) ** 0.5
    assert abs(outputs.var() / variance - 1) < 5 * (2.5 / n) ** 0.5 < 0.15
    # Each row has a mask of its own: 2^5 outputs, and no two rows go together.
    assert len(np.unique(outputs[0])) > 15
    correlation = np.corrcoef(outputs[:, :200].ravel(), outputs[:, 200:].ravel())[0, 1]
    assert abs(correlation) < 5 / 1600**0.5
    # ... and each sample another.
    assert not np.array_equal(outputs[0], outputs[1])
    assert not tiny.moved(before, state(model))
    assert not any("call" in vars(layer) for layer in model.layers)


@pytest.mark.parametrize(
    "random",
    [
        lambda: layers.SpatialDropout1D(0.5),
        lambda: layers.GaussianNoise(0.5),
        lambda: layers.AlphaDropout(0.5),
        lambda: layers.LSTM(3, dropout=0.5),
        lambda: layers.Bidirectional(layers.GRU(3, recurrent_dropout=0.5)),
    ],
    ids=["spatial", "gaussian", "alpha", "lstm", "bidirectional"],
)
def test_random_layers_draw(random):
    model = keras.Sequential([keras.Input((4, 3)), random(), layers.Flatten()])
    result = posterior_predict(model, np.ones((2, 4, 3)), 3, seed=1)
    assert (result.variance > 0).any()
    # Rows are equal, so what differs is drawn.
    assert not np.array_equal(result.mean[0], result.mean[1])


def test_what_is_not_random_is_refused_and_augmentation_stays_off():
    still = [
        layers.RandomContrast(0.9),
        layers.Dropout(0.0),
        layers.GaussianNoise(0.0),
    ]
    model = keras.Sequential([keras.Input((2, 2, 1)), *still])
    with pytest.raises(ValueError, match="Dropout layer.*PosteriorSamples"):
        posterior_predict(model, np.ones((1, 2, 2, 1)))
    recurrent = keras.Sequential([keras.Input((2, 2)), layers.LSTM(2)])
    with pytest.raises(ValueError, match="nothing to sample from"):
        posterior_predict(recurrent, np.ones((1, 2, 2)))
    model = keras.Sequential([*model.layers, layers.Dropout(0.5)])
    x = np.linspace(0.1, 1.0, 4).reshape(1, 2, 2, 1)
    kept = posterior_predict(model, x, 4, seed=1, keep_samples=True).samples
    # Dropout alone: every entry is 0 or twice its input.
    assert np.isclose(kept, 0).any()
    assert (np.isclose(kept, 0) | np.isclose(kept, 2 * x)).all()


def test_layers_of_ones_own_draw_too():
    class Noise(layers.Layer):
        def __init__(self):
            super().__init__()
            self.generator = keras.random.SeedGenerator(1)

        def call(self, x):
            return x + keras.random.normal(tf.shape(x), seed=self.generator)

    model = keras.Sequential([keras.Input((2,)), Noise()])
    before = np.array(model.layers[0].generator.state)
    assert (posterior_predict(model, np.ones((2, 2)), 3, seed=1).variance > 0).all()
    assert np.array_equal(before, model.layers[0].generator.state)


# --- structures, data, results ------------------------------------------------------


def functional(kind):
    a, b = keras.Input((2,), name="a"), keras.Input((3,), name="b")
    h = layers.Dropout(0.5)(layers.Concatenate()([a, b]))
    outputs = {"p": layers.Dense(2)(h), "q": layers.Dense(1)(h)}
    return kind({"a": a, "b": b}, outputs)


@pytest.mark.parametrize("private", [False, True])
def test_dicts_and_data_sets(private):
    model = functional(keras_dpopt.DPModel if private else keras.Model)
    if private:
        model = keras_dpopt.make_private(model)
    x = {"a": np.ones((5, 2)), "b": np.arange(15.0).reshape(5, 3)}
    result = posterior_predict(model, x, 4, seed=2, batch_size=2, keep_samples=True)
    assert result.mean["p"].shape == (5, 2) and result.samples["q"].shape == (4, 5, 1)
    assert result.mean["p"].dtype == np.float32
    with pytest.raises(ValueError, match="several outputs"):
        result.calibration(np.zeros(5, int))
    batches = tf.data.Dataset.from_tensor_slices((x, np.zeros(5))).batch(2)
    again = posterior_predict(model, batches, 4, seed=2)
    np.testing.assert_array_equal(again.mean["p"], result.mean["p"])

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, i):
            rows = {name: part[2 * i : 2 * i + 2] for name, part in x.items()}
            return rows, np.zeros(len(rows["a"]))

    again = posterior_predict(model, Batches(), 4, seed=2)
    np.testing.assert_array_equal(again.mean["p"], result.mean["p"])
    generator = (Batches()[i] for i in range(3))
    again = posterior_predict(model, generator, 4, seed=2)
    np.testing.assert_array_equal(again.variance["q"], result.variance["q"])


def test_bad_data_is_refused():
    model = dropout_model()
    endless = tf.data.Dataset.from_tensors(np.ones((2, 5))).repeat()
    with pytest.raises(ValueError, match="has no end"):
        posterior_predict(model, endless)
    with pytest.raises(ValueError, match="no input"):
        posterior_predict(model, endless.take(0))
    with pytest.raises(ValueError, match="num_samples"):
        posterior_predict(model, np.ones((2, 5)), 0)


def test_activation_comes_before_the_average():
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dropout(0.5), layers.Dense(3, name="logits")]
    )
    model.layers[-1].kernel.assign(10 * model.layers[-1].kernel)
    x, labels = np.ones((6, 4)), np.arange(6) % 3
    softmax = keras.ops.softmax
    plain = posterior_predict(model, x, 20, seed=1, keep_samples=True)
    result = posterior_predict(model, x, 20, seed=1, activation=softmax)
    wanted = np.mean(softmax(plain.samples), axis=0)
    np.testing.assert_allclose(result.mean, wanted, rtol=1e-5, atol=1e-7)
    assert not np.allclose(result.mean, softmax(plain.mean), atol=0.01)
    report = result.calibration(labels, bins=10)
    assert str(report) == str(calibration.calibration_report(wanted, labels, 10))
    assert result.num_samples == 20 and result.samples is None
    assert np.isnan(posterior_predict(model, x, 1).variance).all()


# --- samples ------------------------------------------------------------------------


def test_samples_are_thinned_and_newest_kept(tmp_path):
    optimizer = helpers.make_optimizer(keras_dpopt.DPSGLD, 1e-3, train_size=12)
    model = helpers.rows_model(optimizer, (4,))
    x = np.random.default_rng(0).normal(size=(12, 4)).astype("f4")
    every = PosteriorSamples(max_samples=100)
    samples = PosteriorSamples(burn_in=4, thinning=3, max_samples=4)
    for epochs in (3, 4):  # 9 and 12 steps
        tiny.fit(
            model,
            x,
            helpers.targets(x),
            batch_size=4,
            epochs=epochs,
            callbacks=[every, samples],
        )
    assert every.releases == list(range(1, 22))
    # 7, 10, 13, 16, 19 were due.
    assert samples.releases == [10, 13, 16, 19] and len(samples) == 4
    for release, sample in zip(samples.releases, samples.weights, strict=True):
        np.testing.assert_array_equal(sample[0], every.weights[release - 1][0])
    samples.save(tmp_path / "samples.npz")
    loaded = PosteriorSamples.load(tmp_path / "samples.npz")
    assert loaded.releases == samples.releases and loaded.thinning == 3
    assert not tiny.moved(loaded.weights, samples.weights)

    before = state(model)
    result = posterior_predict(model, x, samples=loaded, batch_size=5)
    outputs = np.array([x @ sample[0] for sample in samples.weights])
    np.testing.assert_allclose(result.mean[:, 0], outputs.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(
        result.variance[:, 0], outputs.var(0, ddof=1), rtol=1e-3, atol=1e-8
    )
    assert result.num_samples == 4
    again = posterior_predict(model, x, samples=samples.weights, batch_size=5)
    np.testing.assert_array_equal(result.mean, again.mean)
    assert not tiny.moved(before, state(model))


def test_bad_samples_are_refused(tmp_path):
    model = helpers.rows_model(helpers.make_optimizer(keras_dpopt.DPSGLD), (3,))
    x = np.ones((2, 3))
    with pytest.raises(ValueError, match="burn_in"):
        posterior_predict(model, x, samples=PosteriorSamples())
    with pytest.raises(ValueError, match="trainable_variables"):
        posterior_predict(model, x, samples=[[np.ones(4)]])
    with pytest.raises(ValueError, match="PosteriorSamples"):
        posterior_predict(model, x)
    np.savez(tmp_path / "other.npz", a=np.ones(2))
    with pytest.raises(ValueError, match="does not hold posterior samples"):
        PosteriorSamples.load(tmp_path / "other.npz")
    plain = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    plain.compile("sgd", "mse")
    with pytest.raises(TypeError, match="make_private"):
        plain.fit(x, np.ones((2, 1)), callbacks=[PosteriorSamples()], verbose=0)
    for bad in ({"thinning": 0}, {"max_samples": 0}, {"burn_in": -1}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            PosteriorSamples(**bad)

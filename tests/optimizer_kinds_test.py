"""What is special to some optimizers, and what they have in common with few others."""

import contract
import helpers
import keras
import numpy as np
import pytest
import runs
import tensorflow as tf
from tensorflow_privacy.privacy.dp_query.gaussian_query import GaussianSumQuery

import keras_dpopt
from keras_dpopt import data

X = np.zeros((16, 12), "f4")
Y = helpers.targets(X)


def _noise_model(optimizer):
    """A model without gradients on X, and what its steps release."""
    model = helpers.rows_model(optimizer, (4, 2), (4,))
    model(X)
    optimizer.build(model.trainable_variables)
    return model


def _fit(model, **arguments):
    return model.fit(X, Y, **{"batch_size": 4, "verbose": 0, **arguments})


# ------------------------------------------------------------------------------ DPSGLD


def _langevin(learning_rate, noise_multiplier=0.0, **arguments):
    return keras_dpopt.DPSGLD(
        learning_rate,
        l2_norm_clip=0.5,
        noise_multiplier=noise_multiplier,
        expected_batch_size=4,
        gradient_engine="loop",
        **arguments,
    )


def test_langevin_noise_is_never_below_what_the_ledger_has_of_its_step():
    """A decaying rate raises the noise; the least multiplier holds it at the start."""
    rate = keras.optimizers.schedules.ExponentialDecay(0.2, 1, 0.7)
    model = _noise_model(_langevin(rate, noise_multiplier=2.6, seed=1))
    steps = 8
    watch = contract.Watch(model, steps)
    _fit(model, epochs=2)
    (phase,) = model.privacy_ledger.sync().phases
    plan = [sigma for sigma, count in phase.noise_plan for _ in range(count)]
    assert len(plan) == phase.steps == steps
    used = np.array([watch.stddev(t) * 4 / 0.5 for t in range(steps)])
    eta = 0.2 * 0.7 ** np.arange(steps)
    own = 2 * 4 / (16 * 0.5 * np.sqrt(eta))
    np.testing.assert_allclose(used, np.maximum(own, 2.6), rtol=1e-5)
    assert used[0] == pytest.approx(2.6) and used[-1] > 2 * used[0]
    assert (used >= plan).all()  # Not even by float32 rounding.
    assert (np.array(plan) * 1.006 > used).all()  # The plan's resolution.
    # A step of Langevin dynamics: the weights' noise has the variance eta.
    change = (eta / 2) * 16 * used * 0.5 / 4
    np.testing.assert_allclose(change[4:], np.sqrt(eta[4:]), rtol=1e-5)


def test_langevin_rate_cannot_be_assigned():
    model = _noise_model(_langevin(0.1))
    optimizer = model.optimizer
    with pytest.raises(ValueError, match="cannot be assigned.*schedule"):
        optimizer.learning_rate = 0.2
    callback = keras.callbacks.LearningRateScheduler(lambda epoch: 0.2)
    with pytest.raises(ValueError, match="cannot be assigned"):
        _fit(model, callbacks=[callback])
    assert float(optimizer.learning_rate) == pytest.approx(0.1)
    assert optimizer.releases() == 0
    np.testing.assert_array_equal(model.flat(), 0.0)


@pytest.mark.parametrize("way", ["load", "assign"])
def test_langevin_stops_where_the_number_of_updates_is_changed(way, tmp_path):
    path = str(tmp_path / "m.weights.h5")

    class Change(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                if way == "load":
                    self.model.load_weights(path)
                else:
                    self.model.optimizer.iterations.assign(0)
                self.left = self.model.get_weights()

    rate = keras.optimizers.schedules.ExponentialDecay(0.2, 1, 0.7)
    model = _noise_model(_langevin(rate))
    model.save_weights(path)
    change = Change()
    with pytest.raises(
        (RuntimeError, tf.errors.InvalidArgumentError),
        match="within a run" if way == "load" else "within a fit",
    ):
        _fit(model, epochs=2, callbacks=[change])
    for a, b in zip(model.get_weights(), change.left, strict=True):
        np.testing.assert_array_equal(a, b)
    # In the graph, what was begun counts.
    made = 2 if way == "load" else 3
    assert model.privacy_ledger.sync().total_steps == made
    _fit(model)  # The next fit has a plan of its own.
    assert model.privacy_ledger.sync().total_steps == made + 4


# --------------------------------------------------------------------- correlated noise

CORRELATED = {
    "banded": lambda **a: keras_dpopt.MFDPFTRL(**contract.REQUIRED, bands=2, **a),
    "blt": lambda **a: keras_dpopt.MFDPFTRL(
        **contract.REQUIRED, strategy="blt", buffers=2, **a
    ),
    "tree": lambda **a: keras_dpopt.DPFTRL(**contract.REQUIRED, restart=None, **a),
}


@pytest.mark.parametrize("name", CORRELATED)
def test_correlated_noise_keeps_to_its_order_of_the_records(name):
    optimizer = CORRELATED[name](gradient_engine="loop", expected_batch_size=4)
    model = _noise_model(optimizer)
    for sampler in (keras_dpopt.PoissonSampler(), keras_dpopt.FixedSizeSampler()):
        with pytest.raises(ValueError, match="sampler"):
            _fit(model, sampler=sampler)
    with pytest.raises(ValueError, match="Pass arrays"):
        model.train_on_batch(X[:4], Y[:4])
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    with pytest.raises(ValueError, match="Pass arrays"):
        model.fit(batches, verbose=0)
    assert optimizer.releases() == 0

    class Further(keras.callbacks.Callback):
        """One step more than the run was planned for."""

        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                optimizer.limit_releases(1)
                batch = data.single_batch(X[:4], Y[:4], None, None, None)
                batch["step"] = tf.constant(optimizer.releases(), tf.int64)
                batch = data.in_microbatches(batch, 4)
                self.left = self.model.get_weights()
                with pytest.raises(tf.errors.InvalidArgumentError, match="beyond"):
                    self.model.train_function(iter([batch]))

    further = Further()
    _fit(model, epochs=2, callbacks=[further])
    for a, b in zip(model.get_weights(), further.left, strict=True):
        np.testing.assert_array_equal(a, b)
    ledger = model.privacy_ledger.sync()
    once, steps = ledger.epsilon(1e-5), ledger.total_steps
    assert steps == 9  # The one that failed counts as well.
    _fit(model, epochs=2)
    ledger = model.privacy_ledger.sync()
    assert len(ledger.phases) == 2 and ledger.total_steps == 17
    assert ledger.epsilon(1e-5) > 1.2 * once


# ------------------------------------------------------------------------------- DPSAM


def test_the_two_releases_of_sam_are_accounted_and_apart():
    """Both count; their noise is of streams of its own."""
    optimizer = contract.make(
        keras_dpopt.DPSAM, expected_batch_size=4, gradient_engine="loop", seed=5
    )
    model = _noise_model(optimizer)
    seen, release = [], optimizer.release

    def watching(clipped, stage, drawn):
        gradient = release(clipped, stage, drawn)
        seen.append((stage, gradient.values))
        return gradient

    object.__setattr__(optimizer, "release", watching)
    model.run_eagerly = True
    model.train_on_batch(X[:4], Y[:4])
    assert [stage for stage, _ in seen] == [0, 1]
    for stage, values in seen:
        for i, value in enumerate(values):
            white = helpers.expected_noise(5, 0, 2 * stage + i, value.shape)
            np.testing.assert_allclose(value, 1.1 / 4 * white, rtol=1e-5, atol=1e-7)
    (phase,) = model.privacy_ledger.sync().phases
    assert phase.noise_multipliers == (1.1, 1.1) and phase.steps == 1
    assert phase.noise_multiplier == pytest.approx(1.1 / 2**0.5)


# -------------------------------------------------------------- clips of another making


@pytest.mark.parametrize("name", helpers.OPTIMIZERS)
def test_a_dp_sum_query_serves_or_is_refused(name):
    cls = helpers.OPTIMIZERS[name]
    query = GaussianSumQuery(l2_norm_clip=0.5, stddev=1.0)
    own = {**contract.kind(cls).arguments, "dp_sum_query": query}
    if contract.kind(cls).own_mechanism:
        with pytest.raises((TypeError, ValueError), match="dp_sum_query"):
            cls(**contract.REQUIRED, **own)
        return
    optimizer = cls(0.1, expected_batch_size=4, gradient_engine="loop", **own)
    model = _noise_model(optimizer)
    watch = contract.Watch(model, 2)
    for _ in range(2):
        model.train_on_batch(X[:4], Y[:4])
    assert np.isfinite(model.flat()).all() and np.abs(model.flat()).min() > 0
    assert watch.stddev(0) == watch.stddev(1) == pytest.approx(1.0 / 4)
    for first, second in zip(watch.gradient(0), watch.gradient(1), strict=True):
        assert np.abs(first).min() > 0 and np.abs(first - second).min() > 0
    if "noise_velocity" in optimizer.named_variables():
        assert helpers.scalar_slot(optimizer, "noise_velocity") > 0.0
    (phase,) = model.privacy_ledger.sync().phases
    assert set(phase.noise_multipliers) == {2.0}
    with pytest.raises(ValueError, match="dp_sum_query"):
        optimizer.get_config()


STYLES = {
    "automatic": {"clipping": "automatic"},
    "per layer": {"clipping": "per_layer"},
    "adaptive": {"clipping": keras_dpopt.AdaptiveClipping(0.7, count_noise_stddev=2.0)},
    "unit norm": {"rescale_to_unit_norm": True},
}


# Every style: those that change the noise where a correction follows it, and those that
# look into the record or at its norms where it is two gradients long.
@pytest.mark.parametrize(
    ("name", "style"),
    [
        ("DPSGD", "automatic"),
        ("DPSGD", "per layer"),
        ("FiBeR", "adaptive"),
        ("FiBeR", "unit norm"),
        ("DPBayesByBackprop", "per layer"),
        ("DPBayesByBackprop", "adaptive"),
    ],
)
def test_clipping_styles_train_and_come_back(name, style, tmp_path):
    optimizer = contract.make(
        helpers.OPTIMIZERS[name],
        0.05,
        l2_norm_clip=0.5,
        expected_batch_size=runs.BATCH,
        gradient_engine="loop",
        seed=3,
        **STYLES[style],
    )
    model = runs.model(optimizer, metrics=[])
    start = model.get_weights()
    runs.fit(model)
    for before, after in zip(start, model.get_weights(), strict=True):
        assert np.isfinite(after).all() and np.abs(after - before).max() > 1e-4
    assert model.privacy_ledger.sync().total_steps == runs.STEPS
    model.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    assert loaded.optimizer.get_config() == optimizer.get_config()
    assert not runs.different(runs.state(loaded), runs.state(model))
    if style == "adaptive":
        clip = float(optimizer.mechanism.current_clip(optimizer.mechanism_state()))
        assert clip != 0.5
        again = loaded.optimizer
        assert float(again.mechanism.current_clip(again.mechanism_state())) == clip


@pytest.mark.parametrize("noise_correction", ["filtered", "exact", "unfiltered"])
def test_the_correction_of_fiber_follows_an_adaptive_clip(noise_correction):
    """Its variance is that of the C of each step, through the filter and v's average.

    Records of zero have norms below C, so that C falls at each step.
    """
    omega, beta_2, steps = 0.6, 0.9, 4
    optimizer = keras_dpopt.FiBeR(
        0.05,
        omega=omega,
        beta_2=beta_2,
        noise_correction=noise_correction,
        l2_norm_clip=2.0,
        noise_multiplier=1.5,
        clipping=keras_dpopt.AdaptiveClipping(0.1, count_noise_stddev=1.0),
        expected_batch_size=4,
        gradient_engine="loop",
        seed=3,
    )
    model = _noise_model(optimizer)
    watch, record = contract.Watch(model, steps), contract.Record()
    _fit(model, callbacks=[record])
    stddevs = np.array([watch.stddev(t) for t in range(steps)], "f8")
    assert (np.diff(stddevs) != 0).all()
    z_gradient = (1.5**-2 - 2.0**-2) ** -0.5
    clips = [2.0, *(state["mechanism.0"] for state in record.states[:-1])]
    np.testing.assert_allclose(stddevs, z_gradient * np.array(clips) / 4, rtol=1e-5)
    transition = np.array([[1 - omega, 1 - omega], [-omega, 1 - omega]])
    drive = np.full((2, 2), omega**2)
    steady = np.array([[2 - omega, omega], [omega, 2 * omega]]) / (4 - 3 * omega)
    covariance, mean = np.zeros((2, 2)), 0.0
    for t, variance in enumerate(stddevs**2):
        covariance = transition @ covariance @ transition.T + drive * variance
        if t == 0 and noise_correction == "filtered":
            covariance = steady * variance
        subtracted = variance if noise_correction == "unfiltered" else covariance[0, 0]
        mean = beta_2 * mean + (1 - beta_2) * subtracted
        assert record.states[t]["noise_velocity"] == pytest.approx(mean, rel=1e-4)

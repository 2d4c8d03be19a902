"""Diagnostics against closed forms: tiny linear and quadratic models, pure noise."""

import keras
import numpy as np
import pytest

import keras_dpopt
from keras_dpopt import diagnostics, diagnostics_audit
from tests import helpers, tiny

SIZE = 4000


def noise_run(cls, steps, **arguments):
    """A model after steps on records whose gradient is zero: noise alone."""
    model = helpers.rows_model(
        helpers.make_optimizer(cls, seed=2, **arguments), (SIZE,)
    )
    return further(model, steps)


def further(model, steps):
    """The model after more such steps, and its optimizer."""
    x = np.zeros((4, SIZE), "f4")
    tiny.fit(model, x, helpers.targets(x), batch_size=4, steps_per_epoch=steps)
    return model, model.optimizer


def built(cls, **arguments):
    """An optimizer whose state says that an update was made."""
    optimizer = helpers.make_optimizer(cls, **arguments)
    optimizer.build(helpers.rows_model(optimizer, (SIZE,)).trainable_variables)
    optimizer.iterations.assign(1)
    return optimizer


# --- of released gradients ----------------------------------------------------------


def test_clamped_coordinates_are_those_that_the_step_clamps():
    learning_rate = 1e-4
    model, optimizer = noise_run(keras_dpopt.FiBeR, 1, learning_rate=learning_rate)
    mass, fraction = diagnostics.clamp_mass(optimizer)
    # At step 0, P(|Z| < sqrt(A)/omega) = 0.693 (SPEC 10d, 3); five sigma.
    assert abs(fraction - 0.6932) < 5 * 0.0073
    m_hat = helpers.slot(optimizer, "momentum") / np.float32(0.1)
    largest = learning_rate * np.abs(m_hat) / (1e-4 + 1e-8)
    at_floor = np.isclose(np.abs(helpers.slot(optimizer, "last_update")), largest)
    assert fraction == pytest.approx(at_floor.mean(), abs=1e-3)
    of_floor = np.abs(m_hat[at_floor]).sum() / np.abs(m_hat).sum()
    assert mass == pytest.approx(of_floor, abs=1e-3)
    assert 0.2 < mass < fraction  # small ones are clamped
    assert model.privacy_statement(delta=1e-5).notes == ()
    # The same run goes on to the steady state of the filter.
    _, optimizer = further(model, 9)
    assert abs(diagnostics.signal_to_noise(optimizer) - 1.0) < 5 / (2 * SIZE) ** 0.5


def test_clamp_mass_of_given_moments():
    optimizer = built(keras_dpopt.DPAdamBC, variance_floor=0.5)
    state = optimizer.named_variables()
    debias = 1 - 0.999**10
    optimizer.iterations.assign(10)
    state["noise_velocity"].assign(2.0 * debias)
    v_hat = np.full(SIZE, 3.0)  # above 2.0 + 0.5
    v_hat[:1000] = 2.4
    state["velocity.0"].assign(v_hat * debias)
    state["momentum.0"].assign(np.where(v_hat < 2.5, -3.0, 1.0))
    mass, fraction = diagnostics.clamp_mass(optimizer)
    assert fraction == 0.25 and mass == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("name", "steps"),
    [("DOPPLER", 60), ("DPAdam", 3)],
)
def test_signal_to_noise_of_noise_is_one(name, steps):
    cls = helpers.OPTIMIZERS[name]
    _, optimizer = noise_run(cls, steps, learning_rate=1e-3)
    ratio = diagnostics.signal_to_noise(optimizer)
    assert abs(ratio - 1.0) < 5 / (2 * SIZE) ** 0.5 < 0.06
    if name == "DPAdam":
        # A signal of four standard deviations of m_hat in each coordinate.
        gain = 0.1 / 1.9 * (1 - 0.9**6) / (1 - 0.9**3) ** 2
        m = optimizer.named_variables()["momentum.0"]
        m.assign(m + 4.0 * gain**0.5 * 0.25 * (1 - 0.9**3))
        wanted = (ratio**2 + 16) ** 0.5
        assert diagnostics.signal_to_noise(optimizer) == pytest.approx(wanted, rel=0.05)


def test_what_keeps_nothing_to_measure_is_refused():
    optimizer = built(keras_dpopt.DPSGD)
    with pytest.raises(ValueError, match="keeps no filtered gradient"):
        diagnostics.signal_to_noise(optimizer)
    with pytest.raises(ValueError, match="no variance floor"):
        diagnostics.clamp_mass(optimizer)
    fresh = helpers.make_optimizer(keras_dpopt.FiBeR)
    with pytest.raises(ValueError, match="no update yet"):
        diagnostics.clamp_mass(fresh)
    with pytest.raises(ValueError, match="no update yet"):
        diagnostics.signal_to_noise(fresh)


# --- callbacks ----------------------------------------------------------------------


def test_callbacks_log_and_the_raw_ones_are_listed():
    model = helpers.rows_model(helpers.make_optimizer(keras_dpopt.FiBeR, 1e-3), (4,))
    x, _ = tiny.rows(12)
    y = helpers.targets(x)
    clamp = diagnostics.ClampMass(every=2)
    noise = diagnostics.SignalToNoise()
    bias = diagnostics.NonPrivateGradientBias(x, y, every=2)
    held_out = diagnostics.NonPrivateSharpness(x, y, held_out=True)
    callbacks = [clamp, noise, bias, held_out]
    logs = tiny.fit(model, x, y, batch_size=4, epochs=2, callbacks=callbacks).history
    assert [h["step"] for h in clamp.history] == [2, 4, 6]
    assert [h["step"] for h in noise.history] == [1, 2, 3, 4, 5, 6]
    assert logs["clamp_mass"][-1] == clamp.history[-1]["clamp_mass"]
    assert logs["clamp_mass"][0] == clamp.history[0]["clamp_mass"]
    assert len(logs["signal_to_noise"]) == len(logs["nonprivate_sharpness"]) == 2
    assert [h["epoch"] for h in bias.history] == [1]
    direct = diagnostics.gradient_bias(model, x, y, held_out=True)
    assert logs["nonprivate_gradient_bias"] == [direct.bias_norm]
    assert logs["nonprivate_gradient_cosine"] == [direct.cosine]
    listed = tiny.notes(model)
    assert "NonPrivateGradientBias" in listed and "Sharpness" not in listed
    assert "gradient_bias" not in listed and "ClampMass" not in listed
    assert tiny.steps(model) == 6


def test_callbacks_refuse_plain_models():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x, y = np.ones((2, 2)), np.ones((2, 1))
    for callback in (
        diagnostics.ClampMass(),
        diagnostics.NonPrivateSharpness(x, y),
    ):
        with pytest.raises(TypeError, match="make_private"):
            model.fit(x, y, callbacks=[callback], verbose=0)
    with pytest.raises(TypeError, match="gradient_bias needs a private model"):
        diagnostics.gradient_bias(model, x, y)
    private = keras_dpopt.make_private(model)
    with pytest.raises(ValueError, match="compile"):
        diagnostics.sharpness(private, x, y)


# --- of raw gradients ---------------------------------------------------------------


def automatic(rows):
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / (norms + 0.01)


@pytest.mark.parametrize(
    ("name", "arguments", "clipped"),
    [
        ("DPSGD", {}, lambda rows: helpers.clipped_rows(rows, 1.0)),
        ("FiBeR", {}, lambda rows: helpers.clipped_rows(rows, 1.0)),
        # A record of two halves under one clip.
        ("DPBayesByBackprop", {}, lambda rows: helpers.clipped_rows(rows, 1.0)),
        ("DPSGD", {"clipping": "adaptive"}, lambda r: helpers.clipped_rows(r, 1.0)),
        ("DPSGD", {"clipping": "automatic"}, automatic),
    ],
)
def test_gradient_bias_of_known_gradients(name, arguments, clipped):
    optimizer = helpers.make_optimizer(helpers.OPTIMIZERS[name], **arguments)
    model = helpers.rows_model(optimizer, (2,), (3,))
    rows = np.random.default_rng(0).normal(size=(40, 5))
    rows = (rows * np.linspace(0.05, 2.0, 40)[:, np.newaxis]).astype("f4")
    bias = diagnostics.gradient_bias(
        model, rows, helpers.targets(rows), quantiles=(0.0, 0.5, 1.0)
    )
    raw, mean = rows.astype("f8").mean(0), clipped(rows).mean(0)
    norms = np.linalg.norm(rows, axis=1)
    assert bias.bias_norm == pytest.approx(np.linalg.norm(mean - raw), rel=1e-5)
    assert bias.gradient_norm == pytest.approx(np.linalg.norm(raw), rel=1e-5)
    cosine = raw @ mean / np.linalg.norm(raw) / np.linalg.norm(mean)
    assert bias.cosine == pytest.approx(cosine, rel=1e-6) and cosine < 0.999
    ratio = np.linalg.norm(mean) / np.linalg.norm(raw)
    assert bias.norm_ratio == pytest.approx(ratio, rel=1e-5)
    assert bias.fraction_clipped == np.mean(norms > 1.0)
    assert bias.records == 40
    for level, value in bias.norm_quantiles.items():
        assert value == pytest.approx(np.quantile(norms, level), rel=1e-5)
    assert "gradient_bias" in tiny.notes(model)
    assert not model.flat().any() and optimizer.releases() == 0


def test_sharpness_of_a_quadratic():
    centers = np.array([[1.0, -2.0, 0.5], [0.0, 1.0, -1.0]], "f4")
    curvatures = np.array([[1.0, 2.0, 0.5], [3.0, 0.2, 1.0]], "f4")
    model = helpers.QuarticModel([0.3, -0.4, 1.0])
    model.compile(helpers.make_optimizer(keras_dpopt.DPSGD), helpers.quartic_loss(0.0))
    theta = model.theta.numpy().astype("f8")
    gradient = (curvatures * (theta - centers)).mean(0)
    along = gradient / np.linalg.norm(gradient)
    for radius in (0.05, 2.0):
        wanted = radius * np.linalg.norm(gradient)
        wanted += 0.5 * radius**2 * np.sum(curvatures.mean(0) * along**2)
        rise = diagnostics.sharpness(model, centers, curvatures, radius=radius)
        assert rise == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    np.testing.assert_array_equal(model.theta.numpy(), theta.astype("f4"))
    with pytest.raises(ValueError, match="radius"):
        diagnostics.sharpness(model, centers, curvatures, radius=0.0)


# --- the audit ----------------------------------------------------------------------


def audit(cls, rows, **arguments):
    def make_model():
        optimizer = helpers.make_optimizer(cls, 0.0, **arguments)
        return helpers.rows_model(optimizer, (rows.shape[1],))

    return diagnostics.attenuation_audit(
        make_model,
        rows,
        helpers.targets(rows),
        batch_size=4,
        steps=320,
        projections=20,
        seed=1,
    )


def test_attenuation_of_the_innovation_filter_in_open_loop():
    rows = np.random.default_rng(3).normal(size=(12, 20)).astype("f4")
    report = audit(keras_dpopt.FiBeR, rows)
    gain = 1.1 / 1.3
    assert report.gain == pytest.approx(gain)
    # The error's own theory: relative variance 4*sum_k rho_k^2/(T*P) of a ratio of
    # autocorrelated over white noise; 20 blocks tell it to about 16 %.
    impulse = np.zeros(60)
    impulse[0] = 1.0
    h = diagnostics_audit.filtered_series(
        keras_dpopt.FiBeR(0.0, l2_norm_clip=1.0, noise_multiplier=1.0).filter, impulse
    )
    assert np.sum(h**2) == pytest.approx(gain, rel=1e-6)
    lags = [np.sum(h[k:] * h[: 60 - k]) / gain for k in range(1, 60)]
    error = gain * (4 * np.sum(np.square(lags)) / (280 * 20)) ** 0.5
    assert 0.4 * error < report.standard_error < 1.8 * error
    # Five sigma: 6e-7. It rejects no filter (A = 1) and the EMA's kappa/(2-kappa).
    assert abs(report.ratio - gain) < 5 * error
    assert abs(report.ratio - 1.0) > 15 * error
    assert abs(report.ratio - 0.9 / 1.1) > 5 * error
    # 2*s^2 is the variance of the difference: 5600 values, sqrt(2/5600) = 0.019.
    assert abs(report.noise_share.mean() - 1.0) < 5 * 0.019
    # Signal (the same few rows) and noise are independent: 5/sqrt(280) each.
    assert np.abs(report.correlation).max() < 0.3
    assert report.cross_term.max() < 0.6
    # White noise nearly: sqrt(2/100) of independent windows; fewer are seen here.
    assert 0.03 < report.variation.mean() < 0.3
    assert "0.8462" in str(report) and "not private" in str(report)


def test_attenuation_of_an_average_and_the_noise_that_is_subtracted():
    report = audit(keras_dpopt.DiSK, np.zeros((12, 20), "f4"))
    gain = 0.7 / 1.3
    assert report.gain == pytest.approx(gain)
    assert abs(report.ratio - gain) < 5 * report.standard_error < 0.05
    # Without a signal, what is left of f when the noise is taken out is rounding;
    # with any other noise than that of the run it would be -E[n^2].
    assert report.cross_term.max() < 1e-5


def test_statistics_of_given_series():
    draw = np.random.default_rng(0)
    noise, other = draw.normal(size=(2, 4000, 2))
    signal = 0.5 * noise + 0.5 * draw.normal(size=(4000, 2))
    ones = np.ones((4000, 2))
    optimizer = helpers.make_optimizer(keras_dpopt.DPAdam)
    first = diagnostics_audit._Series(signal + noise, signal + noise, noise, ones)
    second = diagnostics_audit._Series(other, 0.5 * other, other, ones)
    report = diagnostics_audit._report(optimizer, first, second, 0, 50)
    assert report.correlation == pytest.approx([0.5**0.5] * 2, abs=0.05)
    assert report.cross_term == pytest.approx([0.5] * 2, abs=0.05)
    # Var(s + n + w) = 2.5 + 1 against 2; Var(f) = 2.5 + 0.25.
    assert report.noise_share == pytest.approx([3.5 / 2] * 2, rel=0.1)
    assert report.ratio == pytest.approx(2.75 / 3.5, rel=0.05)
    assert report.variation == pytest.approx([(2 / 50) ** 0.5] * 2, rel=0.3)


@pytest.mark.parametrize("name", ["FiBeR", "DiSK", "DOPPLER", "DPAdam"])
def test_filtered_series_is_the_filter(name):
    optimizer = helpers.make_optimizer(helpers.OPTIMIZERS[name])
    series = np.random.default_rng(0).normal(size=(30, 2))
    filtered = diagnostics_audit.filtered_series(optimizer.filter, series)
    x, y = series, []
    f, r, c = np.zeros(2), np.zeros(2), 0.0
    for t in range(30):
        if name == "FiBeR":
            r = 0.1 * r + 0.9 * (x[t] - f)
            f = f + r
        elif name == "DiSK":
            f = x[0] if t == 0 else 0.3 * f + 0.7 * x[t]
        elif name == "DOPPLER":
            b = optimizer.filter.b
            a = optimizer.filter.a
            r = -a[0] * r + sum(b[j] * x[t - j] for j in range(len(b)) if j <= t)
            c = -a[0] * c + sum(b[j] for j in range(len(b)) if j <= t)
            f = r / c
        else:
            f = x[t]
        y.append(f)
    np.testing.assert_allclose(filtered, y, rtol=1e-5, atol=1e-6)


def test_bad_audits_are_refused():
    rows = np.ones((4, 3), "f4")

    def run(cls=keras_dpopt.FiBeR, **given):
        def make_model():
            return helpers.rows_model(helpers.make_optimizer(cls), (3,))

        given = {"batch_size": 2, "steps": 60, "projections": 2, **given}
        diagnostics.attenuation_audit(make_model, rows, helpers.targets(rows), **given)

    with pytest.raises(ValueError, match="too few"):
        run(steps=30)
    with pytest.raises(ValueError, match="more than the 3 weights"):
        run(projections=4)
    with pytest.raises(ValueError, match="correlated"):
        run(cls=keras_dpopt.DPFTRL)
    with pytest.raises(TypeError, match="private model"):
        diagnostics.attenuation_audit(
            lambda: keras.Sequential([keras.layers.Dense(1)]),
            rows,
            batch_size=2,
            steps=60,
        )

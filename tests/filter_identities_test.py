"""What filters do to gradients and to noise: closed forms (SPEC sections 7 to 10)."""

import helpers
import keras
import numpy as np
import pytest
from golden_cases import IDENTITIES, METHODS, PROBLEM, THETA0, applied, close

import keras_dpopt
from keras_dpopt import filters, queries

GRADIENTS = np.array(PROBLEM["G"])


def test_filter_that_passes_all():
    fiber = keras_dpopt.FiBeR
    _, optimizer = applied(fiber, omega=1.0)
    close(helpers.slot(optimizer, "filtered"), GRADIENTS[-1])
    assert filters.InnovationFilter(1.0).steady_gain == 1.0
    got, _ = applied(keras_dpopt.DOPPLER, learning_rate=0.1, a=(), b=(1.0,))
    close(got, applied(keras_dpopt.DPSGD, learning_rate=0.1)[0])


@pytest.mark.parametrize("name", METHODS["filter_doppler"])
def test_constant_gradient_passes(name):
    entry = METHODS["filter_doppler"][name]
    gradients = np.tile(GRADIENTS[0], (12, 1))
    got, _ = applied(
        keras_dpopt.DOPPLER, gradients, learning_rate=0.1, a=entry["a"], b=entry["b"]
    )
    # Poles of 0.993 leave a rounding of c_t and m_t alone for long.
    want = THETA0 - 0.1 * np.cumsum(gradients, axis=0)
    close(got, want, atol=3e-6)


@pytest.mark.parametrize("omega", IDENTITIES["A_omega"])
def test_noise_gain_of_the_innovation_filter(omega):
    """Closed form = Lyapunov = impulse response = what `begin` tends to."""
    entry = IDENTITIES["A_omega"][omega]
    innovation = filters.InnovationFilter(float(omega))
    for key in ("A_closed", "A_lyapunov", "A_impulse"):
        # The impulse sum of the reference is cut off after finitely many terms.
        np.testing.assert_allclose(innovation.steady_gain, entry[key], rtol=1e-9)
    # The slowest mode decays as sqrt(1 - omega)^t.
    slots, impulse = {"filtered": 0.0, "residual": 0.0}, []
    for t in range(60 + int(50 / float(omega))):
        filtered, slots = innovation.update(slots, float(t == 0), None)
        impulse.append(filtered)
    energy = np.cumsum(np.square(impulse))
    np.testing.assert_allclose(impulse[:6], entry["h_first6"], rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(energy[-1], entry["A_closed"], rtol=1e-9)
    np.testing.assert_allclose(np.sum(impulse), entry["dc_gain"], rtol=1e-9)
    # `begin`: from nothing, from the steady state, and from the reference's own.
    exact, steady = _gains(innovation, 20, False), _gains(innovation, 20, True)
    np.testing.assert_allclose(exact, energy[:20], rtol=1e-9)
    np.testing.assert_allclose(exact[:5], entry["A_t_first5"], rtol=1e-12)
    np.testing.assert_allclose(steady, entry["A_closed"], rtol=1e-9)
    stationary = np.array(
        [[entry["A_closed"], entry["cov_gr"]], [entry["cov_gr"], entry["var_r"]]]
    )
    _, _, after = innovation.begin({"noise_covariance": stationary}, 2, 1.0, False)
    np.testing.assert_allclose(after["noise_covariance"], stationary, rtol=1e-9)


def _gains(filter_, steps, steady):
    """The variance after the filter, of noise of variance 1."""
    scalars, gains = filter_.scalars, []
    for k in range(1, steps + 1):
        _, gain, scalars = filter_.begin(scalars, k, 1.0, steady=steady)
        gains.append(float(gain))
    return gains


def test_noise_gain_of_the_average():
    """SPEC section 7(e), and that DiSK-CORR takes exactly this out."""
    for kappa, gain in IDENTITIES["A_state"].items():
        average = filters.EMAFilter(float(kappa))
        np.testing.assert_allclose(average.steady_gain, gain, rtol=1e-12)
    zero, first = (filters.EMAFilter(0.7, i) for i in ("zero", "first_gradient"))
    finite = 0.7 / 1.3 * (1 - 0.3 ** (2 * np.arange(1, 9)))
    np.testing.assert_allclose(_gains(zero, 8, False), finite, rtol=1e-6)
    np.testing.assert_allclose(_gains(first, 3, False), [1.0, 0.58, 0.5422], rtol=1e-6)
    for variant in (zero, first):
        np.testing.assert_allclose(_gains(variant, 8, True), 0.7 / 1.3, rtol=1e-6)
    for correction, gain in (("filtered", 0.7 / 1.3), ("unfiltered", 1.0)):
        _, optimizer = applied(
            keras_dpopt.DiSK, sigma_w=0.5, kappa=0.7, noise_correction=correction
        )
        noise = helpers.scalar_slot(optimizer, "noise_velocity") / (1 - 0.999**4)
        np.testing.assert_allclose(noise, gain * 0.5**2, rtol=1e-5)


@pytest.mark.parametrize("name", IDENTITIES["A_doppler"])
def test_noise_gain_of_the_low_pass_filter(name):
    entry, coefficients = IDENTITIES["A_doppler"][name], METHODS["filter_doppler"][name]
    low_pass = filters.LowPassFilter(coefficients["a"], coefficients["b"])
    gain, steady = low_pass.gain, low_pass.steady_gain
    np.testing.assert_allclose(gain, entry["dc_gain"], rtol=1e-9)
    np.testing.assert_allclose(steady, entry["A_normalised"], rtol=1e-9)
    np.testing.assert_allclose(steady * gain**2, entry["A_raw"], rtol=1e-9)


def test_exact_correction():
    """SPEC section 10(d)2: the noise's part of E[v_hat], in units of sigma_w^2."""
    sigma_w = 0.03
    optimizer = helpers.make_optimizer(keras_dpopt.FiBeR, noise_correction="exact")
    optimizer.build([keras.Variable(np.zeros(3), dtype="float32")])
    parts = []
    for k in range(1, 102):
        optimizer.apply(helpers.privatized([np.ones(3)], sigma_w))
        noise = helpers.scalar_slot(optimizer, "noise_velocity")
        parts.append(noise / (1.0 - 0.999**k) / sigma_w**2)
    # The printed digits: six decimals.
    np.testing.assert_allclose(parts[:3], [0.81, 0.826208, 0.832584], atol=2e-6)
    np.testing.assert_allclose(parts[100], 0.845770, atol=2e-6)
    # And the sum itself, with the variances of the reference.
    gains = IDENTITIES["A_omega"]["0.9"]["A_t_first5"]
    for k in range(1, 6):
        weights = 0.001 * 0.999 ** np.arange(k - 1, -1, -1)
        want = np.dot(weights, gains[:k]) / (1 - 0.999**k)
        np.testing.assert_allclose(parts[k - 1], want, rtol=1e-5)


@pytest.mark.parametrize("name", IDENTITIES["two_point_a"])
def test_two_point_weight(name):
    want = IDENTITIES["two_point_a"][name]
    kappa, _, gamma = name.removeprefix("kappa").partition("_gamma")
    query = queries.TwoPointQuery(float(kappa), float(gamma or 0.7))
    np.testing.assert_allclose(query.weight, want, rtol=1e-12)


def test_ramp():
    """A ramp is followed without a lag, where an average has one."""
    entry = IDENTITIES["ramp_slope0.01_error_after_400"]
    innovation, average = filters.InnovationFilter(0.9), filters.EMAFilter(0.7)
    slots = {"filtered": 0.0, "residual": 0.0}
    averaged = {"filtered": 0.0}
    for t in range(400):
        followed, slots = innovation.update(slots, 0.01 * t, None)
        lagging, averaged = average.update(averaged, 0.01 * t, 0.7)
    errors = np.array([followed, lagging]) - 0.01 * 399
    want = [entry["innovation_omega0.9"], entry["ema_kappa0.7"]]
    np.testing.assert_allclose(errors, want, atol=1e-12)
    np.testing.assert_allclose(errors[1], entry["ema_expected"], atol=1e-12)

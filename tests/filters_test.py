"""Filters: what they do to the gradient, and to the noise in it."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from keras_dpopt import filters

OMEGAS = (0.05, 0.3, 0.5, 0.9, 0.99, 1.0)


def _run(innovation, inputs):
    slots = {name: np.zeros_like(inputs[0]) for name in innovation.slots}
    outputs = []
    for x in inputs:
        filtered, slots = innovation.update(slots, x)
        outputs.append(filtered)
    return np.array(outputs)


def test_no_filter():
    gradient = np.array([1.0, -2.0])
    filtered, slots = filters.NoFilter().update({}, gradient)
    assert filtered is gradient and slots == {}
    assert filters.NoFilter().propagate({}, 0.25) == ((0.25, 0.25), {})


def test_omega_1_is_the_identity():
    inputs = np.random.default_rng(0).normal(size=(50, 4))
    np.testing.assert_allclose(
        _run(filters.InnovationFilter(1.0), inputs), inputs, atol=1e-15
    )
    assert filters.InnovationFilter(1.0).steady_gain == 1.0
    (steady, exact), _ = filters.InnovationFilter(1.0).propagate(
        dict.fromkeys(filters.InnovationFilter.noise_slots, 0.0), 0.3
    )
    assert steady == exact == 0.3


@hypothesis.settings(max_examples=50)
@hypothesis.given(st.floats(0.01, 1.0), st.integers(0, 2**32 - 1))
def test_second_order_form(omega, seed):
    """SPEC section 10(a): f_t = (2-2w) f_{t-1} - (1-w) f_{t-2} + w g_t."""
    inputs = np.random.default_rng(seed).normal(size=(30, 2))
    outputs = _run(filters.InnovationFilter(omega), inputs)
    f = np.zeros((2, 2))
    for got, g in zip(outputs, inputs, strict=True):
        f = np.stack([f[1], (2 - 2 * omega) * f[1] - (1 - omega) * f[0] + omega * g])
        np.testing.assert_allclose(got, f[1], atol=1e-12)


@pytest.mark.parametrize("omega", OMEGAS)
def test_constant_passes_in_the_end(omega):
    outputs = _run(filters.InnovationFilter(omega), np.full((3000, 1), 0.7))
    np.testing.assert_allclose(outputs[-1], 0.7, rtol=1e-9)


@hypothesis.settings(max_examples=50)
@hypothesis.given(
    st.floats(0.01, 1.0), st.lists(st.floats(0.0, 10.0), min_size=1, max_size=20)
)
def test_propagated_variance_is_that_of_the_filter(omega, variances):
    """Against the impulse responses, for a noise that changes from step to step."""
    innovation = filters.InnovationFilter(omega)
    steps = len(variances)
    # Column j: the response to an impulse at step j.
    responses = _run(innovation, np.eye(steps))
    noise = dict.fromkeys(innovation.noise_slots, 0.0)
    for t, variance in enumerate(variances):
        (steady, exact), noise = innovation.propagate(noise, variance)
        want = np.dot(responses[t] ** 2, variances)
        np.testing.assert_allclose(exact, want, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(
            steady, (2 - omega) / (4 - 3 * omega) * variance, rtol=1e-12
        )


@pytest.mark.parametrize("omega", [0.5, 0.9])
def test_variance_of_filtered_noise(omega):
    """By simulation: 2e5 values, so the variance is known to 0.32 % (one sigma).

    5 sigma: the false-alarm rate is 6e-7 (and 0 for this seed). The variance of an EMA
    with the same gain (omega/(2-omega): 0.33, 0.82) would be rejected, and so would
    that of no filter.
    """
    inputs = np.random.default_rng(1).normal(size=(40, 200_000))
    variance = _run(filters.InnovationFilter(omega), inputs)[-1].var()
    gain = filters.InnovationFilter(omega).steady_gain
    assert abs(variance / gain - 1) < 5 * np.sqrt(2 / 200_000)
    assert abs(variance / (omega / (2 - omega)) - 1) > 5 * np.sqrt(2 / 200_000)
    assert abs(variance - 1) > 5 * np.sqrt(2 / 200_000)


@pytest.mark.parametrize("omega", [0.0, -0.1, 1.0001, np.nan, np.inf, "1", None, True])
def test_omega_outside_its_range(omega):
    with pytest.raises((ValueError, TypeError), match="omega"):
        filters.InnovationFilter(omega)

"""Filters: what they do to the gradient, and to the noise in it."""

import hypothesis
import numpy as np
import pytest
import scipy.signal
from hypothesis import strategies as st

from keras_dpopt import filters

OMEGAS = (0.05, 0.3, 0.5, 0.9, 0.99, 1.0)
# The authors' own, to the digits that they print.
CHEBYSHEV = ((-1.98342955, 0.98549544), (1.6332e-4, 3.2665e-4, 1.6332e-4))
FILTERS = {
    "none": filters.NoFilter(),
    "innovation": filters.InnovationFilter(0.9),
    "slow innovation": filters.InnovationFilter(0.2),
    "EMA": filters.EMAFilter(0.3),
    "EMA from the first": filters.EMAFilter(0.7, "first_gradient"),
    "low-pass of order 0": filters.LowPassFilter((), (2.0,)),
    "moving average": filters.LowPassFilter((), (0.5, 0.25, 0.25)),
    "low-pass": filters.LowPassFilter((-0.9,), (0.05, 0.05)),
    "other low-pass": filters.LowPassFilter((-0.9,), (0.15, -0.05)),
    "low-pass of order 2": filters.LowPassFilter((-1.2, 0.5), (0.3, -0.1, 0.2)),
    "more past outputs": filters.LowPassFilter((-0.5, 0.1, 0.2), (0.7,)),
    "Chebyshev": filters.LowPassFilter(*CHEBYSHEV),
}
every_filter = pytest.mark.parametrize("filter_", FILTERS.values(), ids=FILTERS)
# Those that let a constant pass from the first step on.
NORMALISED = {
    name: f
    for name, f in FILTERS.items()
    if isinstance(f, filters.LowPassFilter) or name in ("none", "EMA from the first")
}


def _run(filter_, inputs, variances=None, steady=False):
    """Outputs, and the noise variance after the filter at each step."""
    slots = {name: v + np.zeros_like(inputs[0]) for name, v in filter_.slots.items()}
    scalars = filter_.scalars
    outputs, after = [], []
    for t, x in enumerate(inputs):
        variance = 1.0 if variances is None else variances[t]
        shared, now, scalars = filter_.begin(scalars, t + 1, variance, steady)
        shared = None if shared is None else np.float64(shared)
        filtered, slots = filter_.update(slots, x, shared)
        outputs.append(np.array(filtered))
        after.append(float(now))
    return np.array(outputs), np.array(after)


def test_no_filter():
    gradient = np.array([1.0, -2.0])
    no_filter = filters.NoFilter()
    filtered, slots = no_filter.update({}, gradient, None)
    assert filtered is gradient and slots == {}
    assert no_filter.begin({}, 1, 0.25, steady=True) == (None, 0.25, {})


@pytest.mark.parametrize(
    "filter_",
    [
        filters.InnovationFilter(1.0),
        filters.EMAFilter(1.0),
        filters.EMAFilter(1.0, "first_gradient"),
        filters.LowPassFilter((), (1.0,)),
        filters.LowPassFilter((), (-3.0,)),
    ],
)
def test_identity(filter_):
    inputs = np.random.default_rng(0).normal(size=(20, 4))
    for steady in (False, True):
        outputs, after = _run(filter_, inputs, np.full(20, 0.3), steady)
        np.testing.assert_allclose(outputs, inputs, atol=1e-15)
        np.testing.assert_allclose(after, 0.3, rtol=1e-6)
    assert filter_.steady_gain == pytest.approx(1.0, rel=1e-12)


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(st.floats(0.01, 1.0), st.integers(0, 2**32 - 1))
def test_second_order_form(omega, seed):
    """SPEC section 10(a): f_t = (2-2w) f_{t-1} - (1-w) f_{t-2} + w g_t."""
    inputs = np.random.default_rng(seed).normal(size=(30, 2))
    outputs, _ = _run(filters.InnovationFilter(omega), inputs)
    f = np.zeros((2, 2))
    for got, g in zip(outputs, inputs, strict=True):
        f = np.stack([f[1], (2 - 2 * omega) * f[1] - (1 - omega) * f[0] + omega * g])
        np.testing.assert_allclose(got, f[1], atol=1e-12)


@pytest.mark.parametrize("omega", OMEGAS)
def test_constant_passes_in_the_end(omega):
    innovation = filters.InnovationFilter(omega)
    slots = {"filtered": 0.0, "residual": 0.0}
    for _ in range(3000):
        filtered, slots = innovation.update(slots, 0.7, None)
    np.testing.assert_allclose(filtered, 0.7, rtol=1e-9)


@pytest.mark.parametrize("filter_", NORMALISED.values(), ids=NORMALISED)
def test_constant_passes_from_the_first_step(filter_):
    """SPEC section 9(e). c_t is float32 in a step, as here."""
    outputs, _ = _run(filter_, np.full((60, 1), 0.7))
    np.testing.assert_allclose(outputs, 0.7, rtol=2e-5)


@pytest.mark.parametrize("name", ["low-pass", "low-pass of order 2", "Chebyshev"])
def test_low_pass_is_scipys_lfilter_over_its_step_response(name):
    filter_ = FILTERS[name]
    inputs = np.random.default_rng(1).normal(size=(50, 3))
    outputs, _ = _run(filter_, inputs)
    a = [1.0, *filter_.a]
    response = scipy.signal.lfilter(filter_.b, a, np.ones(50))
    want = scipy.signal.lfilter(filter_.b, a, inputs, axis=0) / response[:, None]
    np.testing.assert_allclose(outputs, want, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(filter_.step_response(50), response, rtol=1e-9)


@every_filter
def test_propagated_variance_is_that_of_the_filter(filter_):
    """Against the impulse responses, for a noise that changes from step to step."""
    steps = 25
    variances = np.random.default_rng(2).uniform(0.0, 10.0, size=steps)
    # Column j: the response to an impulse at step j.
    responses, exact = _run(filter_, np.eye(steps), variances)
    for t in range(steps):
        want = np.dot(responses[t] ** 2, variances)
        np.testing.assert_allclose(exact[t], want, rtol=2e-5)


@every_filter
def test_steady_variance(filter_):
    """Constant under constant noise; it follows a change as the filter does."""
    gain = getattr(filter_, "steady_gain", 1.0)
    steps = 40
    _, steady = _run(filter_, np.zeros((steps, 1)), np.full(steps, 0.5), True)
    np.testing.assert_allclose(steady, gain * 0.5, rtol=1e-5)
    # After the change, the part of the old noise decays as in a filter that has run
    # for long: what was there before is a run-in here.
    old, new = 400, 10
    variances = np.r_[np.full(old, 4.0), np.full(new, 1.0)]
    _, exact = _run(filter_, np.zeros((old + new, 1)), variances)
    _, steady = _run(filter_, np.zeros((1 + new, 1)), variances[old - 1 :], True)
    if filter_ is not FILTERS["Chebyshev"]:  # which forgets more slowly
        np.testing.assert_allclose(steady, exact[old - 1 :], rtol=1e-4)


def test_variance_of_filtered_noise():
    """By simulation: 2e5 values, so the variance is known to 0.32 % (one sigma).

    5 sigma: the false-alarm rate is 6e-7 (and 0 for this seed). The variance of an EMA
    with the same gain (omega/(2-omega): 0.33, 0.82) would be rejected, and so would
    that of no filter.
    """
    inputs = np.random.default_rng(1).normal(size=(40, 200_000))
    for omega in (0.5, 0.9):
        innovation = filters.InnovationFilter(omega)
        slots = {"filtered": 0.0, "residual": 0.0}
        for x in inputs:
            filtered, slots = innovation.update(slots, x, None)
        variance = np.var(filtered)
        gain = innovation.steady_gain
        assert abs(variance / gain - 1) < 5 * np.sqrt(2 / 200_000)
        ema = filters.EMAFilter(omega).steady_gain
        assert abs(variance / ema - 1) > 5 * np.sqrt(2 / 200_000)
        assert abs(variance - 1) > 5 * np.sqrt(2 / 200_000)


@pytest.mark.parametrize("value", [0.0, -0.1, 1.0001, np.nan, np.inf, "1", None, True])
def test_gain_outside_its_range(value):
    with pytest.raises((ValueError, TypeError), match="omega"):
        filters.InnovationFilter(value)
    with pytest.raises((ValueError, TypeError), match="kappa"):
        filters.EMAFilter(value)


def test_unknown_init():
    with pytest.raises(ValueError, match="filter_init='first'.*zero"):
        filters.EMAFilter(0.5, "first")


@pytest.mark.parametrize(
    ("a", "b", "match"),
    [
        ((-1.0,), (0.1,), "unstable"),
        ((-1.1,), (0.1,), "unstable"),
        ((0.0, 1.0), (0.1,), "unstable"),
        ((-2.0, 1.0000001), (0.1,), "unstable"),
        ((-0.9,), (), "no coefficient"),
        ((-0.9,), (1.0, -1.0), "constant"),
        ((), (0.0, 1.0), "constant"),
        ((-0.5,), (1.0, -2.0, 1.0), "constant"),
        ((np.nan,), (0.1,), "`a`"),
        ((-0.9,), (np.inf,), "`b`"),
        ("abc", (0.1,), "`a`"),
        (0.9, (0.1,), "`a`"),
        ((-0.9,), None, "`b`"),
    ],
)
def test_refused_coefficients(a, b, match):
    with pytest.raises((ValueError, TypeError), match=match):
        filters.LowPassFilter(a, b)


@pytest.mark.parametrize(
    "design",
    [
        lambda: scipy.signal.butter(1, 0.1),
        lambda: scipy.signal.butter(3, 0.05),
        lambda: scipy.signal.cheby1(2, 10, 0.02),
        lambda: scipy.signal.cheby2(2, 20, 0.2),
        lambda: scipy.signal.ellip(2, 1, 20, 0.1),
        lambda: (scipy.signal.firwin(5, 0.2), np.array([1.0])),
    ],
)
def test_scipy_designs(design):
    b, a = design()
    filter_ = filters.LowPassFilter(a[1:], b)
    outputs, _ = _run(filter_, np.full((50, 1), 1.0))
    np.testing.assert_allclose(outputs, 1.0, rtol=2e-4)
    impulse = scipy.signal.lfilter(b, a, np.eye(1, 5000)[0])
    gain = np.sum(impulse**2) / np.sum(impulse) ** 2
    np.testing.assert_allclose(filter_.steady_gain, gain, rtol=1e-6)

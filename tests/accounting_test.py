"""Tests of accounting.py, composition.py, renyi.py and dp_events.py.

The oracles are dp_accounting's own accountants, TF Privacy's own statement, and the
noise multipliers of golden.json, which were made with dp_accounting and Opacus.
"""

import json
import math
import pathlib
import re
import sys
import time
import warnings
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld, rdp

from keras_dpopt import accounting, composition, renyi

_GOLDEN = json.loads(
    (pathlib.Path(__file__).parent / "golden" / "golden.json").read_text()
)["accounting"]
_ROWS = _GOLDEN["rows"]
_TARGETS = ("0.5", "1.0", "2.0", "4.0", "8.0")
_RUN = {
    "delta": _GOLDEN["delta"],
    "train_size": _GOLDEN["N"],
    "batch_size": _GOLDEN["B"],
    "epochs": _GOLDEN["epochs"],
}
# PLATFORM.md: sigma 1.1, batch 256 of 60000, 2350 steps, delta 1e-5.
_REFERENCE = {"delta": 1e-5, "train_size": 60000, "batch_size": 256, "epochs": 10}

gaussian = dp_accounting.GaussianDpEvent


def _dp_accounting_epsilon(releases, delta, accountant):
    for event, count in releases:
        accountant.compose(event, count)
    return accountant.get_epsilon(delta)


# --- steps -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "train_size, batch_size, steps",
    [(60000, 256, 235), (1024, 256, 4), (1025, 256, 5), (5, 5, 1), (5, 1, 5)],
)
def test_an_epoch_has_ceil_n_over_b_steps(train_size, batch_size, steps):
    assert accounting.steps_per_epoch(train_size, batch_size) == steps
    assert accounting.training_steps(train_size, batch_size, 7) == 7 * steps


def test_steps_are_exact_where_float_division_is_not():
    # (2^53 + 2) / 2 rounded to float64 and then up would be one too few or too many.
    assert accounting.steps_per_epoch(2**53 + 3, 2) == 2**52 + 2


# --- golden and reference values -------------------------------------------------


@pytest.mark.parametrize("target", _TARGETS)
def test_golden_poisson_rdp(target):
    row = _ROWS["poisson_rdp_default_improved"][target]
    assert accounting.epsilon(
        noise_multiplier=row["noise_multiplier"], **_RUN
    ) == pytest.approx(row["eps_at"], rel=1e-9)
    sigma = accounting.noise_multiplier(target_epsilon=float(target), **_RUN)
    assert sigma == pytest.approx(row["noise_multiplier"], rel=2e-5)


@pytest.mark.parametrize("target", _TARGETS)
def test_golden_poisson_pld(target):
    row = _ROWS["poisson_pld"][target]
    assert accounting.epsilon(
        noise_multiplier=row["noise_multiplier"], accountant="pld", **_RUN
    ) == pytest.approx(row["eps_at"], rel=1e-6)


@pytest.mark.parametrize("target", ["0.5", "8.0"])
def test_golden_calibration_pld(target):
    sigma = accounting.noise_multiplier(
        target_epsilon=float(target), accountant="pld", **_RUN
    )
    expected = _ROWS["poisson_pld"][target]["noise_multiplier"]
    assert sigma == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("target", _TARGETS)
def test_golden_fixed_size(target):
    # The table's z is over the sensitivity 2C, so that sigma = 2z.
    row = _ROWS["wor_rdp_default_improved"][target]
    event = accounting.fixed_size_event(
        (2 * row["noise_multiplier"],), _GOLDEN["N"], _GOLDEN["B"]
    )
    assert accounting.compose_epsilon(
        [(event, _GOLDEN["T"])], _GOLDEN["delta"], "rdp", accounting.REPLACE_ONE
    ) == pytest.approx(row["eps_at"], rel=1e-9)


@pytest.mark.parametrize("target", _TARGETS)
def test_golden_cross_values(target):
    row = _GOLDEN["cross"]["poisson_rdp_default_improved"][target]
    sigma = row["sigma"]
    for event_sigma, name in (
        (2 * sigma, "eps_wor_z_equals_sigma"),
        (sigma, "eps_wor_z_equals_half_sigma"),
    ):
        event = accounting.fixed_size_event((event_sigma,), 50000, 5000)
        value = accounting.compose_epsilon(
            [(event, 800)], _GOLDEN["delta"], "rdp", accounting.REPLACE_ONE
        )
        assert value == pytest.approx(row[name], rel=1e-6)


@pytest.mark.parametrize(
    "sigma, accountant, expected",
    [
        (1.1, "rdp", 1.0997),
        (1.1, "pld", 0.920),
        (0.55, "rdp", 7.973),
        (0.55, "pld", 6.727),
    ],
)
def test_reference_values(sigma, accountant, expected):
    value = accounting.epsilon(
        noise_multiplier=sigma, accountant=accountant, **_REFERENCE
    )
    digits = len(str(expected).split(".")[1])
    assert value == pytest.approx(expected, abs=0.6 * 10**-digits)


def test_reference_value_of_fixed_size_sampling():
    event = accounting.fixed_size_event((1.1,), 60000, 256)
    value = accounting.compose_epsilon(
        [(event, 2350)], 1e-5, "rdp", accounting.REPLACE_ONE
    )
    assert value == pytest.approx(11.98, abs=0.006)


# --- TF Privacy's own ------------------------------------------------------------


@pytest.fixture(scope="module")
def tf_privacy_lib():
    # Its Keras classes stop at Keras 2; this leaves them out.
    sys.skip_tf_privacy_import = True  # type: ignore[attr-defined]
    from tensorflow_privacy.privacy.analysis import compute_dp_sgd_privacy_lib

    return compute_dp_sgd_privacy_lib


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize(
    "train_size, batch_size, epochs, sigma, delta",
    # Batches that divide N: otherwise TF Privacy counts ceil(epochs * N / b) steps,
    # which is not what a fit does.
    [
        (60000, 240, 10, 1.1, 1e-5),
        (1437, 1437, 4, 5.0, 1e-4),
        (50000, 5000, 3, 0.9, 1e-6),
    ],
)
def test_equals_tf_privacy_statement(
    tf_privacy_lib, train_size, batch_size, epochs, sigma, delta, accountant
):
    text = tf_privacy_lib.compute_dp_sgd_privacy_statement(
        number_of_examples=train_size,
        batch_size=batch_size,
        num_epochs=epochs,
        noise_multiplier=sigma,
        delta=delta,
        used_microbatching=False,
        accountant_type=tf_privacy_lib.AccountantType(accountant.upper()),
    )
    match = re.search(r"Epsilon assuming Poisson sampling \(\*\): +([0-9.]+)", text)
    assert match
    ours = accounting.epsilon(
        noise_multiplier=sigma,
        delta=delta,
        train_size=train_size,
        batch_size=batch_size,
        epochs=epochs,
        accountant=accountant,
    )
    assert ours == pytest.approx(float(match[1]), abs=5.1e-4)


def test_steps_differ_from_tf_privacy_only_in_the_rounding_of_epochs(tf_privacy_lib):
    # Ten epochs of ceil(60000 / 256) are 2350 steps; TF Privacy counts 2344 of them.
    def theirs(epochs):
        return tf_privacy_lib._compute_dp_sgd_example_privacy(
            epochs, 1.1, 1e-5, False, 256 / 60000
        )

    ours = accounting.epsilon(noise_multiplier=1.1, **_REFERENCE)
    assert ours == pytest.approx(theirs(2349.5 * 256 / 60000), rel=1e-12)
    assert ours > theirs(10)


# --- composition -----------------------------------------------------------------


def test_heterogeneous_composition_equals_rdp_accountant():
    releases = [
        (accounting.poisson_event((1.1,), 60000, 256), 500),
        (accounting.poisson_event((0.8,), 60000, 512), 100),
        (accounting.unsampled_event((20.0,)), 7),
        (accounting.poisson_event((1.1,), 60000, 256), 250),
    ]
    expected = _dp_accounting_epsilon(releases, 1e-5, rdp.RdpAccountant())
    assert accounting.compose_epsilon(releases, 1e-5) == pytest.approx(
        expected, rel=1e-12
    )
    for left_out in range(4):
        rest = releases[:left_out] + releases[left_out + 1 :]
        assert accounting.compose_epsilon(rest, 1e-5) < 0.995 * expected


def test_heterogeneous_composition_equals_pld_accountant():
    releases = [
        (accounting.poisson_event((1.1,), 6000, 256), 500),
        (accounting.poisson_event((0.9,), 6000, 512), 20),
        (accounting.unsampled_event((20.0,)), 7),
    ]
    expected = _dp_accounting_epsilon(releases, 1e-5, pld.PLDAccountant())
    value = accounting.compose_epsilon(releases, 1e-5, "pld")
    assert value == pytest.approx(expected, rel=1e-9)
    assert value < accounting.compose_epsilon(releases, 1e-5)


def test_heterogeneous_composition_under_replace_one():
    relation = accounting.REPLACE_ONE
    releases = [
        (accounting.fixed_size_event((2.2,), 6000, 64), 300),
        (accounting.unsampled_event((40.0,), relation), 5),
    ]
    accountant = rdp.RdpAccountant(neighboring_relation=relation)
    expected = _dp_accounting_epsilon(releases, 1e-5, accountant)
    value = accounting.compose_epsilon(releases, 1e-5, "rdp", relation)
    assert value == pytest.approx(expected, rel=1e-12)


def test_replace_one_halves_the_noise():
    event = accounting.unsampled_event((3.0,), accounting.REPLACE_ONE)
    assert event == gaussian(1.5)
    assert accounting.unsampled_event((3.0,)) == gaussian(3.0)
    fixed = accounting.fixed_size_event((3.0,), 100, 10)
    assert fixed.event == gaussian(1.5)
    assert (fixed.source_dataset_size, fixed.sample_size) == (100, 10)


def test_large_fixed_size_batches_cost_no_more_than_no_sampling():
    # The bound of dp_accounting alone is three times as large here.
    relation = accounting.REPLACE_ONE
    sampled = accounting.fixed_size_event((20.0,), 1000, 900)
    unsampled = accounting.unsampled_event((20.0,), relation)
    values = [
        accounting.compose_epsilon([(event, 10)], 1e-5, "rdp", relation)
        for event in (sampled, unsampled)
    ]
    assert values[0] <= values[1]
    accountant = rdp.RdpAccountant(neighboring_relation=relation)
    assert _dp_accounting_epsilon([(sampled, 10)], 1e-5, accountant) > 1.2 * values[1]


def test_full_batches_are_unsampled():
    assert accounting.poisson_event((2.0,), 50, 50) == gaussian(2.0)


def test_nothing_released_is_free():
    event = accounting.poisson_event((0.0,), 60000, 256)
    for accountant in accounting.ACCOUNTANTS:
        assert accounting.compose_epsilon([], 1e-5, accountant) == 0.0
        assert accounting.compose_epsilon([(event, 0)], 1e-5, accountant) == 0.0


def test_without_noise_epsilon_is_infinite():
    for accountant in accounting.ACCOUNTANTS:
        for batch_size in (256, 60000):
            event = accounting.poisson_event((0.0,), 60000, batch_size)
            good = accounting.poisson_event((5.0,), 60000, batch_size)
            releases = [(good, 10), (event, 1)]
            assert accounting.compose_epsilon(releases, 1e-5, accountant) == math.inf
    assert accounting.epsilon(noise_multiplier=0, **_REFERENCE) == math.inf


# --- calibration -----------------------------------------------------------------


@pytest.mark.parametrize("target", [0.02, 0.3, 3.0, 50.0, 1e4])
@pytest.mark.parametrize("batch_size", [1, 256, 60000])
def test_calibration_meets_the_target_from_below(target, batch_size):
    run = {**_REFERENCE, "batch_size": batch_size}
    sigma = accounting.noise_multiplier(target_epsilon=target, **run)
    reached = accounting.epsilon(noise_multiplier=sigma, **run)
    assert 0.99 * target <= reached <= target


@pytest.mark.parametrize("target", [0.1, 3.0])
def test_calibration_by_pld_needs_less_noise(target):
    run = {**_REFERENCE, "train_size": 6000, "epochs": 30}
    by_rdp = accounting.noise_multiplier(target_epsilon=target, **run)
    by_pld = accounting.noise_multiplier(target_epsilon=target, accountant="pld", **run)
    reached = accounting.epsilon(noise_multiplier=by_pld, accountant="pld", **run)
    assert 0.99 * target <= reached <= target
    assert by_pld < by_rdp


def test_a_target_that_rdp_cannot_resolve_is_refused():
    # Its highest order is 1024: below about log(1/delta)/1023 - ... it jumps to 0.
    with pytest.raises(ValueError, match="RDP accountant cannot resolve"):
        accounting.noise_multiplier(target_epsilon=1e-4, **_REFERENCE)


# --- the largest number of steps -------------------------------------------------


@pytest.mark.parametrize("accountant", accounting.ACCOUNTANTS)
@pytest.mark.parametrize("target", [0.7, 1.5])
def test_max_steps_is_the_largest_that_fits(accountant, target):
    prior = [(accounting.unsampled_event((30.0,)), 3)]
    event = accounting.poisson_event((1.1,), 60000, 256)

    def after(steps):
        return [*prior, (event, steps)]

    def value(steps):
        return accounting.compose_epsilon(after(steps), 1e-5, accountant)

    most = accounting.max_steps(after, target, 1e-5, accountant)

    assert most > 0
    assert value(most) <= target < value(most + 1)


def _many(event, *prior):
    return lambda steps: [*prior, (event, steps)]


def test_max_steps_with_nothing_left_or_much():
    event = accounting.poisson_event((1.1,), 60000, 256)
    spent = (accounting.unsampled_event((2.0,)), 10)
    assert accounting.max_steps(_many(event, spent), 1.0, 1e-5) == 0
    assert accounting.max_steps(_many(gaussian(0.0)), 1.0, 1e-5) == 0
    assert accounting.max_steps(_many(event), 3.0, 1e-5, limit=100) == 100
    assert accounting.max_steps(_many(event), 3.0, 1e-5, limit=0) == 0
    tiny = accounting.poisson_event((1e6,), 60000, 256)
    assert accounting.max_steps(_many(tiny), 3.0, 1e-5, "pld", limit=10**9) == 10**9


def test_pld_allows_more_steps():
    event = accounting.poisson_event((1.1,), 60000, 256)
    by_rdp, by_pld = (
        accounting.max_steps(_many(event), 1.0, 1e-5, name)
        for name in accounting.ACCOUNTANTS
    )
    assert by_pld > 1.1 * by_rdp


@pytest.mark.parametrize("accountant", accounting.ACCOUNTANTS)
def test_max_steps_where_many_steps_are_one_release(accountant):
    calls = []

    def after(steps):
        calls.append(steps)
        return [(gaussian(10.0), -(-steps // 1000))]

    target = accounting.compose_epsilon(after(2000), 1e-5, accountant)
    below = target * (1 - 1e-9)
    for most, value in ((2000, target), (1000, below)):
        assert accounting.max_steps(after, value, 1e-5, accountant) == most
    assert accounting.max_steps(after, target, 1e-5, accountant, limit=70) == 70
    assert min(calls) == 1


# --- extremes --------------------------------------------------------------------

_SIGMAS = (1e-300, 1e-6, 1e-3, 0.05, 0.3, 1.0, 30.0, 1e4, 1e5, 1e6, 1e8, 1e300)


@pytest.mark.parametrize("accountant", accounting.ACCOUNTANTS)
@pytest.mark.parametrize("delta", [1e-300, 1e-13, 1e-5, 0.5])
@pytest.mark.filterwarnings("ignore:delta")
def test_extremes_answer_in_seconds_and_fall_with_noise(accountant, delta):
    start = time.monotonic()
    values = [
        accounting.epsilon(
            noise_multiplier=sigma,
            accountant=accountant,
            **{**_REFERENCE, "delta": delta},
        )
        for sigma in _SIGMAS
    ]
    assert time.monotonic() - start < 60
    assert not np.isnan(values).any()
    assert values[-1] < 0.7
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("relation", [accounting.ZERO_OUT, accounting.REPLACE_ONE])
def test_divergences_fall_smoothly_across_the_range_of_float64(relation):
    """At the limits where dp_accounting is left, no order may jump up."""
    last = None
    for exponent in np.arange(0, 9, 0.5):
        sigma = 10.0**exponent
        if relation is accounting.ZERO_OUT:
            event = accounting.poisson_event((sigma,), 60000, 256)
        else:
            event = accounting.fixed_size_event((sigma,), 60000, 256)
        values = renyi.divergences(event, relation)
        assert (values > 0).all()
        assert (np.diff(values) >= 0).all()
        if last is not None:
            assert (values <= last * (1 + 1e-9)).all()
        last = values


@pytest.mark.parametrize("q, sigma", [(0.1, 3e4), (1e-3, 5e3), (1e-6, 9.0)])
def test_large_noise_formula_is_an_upper_bound_close_to_the_truth(q, sigma):
    """Beyond the limit, against log sum_i C(a,i) (1-q)^(a-i) q^i e^(..) in full digits.

    The sum less 1 has positive terms only: nothing cancels.
    """
    batch_size = round(q * 10**6)
    event = accounting.poisson_event((sigma,), 10**6, batch_size)
    values = renyi.divergences(event, accounting.ZERO_OUT)
    for order in (2, 8, 32):
        excess = sum(
            math.comb(order, i)
            * (1 - q) ** (order - i)
            * q**i
            * math.expm1((i * i - i) / (2 * sigma**2))
            for i in range(2, order + 1)
        )
        truth = math.log1p(excess) / (order - 1)
        value = values[list(renyi.ORDERS).index(order)]
        assert truth * (1 - 1e-3) <= value <= 1.2 * truth


def test_pld_with_small_noise_stays_an_upper_bound():
    # One unsampled Gaussian has a closed form (Balle & Wang, arXiv:1805.06530).
    def delta_of(epsilon, sigma):
        def phi(x):
            return 0.5 * math.erfc(-x / math.sqrt(2))

        a, b = 0.5 / sigma, epsilon * sigma
        return phi(a - b) - math.exp(min(epsilon, 700)) * phi(-a - b)

    value = accounting.compose_epsilon([(gaussian(0.1), 1)], 1e-5, "pld")
    assert delta_of(value, 0.1) <= 1e-5
    assert delta_of(value * 0.99, 0.1) > 1e-5


def test_pld_takes_the_bound_of_rdp_where_its_tail_is_cut_off():
    releases = [(accounting.poisson_event((1.1,), 60000, 256), 2350)]
    assert _dp_accounting_epsilon(releases, 1e-18, pld.PLDAccountant()) == math.inf
    by_rdp = accounting.compose_epsilon(releases, 1e-18, "rdp")
    assert accounting.compose_epsilon(releases, 1e-18, "pld") == by_rdp < 4.0


def test_epsilon_at_another_step_count_is_fast():
    """It is shown at every batch of a progress bar."""
    event = accounting.poisson_event((1.234,), 60000, 256)
    accounting.compose_epsilon([(event, 1)], 1e-5)
    times = []
    for steps in range(1000, 1051):
        start = time.perf_counter()
        accounting.compose_epsilon([(event, steps)], 1e-5)
        times.append(time.perf_counter() - start)
    assert sorted(times)[len(times) // 2] < 5e-3


def test_divergences_of_integer_order_equal_dp_accounting():
    for q, sigma in [(256 / 60000, 1.1), (0.1, 0.5), (0.9, 3.0), (0.01, 20.0)]:
        event = dp_accounting.PoissonSampledDpEvent(q, gaussian(sigma))
        expected = rdp.RdpAccountant().compose(event).rdp
        assert renyi._poisson_rdp(q, gaussian(sigma)) == pytest.approx(
            expected, rel=1e-9
        )


def test_divergences_of_integer_order_keep_their_digits():
    """dp_accounting loses them to 1 + x: here it has five right ones, or none."""
    for q, sigma in [(2e-5, 26.0), (1e-6, 9.0)]:
        values = renyi._poisson_rdp(q, gaussian(sigma))
        second = math.log1p(q * q * math.expm1(1 / sigma**2))  # of order 2, exactly
        index = list(renyi.ORDERS).index(2.0)
        assert values[index] == pytest.approx(second, rel=1e-12)


def test_pld_of_unsampled_gaussians_that_differ_is_that_of_one():
    releases = [(gaussian(20.0 + k), k + 1) for k in range(40)]
    inverse = sum(n / event.noise_multiplier**2 for event, n in releases)
    together = [(gaussian(inverse**-0.5), 1)]
    for accountant in accounting.ACCOUNTANTS:
        value = accounting.compose_epsilon(releases, 1e-5, accountant)
        expected = accounting.compose_epsilon(together, 1e-5, accountant)
        assert value == pytest.approx(expected, rel=1e-9)


def test_pld_of_too_many_different_events_is_that_of_rdp():
    def epsilon(count, accountant):
        releases = [
            (accounting.poisson_event((6.0 + k,), 600, 60), 5) for k in range(count)
        ]
        return accounting.compose_epsilon(releases, 1e-5, accountant)

    most = composition._PLD_MAX_EVENTS
    assert epsilon(most, "pld") < 0.95 * epsilon(most, "rdp")
    assert epsilon(most + 1, "pld") == epsilon(most + 1, "rdp")


# --- mechanisms ------------------------------------------------------------------


def test_several_gaussians_are_one():
    # SPEC 19: z = 0.5 and s_b = 0.5 on centred counts (sensitivity 1/2).
    z_d = (0.5**-2 - (2 * 0.5) ** -2) ** -0.5
    assert z_d == pytest.approx(0.5773502692)
    assert accounting.effective_noise_multiplier((z_d, 1.0)) == pytest.approx(0.5)
    assert accounting.effective_noise_multiplier((1.5,)) == 1.5
    assert accounting.effective_noise_multiplier((1.5, 0.0)) == 0.0
    assert accounting.effective_noise_multiplier((1e-200, 1e200)) == 1e-200


def test_banded_batches_are_poisson_in_a_group():
    event = accounting.banded_event((2.0,), 1003, 50, bands=10)
    assert event == dp_accounting.PoissonSampledDpEvent(0.5, gaussian(2.0))
    assert accounting.banded_event((2.0,), 1003, 100, bands=10) == gaussian(2.0)
    one = accounting.banded_event((2.0,), 1003, 50, bands=1)
    assert one == accounting.poisson_event((2.0,), 1003, 50)
    with pytest.raises(ValueError, match="1003 examples in 10 groups are 100 each"):
        accounting.banded_event((2.0,), 1003, 101, bands=10)


def test_composed_release_equals_dp_accounting():
    composed = dp_accounting.PoissonSampledDpEvent(
        0.01, dp_accounting.ComposedDpEvent([gaussian(1.3), gaussian(2.5)])
    )
    expected = rdp.RdpAccountant().compose(composed, 300).get_epsilon(1e-5)
    event = accounting.poisson_event((1.3, 2.5), 1000, 10)
    value = accounting.compose_epsilon([(event, 300)], 1e-5)
    assert value == pytest.approx(expected, rel=1e-12)


def test_noise_multipliers_of_event():
    composed = dp_accounting.ComposedDpEvent(
        [
            gaussian(np.float32(1.5)),
            dp_accounting.SelfComposedDpEvent(gaussian(4.0), 4),
            dp_accounting.NonPrivateDpEvent(),
        ]
    )
    assert accounting.noise_multipliers_of_event(composed) == (1.5, 2.0, 0.0)


@pytest.mark.parametrize(
    "event",
    [
        dp_accounting.LaplaceDpEvent(1.0),
        dp_accounting.UnsupportedDpEvent(),
        dp_accounting.NoOpDpEvent(),
        dp_accounting.ComposedDpEvent([]),
        dp_accounting.ComposedDpEvent([gaussian(1.0), dp_accounting.LaplaceDpEvent(1)]),
        dp_accounting.SelfComposedDpEvent(gaussian(1.0), 0),
        dp_accounting.SingleEpochTreeAggregationDpEvent(1.0, 4),
        dp_accounting.PoissonSampledDpEvent(0.1, gaussian(1.0)),
        "GaussianDpEvent",
    ],
)
def test_events_that_are_not_gaussian_are_refused_by_name(event):
    with pytest.raises(ValueError, match="neither Gaussian") as error:
        accounting.noise_multipliers_of_event(event)
    name = event if isinstance(event, str) else "DpEvent"
    assert name in str(error.value)


def test_a_symbolic_event_is_refused():
    tf = pytest.importorskip("tensorflow")
    with tf.Graph().as_default(), pytest.raises(ValueError, match="eagerly"):
        accounting.noise_multipliers_of_event(gaussian(tf.constant(1.0)))


# --- errors ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"delta": 0.0}, "`delta` must lie strictly between"),
        ({"delta": 1.0}, "`delta` must lie strictly between"),
        ({"delta": 1.5}, "`delta` must lie strictly between"),
        ({"delta": -1e-5}, "`delta` must lie strictly between"),
        ({"delta": math.nan}, "`delta` must lie strictly between"),
        ({"batch_size": 60001}, "larger than the training set of 60000"),
        ({"batch_size": 0}, "`batch_size` must be at least 1"),
        ({"train_size": -1}, "`train_size` must be at least 1"),
        ({"epochs": 0}, "`epochs` must be at least 1"),
        ({"epochs": -3}, "`epochs` must be at least 1"),
        ({"noise_multiplier": -1.0}, "`noise_multiplier` must be non-negative"),
        ({"noise_multiplier": math.inf}, "`noise_multiplier` must be non-negative"),
        ({"noise_multiplier": math.nan}, "`noise_multiplier` must be non-negative"),
        ({"accountant": "prv"}, "'prv'. Use one of 'rdp', 'pld'"),
    ],
)
def test_epsilon_refuses(changed, message):
    with pytest.raises(ValueError, match=message):
        accounting.epsilon(**{"noise_multiplier": 1.0, **_REFERENCE, **changed})


@pytest.mark.parametrize("name", ["epochs", "batch_size", "train_size"])
@pytest.mark.parametrize("value", [1.5, True, "3", None])
def test_sizes_must_be_whole_numbers(name, value):
    with pytest.raises(TypeError, match=f"`{name}` must be a whole number"):
        accounting.epsilon(**{"noise_multiplier": 1.0, **_REFERENCE, name: value})


@pytest.mark.parametrize("value", ["1.0", None, True])
def test_noise_must_be_a_number(value):
    with pytest.raises(TypeError, match="`noise_multiplier` must be a number"):
        accounting.epsilon(noise_multiplier=value, **_REFERENCE)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"target_epsilon": 0.0}, "`target_epsilon` must be positive"),
        ({"target_epsilon": math.inf}, "`target_epsilon` must be positive"),
        ({"delta": 2.0}, "`delta` must lie strictly between"),
        ({"batch_size": 60001}, "larger than the training set of 60000"),
        ({"accountant": "RDP"}, "Use one of 'rdp', 'pld'"),
    ],
)
def test_calibration_refuses(changed, message):
    with pytest.raises(ValueError, match=message):
        accounting.noise_multiplier(**{"target_epsilon": 1.0, **_REFERENCE, **changed})


def test_pld_refuses_fixed_size_sampling():
    event = accounting.fixed_size_event((1.1,), 60000, 256)
    with pytest.raises(ValueError, match="accountant='rdp' with fixed-size"):
        accounting.compose_epsilon([(event, 1)], 1e-5, "pld", accounting.REPLACE_ONE)


def test_sampling_needs_its_own_relation():
    poisson = accounting.poisson_event((1.1,), 60000, 256)
    fixed = accounting.fixed_size_event((1.1,), 60000, 256)
    with pytest.raises(ValueError, match="cannot be accounted for under REPLACE_ONE"):
        accounting.compose_epsilon([(poisson, 1)], 1e-5, "rdp", accounting.REPLACE_ONE)
    with pytest.raises(ValueError, match="cannot be accounted for under ADD_OR"):
        accounting.compose_epsilon([(fixed, 1)], 1e-5)


def test_compose_refuses_negative_counts_and_empty_mechanisms():
    with pytest.raises(ValueError, match="released -1 times"):
        accounting.compose_epsilon([(gaussian(1.0), -1)], 1e-5)
    with pytest.raises(ValueError, match="without any noise multiplier"):
        accounting.effective_noise_multiplier(())


@pytest.mark.parametrize("calibrate", [False, True])
def test_a_delta_of_one_over_n_warns_and_a_smaller_one_does_not(calibrate):
    def call(delta):
        sizes: dict[str, Any] = {"train_size": 1000, "batch_size": 10, "epochs": 1}
        if calibrate:
            accounting.noise_multiplier(target_epsilon=2.0, delta=delta, **sizes)
        else:
            accounting.epsilon(noise_multiplier=2.0, delta=delta, **sizes)

    with pytest.warns(UserWarning, match="not below 1/N") as record:
        call(1e-3)
    assert record[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(9e-4)

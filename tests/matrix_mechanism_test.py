"""Mechanisms with correlated noise: what they add, and what it is worth.

`response` asks the mechanism itself, not its parts: with unit vectors for draws, the
noise of step t is row t of the matrix L in "noise = L z". To whoever sees all steps,
clipped gradients G give L^{-1} G + z: the ledger's noise multiplier is right if no
record can move L^{-1} G by more than 1 over it. Whatever goes wrong between a strategy
and the noise (a buffer, a restart, a scale, a rounding) goes wrong in L.
"""

import helpers
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from toeplitz_test import matrix

from keras_dpopt import matrix_mechanism, prng, sampling, toeplitz
from keras_dpopt.run_plan import ComingSteps
from keras_dpopt.types import ClippedSum

GOLDEN = helpers.golden()["methods"]["mf_dp_ftrl"]
CLIP, SIGMA, KEY = 0.7, 2.5, 77
# L is float32, and its inverse no better.
ROUNDING = 2e-5


def toeplitz_mechanism(
    strategy="banded",
    bands=3,
    buffers=2,
    amplified=False,
    momentum=0.0,
    coefficients=None,
    sigma=SIGMA,
    clip=CLIP,
):
    return matrix_mechanism.ToeplitzMechanism(
        clip, sigma, strategy, bands, buffers, amplified, momentum, coefficients
    )


def tree_mechanism(restart="epoch"):
    return matrix_mechanism.TreeMechanism(CLIP, SIGMA, restart)


def coming(steps, train_size, batch_size, drawn=True):
    return ComingSteps(steps, batch_size, train_size, drawn, lambda: None)


def releases(mechanism, steps, shape, first=0, batch_size=1.0, graph=True, key=KEY):
    """The noise of each step, `[steps, *shape]`, and the reported deviations."""
    built = mechanism.built_for([0], [shape])

    def one(state, number):
        clipped = ClippedSum((tf.zeros(shape),), built.l2_norm_clip)
        gradient, state = built.release(clipped, state, key, number, batch_size)
        return gradient.values[0], gradient.noise_stddev, state

    one = tf.function(one, autograph=False) if graph else one
    state, noise, stddevs = first_state(built), [], []
    for number in range(first, first + steps):
        value, stddev, state = one(state, tf.constant(number, tf.int64))
        noise.append(value.numpy().astype(np.float64))
        stddevs.append(float(stddev))
    return np.array(noise), np.array(stddevs)


def first_state(built):
    return tf.nest.map_structure(tf.convert_to_tensor, built.initial_state())


def response(mechanism, steps, monkeypatch, first=0):
    """L, `[steps, steps]`."""
    monkeypatch.setattr(
        prng,
        "standard_normal",
        lambda key, step, stream, shape: tf.one_hot(step - first, shape[0]),
    )
    noise, _ = releases(mechanism, steps, (steps,), first, graph=False)
    monkeypatch.undo()
    return noise


# ------------------------------------------------------------------------ the noise

MECHANISMS = {
    "banded": toeplitz_mechanism,
    "momentum": lambda: toeplitz_mechanism(bands=4, momentum=0.9),
    "given": lambda: toeplitz_mechanism(coefficients=(5.0, 2.0, 1.0)),
    "independent": lambda: toeplitz_mechanism(bands=1),
    "blt": lambda: toeplitz_mechanism("blt"),
    "amplified": lambda: toeplitz_mechanism(amplified=True),
    "tree": tree_mechanism,
    "one tree": lambda: tree_mechanism(None),
}


@pytest.mark.parametrize("name", MECHANISMS)
def test_noise_has_the_covariance_of_the_strategy(name, monkeypatch):
    """By 20000 independent runs of 11 steps, one a coordinate: N = 16, B = 4.

    Whitened by L^{-1}, the joint covariance is 1: each entry within 6 of its standard
    deviations, sqrt(2) on the diagonal; false-alarm rate 66 * 2e-9. Power: with the
    noise of any other mechanism, it is not.
    """
    steps, n = 11, 20_000
    mechanism = MECHANISMS[name]()
    mechanism.plan_run(coming(steps, 16, 4))
    noise, stddevs = releases(mechanism, steps, (n,), first=5, batch_size=4.0)
    matrix_of_noise = response(mechanism, steps, monkeypatch)
    white = 4.0 * np.linalg.solve(matrix_of_noise, noise)
    errors = np.sqrt(n) * (white @ white.T / n - np.eye(steps))
    assert np.abs(errors).max() < 6 * np.sqrt(2)
    assert scipy.stats.kstest(white.ravel(), "norm").pvalue > 1e-5
    # What rules correct for is what each step has.
    want = np.linalg.norm(matrix_of_noise, axis=1) / 4.0
    np.testing.assert_allclose(stddevs, want, rtol=1e-5)
    np.testing.assert_allclose(noise.std(axis=1), stddevs, rtol=0.03)
    other = MECHANISMS["one tree" if name != "one tree" else "blt"]()
    other.plan_run(coming(steps, 16, 4))
    wrong = 4.0 * np.linalg.solve(response(other, steps, monkeypatch), noise)
    assert np.sqrt(n) * np.abs(wrong @ wrong.T / n - np.eye(steps)).max() > 60


@pytest.mark.parametrize("name", MECHANISMS)
def test_noise_is_sigma_s_c_times_the_inverse(name, monkeypatch):
    """L from the settings, in float64, with strategies of toeplitz.py alone."""
    steps, apart = 10, 4
    mechanism = MECHANISMS[name]()
    mechanism.plan_run(coming(steps, 16, 4))
    c = {
        "banded": toeplitz.optimize_banded(steps, 3).coefficients_up_to(steps),
        "momentum": toeplitz.optimize_banded(steps, 4, 0.9).coefficients_up_to(steps),
        "given": np.append([5.0, 2.0, 1.0], np.zeros(7)),
        "independent": np.eye(steps)[0],
        "blt": toeplitz.optimize_blt(steps, 2, apart).coefficients_up_to(steps),
        "amplified": toeplitz.optimize_banded(steps, 3).coefficients_up_to(steps),
    }.get(name)
    if c is not None:
        scale = toeplitz.sensitivity(c, steps, apart)
        if name == "amplified":
            scale = np.linalg.norm(c)
        want = scale * np.linalg.inv(matrix(c))
    else:
        period = apart if name == "tree" else steps
        want = np.zeros((steps, steps))
        for start in range(0, steps, period):
            size = min(period, steps - start)
            block = slice(start, start + size)
            want[block, block] = np.linalg.inv(toeplitz.tree_matrices(size)[1])
    monkeypatch.setattr(
        prng, "standard_normal", lambda key, step, stream, shape: tf.one_hot(step, 10)
    )
    noise, _ = releases(mechanism, steps, (steps,), graph=False)
    np.testing.assert_allclose(noise, SIGMA * CLIP * want, atol=2e-5 * SIGMA)
    assert abs(noise[3:]).max() > 0.1


def test_the_golden_strategy_makes_the_golden_noise(monkeypatch):
    problem = helpers.golden()["problem"]
    draws = tf.constant(np.concatenate([problem["Z"], problem["E1"]]), tf.float32)
    mechanism = toeplitz_mechanism(bands=4, coefficients=GOLDEN["banded4_coefs"])
    mechanism.plan_run(coming(8, 40, 10))
    monkeypatch.setattr(
        prng, "standard_normal", lambda key, step, stream, shape: draws[step]
    )
    noise, stddevs = releases(mechanism, 8, (3,), batch_size=10.0)
    monkeypatch.undo()
    unit = SIGMA * CLIP / 10.0 * toeplitz.sensitivity(GOLDEN["banded4_coefs"], 8, 4)
    want = np.array(GOLDEN["banded4_noise_from_Z_then_E1"])
    np.testing.assert_allclose(noise, unit * want, rtol=1e-5, atol=1e-6)
    norms = np.array(GOLDEN["banded4_row_std_first8"])
    np.testing.assert_allclose(stddevs, unit * norms, rtol=3e-6)


def test_variables_share_no_noise():
    """Two of one shape, in one release and in the next ones."""
    for name in ("banded", "blt", "tree"):
        mechanism = MECHANISMS[name]()
        mechanism.plan_run(coming(4, 16, 4))
        built = mechanism.built_for([0, 1], [(4000,), (4000,)])
        state, noise = first_state(built), []
        for number in range(4):
            clipped = ClippedSum((tf.zeros([4000]),) * 2, CLIP)
            gradient, state = built.release(clipped, state, KEY, number, 1.0, 7)
            noise.append(np.array(gradient.values))
        first, second = np.swapaxes(noise, 0, 1)
        correlations = np.corrcoef(first, second)[:4, 4:]
        assert np.abs(correlations).max() < 6 / np.sqrt(4000)
        z = prng.standard_normal(KEY, 0, 8, (4000,))
        assert np.corrcoef(second[0], z)[0, 1] > 0.9999


# -------------------------------------------------------------------- what it is worth

RUNS = [
    # steps, N, B, first release
    (12, 12, 3, 0),  # three whole turns
    (11, 13, 4, 0),  # N is no multiple of B, T none of the 4 blocks
    (10, 13, 4, 3),  # nor is the first release
    (9, 9, 2, 10**9 + 1),
    (3, 40, 4, 5),  # less than a turn
    (1, 10, 3, 2),
    (2, 10, 3, 1),
    (7, 4, 1, 2),  # a record a step
]


def multiplier_of(mechanism, plan):
    return plan.phase.get("noise_multipliers", (mechanism.noise_multiplier,))[0]


def largest_move(inverse, member, rng, steps_per_release, same=True):
    """The largest move of one release by a record, in units of the clip.

    `member[t, i]` is 1 where record i is in step t. Contributions are all the same, all
    of them or some of them, or of any direction and size up to the clip.
    """
    largest = 0.0
    for steps_in in member.T.astype(np.float64):
        for trial in range(8):
            if trial == 0:
                moves = inverse @ steps_in[:, np.newaxis]
            elif trial < 4:
                moves = inverse @ (steps_in * rng.integers(0, 2, len(steps_in)))
                moves = moves[:, np.newaxis]
            else:
                gradients = rng.normal(size=(len(steps_in), 3))
                gradients /= np.linalg.norm(gradients, axis=1, keepdims=True)
                sizes = rng.random(len(steps_in)) ** 0.2 * steps_in
                moves = inverse @ (gradients * sizes[:, np.newaxis])
            for start in range(0, len(inverse), steps_per_release):
                part = moves[start : start + steps_per_release]
                largest = max(largest, np.linalg.norm(part))
    return largest * CLIP


def membership(plan, steps, train_size, batch_size, first):
    member = np.zeros((steps, train_size), int)
    for t in range(steps):
        rows = plan.sampler.indices(KEY, first + t, train_size, batch_size)
        member[t, rows.numpy()] += 1
    return member


@pytest.mark.parametrize("run", RUNS, ids=str)
@pytest.mark.parametrize("name", sorted(set(MECHANISMS) - {"amplified"}))
def test_no_record_moves_a_cyclic_run_by_more_than_the_ledger_says(
    name, run, monkeypatch
):
    steps, train_size, batch_size, first = run
    mechanism = MECHANISMS[name]()
    if mechanism.__dict__.get("bands", 1) > -(-train_size // batch_size):
        pytest.skip("refused: see below")
    plan = mechanism.plan_run(coming(steps, train_size, batch_size))
    assert type(plan.sampler) is sampling.CyclicSampler
    assert plan.phase["sampling"] == "cyclic" and not plan.allows_other_samplers
    inverse = np.linalg.inv(response(mechanism, steps, monkeypatch, first))
    member = membership(plan, steps, train_size, batch_size, first)
    assert member.max() == 1
    rng = np.random.default_rng(0)
    per_release = plan.phase["steps_per_release"]
    move = largest_move(inverse, member, rng, per_release)
    bound = 1.0 / multiplier_of(mechanism, plan)
    assert move <= bound * (1 + ROUNDING)
    # ... and nothing is given away: where a turn begins with the run, it is reached.
    if first == 0 and name not in ("tree", "one tree"):
        assert move >= bound * (1 - ROUNDING)
    # Noise of another release depends on nothing in this one.
    for start in range(0, steps, per_release):
        inside = np.arange(start, min(start + per_release, steps))
        assert not np.delete(inverse[inside], inside, axis=1).any()
    # Power: with a record back one step sooner, it is more than the ledger says.
    if name == "blt" and run == RUNS[0]:
        sooner = np.zeros((steps, 1), int)
        sooner[::3] = 1
        assert largest_move(inverse, sooner, rng, steps) > 1.05 * bound


@pytest.mark.parametrize(
    ("steps", "train_size", "batch_size", "bands", "first"),
    [(12, 24, 2, 3, 0), (11, 26, 3, 4, 7), (2, 24, 2, 3, 1), (8, 10, 5, 2, 3)],
)
def test_each_turn_of_amplified_groups_is_one_release(
    steps, train_size, batch_size, bands, first, monkeypatch
):
    """Columns of one record do not overlap, and none is longer than 1 / sigma."""
    mechanism = toeplitz_mechanism(bands=bands, amplified=True, momentum=0.9)
    plan = mechanism.plan_run(coming(steps, train_size, batch_size))
    assert plan.sampler == sampling.BandedPoissonSampler(bands)
    assert plan.phase == {"sampling": "banded", "steps_per_release": bands}
    inverse = np.linalg.inv(response(mechanism, steps, monkeypatch, first))
    groups = membership(plan, steps, train_size, train_size // bands, first)
    longest = 0.0
    for steps_in in groups.T.astype(bool):
        columns = CLIP * inverse[:, steps_in]
        products = columns.T @ columns
        lengths = np.sqrt(np.diag(products))
        assert len(lengths) <= -(-steps // bands)
        np.testing.assert_allclose(products, np.diag(lengths**2), atol=1e-6)
        longest = max([longest, *lengths])
    assert longest <= (1 + ROUNDING) / SIGMA
    assert steps < bands or longest >= (1 - ROUNDING) / SIGMA


@pytest.mark.parametrize("steps", [1, 5, 40, 2000])
@pytest.mark.parametrize("name", ["banded", "momentum", "given", "blt"])
def test_float32_rounds_no_sensitivity_down(name, steps):
    """In float64, from the very parameters that the steps read."""
    mechanism = MECHANISMS[name]()
    mechanism.plan_run(coming(steps, 400, 40))
    parameters = mechanism._parameters.numpy().astype(np.float64)
    if name == "blt":
        powers = parameters[0][:, np.newaxis] ** np.arange(steps - 1)
        c = np.append(1.0, parameters[1] @ powers)
    else:
        c = np.append(parameters, np.zeros(steps))[:steps]
    worst = np.zeros(steps)
    for start in range(0, steps, 10):
        worst[start:] += c[: steps - start]
    scale = float(mechanism._scale.numpy())
    assert np.linalg.norm(worst) <= scale <= np.linalg.norm(worst) * (1 + 2e-6)


def test_a_decay_that_float32_rounds_to_one_is_accounted_so(monkeypatch):
    """20000 steps want a decay of 1 - 4e-8, which float32 has not."""
    best = toeplitz.BufferedLinearToeplitz((1 - 1e-8, 0.5), (0.3, 0.2))
    monkeypatch.setattr(toeplitz, "optimize_blt", lambda *_, **__: best)
    mechanism = toeplitz_mechanism("blt")
    mechanism.plan_run(coming(20_000, 400, 40))
    decays, scales = mechanism._parameters.numpy().astype(np.float64)
    assert decays.max() < 1.0
    c = np.append(1.0, scales @ decays[:, np.newaxis] ** np.arange(19_999))
    assert float(mechanism._scale.numpy()) >= toeplitz.sensitivity(c, 20_000, 10)


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1e38, 1e300])
def test_the_scale_of_given_coefficients_changes_nothing(scale):
    """Where z / c_0 left float32, there would be no noise, or nothing else."""

    def noise(scale):
        c = (scale, 0.5 * scale, 0.25 * scale)
        mechanism = toeplitz_mechanism(coefficients=c)
        mechanism.plan_run(coming(6, 16, 4))
        return releases(mechanism, 6, (50,))[0]

    np.testing.assert_array_equal(noise(scale), noise(1.0))
    assert noise(1.0).std() > 1.0


# ------------------------------------------------------------------- plans and refusals


@pytest.mark.parametrize(
    ("made", "want"),
    [
        (lambda: toeplitz_mechanism(bands=4), (1, 40)),
        (lambda: toeplitz_mechanism("blt"), (1, 40)),
        (lambda: toeplitz_mechanism(bands=1), (1, 40)),
    ],
)
def test_a_cyclic_run_is_one_release_of_sigma(made, want):
    plan = made().plan_run(coming(want[1], 100, 10))
    assert plan.phase == {"sampling": "cyclic", "steps_per_release": want[1]}


def test_a_tree_costs_its_depth():
    for steps, train_size, batch_size, period, squared in [
        (40, 100, 10, 10, 4),  # floor(log2 10) + 1
        (40, 80, 10, 8, 4),
        (40, 70, 10, 7, 3),
        (3, 100, 10, 3, 2),
        (5, 10, 10, 1, 1),
    ]:
        plan = tree_mechanism().plan_run(coming(steps, train_size, batch_size))
        assert plan.phase["steps_per_release"] == period
        (multiplier,) = plan.phase["noise_multipliers"]
        assert multiplier == pytest.approx(SIGMA / np.sqrt(squared), rel=1e-12)
    plan = tree_mechanism(None).plan_run(coming(40, 100, 10))
    assert plan.phase["steps_per_release"] == 40
    (multiplier,) = plan.phase["noise_multipliers"]
    want = SIGMA / toeplitz.tree_sensitivity(40, 10)
    assert multiplier == pytest.approx(want, rel=1e-12) and multiplier < SIGMA / 2


def test_one_amplified_band_is_poisson_sampling():
    plan = toeplitz_mechanism(bands=1, amplified=True).plan_run(coming(9, 20, 5))
    assert plan.sampler == sampling.PoissonSampler()
    assert plan.phase == {"sampling": "poisson"}


@pytest.mark.parametrize("name", MECHANISMS)
def test_batches_of_the_callers_are_refused(name):
    for wrong in (coming(8, 16, 4, drawn=False), coming(None, 16, 4)):
        with pytest.raises(ValueError, match="Pass arrays to `fit`"):
            MECHANISMS[name]().plan_run(wrong)


@pytest.mark.parametrize(
    ("name", "graph"),
    [*((name, False) for name in MECHANISMS), ("banded", True), ("tree", True)],
)
def test_a_step_beyond_the_horizon_fails(name, graph):
    mechanism = MECHANISMS[name]()
    mechanism.plan_run(coming(5, 16, 4))
    releases(mechanism, 5, (2,), graph=graph)
    with pytest.raises(tf.errors.InvalidArgumentError, match="beyond the run"):
        releases(mechanism, 6, (2,), graph=graph)


def test_another_key_or_plan_within_a_run_fails():
    mechanism = MECHANISMS["banded"]()
    mechanism.plan_run(coming(5, 16, 4))
    built = mechanism.built_for([0], [(2,)])
    clipped = ClippedSum((tf.zeros([2]),), CLIP)
    _, state = built.release(clipped, first_state(built), KEY, 0, 4.0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="Weights were loaded"):
        built.release(clipped, state, KEY + 1, 1, 4.0)
    _, later = built.release(clipped, state, KEY, 1, 4.0)
    built.plan_run(coming(9, 16, 4))
    with pytest.raises(tf.errors.InvalidArgumentError, match="Another run"):
        built.release(clipped, later, KEY, 2, 4.0)
    built.plan_run(coming(5, 16, 4))  # the same one
    built.release(clipped, later, KEY, 2, 4.0)


def test_a_sum_of_another_sensitivity_is_refused():
    mechanism = MECHANISMS["banded"]()
    mechanism.plan_run(coming(5, 16, 4))
    built = mechanism.built_for([0], [(2,)])
    clipped = ClippedSum((tf.zeros([2]),), 2 * CLIP)
    with pytest.raises(ValueError, match="sensitivity"):
        built.release(clipped, first_state(built), KEY, 0, 4.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"strategy": "tree"}, "strategy"),
        ({"bands": 0}, "bands"),
        ({"bands": 2.5}, "bands"),
        ({"strategy": "blt", "buffers": 0}, "buffers"),
        ({"momentum": 1.0}, "momentum"),
        ({"amplified": 1}, "amplified"),
        ({"strategy": "blt", "amplified": True}, "finitely many bands"),
        ({"coefficients": (1.0, 0.5)}, "2 coefficients for 3 bands"),
        ({"strategy": "blt", "coefficients": (1.0, 0.5, 0.1)}, "with 'banded'"),
        ({"coefficients": (1.0, 0.5, 0.6)}, "known sensitivity"),
        ({"coefficients": (1.0, 0.5, np.nan)}, "coefficients"),
        ({"coefficients": (0.0, 0.0, 0.0)}, "known sensitivity"),
        ({"sigma": -1.0}, "noise_multiplier"),
        ({"clip": np.inf}, "l2_norm_clip"),
    ],
)
def test_arguments_without_a_meaning_are_refused(arguments, words):
    with pytest.raises((ValueError, TypeError), match=words):
        toeplitz_mechanism(**arguments)


def test_trees_are_restarted_at_epochs_or_never():
    with pytest.raises(ValueError, match="restart"):
        tree_mechanism("step")


def test_bands_reach_no_further_than_a_records_next_step():
    for train_size, batch_size in [(10, 10), (10, 5), (2, 1)]:
        with pytest.raises(ValueError, match="Pass fewer bands, or a smaller batch"):
            toeplitz_mechanism().plan_run(coming(9, train_size, batch_size))
    toeplitz_mechanism().plan_run(coming(9, 10, 4))


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("name", MECHANISMS)
def test_runs_shorter_than_the_bands_or_a_turn(name, steps):
    mechanism = MECHANISMS[name]()
    plan = mechanism.plan_run(coming(steps, 16, 4))
    assert plan.phase["steps_per_release"] >= 1
    noise, stddevs = releases(mechanism, steps, (4000,))
    if steps:
        np.testing.assert_allclose(noise.std(axis=1), stddevs, rtol=0.06)
        assert stddevs.min() >= 0.999 * SIGMA * CLIP


def test_without_noise_there_is_none():
    mechanism = toeplitz_mechanism(sigma=0.0, clip=np.inf)
    plan = mechanism.plan_run(coming(4, 16, 4))
    noise, stddevs = releases(mechanism, 4, (3,))
    assert not noise.any() and not stddevs.any()
    assert multiplier_of(mechanism, plan) == 0.0

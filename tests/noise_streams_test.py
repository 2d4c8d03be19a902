"""Noise streams: the recursions equal C^{-1} z, and TF Privacy's tree.

Everything is compared with explicit float64 matrices, so the recursions are on trial
and nothing else: draws are given, not drawn. Float32 tolerances: 1e-5 for noise of size
1, after at most 40 steps.
"""

import helpers
import numpy as np
import pytest
import tensorflow as tf
from toeplitz_test import matrix, random_column

from keras_dpopt import prng, tf_privacy, toeplitz
from keras_dpopt.noise_streams import BandedStream, BufferedLinearStream, TreeStream
from keras_dpopt.toeplitz import BandedToeplitz, BufferedLinearToeplitz

# Possible after keras_dpopt.tf_privacy has set sys.skip_tf_privacy_import.
assert tf_privacy
from tensorflow_privacy.privacy.dp_query import (  # isort: skip  # noqa: E402
    restart_query,
    tree_aggregation,
)

GOLDEN = helpers.golden()["methods"]["mf_dp_ftrl"]
PROBLEM = helpers.golden()["problem"]
GOLDEN_DRAWS = np.concatenate([PROBLEM["Z"], PROBLEM["E1"]])
MODES = {
    "eager": lambda step: step,
    "graph": lambda step: tf.function(step, autograph=False),
    "xla": lambda step: tf.function(step, autograph=False, jit_compile=True),
}


def noise_of(stream, parameters, draws, mode="eager", first=0):
    """What a stream makes of given draws, `[steps, *shape]`, in float64."""
    z = tf.constant(draws, tf.float32)
    buffers = tf.zeros([stream.buffers, *z.shape[1:]])
    parameters = tf.constant(parameters)

    def one(step, buffers):
        return stream.next(parameters, buffers, lambda k: z[step - k - first], step)

    one, noise = MODES[mode](one), []
    for step in range(first, first + len(draws)):
        w, buffers = one(tf.constant(step, tf.int64), buffers)
        noise.append(w.numpy().astype(np.float64))
    return np.array(noise)


def stream_of(strategy):
    if isinstance(strategy, BandedToeplitz):
        return BandedStream(strategy.bands)
    return BufferedLinearStream(len(strategy.decays))


def random_strategies(cases, seed=0):
    rng = np.random.default_rng(seed)
    for i in range(cases):
        if i % 2:
            scales = rng.dirichlet(np.ones(3))[:2]
            yield BufferedLinearToeplitz(tuple(rng.random(2)), tuple(scales))
        else:
            yield BandedToeplitz(random_column(rng, int(rng.integers(1, 7))))


# ------------------------------------------------------------------- banded and BLT


@pytest.mark.parametrize("mode", MODES)
def test_banded_noise_equals_the_golden_values(mode):
    strategy = BandedToeplitz(GOLDEN["banded4_coefs"])
    stream = BandedStream(4)
    noise = noise_of(stream, stream.parameters(strategy), GOLDEN_DRAWS, mode)
    want = GOLDEN["banded4_noise_from_Z_then_E1"]
    np.testing.assert_allclose(noise, want, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_blt_noise_equals_the_golden_values(mode):
    golden = GOLDEN["blt"]
    strategy = BufferedLinearToeplitz(
        tuple(golden["buf_decay"]), tuple(golden["output_scale"])
    )
    stream = BufferedLinearStream(2)
    noise = noise_of(stream, stream.parameters(strategy), GOLDEN_DRAWS, mode)
    np.testing.assert_allclose(noise, golden["noise"], atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "mode", "cases"),
    [((), "eager", 8), ((3,), "graph", 4), ((2, 3), "eager", 12), ((2, 3), "xla", 2)],
)
def test_noise_equals_the_matrix_product(shape, mode, cases):
    rng = np.random.default_rng(len(shape))
    for strategy in random_strategies(cases, seed=len(shape)):
        stream = stream_of(strategy)
        strategy = stream.rounded(strategy)
        draws = rng.normal(size=(20, *shape)).astype(np.float32).astype(np.float64)
        noise = noise_of(stream, stream.parameters(strategy), draws, mode)
        inverse = matrix(strategy.inverse_up_to(20))
        want = np.tensordot(inverse, draws, 1)
        size = np.abs(want).max()
        np.testing.assert_allclose(noise, want, atol=1e-5 * size)
        column = strategy.coefficients_up_to(20)
        back = np.tensordot(matrix(column), noise, 1)
        np.testing.assert_allclose(back, draws, atol=1e-5 * size)
        # Power: a coefficient that is off by a hundredth is seen.
        if len(column) > 1:
            column[1] += 0.01
            wrong = np.tensordot(matrix(column), noise, 1)
            assert np.abs(wrong - draws).max() > 1e-3


def test_one_band_is_independent_noise():
    draws = np.random.default_rng(0).normal(size=(5, 4))
    stream = BandedStream(1)
    noise = noise_of(stream, np.float32([4.0]), draws)
    np.testing.assert_allclose(noise, draws / 4.0, rtol=1e-6)
    assert stream.buffers == 0


def test_coefficients_beyond_those_of_the_strategy_are_zero():
    stream = BandedStream(5)
    c = stream.parameters(BandedToeplitz((1.0, 0.5)))
    assert c.tolist() == [1.0, 0.5, 0.0, 0.0, 0.0]
    draws = np.random.default_rng(0).normal(size=(9, 2))
    want = noise_of(BandedStream(2), c[:2], draws)
    np.testing.assert_allclose(noise_of(stream, c, draws), want, atol=1e-6)


# ------------------------------------------------------------------------- rounding


def test_what_is_accounted_is_what_float32_computes():
    """`rounded` changes a strategy little, and `parameters` then nothing."""
    for strategy in random_strategies(20, seed=4):
        stream = stream_of(strategy)
        rounded = stream.rounded(strategy)
        parameters = stream.parameters(rounded).astype(np.float64)
        column = strategy.coefficients_up_to(30)
        near = rounded.coefficients_up_to(30)
        np.testing.assert_allclose(near, column / column[0], atol=1e-5)
        if isinstance(rounded, BandedToeplitz):
            assert tuple(parameters) == rounded.coefficients
            assert rounded.coefficients[0] == 1.0
        else:
            assert (tuple(parameters[0]), tuple(parameters[1])) == (
                rounded.decays,
                rounded.scales,
            )


def test_decays_next_to_one_are_accounted_as_they_are_in_float32():
    """Rounded to nearest, this decay is 1: larger coefficients than accounted."""
    decay = 1.0 - 1e-8
    assert np.float32(decay) == 1.0
    stream = BufferedLinearStream(1)
    rounded = stream.rounded(BufferedLinearToeplitz((decay,), (0.9,)))
    assert rounded.decays[0] < 1.0 and rounded.scales[0] <= 0.9
    assert stream.parameters(rounded)[0, 0] == rounded.decays[0]
    # The optimum for many steps is of that kind; its float32 version is another one.
    best = toeplitz.optimize_blt(20_000, 3, separation=200, momentum=0.9)
    near = BufferedLinearStream(3).rounded(best)
    difference = best.coefficients_up_to(20_000) - near.coefficients_up_to(20_000)
    assert 0.0 <= difference.min() <= difference.max() < 1e-2


@pytest.mark.parametrize("scale", [1e-300, 1e-40, 1.0, 1e38, 1e300])
def test_the_scale_of_coefficients_does_not_reach_float32(scale):
    """A c_0 of 1e38 would flush z / c_0 to zero: a run without noise."""
    stream = BandedStream(3)
    rounded = stream.rounded(BandedToeplitz((scale, 0.5 * scale, 0.25 * scale)))
    assert rounded.coefficients == (1.0, 0.5, 0.25)
    assert not np.float32(1e-39) * tf.constant(1.0)  # TensorFlow flushes


# ----------------------------------------------------------------------------- trees


class Given(tree_aggregation.ValueGenerator):
    """Gives TF Privacy's tree the draws of a list, one after the other."""

    def __init__(self, draws):
        self._draws = tf.constant(draws, tf.float32)

    def initialize(self):
        return tf.constant(0)

    def next(self, state):
        return self._draws[state], state + 1


@pytest.mark.parametrize(
    ("steps", "mode"),
    [(1, "eager"), (2, "eager"), (7, "graph"), (8, "xla"), (21, "eager")],
)
def test_tree_noise_equals_the_matrix_product(steps, mode):
    draws = np.random.default_rng(steps).normal(size=(steps, 3))
    noise = noise_of(TreeStream(), np.int64(steps), draws, mode)
    prefixes, covers = toeplitz.tree_matrices(steps)
    np.testing.assert_allclose(np.cumsum(noise, axis=0), prefixes @ draws, atol=1e-5)
    want = np.linalg.solve(np.tri(steps), prefixes @ draws)
    np.testing.assert_allclose(noise, want, atol=1e-5)
    assert np.linalg.matrix_rank(covers) == steps


def test_prefix_sums_are_those_of_tf_privacys_tree():
    """Its `TreeAggregator`, given the same value for each node as it is made."""
    steps = 37
    draws = np.random.default_rng(1).normal(size=(steps + 1, 3))
    aggregator = tree_aggregation.TreeAggregator(Given(draws))
    state, theirs = aggregator.init_state(), []
    for _ in range(steps):
        total, state = aggregator.get_cumsum_and_update(state)
        theirs.append(total.numpy())
    noise = noise_of(TreeStream(), np.int64(steps), draws[:steps])
    ours = np.cumsum(noise, axis=0)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    # Power: independent noise of the same draws is something else.
    assert np.abs(np.cumsum(draws[:steps], axis=0) - theirs).max() > 1.0


def test_restarts_are_those_of_tf_privacys_tree():
    """`PeriodicRoundRestartIndicator` with `reset_state`, at the same steps."""
    period, steps = 6, 17
    draws = np.random.default_rng(2).normal(size=(steps + 4, 2))
    aggregator = tree_aggregation.TreeAggregator(Given(draws))
    restart = restart_query.PeriodicRoundRestartIndicator(period)
    state, rounds = aggregator.init_state(), restart.initialize()
    base, last, theirs = np.zeros(2), np.zeros(2), []
    for _ in range(steps):
        total, state = aggregator.get_cumsum_and_update(state)
        last = base + total.numpy()
        theirs.append(last)
        again, rounds = restart.next(rounds)
        if again:
            base, state = last, aggregator.reset_state(state)
    noise = noise_of(TreeStream(), np.int64(period), _without_unused(draws, period))
    np.testing.assert_allclose(
        np.cumsum(noise[:steps], axis=0), np.array(theirs), atol=1e-5
    )


def _without_unused(draws, period):
    """TF Privacy draws one more node than it has steps before it resets a tree."""
    used = [i for i in range(len(draws)) if i % (period + 1) != period]
    return draws[used]


@pytest.mark.parametrize("level", [0, 1, 5, 20])
def test_noise_of_late_steps_has_the_variance_of_its_nodes(level):
    """sqrt(1 + l) within 2 %: seven standard deviations at 60000 coordinates."""
    shape, first = (60_000,), 11
    step = tf.constant((1 << 20) - 1 + (1 << level) % (1 << 20), tf.int64)
    drawn = []

    def draw(back):
        drawn.append(int(back))
        return prng.standard_normal(3, first + step - back, 0, shape)

    noise, _ = TreeStream().next(np.int64(1 << 40), tf.zeros([0]), draw, step)
    assert drawn == [0] + [1 << m for m in range(level)]
    assert abs(np.std(noise) / np.sqrt(1 + level) - 1) < 0.02
    assert abs(np.mean(noise)) < 5 * np.sqrt((1 + level) / shape[0])

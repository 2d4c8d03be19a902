"""Samplers: the law of the draw, and that it is a function of (key, step) alone."""

import dataclasses
import time

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from keras_dpopt import prng, sampling

KEY = prng.key_from_seed(2024, "sampler")  # Fixed: a test's outcome never flickers.
PERIODIC = [sampling.CyclicSampler(), sampling.BandedPoissonSampler(8)]
SAMPLERS = [sampling.PoissonSampler(), sampling.FixedSizeSampler(), *PERIODIC]


def _membership(sampler, steps, train_size, batch_size, key=KEY):
    """0/1 matrix [steps, train_size]: who is in which batch."""

    def member(step):
        rows = sampler.indices(key, step, train_size, batch_size)
        ones = tf.ones_like(rows)
        return tf.math.unsorted_segment_sum(ones, rows, train_size)

    draws = tf.data.Dataset.range(steps).map(member)
    return np.stack(list(draws.as_numpy_iterator()))


@pytest.fixture(scope="module")
def poisson():
    """4,000 draws at q = 30/200."""
    return _membership(sampling.PoissonSampler(), 4000, 200, 30)


@pytest.fixture(scope="module")
def fixed():
    """4,000 draws of 30 of 200."""
    return _membership(sampling.FixedSizeSampler(), 4000, 200, 30)


# ------------------------------------------------------------------------- Poisson


def test_poisson_batch_sizes_are_binomial(poisson):
    sizes, q = poisson.sum(1), 30 / 200
    count, mean, variance = len(sizes), 30, 200 * q * (1 - q)
    # 4 sigma each: a false alarm in 16,000 choices of KEY.
    assert abs(sizes.mean() - mean) < 4 * np.sqrt(variance / count)
    assert abs(sizes.var() - variance) < 4 * variance * np.sqrt(2 / count)
    # Pooled over sizes that are expected at least 20 times.
    edges = np.arange(18, 44)
    cells = np.diff(stats.binom.cdf(edges, 200, q), prepend=0, append=1)
    observed = np.bincount(np.searchsorted(edges, sizes), minlength=len(cells))
    assert stats.chisquare(observed, count * cells).pvalue > 1e-4  # False alarm rate.


@pytest.mark.parametrize("name", ["poisson", "fixed"])
def test_every_row_is_as_likely(name, request):
    counts = request.getfixturevalue(name).sum(0)
    steps, q = 4000, 30 / 200
    # sum (O-E)^2/(E(1-q)) is chi-square: 200 degrees, one less at a fixed size. A
    # false alarm in 10,000 choices of KEY, and in as many for rows that are too even.
    statistic = np.sum((counts - steps * q) ** 2) / (steps * q * (1 - q))
    low, high = stats.chi2.ppf([1e-4, 1 - 1e-4], 200)
    assert low < statistic * (200 / 199 if name == "fixed" else 1) < high


@pytest.mark.parametrize("name", ["poisson", "fixed"])
def test_steps_are_independent(name, request):
    member = request.getfixturevalue(name)
    variance = 30 / 200 * (170 / 200)
    centred = member - 30 / 200
    for lag in (1, 2, 10):
        correlation = np.mean(centred[lag:] * centred[:-lag]) / variance
        # 4.5 sigma: a false alarm in 1e5 choices of KEY.
        assert abs(correlation) < 4.5 / np.sqrt(centred[lag:].size)
    assert len(np.unique(member, axis=0)) == len(member)


def test_poisson_rows_are_independent_and_fixed_rows_exclude_each_other(poisson, fixed):
    for member, expected in [(poisson, 0), (fixed, -1 / 199)]:
        # The mean correlation of two rows, from the variance of the batch size.
        variance = 30 / 200 * (170 / 200)
        mean = (np.var(member.sum(1)) / (200 * variance) - 1) / 199
        error = 4.5 * np.sqrt(2 / 4000) / 199  # A false alarm in 1e5 choices.
        assert abs(mean - expected) < error


def test_poisson_at_q_one_takes_every_row():
    for step in range(50):
        rows = sampling.PoissonSampler().indices(KEY, step, 1000, 1000)
        assert rows.dtype == tf.int64
        np.testing.assert_array_equal(rows, np.arange(1000))


def test_poisson_probability_is_exact_and_never_above_q(monkeypatch):
    def taken(word, train_size, batch_size):
        bits = tf.fill([train_size], tf.constant(word, tf.uint32))
        monkeypatch.setattr(prng, "random_bits", lambda *_: bits)
        rows = sampling.PoissonSampler().indices(0, 0, train_size, batch_size)
        return len(rows) == train_size

    for train_size, batch_size in [(3, 1), (7, 6), (60_000, 1024), (10**6, 1)]:
        threshold = 2**32 * batch_size // train_size  # Words below it: exactly q.
        assert taken(threshold - 1, train_size, batch_size)
        assert not taken(threshold, train_size, batch_size)
        assert threshold * train_size <= 2**32 * batch_size


def test_poisson_batches_can_be_empty():
    sizes = _membership(sampling.PoissonSampler(), 200, 50, 1).sum(1)
    # P(empty) = 0.98^50 = 0.364; 40 to 110 of 200 fails in 1e6 choices of KEY.
    assert 40 < np.sum(sizes == 0) < 110


# ---------------------------------------------------------------------- fixed size


@pytest.mark.parametrize("sizes", [(1, 1), (5, 1), (5, 5), (1000, 17), (1000, 999)])
def test_fixed_size_is_exact_and_without_replacement(sizes):
    train_size, batch_size = sizes
    for step in range(10):
        rows = sampling.FixedSizeSampler().indices(KEY, step, train_size, batch_size)
        assert rows.shape == [batch_size]
        assert rows.dtype == tf.int64
        assert (np.diff(rows) > 0).all()
        assert rows[0] >= 0
        assert rows[-1] < train_size


def test_every_subset_is_as_likely():
    member = _membership(sampling.FixedSizeSampler(), 6000, 6, 3)
    subsets = np.bincount(member @ 2 ** np.arange(6), minlength=64)
    counts = subsets[subsets > 0]
    assert len(counts) == 20  # All of 6 choose 3.
    assert stats.chisquare(counts).pvalue > 1e-4  # False alarm rate.


def test_equal_words_are_decided_for_the_lower_row(monkeypatch):
    monkeypatch.setattr(prng, "random_bits", lambda *_: tf.ones([9, 2], tf.uint32))
    rows = sampling.FixedSizeSampler().indices(0, 0, 9, 4)
    np.testing.assert_array_equal(rows, np.arange(4))


# ---------------------------------------------------------------- cyclic, banded


@pytest.mark.parametrize("sizes", [(1, 1), (7, 7), (7, 1), (10, 4), (10, 5), (23, 6)])
def test_cyclic_takes_every_record_once_in_each_turn(sizes):
    """Whatever the key and the first step: any `blocks` consecutive steps do."""
    train_size, batch_size = sizes
    blocks = -(-train_size // batch_size)
    rest = train_size - (blocks - 1) * batch_size
    sampler = sampling.CyclicSampler()
    orders = set()
    for key in (KEY, 0, -1, 2**62):
        for first in (0, 1, blocks + 1, 10**9 + 7):
            drawn = [
                sampler.indices(key, first + t, train_size, batch_size).numpy()
                for t in range(2 * blocks + 1)
            ]
            for t in range(blocks + 1):
                turn = np.concatenate(drawn[t : t + blocks])
                np.testing.assert_array_equal(np.sort(turn), np.arange(train_size))
                np.testing.assert_array_equal(drawn[t], drawn[t + blocks])
            sizes_drawn = sorted(map(len, drawn[:blocks]))
            assert sizes_drawn == [rest] + [batch_size] * (blocks - 1)
        at_zero = [
            tuple(sampler.indices(key, t, train_size, batch_size).numpy())
            for t in range(blocks)
        ]
        orders.add(tuple(at_zero))
    assert len(orders) > 1 or train_size == 1  # the key is what orders them


def test_banded_groups_are_a_partition_that_the_key_fixes():
    for train_size, bands in [(10, 3), (12, 4), (7, 7), (5, 1), (101, 8)]:
        sampler, size = sampling.BandedPoissonSampler(bands), train_size // bands
        for first in (0, 1, 10**9 + 3):
            # A batch as large as a group is the group.
            groups = [
                sampler.indices(KEY, first + t, train_size, size).numpy()
                for t in range(2 * bands)
            ]
            together = np.concatenate(groups[:bands])
            np.testing.assert_array_equal(np.sort(together), np.arange(train_size))
            assert {len(group) for group in groups} <= {size, size + 1}
            for group, again in zip(groups[:bands], groups[bands:], strict=True):
                np.testing.assert_array_equal(group, again)
                assert (np.diff(group) > 0).all()
    other = sampling.BandedPoissonSampler(3).indices(KEY + 1, 0, 101, 33).numpy()
    mine = sampling.BandedPoissonSampler(3).indices(KEY, 0, 101, 33).numpy()
    assert other.tolist() != mine.tolist()


def test_banded_takes_a_record_in_its_groups_steps_alone_at_the_accounted_rate():
    """q = B / floor(N / bands) = 7/25, N not a multiple of the bands."""
    train_size, batch_size, bands, turns = 103, 7, 4, 3000
    sampler = sampling.BandedPoissonSampler(bands)
    member = _membership(sampler, bands * turns, train_size, batch_size)
    by_turn = member.reshape(turns, bands, train_size)
    counts = by_turn.sum(0)
    assert ((counts > 0).sum(0) == 1).all()  # every record, in one group
    assert sorted((counts > 0).sum(1)) == [25, 26, 26, 26]
    q = 7 / 25
    # Chi-square over the records, as for Poisson: a false alarm in 10,000 KEYs.
    taken = counts.max(0)
    statistic = np.sum((taken - turns * q) ** 2) / (turns * q * (1 - q))
    low, high = stats.chi2.ppf([1e-4, 1 - 1e-4], train_size)
    assert low < statistic < high
    # In all: 4.5 sigma is 0.4 % of q. With B * bands / N, 3 % less, it would show.
    error = 4.5 * np.sqrt(q * (1 - q) / (turns * train_size))
    assert abs(taken.mean() / turns - q) < error < q - batch_size * bands / train_size
    # Independent from turn to turn.
    own = by_turn[:, np.argmax(counts, axis=0), np.arange(train_size)] - q
    for lag in (1, 2):
        correlation = np.mean(own[lag:] * own[:-lag]) / (q * (1 - q))
        assert abs(correlation) < 4.5 / np.sqrt(own[lag:].size)


def test_banded_probability_is_exact_and_never_above_the_accounted(monkeypatch):
    def taken(word, train_size, batch_size, bands):
        def bits(key, step, stream, shape):
            if len(shape) == 2:  # of the order
                return random_bits(key, step, stream, shape)
            return tf.fill(shape, tf.constant(word, tf.uint32))

        monkeypatch.setattr(prng, "random_bits", bits)
        sampler = sampling.BandedPoissonSampler(bands)
        drawn = [
            len(sampler.indices(0, t, train_size, batch_size)) for t in range(bands)
        ]
        return sum(drawn)

    random_bits = prng.random_bits
    for train_size, batch_size, bands in [(11, 1, 3), (100, 6, 7), (60_000, 1024, 9)]:
        size = train_size // bands
        threshold = 2**32 * batch_size // size
        assert taken(threshold - 1, train_size, batch_size, bands) == train_size
        assert taken(threshold, train_size, batch_size, bands) == 0
        assert threshold * size <= 2**32 * batch_size


def test_groups_do_not_follow_the_order_of_the_records():
    """Over keys, two neighbours meet in one of 4 groups as often as any two."""
    sampler, same, first = sampling.BandedPoissonSampler(4), 0, np.zeros(20)
    keys = range(400)
    for key in keys:
        group = sampler.indices(key, 0, 20, 5).numpy()
        same += np.isin([8, 9], group).all()
        first[group] += 1
    # 400 trials at 1/4 * 4/19 and 1/4: 4.5 sigma.
    p = 5 / 20 * 4 / 19
    assert abs(same - 400 * p) < 4.5 * np.sqrt(400 * p * (1 - p))
    assert np.abs(first - 100).max() < 5 * np.sqrt(400 * 0.25 * 0.75)


def test_a_group_smaller_than_the_batch_is_refused():
    for train_size, batch_size, bands in [(10, 4, 3), (3, 1, 4)]:
        sampler = sampling.BandedPoissonSampler(bands)
        with pytest.raises(ValueError, match="fewer bands or a smaller batch"):
            sampler.indices(KEY, 0, train_size, batch_size)


@pytest.mark.parametrize("sampler", PERIODIC, ids=lambda sampler: sampler.kind)
def test_a_draw_of_a_million_records_takes_a_fraction_of_a_second(sampler):
    """27 and 58 ms on two quiet cores."""
    pipeline = tf.data.Dataset.range(6).map(
        lambda step: sampler.indices(KEY, step, 10**6, 1000)
    )
    times = []
    for _ in pipeline:
        times.append(time.monotonic())
    assert np.median(np.diff(times)) < 1.0


# ---------------------------------------------------------------------------- all


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: sampler.kind)
def test_a_draw_is_a_function_of_key_and_step(sampler):
    def draw(step, key=KEY):
        return sampler.indices(key, step, 500, 60).numpy().tolist()

    key = tf.Variable(KEY, dtype=tf.int64)
    pipeline = tf.data.Dataset.range(20).map(
        lambda step: sampler.indices(key, step, 500, 60),
        num_parallel_calls=tf.data.AUTOTUNE,
    )
    forward = [rows.tolist() for rows in pipeline.prefetch(5).as_numpy_iterator()]
    backward = [draw(step) for step in reversed(range(20))]
    assert forward == backward[::-1]
    again = dataclasses.replace(sampler).indices(KEY, 3, 500, 60)
    assert draw(3) == again.numpy().tolist()
    assert draw(3) != draw(3, key=KEY + 1)


def test_kinds_are_what_mechanisms_name():
    kinds = [sampler.kind for sampler in SAMPLERS]
    assert kinds == ["poisson", "fixed_size", "cyclic", "banded"]
    for sampler in SAMPLERS:
        assert sampler == dataclasses.replace(sampler)
        assert "Privacy:" in type(sampler).__doc__
        with pytest.raises(dataclasses.FrozenInstanceError):
            sampler.kind = "shuffled"


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: sampler.kind)
def test_wrong_sizes_are_refused(sampler):
    with pytest.raises(ValueError, match="smaller batch_size"):
        sampler.indices(KEY, 0, 10, 11)
    with pytest.raises(ValueError, match="batch_size"):
        sampler.indices(KEY, 0, 10, 0)
    with pytest.raises(ValueError, match="train_size"):
        sampler.indices(KEY, 0, 0, 0)
    with pytest.raises(TypeError, match="batch_size"):
        sampler.indices(KEY, 0, 10, 2.5)

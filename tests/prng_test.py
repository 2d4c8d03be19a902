"""Draws are addressed by (key, step, stream), disjoint, and have the right law."""

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from keras_dpopt import prng

KEY = prng.key_from_seed(2024, "noise")  # Fixed: a test's outcome never flickers.
PINNED_KEY = (
    4219540042950891077  # First 8 bytes of sha256("keras_dpopt\0noise\x001\0").
)


def _philox_block(key, counter):
    """Philox-4x32-10 of one 128-bit counter (Salmon et al., SC 2011), in integers."""
    word = [counter >> (32 * i) & 0xFFFFFFFF for i in range(4)]
    key_low, key_high = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    for _ in range(10):
        first, second = 0xD2511F53 * word[0], 0xCD9E8D57 * word[2]
        word = [
            second >> 32 ^ word[1] ^ key_low,
            second & 0xFFFFFFFF,
            first >> 32 ^ word[3] ^ key_high,
            first & 0xFFFFFFFF,
        ]
        key_low = (key_low + 0x9E3779B9) & 0xFFFFFFFF
        key_high = (key_high + 0xBB67AE85) & 0xFFFFFFFF
    return word


def _in_all_ways(draw):
    """Results of draw(key, step) with tensors: eager, graph, XLA, while_loop."""

    def looped(key, step):
        first = draw(key, tf.zeros_like(step))
        return tf.while_loop(
            lambda i, _: i <= step,
            lambda i, _: (i + 1, draw(key, i)),
            [tf.zeros_like(step), first],
        )[1]

    return {
        "eager": draw,
        "graph": tf.function(draw),
        "xla": tf.function(draw, jit_compile=True),
        "while_loop": tf.function(looped),
        "while_loop in xla": tf.function(looped, jit_compile=True),
    }


# ---------------------------------------------------------------------------- keys


def test_keys_of_one_seed_are_unrelated_and_pinned():
    keys = {p: prng.key_from_seed(1, p) for p in ("noise", "sampler", "layers")}
    assert len({*keys.values(), prng.key_from_seed(2, "noise")}) == 4
    # Pinned: another derivation would silently change every seeded run.
    assert prng.key_from_seed(1, "noise") == PINNED_KEY
    assert prng.key_from_seed(np.int32(1), "noise") == PINNED_KEY
    many = [prng.key_from_seed(seed, "noise") for seed in range(-200, 200)]
    assert len(set(many)) == 400
    assert all(-(2**63) <= key < 2**63 for key in many)
    assert min(many) < 0 < max(many)


def test_new_keys_differ_and_fill_64_bits():
    keys = [prng.new_key() for _ in range(500)]
    assert len(set(keys)) == 500
    ones = np.unpackbits(np.array(keys, np.int64).view(np.uint8)).reshape(500, 64)
    # 6 sigma for each of 64 bits: a false alarm in 1e7 runs.
    assert np.abs(ones.mean(0) - 0.5).max() < 6 * 0.5 / np.sqrt(500)


@pytest.mark.parametrize("seed", [True, 1.5, "1", None])
def test_a_seed_that_is_no_integer_is_refused(seed):
    with pytest.raises(TypeError, match="integer"):
        prng.key_from_seed(seed, "noise")


@pytest.mark.parametrize("purpose", ["", "a\0b"])
def test_an_ambiguous_purpose_is_refused(purpose):
    with pytest.raises(ValueError, match="purpose"):
        prng.key_from_seed(1, purpose)


# ---------------------------------------------------------------------------- bits


def test_bits_are_philox_with_step_and_stream_in_the_high_half_of_the_counter():
    # The published known answer for the all-zero counter and key.
    assert _philox_block(0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    last = (1 << 43) - 1
    for key, step, stream in [(0, 0, 0), (KEY, 5, 3), (-1, last, 2**20 - 1)]:
        high = step * 2**20 + stream
        expected = [
            word
            for block in range(5)
            for word in _philox_block(key % 2**64, high << 64 | block)
        ]
        actual = prng.random_bits(key, step, stream, [20]).numpy()
        assert actual.dtype == np.uint32
        assert actual.tolist() == expected


def test_bits_are_the_same_in_every_way_of_running():
    ways = _in_all_ways(lambda key, step: prng.random_bits(key, step, 7, [3, 1001]))
    results = {
        name: way(tf.constant(KEY, tf.int64), tf.constant(4, tf.int64)).numpy()
        for name, way in ways.items()
    }
    plain = prng.random_bits(KEY, 4, 7, [3, 1001]).numpy()
    for name, result in results.items():
        np.testing.assert_array_equal(result, plain, err_msg=name)


def test_variables_and_small_integers_are_keys_and_steps():
    plain = prng.random_bits(5, 3, 0, [9]).numpy()
    key, step = tf.Variable(5, dtype=tf.int64), tf.Variable(3, dtype=tf.int64)
    np.testing.assert_array_equal(prng.random_bits(key, step, 0, [9]), plain)
    np.testing.assert_array_equal(
        prng.random_bits(np.int64(5), tf.constant(3), 0, [9]), plain
    )


def test_no_two_draws_share_a_word_pair():
    draws = [
        prng.random_bits(key, step, stream, [4000]).numpy().view(np.uint64)
        for key in (KEY, KEY + 1, 0)
        for step in (0, 1, 2, 1000)
        for stream in (0, 1, 2, 2**20 - 1)
    ]
    pairs = np.concatenate(draws)
    # 96,000 of 2**64 values: one is met twice by chance in 4e9 choices of the keys.
    assert len(np.unique(pairs)) == len(pairs)


@pytest.mark.parametrize("stream", [-1, 2**20])
def test_a_stream_that_would_run_into_the_next_step_is_refused(stream):
    with pytest.raises(ValueError, match="stream must be in"):
        prng.random_bits(KEY, 0, stream, [1])
    with pytest.raises(ValueError, match="stream must be in"):
        prng.standard_normal(KEY, 0, stream, [1])
    with pytest.raises(ValueError, match="stream must be in"):
        prng.per_record_seeds(KEY, 0, tf.range(2), stream)


@pytest.mark.parametrize("step", [-1, 2**43])
def test_a_step_that_would_wrap_around_is_refused(step):
    with pytest.raises(ValueError, match="step must be in"):
        prng.random_bits(KEY, step, 0, [1])


# ------------------------------------------------------------------------- normals


@pytest.fixture(scope="module")
def normals():
    return prng.standard_normal(KEY, 1, 2, [2000, 2000]).numpy().ravel()


def test_ks_accepts_sigma_and_rejects_two_thirds_and_three_halves(normals):
    sample = normals[:200_000].astype(np.float64)
    # False alarm: 1 in 1000 choices of KEY.
    assert stats.kstest(sample, "norm").pvalue > 1e-3
    for factor in (2 / 3, 3 / 2, 0.97, 1.03):
        assert stats.kstest(factor * sample, "norm").pvalue < 1e-3, factor


def test_both_halves_of_a_draw_have_the_law_and_are_independent(normals):
    cosines, sines = normals.astype(np.float64).reshape(2, -1)
    limit = 5 / np.sqrt(len(cosines))  # 5 sigma: 6e-7 for each of the three.
    assert stats.kstest(cosines[:200_000], "norm").pvalue > 1e-3
    assert stats.kstest(sines[:200_000], "norm").pvalue > 1e-3
    assert abs(np.corrcoef(cosines, sines)[0, 1]) < limit
    # One radius for both: this is zero only if the radius has the right law.
    assert abs(np.corrcoef(cosines**2, sines**2)[0, 1]) < limit
    assert abs(np.corrcoef(cosines[:-1], cosines[1:])[0, 1]) < limit


def test_moments(normals):
    sample, count = normals.astype(np.float64), normals.size
    # 5 sigma of the k-th sample moment: 6e-7 each. Var(z^k) = E z^2k - (E z^k)^2.
    for power, moment, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        error = abs(np.mean(sample**power) - moment)
        assert error < 5 * np.sqrt(variance / count), power


@pytest.mark.parametrize("limit", [3.0, 4.0, 4.5, 5.0])
def test_tail_counts(normals, limit):
    expected = 2 * stats.norm.sf(limit) * normals.size
    count = np.sum(np.abs(normals) > limit)
    # Poisson quantiles: a false alarm in 1e5 choices of KEY for each side.
    low, high = stats.poisson.ppf([1e-5, 1 - 1e-5], expected)
    assert low <= count <= high


@pytest.mark.parametrize("jit", [False, True])
def test_extreme_words_give_finite_draws(monkeypatch, jit):
    words = np.array([0, 1, 2**8, 2**31, 2**32 - 2**8, 2**32 - 1], np.uint32)
    grid = np.array(np.meshgrid(words, words, words)).reshape(3, -1)
    monkeypatch.setattr(prng, "random_bits", lambda *_: tf.constant(grid))
    size = 2 * grid.shape[1]
    draw = tf.function(lambda: prng.standard_normal(0, 0, 0, [size]), jit_compile=jit)
    cosines, sines = draw().numpy().astype(np.float64).reshape(2, -1)
    assert np.isfinite([cosines, sines]).all()
    radius = np.hypot(cosines, sines)
    np.testing.assert_allclose(radius.max(), np.sqrt(130 * np.log(2)), rtol=1e-6)
    # No pair of coordinates is left without noise.
    np.testing.assert_allclose(radius.min(), 2**-11.5, rtol=1e-3)


def test_normals_agree_with_and_without_xla():
    for shape in [(), (0,), (1,), (2,), (7,), (3, 5), (0, 4), (10, 10_001)]:

        def draw(key, step, shape=shape):
            return prng.standard_normal(key, step, 3, shape)

        arguments = tf.constant(KEY, tf.int64), tf.constant(9, tf.int64)
        plain = prng.standard_normal(KEY, 9, 3, shape)
        assert plain.shape == shape
        assert plain.dtype == tf.float32
        for name, way in _in_all_ways(draw).items():
            np.testing.assert_allclose(
                way(*arguments), plain, rtol=0, atol=2e-6, err_msg=f"{shape} {name}"
            )


def test_no_normal_is_drawn_twice():
    draws = [
        prng.standard_normal(key, step, stream, [3000]).numpy().view(np.uint64)
        for key in (KEY, KEY + 1)
        for step in range(5)
        for stream in range(5)
    ]
    # Pairs of neighbours (single float32 normals do repeat): 75,000 pairs of about
    # 2**47 likely values; a false alarm in 5e4 choices of KEY.
    assert len(np.unique(np.concatenate(draws))) == 50 * 1500


# ----------------------------------------------------------------- per-record seeds


def test_seeds_do_not_depend_on_how_the_batch_is_cut():
    whole = prng.per_record_seeds(KEY, 3, tf.range(60), 1).numpy()
    assert whole.dtype == np.uint32
    for size in (1, 7, 20):
        parts = [
            prng.per_record_seeds(KEY, 3, tf.range(i, min(i + size, 60)), 1)
            for i in range(0, 60, size)
        ]
        np.testing.assert_array_equal(np.concatenate(parts), whole)
    grid = prng.per_record_seeds(KEY, 3, tf.reshape(tf.range(60), [4, 15]), 1)
    np.testing.assert_array_equal(grid, whole.reshape(4, 15, 2))
    alone = prng.per_record_seeds(KEY, 3, tf.constant(59, tf.int64), 1)
    np.testing.assert_array_equal(alone, whole[59])


def test_seeds_are_the_same_in_every_way_of_running():
    positions = tf.Variable(np.arange(5, 12))  # A value that no trace knows.
    plain = prng.per_record_seeds(KEY, 4, tf.range(5, 12), 2).numpy()
    ways = _in_all_ways(
        lambda key, step: prng.per_record_seeds(key, step, positions, 2)
    )
    for name, way in ways.items():
        result = way(tf.constant(KEY, tf.int64), tf.constant(4, tf.int64))
        np.testing.assert_array_equal(result, plain, err_msg=name)


def test_seeds_follow_their_formula():
    (w0, w1), mask = prng.random_bits(KEY, 4, 2, [2, 2]).numpy().tolist(), 2**64 - 1

    def mix(word):
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & mask
        word = (word ^ word >> 27) * 0x94D049BB133111EB & mask
        return word ^ word >> 31

    # SplitMix64's published first output for the state 0.
    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF
    seeds = prng.per_record_seeds(KEY, 4, [0, 1, 12345], 2).numpy().tolist()
    for position, seed in zip([0, 1, 12345], seeds, strict=True):
        start = (w0[0] + (w0[1] << 32) + position * 0x9E3779B97F4A7C15) & mask
        expected = mix(mix(start) ^ w1[0] ^ w1[1] << 32)
        assert seed == [expected & 0xFFFFFFFF, expected >> 32]


def test_seeds_of_a_step_are_distinct_and_look_random():
    count = 200_000
    seeds = prng.per_record_seeds(KEY, 0, tf.range(count), 0).numpy()
    words = seeds.view(np.uint64).ravel()
    assert len(np.unique(words)) == count
    bits = np.unpackbits(seeds.view(np.uint8), axis=1).astype(np.float64)
    limit = 6 * 0.5 / np.sqrt(count)  # 6 sigma: with 128 bits, a false alarm in 4e6.
    assert np.abs(bits.mean(0) - 0.5).max() < limit
    # Neighbouring positions: each bit flips with probability 1/2.
    assert np.abs((bits[1:] != bits[:-1]).mean(0) - 0.5).max() < limit
    # And the bits of one seed do not follow each other.
    correlation = np.corrcoef(bits, rowvar=False) - np.eye(64)
    assert np.abs(correlation).max() < 6 / np.sqrt(count)


def test_seeds_differ_across_steps_streams_and_keys():
    positions = tf.range(2000)
    seeds = [
        prng.per_record_seeds(key, step, positions, stream).numpy().view(np.uint64)
        for key in (KEY, KEY + 1)
        for step in range(3)
        for stream in range(3)
    ]
    # 36,000 of 2**64 values: a false alarm in 3e10 choices of KEY.
    assert len(np.unique(np.concatenate(seeds))) == 18 * 2000

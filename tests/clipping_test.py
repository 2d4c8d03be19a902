"""Clipping against float64 NumPy: the norm stays at most C whatever the record holds.

No tolerance on the bound itself: norm64(clipped) <= C, as exactly as float64 tells.
"""

import hard_records
import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hard_records import OVER_CLIP, TINY
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from keras_dpopt import clipping

WAYS = {
    kind: hard_records.way(kind, clipping.clip_record) for kind in hard_records.WAYS
}
every_way = pytest.mark.parametrize("way", WAYS)


def _clip(way, batch, limit):
    batch = [tf.constant(values) for values in batch]
    return [x.numpy() for x in WAYS[way](batch, tf.constant(limit, tf.float64))]


def _check(batch, clipped, limit):
    """Holds clipped records against float64 NumPy."""
    norms, after = hard_records.norms(batch), hard_records.norms(clipped)
    assert (after <= limit).all(), (norms, after, limit)
    for row, norm in enumerate(norms):
        for values, result in zip(batch, clipped, strict=True):
            value, result = np.asarray(values[row]), np.asarray(result[row])
            assert result.dtype == np.float32
            if not np.isfinite(norm):
                expected = np.zeros_like(value)
            elif norm * (1 + OVER_CLIP) + TINY * 100 <= limit:
                expected = value
            else:
                exact = value.astype(np.float64) * min(1.0, limit / norm)
                # Entries that do not count beside the others may be flushed.
                lost = limit * 1e-25 + float(TINY)
                np.testing.assert_allclose(result, exact, rtol=OVER_CLIP, atol=lost)
                continue
            # Bits, so that -0.0 and denormal numbers count.
            assert result.tobytes() == expected.tobytes()


# ------------------------------------------------------------------------- records


@every_way
@pytest.mark.parametrize("limit", [1e-20, 1e-6, 0.1, 1.0, 1e6, 1e30, np.inf])
def test_hard_records(way, limit):
    batch = hard_records.records(*hard_records.hard_rows())
    _check(batch, _clip(way, batch, limit), limit)


@pytest.mark.parametrize("way", ["vectorized", "vectorized xla"])
@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
@hypothesis.given(
    rows=hnp.arrays(
        np.float32, (6, 23), elements=st.floats(width=32), fill=st.nothing()
    ),
    common=st.integers(-30, 30),
    plain=st.booleans(),
    limit=st.floats(1e-6, 1e6) | st.sampled_from([0.1, 1.0, np.inf]),
)
def test_drawn_records(way, rows, common, plain, limit):
    if plain:  # Bounded entries of one magnitude, instead of anything at all.
        rows = np.nan_to_num(np.tanh(rows), nan=0.5) * np.float32(10.0**common)
    batch = hard_records.records(*rows)
    _check(batch, _clip(way, batch, limit), limit)


@pytest.mark.parametrize("way", ["eager", "vectorized", "vectorized xla"])
def test_records_at_the_border_stay_at_the_border(way):
    # Norms within a few units in the last place of C, where rounding decides.
    random = np.random.default_rng(1)
    rows = random.normal(size=(200, 23))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    rows *= 1 + random.integers(-300, 300, size=(200, 1)) * 2.0**-24
    batch = hard_records.records(*rows)
    _check(batch, _clip(way, batch, 1.0), 1.0)


def test_a_plain_float32_norm_breaks_the_bound():
    """The mutant that shows that these tests can fail."""

    def naive(record, limit):
        norm = tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(value)) for value in record]))
        return [value * tf.minimum(1.0, limit / norm) for value in record]

    rows = np.random.default_rng(2).normal(size=(100, 23))
    batch = [tf.constant(values) for values in hard_records.records(*rows)]
    for way in ("eager", "vectorized", "vectorized xla"):
        clipped = hard_records.way(way, naive)(batch, tf.constant(1.0))
        assert 10 < np.sum(hard_records.norms(clipped) > 1.0) < 90


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    ("size", "value", "lead"),
    [
        (2**22, 1.0001, 1.0001),
        (2**22, 1.3333334, 1.3333334),
        (2**22, 2.0**-12.6, 1.0),  # Squares below half a unit of the first one.
        (2**22 + 15, 1.0001, 1.0001),  # Prime: no two runs of equal length.
        (2**25, 1 + 2.0**-12, 1 + 2.0**-12),
    ],
)
def test_long_records_of_equal_entries(size, value, lead, jit):
    value, lead = np.float32(value), np.float32(lead)
    true = np.sqrt(float(lead) ** 2 + (size - 1) * float(value) ** 2)
    record = tf.concat([[lead], tf.fill([size - 1], value)], axis=0)

    def measure(record):
        norm = clipping.norm_upper_bound([record])
        clipped = clipping.clip_record([record], 1.0)[0]
        naive = tf.sqrt(tf.reduce_sum(tf.square(record)))
        return norm.bound, naive, clipped[0], clipped[-1]

    bound, naive, first, last = tf.function(measure, jit_compile=jit)(record)
    assert true <= bound.numpy() <= true * (1 + OVER_CLIP)
    assert np.sqrt(float(first) ** 2 + (size - 1) * float(last) ** 2) <= 1.0
    if jit and value > 1:  # The naive sum is one long chain under XLA.
        assert naive.numpy() < true * (1 - 2e-5)


@every_way
def test_removing_a_record_moves_the_clipped_sum_by_at_most_c(way):
    rows = hard_records.hard_rows()
    batch, limit = hard_records.records(*rows), 0.5
    flat = [x.reshape(len(rows), -1).astype(np.float64) for x in _clip(way, batch, 0.5)]
    flat = np.concatenate(flat, axis=1)
    assert np.isfinite(flat.sum(0)).all()
    for row in range(len(rows)):
        rest = np.delete(flat, row, axis=0)
        moved = np.linalg.norm(flat.sum(0) - rest.sum(0))
        assert moved <= limit * (1 + 1e-12)  # The sums of this test round as well.


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64])
def test_other_types_are_clipped_in_float32(dtype):
    record = [tf.constant([30_000.0, -30_000.0, 1e-3], dtype), tf.ones((), dtype)]
    single = [tf.cast(value, tf.float32) for value in record]
    for limit in (1e-3, 1e6):
        clipped = clipping.clip_record(record, limit)
        for value, same in zip(
            clipped, clipping.clip_record(single, limit), strict=True
        ):
            assert value.dtype == tf.float32
            np.testing.assert_array_equal(value, same)


def test_records_with_empty_tensors_and_repeated_rows():
    repeated = tf.IndexedSlices(
        tf.ones([2, 3]), tf.constant([1, 1]), tf.constant([4, 3])
    )
    clipped = clipping.clip_record([tf.zeros([0, 3]), repeated], 1.0)
    assert clipped[0].shape == [0, 3]
    # Rows of equal index count as their sum: norm sqrt(3 * 2^2), not sqrt(6).
    np.testing.assert_allclose(clipped[1][1], np.full(3, 3**-0.5), rtol=OVER_CLIP)
    assert clipping.clip_record([tf.zeros([0])], 1.0)[0].shape == [0]
    empty = tf.vectorized_map(
        lambda x: clipping.clip_record(x, 1.0), [tf.zeros([2, 0]), tf.ones([2, 4])]
    )
    np.testing.assert_allclose(empty[1], np.full((2, 4), 0.5), rtol=OVER_CLIP)


def test_a_size_that_no_trace_knows():
    @tf.function(input_signature=[tf.TensorSpec([None, None])])
    def clip(value):
        return clipping.clip_record([value], 1.0)[0]

    value = np.random.default_rng(3).normal(size=(13, 17)).astype(np.float32)
    _check([value[None]], [clip(value).numpy()[None]], 1.0)


# --------------------------------------------------------------------------- parts


@every_way
def test_bound_is_tight_and_above(way):
    batch = hard_records.records(*hard_records.hard_rows())

    def bound(record, _):
        return [clipping.norm_upper_bound(record).bound]

    bounds = hard_records.way(way, bound)(
        [tf.constant(x) for x in batch], tf.constant(1.0)
    )[0]
    bounds, norms = bounds.numpy(), hard_records.norms(batch)
    finite = np.isfinite(norms)
    np.testing.assert_array_equal(np.isfinite(bounds), finite)
    lost = np.sqrt(23) * float(TINY)
    assert (bounds[finite] >= norms[finite]).all()
    assert (bounds[finite] <= norms[finite] * (1 + OVER_CLIP) + lost).all()


def test_factor_is_never_above_c_over_the_bound():
    bounds = tf.constant([0.0, 0.1, 0.3, 1e300, np.inf, np.nan], tf.float64)
    factors = clipping.abadi_factor(bounds, 0.1).numpy()
    np.testing.assert_allclose(factors, [1, 1, 1 / 3, 1e-301, 0, 0], rtol=1e-15)
    # A Python number is taken exactly: float32(0.1) would let 0.1 + 1.5e-9 through.
    between = tf.constant([0.1 + 1e-9], tf.float64)
    assert clipping.abadi_factor(between, 0.1).numpy() < 1
    assert clipping.abadi_factor(between, tf.constant(0.1)).numpy() == 1
    np.testing.assert_array_equal(
        clipping.abadi_factor(bounds, np.inf), [1, 1, 1, 1, 0, 0]
    )


def test_another_style_needs_another_factor_only():
    record = [tf.constant([3.0, 0.0]), tf.constant(4.0)]
    norm = clipping.norm_upper_bound(record)
    factor = 1.0 / (norm.bound + 0.01)  # AUTO-S of SPEC 0, R = 1.
    scaled = clipping.apply_factor(norm, factor)
    np.testing.assert_allclose(scaled[1], 4 / 5.01, rtol=OVER_CLIP)


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), np.float32(0), 1e-21])
def test_a_limit_that_is_not_positive_is_refused(limit):
    with pytest.raises(ValueError, match="l2_norm_clip"):
        clipping.clip_record([tf.ones([2])], limit)


def test_a_record_without_tensors_is_refused():
    with pytest.raises(ValueError, match="at least one tensor"):
        clipping.clip_record([], 1.0)


def test_a_python_number_is_not_rounded():
    assert (
        clipping.exact_limit(0.1).numpy()
        == 0.1
        < clipping.exact_limit(tf.constant(0.1))
    )
    assert clipping.exact_limit(np.float64(1 / 3)).dtype == tf.float64


def test_automatic_factor_times_the_bound_is_below_c():
    bounds = tf.constant([0.0, 1e-300, 0.1, 0.3, 1e300, np.inf, np.nan], tf.float64)
    factors = clipping.automatic_factor(bounds, 0.1, 0.01).numpy()
    want = [10, 10, 0.1 / 0.11, 0.1 / 0.31, 1e-301, 0, 0]
    np.testing.assert_allclose(factors, want, rtol=1e-14)
    with pytest.raises(ValueError, match="l2_norm_clip"):
        clipping.automatic_factor(bounds, 0.0, 0.01)

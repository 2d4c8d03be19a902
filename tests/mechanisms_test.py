"""Mechanisms: clipping and noise as the final weights tell them."""

import dp_accounting
import helpers
import hypothesis
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import keras_dpopt
from keras_dpopt import clipping, mechanisms, prng, tf_privacy

# Possible after keras_dpopt.tf_privacy has set sys.skip_tf_privacy_import.
from tensorflow_privacy.privacy.dp_query import (  # isort: skip
    dp_query,
    gaussian_query,
    normalized_query,
    quantile_adaptive_clip_sum_query,
)

OVER_CLIP = 2e-5  # What `clip_record` may take away beyond the clip.


# ----------------------------------------------------------------- noise on the weights

# 2 * 30000 coordinates: the standard deviation is known to 1/sqrt(2*60000) = 0.29 %.
SHAPES = ((200, 150), (200, 150))
SIGMA, CLIP, BATCH, RATE = 1.3, 0.7, 5, 0.4


def _noise_model(seed=11, jit_compile="auto", **arguments):
    optimizer = keras_dpopt.DPSGD(
        RATE,
        l2_norm_clip=CLIP,
        noise_multiplier=SIGMA,
        expected_batch_size=BATCH,
        seed=seed,
        **arguments,
    )
    return helpers.rows_model(optimizer, *SHAPES, jit_compile=jit_compile)


def _noise_steps(model, steps=1, rows=4):
    """Increments of `steps` steps on records whose loss has zero weight."""
    x = np.ones((rows, model.size), np.float32)
    increments = []
    for _ in range(steps):
        before = model.flat()
        model.train_on_batch(x, helpers.targets(x), sample_weight=np.zeros(rows))
        increments.append(model.flat() - before)
    return np.array(increments)


def _check_noise(values, stddev):
    """Accepts the noise of this standard deviation, and no other.

    std within 2 %: 7 of its own standard deviations, false-alarm rate 3e-12. KS at
    p = 1e-5: that is its false-alarm rate; at 2/3 and 3/2 of sigma the distance is
    0.13 or more, and n = 60000 makes p < 1e-300 (all draws here are seeded, so a test
    that passes once does so always).
    """
    assert abs(np.std(values) / stddev - 1) < 0.02
    assert abs(np.mean(values)) < 5 * stddev / np.sqrt(len(values))

    def p(scale):
        return scipy.stats.kstest(values, "norm", args=(0, stddev * scale)).pvalue

    assert p(1.0) > 1e-5
    assert p(2 / 3) < 1e-100 and p(3 / 2) < 1e-100


@pytest.mark.parametrize(
    ("engine", "microbatch_size", "jit_compile"),
    [
        ("vectorized", 1, True),
        ("vectorized", 3, False),
        ("vectorized", None, False),
        ("loop", 3, True),
        ("loop", None, False),
    ],
)
def test_noise_on_the_final_weights(engine, microbatch_size, jit_compile):
    model = _noise_model(
        gradient_engine=engine,
        microbatch_size=microbatch_size,
        jit_compile=jit_compile,
    )
    (increment,) = _noise_steps(model)
    # std(increment) * B / lr = sigma * C
    _check_noise(increment * BATCH / RATE, SIGMA * CLIP)
    # And it is the same noise for each of these settings (DESIGN rule 2).
    want = [helpers.expected_noise(11, 0, i, s).ravel() for i, s in enumerate(SHAPES)]
    np.testing.assert_allclose(
        increment * BATCH / RATE,
        -SIGMA * CLIP * np.concatenate(want),
        atol=1e-5,  # Of |z| < 5 in float32, through a weight and back.
    )


def test_noise_without_a_seed():
    """From the system's entropy; false-alarm rate of the test: 1e-5 (see above)."""
    (increment,) = _noise_steps(_noise_model(seed=None))
    _check_noise(increment * BATCH / RATE, SIGMA * CLIP)


def test_noise_by_fit():
    """One step of `fit`, at a Poisson batch, through the data pipeline."""
    model = _noise_model()
    x = np.zeros((20, model.size), np.float32)
    model.fit(x, helpers.targets(x), steps_per_epoch=1, epochs=2, verbose=0)
    # Two independent draws add up.
    _check_noise(model.flat() * BATCH / RATE, SIGMA * CLIP * np.sqrt(2))


def test_an_empty_batch_is_a_step_of_noise_only():
    model = _noise_model()
    x = np.zeros((0, model.size), np.float32)
    data = tf.data.Dataset.from_tensors((x, helpers.targets(x)))
    model.fit(data, epochs=1, verbose=0)
    assert model.optimizer.releases() == 1
    _check_noise(model.flat() * BATCH / RATE, SIGMA * CLIP)


def test_an_empty_batch_by_train_on_batch_is_a_step_of_noise_only():
    """For a caller who draws Poisson batches: DESIGN rule 1."""
    model = _noise_model()
    x = np.zeros((0, model.size), np.float32)
    model.train_on_batch(x, helpers.targets(x))
    _check_noise(model.flat() * BATCH / RATE, SIGMA * CLIP)


def test_no_two_draws_are_shared():
    """Across steps, variables of one shape, and optimizers.

    |correlation| of two independent draws of 30000 is below 6/sqrt(30000) = 0.035
    except with probability 2e-9 a pair; a shared draw has correlation 1.
    """
    draws = []
    for model in (_noise_model(seed=None), _noise_model(seed=None), _noise_model()):
        for increment in _noise_steps(model, steps=3):
            draws += np.split(increment, 2)
    correlations = np.corrcoef(draws) - np.eye(len(draws))
    assert np.abs(correlations).max() < 6 / np.sqrt(30_000)
    # Power: a draw that comes twice, also as a shifted or negated copy of itself.
    assert np.abs(np.corrcoef(draws[0], -draws[0])).min() > 0.99


def test_noise_within_a_draw_is_white():
    """Box and Muller's pairs must not show: see the false-alarm rate above."""
    (increment,) = _noise_steps(_noise_model())
    for lag in (1, 2, 150, 15_000, 30_000):
        correlation = np.corrcoef(increment[:-lag], increment[lag:])[0, 1]
        assert abs(correlation) < 6 / np.sqrt(len(increment) - lag)


# ------------------------------------------------------------- clipping on the weights


def _hard_rows():
    generator = np.random.default_rng(0)
    normal = generator.normal(size=8)
    rows = [normal * scale for scale in (1e-15, 1e-3, 0.1, 1.0, 50.0, 1e15, 1e30)]
    rows += [np.zeros(8), np.full(8, 3e38), np.eye(8)[3] * 1e25]
    for bad in (np.nan, np.inf, -np.inf):
        rows.append(np.where(np.arange(8) == 5, bad, normal))
    rows.append(np.full(8, np.nan))
    rows.append(normal[::-1])  # The last one is what padding is made of.
    return np.array(rows, np.float32)


@pytest.mark.parametrize(
    ("engine", "microbatch_size", "jit_compile"),
    [
        ("vectorized", 4, True),
        ("vectorized", None, False),
        ("loop", None, True),
        ("loop", 4, False),
    ],
)
def test_clipped_sum_of_hard_rows(engine, microbatch_size, jit_compile):
    rows = _hard_rows()
    for clip in (1.0, 1e-3):
        optimizer = keras_dpopt.DPSGD(
            1.0,
            l2_norm_clip=clip,
            noise_multiplier=0.0,
            expected_batch_size=5,  # Not the 15 that come.
            gradient_engine=engine,
            microbatch_size=microbatch_size,
        )
        model = helpers.rows_model(optimizer, (2, 3), (2,), jit_compile=jit_compile)
        model.train_on_batch(rows, helpers.targets(rows))
        want = helpers.clipped_rows(rows, clip).sum(axis=0)
        np.testing.assert_allclose(
            -5 * model.flat(), want, atol=OVER_CLIP * clip * len(rows)
        )
        assert np.linalg.norm(want) > clip  # There is something to sum.


@pytest.mark.parametrize("row", range(15))
def test_each_hard_row_alone(row, hard_row_sums):
    rows = _hard_rows()
    got, want = hard_row_sums[row], helpers.clipped_rows(rows[[row]], 1.0)[0]
    assert np.isfinite(got).all()
    assert np.linalg.norm(got) <= 1.0 + 1e-7  # One more rounding: the weights'.
    np.testing.assert_allclose(got, want, rtol=OVER_CLIP, atol=1e-12)


@pytest.fixture(scope="module")
def hard_row_sums():
    # The book-keeping engine drops records whose squares leave float32.
    optimizer = keras_dpopt.DPSGD(
        1.0,
        l2_norm_clip=1.0,
        noise_multiplier=0.0,
        expected_batch_size=1,
        gradient_engine="vectorized",
    )
    model = helpers.rows_model(optimizer, (8,))
    sums = []
    for row in _hard_rows():
        model.reset()
        model.train_on_batch(row[None], np.zeros((1, 1)))
        sums.append(-model.flat())
    return sums


def test_clip_is_joint_over_the_variables():
    """Three variables of norm 1 each: the record has norm sqrt(3), not 1."""
    optimizer = keras_dpopt.DPSGD(
        1.0, l2_norm_clip=1.0, noise_multiplier=0.0, expected_batch_size=1
    )
    model = helpers.rows_model(optimizer, (1,), (1,), (1,))
    model.train_on_batch(np.ones((1, 3), "f4"), np.zeros((1, 1)))
    np.testing.assert_allclose(-model.flat(), np.full(3, 3**-0.5), rtol=OVER_CLIP)


@pytest.mark.parametrize("engine", helpers.ENGINES)
def test_weights_multiply_before_the_clip(engine):
    """A sample weight of 1e15 changes a record and not its bound; 0 removes it."""
    rows = np.random.default_rng(1).normal(size=(5, 6)).astype("f4")
    weights = np.array([1e15, 0.0, 1.0, 1e-3, -2.0], "f4")
    optimizer = keras_dpopt.DPSGD(
        1.0,
        l2_norm_clip=0.5,
        noise_multiplier=0.0,
        expected_batch_size=1,
        gradient_engine=engine,
    )
    model = helpers.rows_model(optimizer, (6,))
    model.train_on_batch(rows, helpers.targets(rows), sample_weight=weights)
    want = helpers.clipped_rows(rows * weights[:, None], 0.5).sum(axis=0)
    np.testing.assert_allclose(-model.flat(), want, atol=1e-4)


@pytest.mark.parametrize("engine", helpers.ENGINES)
@pytest.mark.parametrize("kappa", [0.6, 0.5])  # a = 0.95; a = 1.43, opposing weights.
def test_two_opposing_gradients_are_clipped_as_one(engine, kappa):
    """u = a*g1 + (1-a)*g2 with |g1|, |g2| far above C and, in part, opposite."""
    clip = 0.3
    optimizer = keras_dpopt.FiBeR(
        1.0,
        kappa=kappa,
        gamma=0.7,
        omega=1.0,
        noise_correction=None,
        l2_norm_clip=clip,
        noise_multiplier=0.0,
        expected_batch_size=1,
        gradient_engine=engine,
    )
    model = helpers.QuarticModel([0.5, -0.3, 0.8])
    model.compile(optimizer=optimizer, loss=helpers.quartic_loss(0.0))
    gradient = helpers.watch_gradients(model)
    generator = np.random.default_rng(2)
    centers = generator.normal(size=(6, 3)).astype("f4")
    curvature = generator.normal(size=(6, 3), scale=[[1], [5], [50], [1e3], [1e8], [1]])
    curvature = curvature.astype("f4")
    a = (1 - kappa) / (kappa * 0.7)
    change, opposing = np.zeros(3), 0
    for _ in range(3):
        theta = model.theta.numpy()
        ahead = (theta + np.float32(0.7) * change).astype("f4")
        g1, g2 = (curvature * (at - centers).astype("f8") for at in (ahead, theta))
        opposing += ((g1 * (2 * a - 1) * g2).sum(axis=1) < 0).sum()
        model.train_on_batch(centers, curvature)
        want = helpers.clipped_rows(a * g1 + (1 - a) * g2, clip).sum(axis=0)
        # A record's error is 1e-6 of its largest term, before the clip shrinks it.
        np.testing.assert_allclose(gradient[0].numpy(), want, atol=3e-5)
        change = model.theta.numpy() - theta
    assert opposing


_HARD = np.array([0.0, 1e15, -1e15, 3e38, np.inf, np.nan], np.float32)
ROWS = hnp.arrays(
    np.float32,
    st.tuples(st.integers(2, 6), st.just(4)),
    elements=st.one_of(
        st.floats(-4, 4, width=32),
        st.floats(width=32),  # NaN and infinity among them.
        st.sampled_from(_HARD.tolist()),
    ),
)


@pytest.fixture(scope="module")
def sum_by_weights():
    """Function rows -> clipped sum, by the final weights of one compiled model."""
    optimizer = keras_dpopt.DPSGD(
        1.0,
        l2_norm_clip=0.5,
        noise_multiplier=0.0,
        expected_batch_size=1,
        gradient_engine="vectorized",
        microbatch_size=4,
    )
    model = helpers.rows_model(optimizer, (4,))

    def clipped_sum(rows):
        model.reset()
        model.train_on_batch(rows, helpers.targets(rows))
        return -model.flat()

    return clipped_sum


@hypothesis.settings(max_examples=60)
@hypothesis.given(ROWS, st.integers(0, 5))
def test_removing_one_record_moves_the_sum_by_at_most_the_clip(
    sum_by_weights, rows, which
):
    """To the rounding of float32 sums of six numbers below 0.5: 12 * 3 * 2^-24."""
    which %= len(rows)
    moved = sum_by_weights(rows) - sum_by_weights(np.delete(rows, which, axis=0))
    assert np.linalg.norm(moved) <= 0.5 + 36 * 2.0**-24
    want = helpers.clipped_rows(rows[[which]], 0.5)[0]
    np.testing.assert_allclose(moved, want, atol=2e-5)


# ----------------------------------------------------- our query in TF Privacy's terms


def test_query_obeys_the_protocol():
    query = mechanisms.GaussianSumQuery(2.0, 1.5, key=3)
    assert isinstance(query, dp_query.SumAggregationDPQuery)
    state = query.initial_global_state()
    params = query.derive_sample_params(state)
    # A record of TF Privacy may be any structure.
    records = [
        {"a": tf.constant([3.0, 4.0]), "b": (tf.constant(12.0),)},
        {"a": tf.constant([0.3, 0.0]), "b": (tf.constant(-0.4),)},
    ]
    template = {"a": tf.TensorSpec([2]), "b": (tf.TensorSpec([]),)}
    left, right = (query.initial_sample_state(template) for _ in range(2))
    left = query.accumulate_record(params, left, records[0])
    right = query.accumulate_preprocessed_record(
        right, query.preprocess_record(params, records[1])
    )
    total = query.merge_sample_states(left, right)
    want = np.array([3.0, 4.0, 12.0]) * 2 / 13 + np.array([0.3, 0.0, -0.4])
    np.testing.assert_allclose(total["a"], want[:2], rtol=1e-4)
    np.testing.assert_allclose(total["b"][0], want[2], rtol=1e-4)
    result, new_state, event = query.get_noised_result(total, state)
    tf.nest.assert_same_structure(result, total)
    noise = [result["a"] - total["a"], result["b"][0] - total["b"][0]]
    np.testing.assert_allclose(
        noise[0], 3.0 * prng.standard_normal(3, 0, 0, (2,)), rtol=1e-4
    )
    np.testing.assert_allclose(
        noise[1], 3.0 * prng.standard_normal(3, 0, 1, ()), rtol=1e-4
    )
    assert event == dp_accounting.GaussianDpEvent(1.5)
    assert int(new_state.step) == 1
    again, _, _ = query.get_noised_result(total, new_state)
    assert np.abs(again["a"] - result["a"]).min() > 1e-6


def test_query_without_a_key_draws_one():
    keys = {int(mechanisms.GaussianSumQuery(1.0, 1.0).initial_global_state().key)}
    keys.add(int(mechanisms.GaussianSumQuery(1.0, 1.0).initial_global_state().key))
    assert len(keys) == 2


def test_query_within_tf_privacys_normalized_query():
    query = normalized_query.NormalizedQuery(
        mechanisms.GaussianSumQuery(1.0, 0.0, key=1), denominator=4.0
    )
    state = query.initial_global_state()
    params = query.derive_sample_params(state)
    total = query.initial_sample_state(tf.TensorSpec([2]))
    for record in ([3.0, 4.0], [0.5, 0.0]):
        total = query.accumulate_record(params, total, tf.constant(record))
    mean, _, event = query.get_noised_result(total, state)
    np.testing.assert_allclose(mean, [1.1 / 4, 0.8 / 4], rtol=1e-4)
    assert isinstance(event, dp_accounting.NonPrivateDpEvent)


def test_mechanism_tells_stddev_of_the_mean():
    mechanism = mechanisms.GaussianMechanism(0.7, 1.3)
    gradient, _ = mechanism.release(
        mechanisms.ClippedSum((tf.zeros([3]),), 0.7), (), 1, 0, 5.0
    )
    np.testing.assert_allclose(gradient.noise_stddev, 0.7 * 1.3 / 5, rtol=1e-6)
    assert mechanism.noise_multipliers(()) == (1.3,)


@pytest.mark.parametrize("name", ["flat", "automatic", "per_layer"])
def test_the_noise_of_every_style_is_sigma_c(name):
    mechanism = mechanisms.make(CLIP, SIGMA, clipping=name).built_for([0, 1])
    zero = mechanism.zero_sum([tf.TensorSpec(shape) for shape in SHAPES])
    params = mechanism.sample_params(mechanism.initial_state())
    clipped = mechanisms.ClippedSum(zero, mechanism.sensitivity(params))
    gradient, state = mechanism.release(clipped, (), 7, 2, float(BATCH), 5)
    assert state == ()
    values = np.concatenate([np.ravel(v) for v in gradient.values])
    _check_noise(values, SIGMA * CLIP / BATCH)
    np.testing.assert_allclose(gradient.noise_stddev, SIGMA * CLIP / BATCH, rtol=1e-6)
    # Streams are counted from first_stream on: releases of one step share none.
    want = [prng.standard_normal(7, 2, 5 + i, shape) for i, shape in enumerate(SHAPES)]
    np.testing.assert_allclose(
        values,
        SIGMA * CLIP / BATCH * np.concatenate([np.ravel(z) for z in want]),
        rtol=1e-6,
    )
    np.testing.assert_allclose(mechanism.current_clip(()), CLIP)
    # float32(0.7) is below 0.7, and float32(0.1) above 0.1: C is taken exactly.
    assert params.dtype == tf.float64 and params == CLIP


@pytest.mark.parametrize("name", ["flat", "automatic", "per_layer"])
def test_a_sum_of_another_sensitivity_is_refused(name):
    mechanism = mechanisms.make(CLIP, SIGMA, clipping=name)
    for other in (2 * CLIP, None):
        clipped = mechanisms.ClippedSum((tf.zeros([3]),), other)
        with pytest.raises(ValueError, match="sensitivity"):
            mechanism.release(clipped, (), 1, 0, 5.0)


def test_golden_rescale_to_unit_norm(monkeypatch):
    """g = (1/(B*C)) * (sum + sigma*C*z): the sum is Abadi's, divided by C."""
    monkeypatch.setattr(clipping, "_UNIT_ROUNDOFF", 0.0)  # See golden_test.py.
    methods = helpers.golden()["methods"]
    entry = methods["clip_rescale_to_unit_norm"]
    for sigma in (0.0, 0.8):
        mechanism = mechanisms.make(entry["C"], sigma, rescale_to_unit_norm=True)
        params = mechanism.sample_params(())
        records = [
            mechanism.preprocess_record(params, (tf.constant(g, tf.float32),))[0]
            for g in methods["clip_abadi"]["grads"]
        ]
        clipped = mechanisms.ClippedSum((tf.add_n(records),), entry["C"])
        gradient, _ = mechanism.release(clipped, (), 3, 1, 4.0)
        want = np.array(entry["sum"])
        want += (
            sigma
            * entry["noise_std_on_sum_per_sigma"]
            * np.array(prng.standard_normal(3, 1, 0, (3,)), np.float64)
        )
        np.testing.assert_allclose(4 * gradient.values[0], want, rtol=3e-6)
        np.testing.assert_allclose(gradient.noise_stddev, sigma / 4, rtol=1e-6)


@pytest.mark.parametrize("clip", [1e-20, 0.1, 30.0, 1e15])
def test_rescaled_noise_does_not_depend_on_c(clip):
    mechanism = mechanisms.make(clip, SIGMA, rescale_to_unit_norm=True)
    zero = mechanism.zero_sum([tf.TensorSpec(shape) for shape in SHAPES])
    gradient, _ = mechanism.release(
        mechanisms.ClippedSum(zero, clip), (), 7, 2, float(BATCH)
    )
    values = np.concatenate([np.ravel(v) for v in gradient.values])
    _check_noise(values, SIGMA / BATCH)
    np.testing.assert_allclose(gradient.noise_stddev, SIGMA / BATCH, rtol=1e-6)


def test_rescaling_needs_a_norm_to_divide_by():
    with pytest.raises(ValueError, match="finite l2_norm_clip"):
        mechanisms.make(np.inf, 0.0, rescale_to_unit_norm=True)
    config = mechanisms.make(2.0, 0.5, rescale_to_unit_norm=True).get_config()
    assert config["rescale_to_unit_norm"] is True
    assert mechanisms.make(**config).rescale_to_unit_norm is True


# ------------------------------------------------------------- TF Privacy's own queries


def _foreign(query, cls=keras_dpopt.DPSGD, shapes=((6,),), **arguments):
    optimizer = cls(1.0, dp_sum_query=query, expected_batch_size=1, **arguments)
    return helpers.rows_model(optimizer, *shapes)


@pytest.mark.parametrize(
    ("engine", "microbatch_size"),
    [("vectorized", 4), ("vectorized", None), ("loop", 1), ("loop", 4)],
)
def test_foreign_gaussian_query_clips(engine, microbatch_size):
    """Hard rows too: TF Privacy alone would make NaN of them."""
    rows = np.random.default_rng(4).normal(size=(7, 6)).astype("f4")
    rows[1] *= 1e25
    rows[2, 3], rows[3, 0], rows[4] = np.nan, np.inf, 0.0
    model = _foreign(
        gaussian_query.GaussianSumQuery(0.5, 0.0),
        gradient_engine=engine,
        microbatch_size=microbatch_size,
    )
    model.train_on_batch(rows, helpers.targets(rows))
    want = helpers.clipped_rows(rows, 0.5).sum(axis=0)
    np.testing.assert_allclose(-model.flat(), want, atol=1e-5)


@pytest.mark.parametrize("name", ["DPSGD", "DPAdamBC", "DPSAM", "FiBeR"])
def test_foreign_gaussian_query_noises(name):
    """One release a step, or two; those that correct for the noise know its stddev.

    `optimizer_kinds_test.py` has every optimizer with such a query.
    """
    cls = helpers.OPTIMIZERS[name]
    model = _foreign(gaussian_query.GaussianSumQuery(0.5, 0.8), cls, SHAPES)
    gradient = helpers.watch_gradients(model)
    x = np.zeros((3, model.size), "f4")
    draws = []
    for _ in range(2):
        model.train_on_batch(x, helpers.targets(x))
        draws.append(np.concatenate([np.ravel(g.numpy()) for g in gradient]))
        _check_noise(draws[-1], 0.8)
    # |correlation|: 6/sqrt(60000), false-alarm rate 2e-9.
    assert abs(np.corrcoef(*draws)[0, 1]) < 6 / np.sqrt(60_000)
    if "noise_velocity" in model.optimizer.named_variables():
        # (1 - b2) * gain * stddev^2, of two steps: that gain is of the filter.
        assert helpers.scalar_slot(model.optimizer, "noise_velocity") > 0.0


def test_foreign_event_is_accounted():
    optimizer = keras_dpopt.DPSGD(
        0.1, dp_sum_query=gaussian_query.GaussianSumQuery(0.5, 0.8)
    )
    np.testing.assert_allclose(optimizer.noise_multipliers(), [1.6], rtol=1e-6)
    query = _quantile_query(clipped_count_stddev=2.0, noise_multiplier=1.5)
    optimizer = keras_dpopt.DPSGD(0.1, dp_sum_query=query)
    _, _, event = query.get_noised_result(
        query.initial_sample_state((tf.zeros(()),)), query.initial_global_state()
    )
    want = [part.noise_multiplier for part in event.events]
    np.testing.assert_allclose(optimizer.noise_multipliers(), want, rtol=1e-6)
    assert len(want) == 2


def _quantile_query(**arguments):
    arguments = {
        "initial_l2_norm_clip": 1.0,
        "noise_multiplier": 0.0,
        "target_unclipped_quantile": 0.5,
        "learning_rate": 0.5,
        "clipped_count_stddev": 0.0,
        "expected_num_records": 5,
        **arguments,
    }
    return quantile_adaptive_clip_sum_query.QuantileAdaptiveClipSumQuery(**arguments)


def _clip_of(model):
    optimizer = model.optimizer
    state = optimizer.mechanism_state() if optimizer.built else None
    state = state or optimizer.mechanism.initial_state()
    return float(tf_privacy.l2_norm_clip(state))


@pytest.mark.parametrize("engine", helpers.ENGINES)
def test_adaptive_clip_sees_no_padding(engine):
    """Five records of norms 0.2 to 3.4; without noise on the count the clip is exact.

    C <- C * exp(-eta * (fraction at most C - quantile)) (SPEC section 19).
    """
    norms = np.array([0.2, 0.6, 1.4, 2.0, 3.4])
    rows = np.zeros((5, 6), "f4")
    rows[:, 2] = norms
    clips = {}
    for microbatch_size in (1, 4, 5, 8):  # Padding rows: none, 3, none, 3.
        model = _foreign(
            _quantile_query(), gradient_engine=engine, microbatch_size=microbatch_size
        )
        clips[microbatch_size] = []
        for _ in range(4):
            before = model.flat()
            clip = _clip_of(model)
            model.train_on_batch(rows, helpers.targets(rows))
            np.testing.assert_allclose(
                (before - model.flat())[2], np.minimum(norms, clip).sum(), rtol=1e-5
            )
            clips[microbatch_size].append(_clip_of(model))
    clip, want = 1.0, []
    for _ in range(4):
        clip *= np.exp(-0.5 * (np.mean(norms <= clip) - 0.5))
        want.append(clip)
    assert len(set(np.round(want, 6))) == 4
    for got in clips.values():
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_adaptive_clip_trains_by_fit():
    model = helpers.mlp()
    query = _quantile_query(noise_multiplier=0.5, clipped_count_stddev=0.5)
    model.compile(
        keras_dpopt.DPAdam(0.01, dp_sum_query=query), loss=helpers.CROSSENTROPY
    )
    x, y = helpers.classes(40)
    before = model.get_weights()[0]
    model.fit(x, y, batch_size=5, epochs=2, verbose=0)
    assert model.optimizer.releases() == 16
    assert np.abs(model.get_weights()[0] - before).max() > 1e-3
    assert np.isfinite(model.get_weights()[0]).all()
    assert _clip_of(model) != 1.0


def test_foreign_query_refuses_jit():
    with pytest.raises(ValueError, match="XLA"):
        helpers.rows_model(
            keras_dpopt.DPSGD(
                0.1, dp_sum_query=gaussian_query.GaussianSumQuery(1.0, 1.0)
            ),
            (3,),
            jit_compile=True,
        )


@pytest.mark.parametrize("query", [gaussian_query.GaussianSumQuery, "gaussian", 1.0])
def test_foreign_query_must_be_a_sum_query(query):
    with pytest.raises(TypeError, match="SumAggregationDPQuery"):
        keras_dpopt.DPSGD(0.1, dp_sum_query=query)


class _LaplaceQuery(gaussian_query.GaussianSumQuery):
    def get_noised_result(self, sample_state, global_state):
        result, state, _ = super().get_noised_result(sample_state, global_state)
        return result, state, dp_accounting.LaplaceDpEvent(1.0)


class _UnknownQuery(gaussian_query.GaussianSumQuery):
    def get_noised_result(self, sample_state, global_state):
        result, state, event = super().get_noised_result(sample_state, global_state)
        parts = [event, dp_accounting.UnsupportedDpEvent()]
        return result, state, dp_accounting.ComposedDpEvent(parts)


@pytest.mark.parametrize("query", [_LaplaceQuery(1.0, 1.0), _UnknownQuery(1.0, 1.0)])
def test_foreign_query_must_be_gaussian(query):
    with pytest.raises(ValueError, match="Gaussian"):
        keras_dpopt.DPSGD(0.1, dp_sum_query=query)


class _FadingQuery(gaussian_query.GaussianSumQuery):
    """Has less noise at each step, which was not accounted at the start."""

    def get_noised_result(self, sample_state, global_state):
        result, state, event = super().get_noised_result(sample_state, global_state)
        return result, state._replace(stddev=state.stddev * 0.5), event


def test_foreign_query_may_not_release_with_less_noise():
    model = _foreign(_FadingQuery(1.0, 1.0))
    x = np.zeros((2, 6), "f4")
    model.train_on_batch(x, helpers.targets(x))
    weights = model.flat()
    with pytest.raises(Exception, match="less noise"):
        for _ in range(3):
            model.train_on_batch(x, helpers.targets(x))
    assert np.abs(weights).min() > 0


@pytest.mark.parametrize(
    "given", [{"clipping": "automatic"}, {"rescale_to_unit_norm": True}]
)
def test_foreign_query_excludes_styles(given):
    query = gaussian_query.GaussianSumQuery(1.0, 1.0)
    with pytest.raises(ValueError, match="clips by itself"):
        mechanisms.make(None, None, query, **given)


def test_foreign_query_has_no_configuration():
    mechanism = mechanisms.make(None, None, gaussian_query.GaussianSumQuery(0.5, 0.8))
    with pytest.raises(ValueError, match="save_weights"):
        mechanism.get_config()
    # What all mechanisms have.
    state = mechanism.built_for([0, 1]).initial_state()
    np.testing.assert_allclose(mechanism.noise_multipliers(state, 10), [1.6], rtol=1e-6)
    assert mechanism.current_clip(state) == 0.5
    assert mechanism.sensitivity(mechanism.sample_params(state)) is None


@pytest.mark.parametrize("given", [{"l2_norm_clip": 1.0}, {"noise_multiplier": 1.0}])
def test_foreign_query_excludes_clip_and_noise(given):
    query = gaussian_query.GaussianSumQuery(1.0, 1.0)
    with pytest.raises(ValueError, match="l2_norm_clip"):
        keras_dpopt.DPSGD(0.1, dp_sum_query=query, **given)

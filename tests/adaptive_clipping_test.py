"""Adaptive clipping: the pair of releases costs z, and C follows the quantile."""

import functools
import math

import hard_records
import helpers
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from hard_records import OVER_CLIP

import keras_dpopt
from keras_dpopt import clipping, dp_events, mechanisms, prng
from keras_dpopt.adaptive_clipping import AdaptiveClipping, gradient_noise_multiplier
from keras_dpopt.types import ClippedSum

GOLDEN = helpers.golden()
KEY = 1234567


def _mechanism(l2_norm_clip=1.0, noise_multiplier=1.0, rescale=False, **style):
    return mechanisms.make(
        l2_norm_clip,
        noise_multiplier,
        clipping=AdaptiveClipping(**style),
        rescale_to_unit_norm=rescale,
    )


def _masked_sum(mechanism, params, batch, count):
    """The sum over the first `count` records, as the vectorized engine takes it."""
    records = tf.vectorized_map(
        functools.partial(mechanism.preprocess_record, params),
        tuple(batch),
        fallback_to_while_loop=False,
    )

    def total(values):
        mask = tf.reshape(
            tf.range(values.shape[0]) < count, [-1] + [1] * (values.shape.rank - 1)
        )
        return tf.reduce_sum(tf.where(mask, values, tf.zeros_like(values)), axis=0)

    return tf.nest.map_structure(total, records)


def _step(mechanism, batch, state, step, batch_size, count=None, first_stream=0):
    params = mechanism.sample_params(state)
    total = _masked_sum(
        mechanism, params, batch, len(batch[0]) if count is None else count
    )
    clipped = ClippedSum(total, mechanism.sensitivity(params))
    return mechanism.release(clipped, state, KEY, step, batch_size, first_stream)


def _tensors(state):
    return tf.nest.map_structure(lambda v: tf.constant(v, tf.float32), state)


# --------------------------------------------------------------------- sensitivity


@functools.cache
def _preprocess(way):
    mechanism = _mechanism()
    return hard_records.way(
        way, lambda record, limit: mechanism.preprocess_record(limit, record)
    )


@pytest.mark.parametrize("way", hard_records.QUICK_WAYS)
def test_clipped_record_and_count_of_hard_records(way):
    rows = hard_records.hard_rows()
    batch = hard_records.records(*rows)
    norms = hard_records.norms(batch)
    for limit in (1e-20, 1e-6, 0.1, 1.0, 1e6, 1e15):
        limit = np.float32(limit)  # As C is kept.
        c = tf.constant(limit)
        values, counts = _preprocess(way)([tf.constant(x) for x in batch], c)
        same = [clipping.clip_record([x[i] for x in batch], c) for i in (5, 16, 20)]
        for i, record in zip((5, 16, 20), same, strict=True):
            for value, one in zip(values, record, strict=True):
                np.testing.assert_allclose(value[i], one, rtol=1e-6)
        after = hard_records.norms([x.numpy() for x in values])
        assert (after <= limit).all()
        assert counts.dtype == tf.float32 and counts.shape == [len(rows)]
        counts = counts.numpy()
        # Exactly a half, on either side: the count's noise is for it.
        assert set(counts) <= {-0.5, 0.5}
        assert (counts[~np.isfinite(norms)] == -0.5).all()
        clear = np.isfinite(norms) & (np.abs(norms / limit - 1) > 1e-4)
        np.testing.assert_array_equal(
            counts[clear], np.where(norms[clear] <= limit, 0.5, -0.5)
        )


def test_removing_a_record_moves_gradient_and_count_within_their_noise():
    """(|sum|/(z_D C))^2 + (|count|/s_b)^2 <= z^-2, for each record that is removed."""
    z, clip, stddev = 1.3, np.float32(0.7), 0.9
    mechanism = _mechanism(clip, z, count_noise_stddev=stddev)
    z_d, _ = mechanism.noise_multipliers(())
    batch = hard_records.records(*hard_records.hard_rows())
    values, counts = _preprocess("vectorized")(
        [tf.constant(x) for x in batch], tf.constant(clip)
    )
    flat = [np.reshape(x, (len(counts), -1)).astype(np.float64) for x in values]
    flat, counts = np.concatenate(flat, axis=1), counts.numpy().astype(np.float64)
    costs = []
    for row in range(len(counts)):
        moved = np.linalg.norm(flat.sum(0) - np.delete(flat, row, axis=0).sum(0))
        counted = abs(counts.sum() - np.delete(counts, row).sum())
        costs.append((moved / (z_d * clip)) ** 2 + (counted / stddev) ** 2)
    assert max(costs) <= z**-2 * (1 + 1e-12)
    assert max(costs) >= z**-2 * (1 - 1e-4)


@pytest.mark.parametrize(
    ("z", "stddev"),
    [(1e-3, 1.0), (1.1, 1.0), (1.999999, 1.0), (0.5, 12.8), (8.0, 12.8), (8.0, 1e6)],
)
def test_the_pair_costs_z(z, stddev):
    mechanism = _mechanism(noise_multiplier=z, count_noise_stddev=stddev)
    pair = mechanism.noise_multipliers(mechanism.initial_state(), 256)
    assert len(pair) == 2 and pair[1] == 2 * stddev and pair[0] >= z
    effective = dp_events.effective_noise_multiplier(pair)
    np.testing.assert_allclose(effective, z, rtol=1e-14)
    # The formula as it is printed; it loses digits where z is close to 2 s_b.
    if z < 1.9 * stddev:
        np.testing.assert_allclose(
            pair[0], (z**-2 - (2 * stddev) ** -2) ** -0.5, rtol=1e-9
        )


def test_default_noise_on_the_count_is_a_twentieth_of_the_batch():
    mechanism = _mechanism(noise_multiplier=1.1)
    pair = mechanism.noise_multipliers((), 256)
    assert pair == (gradient_noise_multiplier(1.1, 25.6), 25.6)
    with pytest.raises(ValueError, match="expected_batch_size"):
        mechanism.noise_multipliers(())
    assert _mechanism(noise_multiplier=0.0).noise_multipliers((), 256) == (0.0, 25.6)


def test_a_noise_multiplier_that_the_count_exceeds_is_refused():
    for z in (1.0, 1.5):
        with pytest.raises(ValueError, match="count_noise_stddev"):
            _mechanism(noise_multiplier=z, count_noise_stddev=0.5)
    with pytest.raises(ValueError, match="larger count_noise_stddev"):
        _mechanism(noise_multiplier=0.1, count_noise_stddev=0.0)
    _mechanism(noise_multiplier=0.0, count_noise_stddev=0.0)
    # By default it is known as late as B: z = 1.1 needs B > 11.
    mechanism = _mechanism(noise_multiplier=1.1)
    with pytest.raises(ValueError, match="count_noise_stddev"):
        mechanism.noise_multipliers((), 11)
    mechanism.noise_multipliers((), 12)
    batch = [tf.ones([2, 3])]
    with pytest.raises(tf.errors.InvalidArgumentError, match="below twice"):
        _step(mechanism, batch, _tensors((1.0,)), 0, tf.constant(10.0))


# --------------------------------------------------------------------------- noise

SHAPES = ((200, 150), (200, 150))


def _check_noise(values, stddev):
    """As in `mechanisms_test.py`: accepts this standard deviation and no other.

    Standard deviation within 2 %: 7 of its own; KS at p = 1e-5, and below 1e-100 at
    2/3 and 3/2 of it. All draws are seeded.
    """
    values = np.ravel(values)
    assert abs(np.std(values) / stddev - 1) < 0.02

    def p(scale):
        return scipy.stats.kstest(values, "norm", args=(0, stddev * scale)).pvalue

    assert p(1.0) > 1e-5
    assert p(2 / 3) < 1e-100 and p(3 / 2) < 1e-100


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("rescale", [False, True])
def test_noise_on_the_gradient_is_of_the_old_clip(rescale, jit):
    """z_D*C/B with the C that the records were clipped with, not with the next."""
    z, stddev, batch_size, clip = 1.3, 0.75, 5, 0.3
    mechanism = _mechanism(
        9.9, z, rescale, count_noise_stddev=stddev, learning_rate=3.0
    )
    z_d = (z**-2 - (2 * stddev) ** -2) ** -0.5
    assert z_d > 2 * z  # The test would see z in its place.

    @functools.partial(tf.function, jit_compile=jit)
    def step(clip, number, batch_size):
        zero = mechanism.zero_sum([tf.TensorSpec(s) for s in SHAPES])
        clipped = ClippedSum(zero, mechanism.sensitivity(clip))
        gradient, state = mechanism.release(clipped, (clip,), KEY, number, batch_size)
        return gradient.values, gradient.noise_stddev, state

    values, told, (new,) = step(
        tf.constant(clip), tf.constant(3, tf.int64), tf.constant(float(batch_size))
    )
    want = z_d / batch_size if rescale else z_d * clip / batch_size
    np.testing.assert_allclose(told, want, rtol=1e-6)
    _check_noise(values, want)
    # The C of the state moved by far more than the tolerance.
    assert abs(new / clip - 1) > 0.1
    # And it is the noise of the addresses that every mechanism uses.
    for i, value in enumerate(values):
        z_i = prng.standard_normal(KEY, 3, i, SHAPES[i])
        np.testing.assert_allclose(value, want * z_i, atol=2e-6 * want)


@pytest.mark.parametrize("batch_size", [40, 400])
def test_noise_on_the_count(batch_size):
    """By what it does to C; one number a step, so 20000 steps in one graph."""
    mechanism = _mechanism(1.0, 1.0, learning_rate=0.1, target_quantile=0.3)
    steps = 20_000

    def new_clip(step):
        gradient = ClippedSum(
            mechanism.zero_sum([tf.TensorSpec([1])]), tf.constant(1.0)
        )
        _, (new,) = mechanism.release(
            gradient, (tf.constant(1.0),), KEY, step, tf.constant(float(batch_size))
        )
        return new

    clips = tf.function(
        lambda: tf.map_fn(
            new_clip, tf.range(steps, dtype=tf.int64), fn_output_signature=tf.float32
        )
    )().numpy()
    # C' = exp(-eta*(1/2 + N(0, s_b^2)/B - q)), s_b = B/20.
    noise = (-np.log(clips.astype(np.float64)) / 0.1 - 0.2) * batch_size
    _check_noise(noise, batch_size / 20)
    # Standard deviation of the mean: 1/141 of it; no two draws are equal.
    assert abs(noise.mean()) < 5 * batch_size / 20 / math.sqrt(steps)
    correlation = np.corrcoef(noise[:-1], noise[1:])[0, 1]
    assert abs(correlation) < 6 / math.sqrt(steps)


def test_the_count_shares_its_noise_with_no_tensor(monkeypatch):
    seen = []
    standard_normal = prng.standard_normal

    def watching(key, step, stream, shape):
        seen.append((int(key), int(step), stream))
        return standard_normal(key, step, stream, shape)

    monkeypatch.setattr(prng, "standard_normal", watching)
    mechanism = _mechanism(count_noise_stddev=5.0)
    batch = [tf.ones([2, 3]), tf.ones([2]), tf.ones([2, 1])]
    state = _tensors(mechanism.initial_state())
    for step in range(2):
        for release in range(3):  # Several of one step, each from its own stream.
            _, state = _step(mechanism, batch, state, step, 4.0, None, 3 * release)
    assert len(seen) == len(set(seen)) == 2 * 3 * 4
    # Up to the last stream, and not beyond.
    most = 2 ** (prng.STREAM_BITS - 1)
    _step(mechanism, batch, state, 0, 4.0, None, most - 2)
    with pytest.raises(ValueError, match="smaller first_stream"):
        _step(mechanism, batch, state, 0, 4.0, None, most - 1)


# ------------------------------------------------------------------ what C comes to


def test_golden_adaptive_clipping(monkeypatch):
    entry, problem = GOLDEN["methods"]["adaptive_clipping"], GOLDEN["problem"]
    normals = tf.constant(problem["Z"], tf.float32)
    counts = tf.constant(entry["z_b"], tf.float32)

    def fixed(key, step, stream, shape):
        del key
        if tuple(shape) == ():
            assert stream == 2**prng.STREAM_BITS - 1
            return counts[step]
        assert stream == 0
        return normals[step]

    monkeypatch.setattr(prng, "standard_normal", fixed)
    monkeypatch.setattr(clipping, "_UNIT_ROUNDOFF", 0.0)  # See golden_test.py.
    mechanism = _mechanism(
        entry["C0"],
        entry["noise_multiplier_total"],
        target_quantile=entry["target_quantile"],
        learning_rate=entry["lr_C"],
        count_noise_stddev=entry["sigma_b"],
    )
    z_d, count = mechanism.noise_multipliers(mechanism.initial_state())
    np.testing.assert_allclose(z_d, entry["noise_multiplier_grad"], rtol=1e-12)
    assert count == 2 * entry["sigma_b"]
    theta = np.array(problem["theta0"])
    centers, curvature = np.array(problem["centers"]), np.array(problem["H"])
    batch_size = problem["batch_size"]
    state = _tensors(mechanism.initial_state())
    for t, want in enumerate(entry["trace"]):
        np.testing.assert_allclose(mechanism.current_clip(state), want["C"], rtol=2e-6)
        distance = theta - centers
        rows = curvature * distance + problem["quartic"] * distance**3
        batch = [tf.constant(rows, tf.float32)]
        _, counted = _masked_sum(mechanism, mechanism.sample_params(state), batch, 4)
        assert counted + batch_size / 2 == want["unclipped"]
        before = float(state[0])
        gradient, state = _step(mechanism, batch, state, t, float(batch_size))
        np.testing.assert_allclose(gradient.values[0], want["g"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(state[0], want["C_next"], rtol=2e-6)
        # b~ is not cut to [0, 1]: at t = 1 it is -0.065.
        fraction = 0.5 - math.log(float(state[0]) / before) / entry["lr_C"]
        np.testing.assert_allclose(fraction, want["b_tilde"], atol=2e-6)
        theta = theta - entry["lr"] * gradient.values[0].numpy().astype(np.float64)
        np.testing.assert_allclose(theta, want["theta"], rtol=1e-5, atol=1e-6)
    assert min(want["b_tilde"] for want in entry["trace"]) < 0


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("start", [0.03, 1.0, 20.0])
def test_clip_follows_the_quantile(quantile, start):
    """On a stream of log-normal norms, from far below and far above."""
    batch_size, steps = 200, 200
    mechanism = _mechanism(start, 1.0, target_quantile=quantile)
    generator = np.random.default_rng(3)
    step = tf.function(
        lambda rows, state, number: _step(
            mechanism, [rows], state, number, tf.constant(float(batch_size))
        )[1]
    )
    state, clips = _tensors(mechanism.initial_state()), []
    for number in range(steps):
        rows = generator.normal(size=(batch_size, 4))
        norms = np.exp(generator.normal(size=(batch_size, 1)))
        rows *= norms / np.linalg.norm(rows, axis=1, keepdims=True)
        state = step(
            tf.constant(rows, tf.float32), state, tf.constant(number, tf.int64)
        )
        clips.append(float(state[0]))
    # The slowest way, at most exp(0.2*0.2) a step, takes 70 steps.
    below = scipy.stats.norm.cdf(np.log(clips[-40:]))
    # Noise of s_b/B = 0.05 and of the draw, smoothed by eta_C: the mean of 40 steps
    # is within 0.06 of the quantile.
    assert abs(below.mean() - quantile) < 0.06
    assert below.std() < 0.06


def test_empty_and_short_batches():
    """Divided by B, whatever comes: the centred count of no records is 0."""
    mechanism = _mechanism(1.0, 0.0, target_quantile=0.25, count_noise_stddev=0.0)
    clips = []
    for count in (0, 2, 4):
        batch = [tf.constant([[0.5], [0.6], [7.0], [8.0], [0.1]])]
        _, (new,) = _step(mechanism, batch, _tensors((1.0,)), 0, 8.0, count)
        clips.append(float(new))
    # (sum(b - 1/2))/8: 0, 1/8, 0.
    want = np.exp(-0.2 * (np.array([0.5, 0.625, 0.5]) - 0.25))
    np.testing.assert_allclose(clips, want, rtol=1e-6)


def test_padding_rows_do_not_count():
    mechanism = _mechanism(1.0, 0.0, count_noise_stddev=0.0)
    want = _step(mechanism, [tf.ones([3, 2])], _tensors((1.0,)), 0, 8.0)
    for filler in (0.0, 1e30, np.nan):
        batch = [tf.concat([tf.ones([3, 2]), tf.fill([5, 2], filler)], axis=0)]
        got = _step(mechanism, batch, _tensors((1.0,)), 0, 8.0, 3)
        np.testing.assert_array_equal(got[0].values[0], want[0].values[0])
        assert got[1] == want[1]


def test_clip_stays_where_float32_can_square_it():
    for first, side, limit in ((1e14, -1, 1e15), (1e-19, 1, 1e-20)):
        style = AdaptiveClipping(learning_rate=50.0)
        new = style.next_clip(tf.constant(first), tf.constant(side * 1e4), 8.0)
        assert new == np.float32(limit)
        for count in (1e38, -1e38):
            new = style.next_clip(tf.constant(first), tf.constant(count), 1.0)
            assert new in (np.float32(1e15), np.float32(1e-20))
    mechanism = _mechanism(1e15, 1.0)
    zero = mechanism.zero_sum([tf.TensorSpec([1000])])
    clip = tf.constant(1e15)
    gradient, _ = mechanism.release(ClippedSum(zero, clip), (clip,), KEY, 0, 25.0)
    assert np.isfinite(np.square(gradient.values[0])).all()


# ------------------------------------------------------------- the step's own clip


def test_a_sum_of_another_clip_is_refused():
    mechanism = _mechanism(1.0, 1.0, count_noise_stddev=5.0)
    zero = mechanism.zero_sum([tf.TensorSpec([2])])
    state = _tensors((0.5,))
    # The first C, as if it were fixed; and none.
    for fixed in (mechanism.l2_norm_clip, 0.5, None):
        with pytest.raises(ValueError, match="sensitivity"):
            mechanism.release(ClippedSum(zero, fixed), state, KEY, 0, 8.0)
    other = tf.constant(2.0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="another norm"):
        mechanism.release(ClippedSum(zero, other), state, KEY, 0, 8.0)

    def stddev(clip):
        gradient, _ = mechanism.release(ClippedSum(zero, clip), state, KEY, 0, 8.0)
        return gradient.noise_stddev

    with pytest.raises(tf.errors.InvalidArgumentError, match="another norm"):
        tf.function(stddev)(other)
    # XLA has no checks: the noise is then that of the larger one.
    z_d, _ = mechanism.noise_multipliers(state)
    for clip, larger in ((2.0, 2.0), (0.1, 0.5)):
        got = tf.function(stddev, jit_compile=True)(tf.constant(clip))
        np.testing.assert_allclose(got, z_d * larger / 8, rtol=1e-6)


def test_state_and_structure():
    mechanism = _mechanism(0.1, 1.0)
    assert mechanism.initial_state() == (0.1,)
    assert mechanism.l2_norm_clip == 0.1
    assert mechanism.built_for([0, 1]).initial_state() == (0.1,)
    values, count = mechanism.zero_sum([tf.TensorSpec([2, 3]), tf.ones([4])])
    assert [v.shape for v in values] == [[2, 3], [4]] and count.shape == []
    record = mechanism.preprocess_record(
        tf.constant(0.1), (tf.ones([2, 3]), tf.ones([4]))
    )
    tf.nest.assert_same_structure(record, (values, count))
    _, state = mechanism.release(
        ClippedSum((values, count), tf.constant(0.1)), _tensors((0.1,)), KEY, 0, 40.0
    )
    assert state[0].dtype == tf.float32 and state[0].shape == []
    assert not mechanism.state_is_secret
    # Divided by C, the noise is z_D/B at every step.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("target_quantile", 0.0),
        ("target_quantile", 1.0),
        ("target_quantile", 1.5),
        ("learning_rate", 0.0),
        ("learning_rate", np.inf),
        ("count_noise_stddev", -1.0),
        ("count_noise_stddev", np.nan),
    ],
)
def test_arguments_out_of_range(name, value):
    with pytest.raises(ValueError, match=name):
        AdaptiveClipping(**{name: value})
    with pytest.raises(TypeError, match=name):
        AdaptiveClipping(**{name: "much"})


# ------------------------------------------------------------------- by the optimizers


@pytest.mark.parametrize("engine", helpers.ENGINES)
def test_clip_of_an_optimizer_sees_no_padding(engine):
    """Five records of norms 0.2 to 3.4; without noise on the count, C is exact."""
    norms = np.array([0.2, 0.6, 1.4, 2.0, 3.4])
    rows = np.zeros((5, 6), "f4")
    rows[:, 2] = norms
    want, clip = [], 1.0
    for _ in range(4):
        clip *= np.exp(-0.5 * (np.mean(norms <= clip) - 0.5))
        want.append(clip)
    assert len(set(np.round(want, 6))) == 4
    for microbatch_size in (1, 4, 8):  # Padding rows: none, 3, 3.
        optimizer = keras_dpopt.DPSGD(
            1.0,
            l2_norm_clip=1.0,
            noise_multiplier=0.0,
            clipping=AdaptiveClipping(learning_rate=0.5, count_noise_stddev=0.0),
            expected_batch_size=5,
            gradient_engine=engine,
            microbatch_size=microbatch_size,
        )
        model = helpers.rows_model(optimizer, (6,))
        clip = 1.0
        for new in want:
            before = model.flat()
            model.train_on_batch(rows, helpers.targets(rows))
            np.testing.assert_allclose(
                5 * (before - model.flat())[2],
                np.minimum(norms, clip).sum(),
                rtol=OVER_CLIP,
            )
            clip = float(optimizer.mechanism.current_clip(optimizer.mechanism_state()))
            np.testing.assert_allclose(clip, new, rtol=1e-5)
    assert optimizer.named_variables()["mechanism.0"].numpy() == np.float32(clip)


def test_adaptive_clip_trains_by_fit():
    """Noise on everything; the ledger has the pair, which costs what z costs."""
    model = helpers.mlp()
    optimizer = keras_dpopt.DPAdam(
        0.01,
        l2_norm_clip=0.1,
        noise_multiplier=0.4,
        clipping=AdaptiveClipping(count_noise_stddev=0.5),
    )
    model.compile(optimizer, loss=helpers.CROSSENTROPY)
    x, y = helpers.classes(40)
    before = model.get_weights()[0]
    model.fit(x, y, batch_size=5, epochs=2, verbose=0)
    assert optimizer.releases() == 16
    assert np.isfinite(model.get_weights()[0]).all()
    assert np.abs(model.get_weights()[0] - before).max() > 1e-3
    assert optimizer.mechanism.current_clip(optimizer.mechanism_state()) != 0.1
    pair = optimizer.noise_multipliers()
    assert pair == optimizer.mechanism.noise_multipliers((), 5) and pair[1] == 1.0
    plain = keras_dpopt.epsilon(
        noise_multiplier=0.4, delta=1e-5, train_size=40, batch_size=5, epochs=2
    )
    statement = model.privacy_statement(delta=1e-5)
    np.testing.assert_allclose(statement.epsilon, plain, rtol=1e-9)


def test_fit_refuses_a_batch_too_small_for_the_count():
    model = helpers.mlp()
    optimizer = keras_dpopt.DPSGD(
        0.1, l2_norm_clip=1.0, noise_multiplier=1.1, clipping="adaptive"
    )
    model.compile(optimizer, loss=helpers.CROSSENTROPY)
    x, y = helpers.classes(40)
    before = model.get_weights()
    with pytest.raises(ValueError, match="larger count_noise_stddev"):
        model.fit(x, y, batch_size=11, epochs=1, verbose=0)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)

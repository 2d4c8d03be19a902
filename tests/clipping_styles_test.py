"""Clipping styles against float64 NumPy: no record adds more than C, in any style.

As in `clipping_test.py`, the bound itself has no tolerance.
"""

import functools
import json

import hard_records
import helpers
import hypothesis
import keras
import numpy as np
import pytest
import tensorflow as tf
from hard_records import OVER_CLIP, TINY
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import keras_dpopt
from keras_dpopt import clipping, mechanisms
from keras_dpopt.adaptive_clipping import AdaptiveClipping
from keras_dpopt.clipping_styles import (
    AutomaticClipping,
    FlatClipping,
    PerLayerClipping,
)

METHODS = helpers.golden()["methods"]
GROUPS = (4, 7, 4)  # Of the tensors of `hard_records.SHAPES`: two layers.
STYLES = {
    "flat": FlatClipping(),
    "automatic": AutomaticClipping(),
    "automatic 1e-6": AutomaticClipping(1e-6),
    "per_layer": PerLayerClipping(),
}


@functools.cache
def _compiled(style, way):
    clip = lambda record, limit: STYLES[style].clip(record, limit, GROUPS)  # noqa: E731
    return hard_records.way(way, clip)


def _clip(style, way, batch, limit):
    batch = [tf.constant(values) for values in batch]
    clipped = _compiled(style, way)(batch, tf.constant(limit, tf.float64))
    return [x.numpy() for x in clipped]


def _finite(batch):
    return np.isfinite(hard_records.norms(batch))


def _layers(batch):
    """The parts of each layer, as batches."""
    return [[x for x, g in zip(batch, GROUPS, strict=True) if g == n] for n in (4, 7)]


def _factors(style, batch, limit):
    """For each tensor of the record, the exact factors, [records], in float64."""
    norms = hard_records.norms(batch)
    if style == "per_layer":
        parts = [hard_records.norms(part) for part in _layers(batch)]
        two = [np.minimum(1.0, limit / np.sqrt(2) / n) for n in parts]
        factors = [two[(4, 7).index(group)] for group in GROUPS]
    elif style == "flat":
        factors = [np.minimum(1.0, limit / norms)] * 3
    else:
        factors = [limit / (norms + STYLES[style].stability)] * 3
    return [np.where(np.isfinite(norms), f, 0.0) for f in factors]


@np.errstate(divide="ignore", invalid="ignore", over="ignore")
def _check(style, batch, clipped, limit):
    after = hard_records.norms(clipped)
    assert (after <= limit).all(), (after, limit)
    if style.startswith("automatic"):
        assert (after < limit).all()
    finite = _finite(batch)
    for values, result, factor in zip(
        batch, clipped, _factors(style, batch, limit), strict=True
    ):
        assert result.dtype == np.float32
        assert not result[~finite].any()  # Zero in every layer.
        shape = [-1] + [1] * (values.ndim - 1)
        exact = values[finite].astype(np.float64) * factor[finite].reshape(shape)
        # Entries that do not count beside the others may be flushed. A short record's
        # bound is 2^-126 of each entry above its norm.
        lost = limit * 1e-25 + 100 * float(TINY)
        lost *= factor[finite].max(initial=1.0)
        np.testing.assert_allclose(result[finite], exact, rtol=OVER_CLIP, atol=lost)


each_style = pytest.mark.parametrize("style", STYLES)
each_way = pytest.mark.parametrize("way", hard_records.QUICK_WAYS)


@each_way
@each_style
def test_hard_records(style, way):
    batch = hard_records.records(*hard_records.hard_rows())
    for limit in (1e-20, 1e-6, 0.1, 1.0, 1e6, 1e15):
        _check(style, batch, _clip(style, way, batch, limit), limit)


@each_style
@pytest.mark.parametrize("way", ["vectorized", "vectorized xla"])
@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
@hypothesis.given(
    rows=hnp.arrays(
        np.float32, (6, 23), elements=st.floats(width=32), fill=st.nothing()
    ),
    common=st.integers(-30, 30),
    plain=st.booleans(),
    limit=st.floats(1e-6, 1e6) | st.sampled_from([0.1, 1.0]),
)
def test_drawn_records(style, way, rows, common, plain, limit):
    if plain:  # Bounded entries of one magnitude, instead of anything at all.
        rows = np.nan_to_num(np.tanh(rows), nan=0.5) * np.float32(10.0**common)
    batch = hard_records.records(*rows)
    _check(style, batch, _clip(style, way, batch, limit), limit)


@each_style
@each_way
def test_records_at_the_border_stay_at_the_border(style, way):
    """Layers within a few units in the last place of their share of C."""
    random = np.random.default_rng(1)
    size = len(hard_records.hard_rows())
    batch = hard_records.records(*random.normal(size=(size, 23)))
    for part in _layers(batch):
        norms = hard_records.norms(part) * 2**0.5
        stretch = 1 + random.integers(-300, 300, size=size) * 2.0**-24
        for values in part:
            shape = [-1] + [1] * (values.ndim - 1)
            values *= (stretch / norms).reshape(shape).astype("f4")
    limit = 1e3 if style == "automatic" else 1.0
    batch = [values * np.float32(limit) for values in batch]
    _check(style, batch, _clip(style, way, batch, limit), limit)


@each_style
@each_way
def test_removing_a_record_moves_the_clipped_sum_by_at_most_c(style, way):
    rows = hard_records.hard_rows()
    generator = np.random.default_rng(5)
    # Of the same number, so that nothing is compiled again.
    rows[:6] = generator.normal(size=(6, 23)) * 1e15
    rows[6], rows[7] = -rows[5], -rows[4]  # Records that cancel.
    batch, limit = hard_records.records(*rows), 0.5
    clipped = _clip(style, way, batch, limit)
    flat = [x.reshape(len(rows), -1).astype(np.float64) for x in clipped]
    flat = np.concatenate(flat, axis=1)
    assert np.isfinite(flat.sum(0)).all() and np.linalg.norm(flat.sum(0)) > limit
    moves = []
    for row in range(len(rows)):
        rest = np.delete(flat, row, axis=0)
        moves.append(np.linalg.norm(flat.sum(0) - rest.sum(0)))
    assert max(moves) <= limit * (1 + 1e-12)  # The sums of this test round as well.
    assert max(moves) > limit * (1 - 1e-4)


# ----------------------------------------------------------------------- automatic


def test_automatic_is_strictly_below_c_at_any_length():
    style = AutomaticClipping()
    for power in range(-36, 38):
        record = [tf.constant([3.0, -4.0]) * 10.0**power]
        clipped = style.clip(record, 0.1, None)[0].numpy().astype(np.float64)
        norm = np.linalg.norm(record[0].numpy().astype(np.float64))
        assert np.linalg.norm(clipped) < 0.1
        want = 0.1 * norm / (norm + 0.01)
        np.testing.assert_allclose(np.linalg.norm(clipped), want, rtol=3e-5, atol=1e-35)


def test_automatic_grows_with_c_in_proportion():
    """What Adam with a tiny epsilon makes of it does not depend on C (SPEC 0)."""
    record = [tf.constant(values) for values in np.eye(3, dtype="f4") * 7]
    one, eight = (AutomaticClipping().clip(record, c, None) for c in (1.0, 8.0))
    for a, b in zip(one, eight, strict=True):
        np.testing.assert_array_equal(8 * a, b)


@pytest.mark.parametrize("stability", [0, -0.1, np.nan, np.inf])
def test_automatic_refuses_a_stability(stability):
    with pytest.raises(ValueError, match="stability"):
        AutomaticClipping(stability)
    with pytest.raises(TypeError, match="stability"):
        AutomaticClipping("small")


# ----------------------------------------------------------------------- per layer


@each_way
def test_one_bad_entry_removes_all_layers(way):
    rows = np.ones((len(hard_records.hard_rows()), 23), np.float32)
    places = (0, 14, 15, 21, 22)
    for row, place in enumerate(places):
        rows[row, place] = (np.nan, np.inf, -np.inf)[row % 3]
    batch = hard_records.records(*rows)
    clipped = _clip("per_layer", way, batch, 1.0)
    for values in clipped:
        assert not values[: len(places)].any()
        assert values[len(places) :].all()


def test_each_layer_has_its_share():
    """A huge layer does not shrink the others, and a short one is left as it is."""
    record = [tf.constant([3e10, 4e10]), tf.constant([0.1]), tf.constant([30.0, 0.0])]
    clipped = PerLayerClipping().clip(record, 3**0.5, (0, 1, 2))
    np.testing.assert_allclose(clipped[0], [0.6, 0.8], rtol=OVER_CLIP)
    np.testing.assert_array_equal(clipped[1], record[1])
    np.testing.assert_allclose(clipped[2], [1.0, 0.0], rtol=OVER_CLIP)
    # Kernel and bias of one layer are clipped as one.
    clipped = PerLayerClipping().clip(record, 2**0.5, (0, 1, 1))
    np.testing.assert_allclose(clipped[1], [0.1 / 30], rtol=1e-3)


@pytest.mark.parametrize("layers", [1, 2, 3, 7, 30, 100])
def test_shares_of_many_layers(layers):
    """L parts of exactly C/sqrt(L): in exact arithmetic they would be C together."""
    for limit in (0.1, 1.0, 1 / 3, 1e-20, 1e15):
        record = [tf.constant([10.0]) * limit] * layers
        clipped = PerLayerClipping().clip(record, limit, tuple(range(layers)))
        norm = np.linalg.norm(np.array(clipped, np.float64))
        assert limit * (1 - OVER_CLIP) <= norm <= limit


def test_one_layer_is_flat_clipping_bit_for_bit():
    batch = [tf.constant(x) for x in hard_records.records(*hard_records.hard_rows())]
    for row in range(batch[0].shape[0]):
        record = [values[row] for values in batch]
        one = PerLayerClipping().clip(record, 0.1, (5, 5, 5))
        for a, b in zip(one, clipping.clip_record(record, 0.1), strict=True):
            assert a.numpy().tobytes() == b.numpy().tobytes()


def test_per_layer_must_know_the_layers():
    mechanism = mechanisms.make(1.0, 1.0, clipping="per_layer")
    record = (tf.ones([2]), tf.ones([3]))
    params = mechanism.sample_params(())
    with pytest.raises(ValueError, match="built_for"):
        mechanism.preprocess_record(params, record)
    with pytest.raises(ValueError, match="2 tensors"):
        mechanism.built_for([0, 0, 1]).preprocess_record(params, record)
    clipped = mechanism.built_for([0, 1]).preprocess_record(params, record)
    want = [np.full(2, 0.5), np.full(3, 6**-0.5)]
    for value, exact in zip(clipped, want, strict=True):
        np.testing.assert_allclose(value, exact, rtol=OVER_CLIP)
    with pytest.raises(ValueError, match="built_for"):  # It has not changed.
        mechanism.preprocess_record(params, record)


# -------------------------------------------------------------------------- golden


def _golden_clip(style, limit):
    gradients = tf.constant(METHODS["clip_abadi"]["grads"], tf.float32)
    return np.array([style.clip([g], limit, (0,))[0] for g in gradients], np.float64)


def test_golden_clip_auto_s(monkeypatch):
    entry = METHODS["clip_auto_s"]
    gradients = np.array(METHODS["clip_abadi"]["grads"])
    style = AutomaticClipping(entry["gamma"])
    margin = _golden_clip(style, entry["R"])
    np.testing.assert_allclose(margin.sum(axis=0), entry["sum"], rtol=4e-5)
    # With no margin on the norm, to the rounding of float32.
    monkeypatch.setattr(clipping, "_UNIT_ROUNDOFF", 0.0)
    clipped = _golden_clip(style, entry["R"])
    factors = clipped / gradients
    want = np.broadcast_to(np.array(entry["factors"])[:, None], (4, 3))
    np.testing.assert_allclose(factors, want, rtol=1e-6)
    np.testing.assert_allclose(clipped.sum(axis=0), entry["sum"], rtol=1e-6)
    longest = np.linalg.norm(clipped, axis=1).max()
    np.testing.assert_allclose(longest, entry["max_out_norm"], rtol=1e-6)


def test_golden_clip_auto_v_is_the_limit_of_a_small_stability(monkeypatch):
    monkeypatch.setattr(clipping, "_UNIT_ROUNDOFF", 0.0)
    clipped = _golden_clip(AutomaticClipping(1e-12), 1.0)
    np.testing.assert_allclose(
        clipped.sum(axis=0), METHODS["clip_auto_v"]["sum"], rtol=1e-6
    )


def test_golden_clip_of_one_layer(monkeypatch):
    monkeypatch.setattr(clipping, "_UNIT_ROUNDOFF", 0.0)
    entry = METHODS["clip_abadi"]
    clipped = _golden_clip(PerLayerClipping(), entry["C"])
    np.testing.assert_allclose(clipped, entry["clipped"], rtol=1e-6)


def test_golden_opacus_is_told_apart():
    """Opacus' C/(n + 1e-6) is AUTO-S with another stability, cut off at 1."""
    entry = METHODS["clip_abadi_opacus_eps1e-6"]
    clipped = _golden_clip(AutomaticClipping(1e-6), 1.0)
    np.testing.assert_allclose(clipped.sum(axis=0), entry["sum"], rtol=4e-5)
    with pytest.raises(AssertionError):
        clipped = _golden_clip(AutomaticClipping(), 1.0)
        np.testing.assert_allclose(clipped.sum(axis=0), entry["sum"], rtol=4e-5)


# ------------------------------------------------------- arguments and configurations


@pytest.mark.parametrize(
    ("name", "style"),
    [
        ("flat", FlatClipping()),
        ("automatic", AutomaticClipping(stability=0.01)),
        ("per_layer", PerLayerClipping()),
        ("adaptive", AdaptiveClipping(0.5, 0.2, None)),
    ],
)
def test_strings_stand_for_default_styles(name, style):
    assert mechanisms.resolve_clipping(name) == style
    assert style.argument() == name
    config = mechanisms.make(1.0, 1.1, clipping=name).get_config()
    assert config == {
        "l2_norm_clip": 1.0,
        "noise_multiplier": 1.1,
        "clipping": name,
        "rescale_to_unit_norm": False,
    }
    assert mechanisms.make(**config).get_config() == config


@pytest.mark.parametrize(
    "style",
    [
        AutomaticClipping(0.1),
        AdaptiveClipping(0.7, 0.1, 12.0),
        AdaptiveClipping(target_quantile=np.float32(0.25)),
    ],
)
def test_styles_round_trip(style):
    assert mechanisms.resolve_clipping(style) is style
    config = json.loads(
        json.dumps(mechanisms.make(1.0, 1.1, clipping=style).get_config())
    )
    made = mechanisms.make(**config)
    assert made.style == style and type(made.style) is type(style)
    assert made.get_config() == config
    # As Keras saves what holds a style.
    serialized = keras.saving.serialize_keras_object(style)
    assert keras.saving.deserialize_keras_object(serialized) == style
    assert serialized["registered_name"].startswith("keras_dpopt>")


def test_other_arguments_are_refused():
    with pytest.raises(ValueError, match="'ghost' is unknown.*'per_layer'"):
        mechanisms.make(1.0, 1.0, clipping="ghost")
    for other in (None, 1.0, AutomaticClipping, keras.Sequential()):
        with pytest.raises(TypeError, match="clipping style"):
            mechanisms.make(1.0, 1.0, clipping=other)
    config = keras.saving.serialize_keras_object(keras.layers.Dense(1))
    with pytest.raises(TypeError, match="clipping style"):
        mechanisms.make(1.0, 1.0, clipping=config)


@pytest.mark.parametrize("name", ["automatic", "per_layer", "adaptive"])
def test_only_flat_takes_a_clip_that_bounds_nothing(name):
    mechanisms.make(np.inf, 0.0, clipping="flat")
    for clip in (np.inf, 1e16):
        with pytest.raises(ValueError, match="l2_norm_clip above 1e"):
            mechanisms.make(clip, 0.0, clipping=name)


def test_adaptive_does_not_clip_without_its_mechanism():
    mechanism = mechanisms.GaussianMechanism(1.0, 1.0, AdaptiveClipping())
    with pytest.raises(NotImplementedError, match="mechanisms.make"):
        mechanism.preprocess_record(mechanism.sample_params(()), (tf.ones([2]),))


# ------------------------------------------------------------------- by the optimizers


# XLA compiles the microbatches alone, which do not depend on rescaling.
@pytest.mark.parametrize(
    ("engine", "jit_compile", "rescale"),
    [
        ("vectorized", True, False),
        ("vectorized", False, True),
        ("loop", False, False),
    ],
)
@pytest.mark.parametrize("name", ["flat", "automatic", "per_layer", "adaptive"])
def test_styles_on_the_final_weights(name, engine, jit_compile, rescale):
    """Two layers, microbatches with padding, a bad row; against float64 NumPy."""
    clip = 0.8
    model = helpers.mlp()
    optimizer = keras_dpopt.DPSGD(
        1.0,
        l2_norm_clip=clip,
        noise_multiplier=0.0,
        expected_batch_size=5,
        microbatch_size=4,
        gradient_engine=engine,
        clipping=name,
        rescale_to_unit_norm=rescale,
    )
    model.compile(optimizer, loss=helpers.CROSSENTROPY, jit_compile=jit_compile)
    x, y = helpers.classes(7)
    x[2, 1] = np.nan
    before = [w.astype(np.float64) for w in model.get_weights()]
    total = [np.zeros(w.shape) for w in before]
    kinds = set()
    for i in (0, 1, 3, 4, 5, 6):
        with tf.GradientTape() as tape:
            loss = helpers.CROSSENTROPY(y[i : i + 1], model(x[i : i + 1]))
        gradient = tape.gradient(loss, [v.value for v in model.trainable_variables])
        gradient = [g.numpy().astype(np.float64) for g in gradient]
        groups = [[0, 1], [2, 3]] if name == "per_layer" else [[0, 1, 2, 3]]
        for group in groups:
            norm = np.sqrt(sum(np.sum(gradient[j] ** 2) for j in group))
            factor = min(1.0, clip / np.sqrt(len(groups)) / norm)
            if name == "automatic":
                factor = clip / (norm + 0.01)
            kinds.add(factor == 1.0)
            for j in group:
                total[j] += factor * gradient[j]
    assert name != "per_layer" or kinds == {False, True}
    model.train_on_batch(x, y)
    for w, old, want in zip(model.get_weights(), before, total, strict=True):
        step = (old - w) * 5 * (clip if rescale else 1.0)
        np.testing.assert_allclose(step, want, atol=6 * OVER_CLIP * clip)


@pytest.mark.parametrize(
    "style", ["per_layer", AutomaticClipping(0.1), AdaptiveClipping(0.7, 0.1, 12.0)]
)
def test_an_optimizer_with_a_style_round_trips(style):
    optimizer = helpers.make_optimizer(
        keras_dpopt.DPAdam, clipping=style, rescale_to_unit_norm=True
    )
    config = json.loads(json.dumps(keras.saving.serialize_keras_object(optimizer)))
    made = keras.saving.deserialize_keras_object(config)
    assert made.mechanism.style == mechanisms.resolve_clipping(style)
    assert made.mechanism.rescale_to_unit_norm is True
    if isinstance(style, str):
        assert made.get_config()["clipping"] == style

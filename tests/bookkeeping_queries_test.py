"""Book-keeping engine: queries, clipping styles, XLA and random layers."""

import numpy as np
import pytest
import tensorflow as tf
from bookkeeping_cases import (
    BOOKKEEPING,
    IMAGES,
    LOOP,
    SERIES,
    TEXT,
    VECTORS,
    M,
    case,
    check,
    convolutional,
    functional,
    mlp,
    model,
    relative,
    text,
)
from keras import layers

import keras_dpopt
from keras_dpopt import clipping_styles
from keras_dpopt.adaptive_clipping import AdaptiveClipping

QUERIES = {
    "FiBeR": {"noise_correction": None, "kappa": 0.5, "gamma": 0.4},
    "DiSK": {"noise_correction": None},
    "DPIVON": {"ess": 50.0, "mc_samples": 2},
    "DPIVON of Price": {"ess": 50.0, "mc_samples": 2, "hessian": "price"},
    "DPBayesByBackprop": {"train_size": 50, "rho_init": -1.0},
    "DPSAT": {},
}


def _query_case(name, make, x):
    cls = getattr(keras_dpopt, name.split()[0])
    return case(make(), x, cls=cls, **QUERIES[name])


@pytest.mark.parametrize("name", QUERIES)
def test_query_equals_the_loop(name):
    """Two points, sampled points and records of two views: one clip of the sum.

    What two points cancel counts for the rounding of a Gram matrix.
    """
    check(_query_case(name, mlp, SERIES), above=1e-4)


@pytest.mark.parametrize("make, x", [(convolutional, IMAGES), (text, TEXT)])
@pytest.mark.parametrize("name", ["FiBeR", "DPIVON of Price"])
def test_query_of_other_layers_equals_the_loop(name, make, x):
    check(_query_case(name, make, x), above=1e-4)


def test_a_query_of_each_records_own_points_is_refused():
    made = case(mlp(), SERIES, cls=keras_dpopt.BAM)
    with pytest.raises(NotImplementedError, match="every record's gradient"):
        made.bookkeeping(1.0)


STYLES = {
    "flat": clipping_styles.FlatClipping(),
    "automatic": clipping_styles.AutomaticClipping(0.1),
    "per_layer": clipping_styles.PerLayerClipping(),
    "adaptive": AdaptiveClipping(),
}


@pytest.mark.parametrize("name", STYLES)
def test_style_equals_the_loop(name):
    """The engines as a step calls them; then with half of the rows as padding."""
    records, _ = case(convolutional(), IMAGES).records()
    clip = float(np.median(np.linalg.norm(records, axis=1)))
    made = case(convolutional(), IMAGES, clipping=STYLES[name], l2_norm_clip=clip)
    for count in (M, 2):
        got, want = (made.sum(engine, count) for engine in (BOOKKEEPING, LOOP))
        assert relative(got, want) <= 1e-5


XLA = {
    "mlp": (mlp, SERIES, {}),
    "text": (text, TEXT, {}),
    "convolution": (convolutional, IMAGES, {}),
    "copies": (mlp, VECTORS, {"augmentation_multiplicity": 2}),
    "attention": (
        lambda: functional((9, 6), lambda i: layers.MultiHeadAttention(2, 3)(i, i)),
        SERIES,
        {},
    ),
    "two points": (mlp, SERIES, {"cls": keras_dpopt.FiBeR, "noise_correction": None}),
}


@pytest.mark.parametrize("name", XLA)
def test_under_xla_equals_the_loop(name):
    make, x, arguments = XLA[name]
    check(case(make(), x, **arguments), jit=True)


def test_a_step_under_xla_equals_the_loop():
    """As a step calls it: the sampled weights are part of what is compiled."""
    arguments = {"cls": keras_dpopt.DPIVON, "ess": 50.0, "seed": 1, "l2_norm_clip": 0.5}
    got = case(mlp(), SERIES, jit=True, **arguments).sum(BOOKKEEPING, 3)
    want = case(mlp(), SERIES, **arguments).sum(LOOP, 3)
    assert relative(got, want) <= 1e-5


# --- random layers -------------------------------------------------------------------


@pytest.mark.parametrize("copies", [1, 3])
def test_first_row_draws_what_the_record_draws_alone(copies):
    """The others draw further on: each row something else."""
    made = case(
        model(layers.Dropout(0.5), layers.Dense(3)),
        VECTORS,
        augmentation_multiplicity=copies,
        seed=7,
    )
    records, _ = made.records()
    first = made.bookkeeping(1e6, count=1)[0]
    assert relative(first, records[0]) <= 1e-5
    same = tf.nest.map_structure(lambda t: tf.gather(t, [0] * M), made.rows)
    sums = [
        made.bookkeeping(1e6, rows=same, count=n, static=True)[0] for n in (1, 2, 3)
    ]
    assert relative(sums[0], records[0]) <= 1e-5
    assert relative(sums[1] - sums[0], records[0]) > 0.1
    assert relative(sums[2] - sums[1], sums[1] - sums[0]) > 0.1

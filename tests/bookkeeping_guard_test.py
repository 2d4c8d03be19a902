"""Book-keeping engine: no record adds more than C, whatever it holds.

The loss is <y, model(x)>, so the factors of a gradient are the record itself: x_t and
y_t of token t, and the gradient sum_t x_t y_t^T is known in float64.
"""

import numpy as np
import pytest
import tensorflow as tf
from bookkeeping_cases import VECTORS, M, case, draw, mlp, model, relative, tokens
from keras import layers, ops

import keras_dpopt
from keras_dpopt.engines import norm_forms

T, CLIP = 64, 1.0
EXACT = 1.0 + 1e-6


def product(y_true, y_pred):
    """<y, model(x)>."""
    return ops.sum(y_true * y_pred, axis=list(range(1, len(y_pred.shape))))


def gradients(x, y, weight=None):
    """The true gradients of a Dense layer without bias, or of an embedding."""
    if x.ndim == 2:
        x = np.eye(7)[x]
    found = np.einsum("mtp,mtq->mpq", x.astype(np.float64), y.astype(np.float64))
    found = found.reshape(len(x), -1)
    return found if weight is None else found * np.float64(weight)[:, None]


def dense(x, y, **arguments):
    layer = layers.Dense(y.shape[-1], use_bias=False)
    return case(model(layer), x, y, loss=product, **arguments)


def embedding(x, y, **arguments):
    layer = layers.Embedding(7, y.shape[-1])
    return case(model(layer), x, y, loss=product, **arguments)


def alone(made, i, clip=CLIP, **arguments):
    """What record i adds to a sum."""
    rows = tf.nest.map_structure(lambda t: tf.gather(t, [i] * made.size), made.rows)
    return made.bookkeeping(clip, rows=rows, count=1, **arguments)[0]


def hold(made, true, in_factors=True, clip=CLIP, **arguments):
    """Checks that no record adds more than C; returns the factors times the norms.

    Where a gradient is formed, what is clipped is the float32 gradient, and what counts
    is what is added. Where it is not, the factor is right for the true one, too.
    """
    norms = np.linalg.norm(true, axis=1)
    _, factors, bounds, _ = made.bookkeeping(clip, **arguments)
    for i in range(made.size):
        added = alone(made, i, clip, **arguments)
        assert np.isfinite(added).all()
        assert np.linalg.norm(added) <= clip * EXACT
    if in_factors:
        assert (factors * norms <= clip * EXACT).all()
        assert ((bounds * EXACT >= norms) | (factors == 0)).all()
    return factors * norms


@pytest.fixture(params=["gram", "instantiated"])
def form(request, monkeypatch):
    """Both forms for whatever has factors."""
    if request.param == "gram":
        monkeypatch.setattr(norm_forms, "DenseForm", norm_forms.FactoredForm)
    else:
        monkeypatch.setattr(norm_forms, "FactoredForm", norm_forms.DenseForm)
    return request.param


def cancelling(size, rest, width=5):
    """Pairs of tokens whose contributions of this size cancel but for a rest."""
    x, y = draw(M, T // 2, 6, seed=1), draw(M, T // 2, width, seed=2)
    order = np.random.default_rng(3).permutation(T)
    x = np.concatenate([x, x], axis=1)[:, order]
    y = np.concatenate([y, -y], axis=1)[:, order]
    y = y * np.float32(size) + np.float32(rest) * draw(M, T, width, seed=4)
    return x, y


@pytest.mark.parametrize(
    "size, rest, jit",
    [(1e6, 0.0, False), (1e6, 0.1, True), (1e6, 1e3, False), (1e15, 1.0, False)],
)
def test_cancelling_tokens(size, rest, jit, form):
    """The entries of the Gram matrix are 1e12 and their sum is 0 to 1e6."""
    x, y = cancelling(size, rest)
    hold(dense(x, y), gradients(x, y), in_factors=form == "gram", jit=jit)


@pytest.mark.parametrize("size, rest", [(1e6, 0.1), (1e15, 1.0)])
def test_cancelling_tokens_of_an_embedding(size, rest, form):
    _, y = cancelling(size, rest)
    ids = np.repeat(tokens(M, 1), T, axis=1)
    hold(embedding(ids, y), gradients(ids, y), in_factors=form == "gram")


def test_opposing_points(form):
    """1024 times the one gradient less 1023 times the other, of a linear model."""
    x, y = draw(M, 9, 6), draw(M, 9, 5, seed=1)
    made = dense(
        x, y, cls=keras_dpopt.FiBeR, noise_correction=None, kappa=1 / 1025, gamma=1.0
    )
    assert sorted(point.coefficient for point in made.points) == [-1023.0, 1024.0]
    hold(made, gradients(x, y), in_factors=form == "gram")


@pytest.mark.parametrize(
    "where, power", [("weight", 50), ("x", 50), ("y", 50), ("x", -50)]
)
def test_factors_of_1e15(where, power, form):
    """In a sample weight, an input or a derivative: the same sum to the last digits."""
    x, y = draw(M, 9, 6), draw(M, 9, 5, seed=1)
    times, weight = 2.0**power, np.ones(M, np.float32)
    parts = {"weight": weight, "x": x, "y": y}
    parts[where] = parts[where] * np.float32(times)
    made = dense(parts["x"], parts["y"], sample_weight=parts["weight"])
    true = gradients(x, y) * times
    reached = hold(made, true)
    if times > 1:
        assert (reached >= 0.99 * CLIP).all()
    else:
        np.testing.assert_allclose(reached, np.linalg.norm(true, axis=1), rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1.0, 1e15])
def test_records_of_any_scale(scale, form):
    """Ordinary but for their scale: none is clipped below 99 % of what it may add."""
    x, y = draw(M, 9, 6) * np.float32(scale), draw(M, 9, 5, seed=1)
    true = gradients(x, y)
    made = dense(x, y)
    reached = hold(made, true)
    most = np.minimum(np.linalg.norm(true, axis=1), CLIP)
    assert (reached >= 0.99 * most).all()
    for i in range(M):
        want = true[i] * reached[i] / np.linalg.norm(true[i])
        assert relative(alone(made, i), want) <= 1e-5


@pytest.mark.parametrize("scale, jit", [(1e18, True), (1e25, False), (1e37, False)])
def test_squares_beyond_float32(scale, jit, form):
    """An overflow in a norm must not be lost on the way to the factor."""
    x, y = cancelling(scale, 0.0)
    x[1] *= np.float32(1e10)
    hold(dense(x, y), gradients(x, y), in_factors=False, jit=jit)


def test_ordinary_records_are_not_overclipped():
    """At the widths and lengths for which gradients are not formed."""
    x, y = draw(M, 16, 96), draw(M, 16, 128, seed=1)
    for made in (dense(x, y), embedding(tokens(M, 16), y)):
        true = gradients(x if made.rows["x"].ndim == 3 else tokens(M, 16), y)
        assert (hold(made, true) >= 0.999 * CLIP).all()


# --- padding, and what is not finite -------------------------------------------------

BAD = [np.nan, np.inf, -np.inf]


@pytest.mark.parametrize("way", ["cut", "masked", "xla"])
def test_padding_leaves_no_trace(way):
    made = case(mlp(), VECTORS)
    records, _ = made.records()
    clip = float(np.median(np.linalg.norm(records, axis=1)))
    clipped = records * np.minimum(
        1.0, clip / np.linalg.norm(records, axis=1, keepdims=True)
    )
    how = {"static": way == "masked", "jit": way == "xla"}
    sums = [made.bookkeeping(clip, count=2, **how)[0]]
    for bad in (np.nan, 1e30):
        x = VECTORS.copy()
        x[2:] = bad
        rows = {**made.rows, "x": tf.constant(x)}
        sums.append(made.bookkeeping(clip, rows=rows, count=2, **how)[0])
    for got in sums:
        assert relative(got, clipped[:2].sum(axis=0)) <= 1e-5
    np.testing.assert_array_equal(made.bookkeeping(clip, count=0, **how)[0], 0.0)


@pytest.mark.parametrize("part, jit", [("x", False), ("x", True), ("y", False)])
def test_records_that_are_not_finite_add_zero(part, jit):
    """And the others what they would without them."""
    made = case(mlp(), VECTORS)
    want = sum(alone(made, i) for i in (0, 2))
    rows = {name: np.array(values) for name, values in made.rows.items()}
    rows[part][1, 0] = np.nan
    rows[part][3, 1] = np.inf
    got = made.bookkeeping(CLIP, rows=_tensors(rows), jit=jit)[0]
    assert relative(got, want) <= 1e-6
    for i in (1, 3):
        one = {name: values[[i] * M] for name, values in rows.items()}
        found = made.bookkeeping(CLIP, rows=_tensors(one), jit=jit)[0]
        np.testing.assert_array_equal(found, 0.0)


@pytest.mark.parametrize("bad", BAD)
def test_a_batch_without_finite_records_adds_zero(bad):
    made = case(mlp(), VECTORS)
    rows = {**made.rows, "x": tf.constant(np.full_like(VECTORS, bad))}
    np.testing.assert_array_equal(made.bookkeeping(CLIP, rows=rows)[0], 0.0)


def test_a_gradient_that_is_not_finite_adds_zero():
    """Of a finite record with a finite loss: the root has no derivative at 0."""

    def root(y_true, y_pred):
        return ops.sum(ops.sqrt(ops.abs(y_pred)), axis=-1)

    x = VECTORS.copy()
    x[1] = 0.0
    made = case(model(layers.Dense(3, use_bias=False)), x, loss=root)
    want = sum(alone(made, i) for i in (0, 2, 3))
    assert relative(made.bookkeeping(CLIP)[0], want) <= 1e-6
    np.testing.assert_array_equal(alone(made, 1), 0.0)


def _tensors(rows):
    return {name: tf.constant(values) for name, values in rows.items()}

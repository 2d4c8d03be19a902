"""The proof that a model keeps records apart: what it finds, and what it refuses.

Each function that is let pass is also run with one record changed: only the entries
that the layout calls that record's may change. Each that is refused does mix records
for some data, whatever it does for others.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import keras_dpopt
from keras_dpopt.engines.layout import Layout
from keras_dpopt.engines.record_axis import NoRule
from keras_dpopt.engines.separation import Separation

M, WIDTH, LENGTH = 5, 4, 3
DRAW = np.random.default_rng(0)
VECTORS = DRAW.normal(size=(M, WIDTH)).astype("float32")
SERIES = DRAW.normal(size=(M, LENGTH, WIDTH)).astype("float32")
IMAGES = DRAW.normal(size=(M, 6, 6, 2)).astype("float32")
IDS = DRAW.integers(0, 7, size=(M, LENGTH)).astype("int32")
KERNEL = DRAW.normal(size=(WIDTH, WIDTH)).astype("float32")
FILTER = DRAW.normal(size=(3, 3, 2, 2)).astype("float32")


def traced(function, rows):
    spec = tf.TensorSpec([None, *rows.shape[1:]], rows.dtype)
    return tf.function(function, autograph=False).get_concrete_function(spec)


def layout(concrete) -> Layout | None:
    return Separation(concrete.inputs[:1]).layout(concrete.outputs[0])


def _time_major(x):
    return tf.transpose(x, [1, 0, 2])


def _loop(x):
    def step(t, total):
        return t + 1, tf.tanh(total @ KERNEL + x[:, t])

    first = tf.zeros([tf.shape(x)[0], WIDTH])
    return tf.while_loop(lambda t, _: t < LENGTH, step, (0, first))[1]


def _stacked_loop(x):
    x, array = _time_major(x), tf.TensorArray("float32", LENGTH)
    x = tf.TensorArray("float32", LENGTH).unstack(x)
    step = lambda t, a: (t + 1, a.write(t, 2.0 * x.read(t)))  # noqa: E731
    return tf.while_loop(lambda t, _: t < LENGTH, step, (0, array))[1].stack()


def _branches(x):
    return tf.cond(tf.shape(x)[0] > 2, lambda: x + 1.0, lambda: x * 2.0)


APART = {
    "elementwise": (
        lambda x: tf.nn.silu(x) * 2.0 + tf.constant([1.0] * WIDTH),
        VECTORS,
    ),
    "by its own maximum": (lambda x: x - tf.reduce_max(x, 1, keepdims=True), VECTORS),
    "mean over time": (lambda x: tf.reduce_mean(x, 1), SERIES),
    "time first": (_time_major, SERIES),
    "time first, and its mean": (lambda x: tf.reduce_mean(_time_major(x), 0), SERIES),
    "matmul": (lambda x: x @ KERNEL, VECTORS),
    "tokens as rows": (lambda x: tf.reshape(x, [-1, WIDTH]) @ KERNEL, SERIES),
    "tensordot": (lambda x: tf.tensordot(x, KERNEL, [[2], [0]]), SERIES),
    "flat": (lambda x: tf.reshape(x, [-1, LENGTH * WIDTH]), SERIES),
    "a size left open": (lambda x: tf.reshape(x, [tf.shape(x)[0], -1]), SERIES),
    "attention": (
        lambda x: tf.nn.softmax(x @ tf.linalg.matrix_transpose(x)) @ x,
        SERIES,
    ),
    "einsum": (lambda x: tf.einsum("btd,bsd->bts", x, x), SERIES),
    "einsum to the end": (lambda x: tf.einsum("...d,de->e...", x, KERNEL), VECTORS),
    "convolution": (lambda x: tf.nn.conv2d(x, FILTER, 1, "SAME"), IMAGES),
    "dilated": (lambda x: tf.nn.convolution(x, FILTER, dilations=2), IMAGES),
    "pooling": (lambda x: tf.nn.max_pool2d(x, 2, 2, "SAME"), IMAGES),
    "padding": (lambda x: tf.pad(x, [[0, 0], [1, 2]]), VECTORS),
    "slices": (lambda x: x[..., tf.newaxis, 1:][:, 0, ::-1], VECTORS),
    "lookup": (lambda i: tf.gather(tf.constant(DRAW.normal(size=(7, 2))), i), IDS),
    "one of each": (lambda i: tf.gather(tf.one_hot(i, 7), i % 2, batch_dims=1), IDS),
    "concatenation": (lambda x: tf.concat([x, tf.zeros_like(x), -x], 1), VECTORS),
    "stack": (lambda x: tf.stack(tf.split(x, 2, 1), 1), VECTORS),
    "repeated": (lambda x: tf.repeat(x, 2, axis=0), VECTORS),
    "backwards in time": (lambda x: tf.cumsum(x[:, ::-1], 1), SERIES),
    "top": (lambda x: tf.math.top_k(x, 2)[0], VECTORS),
    "loop": (_loop, SERIES),
    "loop with arrays": (_stacked_loop, SERIES),
    "function": (tf.function(lambda x: x @ KERNEL), VECTORS),
    "branches by a shape": (_branches, VECTORS),
    "random": (lambda x: x * tf.random.stateless_normal(tf.shape(x), [1, 2]), VECTORS),
}


@pytest.mark.parametrize("name", APART)
def test_records_are_where_the_layout_says(name):
    function, rows = APART[name]
    concrete = traced(function, rows)
    found = layout(concrete)
    assert found is not None and found.blocks == 1
    before = concrete(tf.constant(rows))
    before = before[0] if isinstance(before, list | tuple) else before
    assert before.shape[found.axis] == found.rows * M
    for i in range(M):
        other = rows.copy()
        other[i] = (other[i] + 1) % 7 if rows.dtype == np.int32 else -3.0 * other[i]
        after = concrete(tf.constant(other))
        after = after[0] if isinstance(after, list | tuple) else after
        changed = np.moveaxis(np.asarray(before != after), found.axis, 0)
        changed = changed.reshape(M, -1).any(1)
        assert changed[i] and not np.delete(changed, i).any()


@tf.custom_gradient
def _own_gradient(x):
    return tf.identity(x), lambda g: tf.where(tf.reduce_any(x > 100.0), -g, g)


def _cond(x):
    return tf.cond(tf.reduce_any(x > 100.0), lambda: -x, lambda: x)


def _changing_loop(x):
    more = lambda t, y: tf.reduce_any(y < 0.0) & (t < 9)  # noqa: E731
    return tf.while_loop(more, lambda t, y: (t + 1, y + 1.0), (0, x))[1]


MIXED = {
    "global maximum": (lambda x: x - tf.reduce_max(x), VECTORS),
    "scaled by the batch": (lambda x: x / tf.maximum(10.0, tf.reduce_max(x)), VECTORS),
    "mean of the batch": (lambda x: x - 1e-6 * tf.reduce_mean(x, 0), VECTORS),
    "if any": (lambda x: tf.where(tf.reduce_any(x > 100.0), -x, x), VECTORS),
    "cond": (_cond, VECTORS),
    "loop of the data's length": (_changing_loop, VECTORS),
    "own gradient": (_own_gradient, VECTORS),
    "host": (
        lambda x: tf.numpy_function(np.cumsum, [x], tf.float32, stateful=False),
        VECTORS,
    ),
    "sorted": (lambda x: tf.sort(x, axis=0), VECTORS),
    "rolled": (lambda x: tf.roll(x, 1, axis=0), VECTORS),
    "sums so far": (lambda x: tf.cumsum(x, 0), VECTORS),
    "backwards": (lambda x: x[::-1], VECTORS),
    "the first for all": (lambda x: x + x[:1], VECTORS),
    "pairs": (lambda x: x @ tf.transpose(x), VECTORS),
    "column and row": (lambda x: x[:, :1] - x[:, 0], VECTORS),
    "softmax of the batch": (lambda x: tf.nn.softmax(x, axis=0), VECTORS),
    "time first, flat": (
        lambda x: tf.reshape(tf.reshape(_time_major(x), [-1, WIDTH]), [-1, 12]),
        SERIES,
    ),
    "rows across records": (lambda x: tf.reshape(x, [-1, 5]), VECTORS),
    "tiled": (lambda x: tf.tile(x, [2, 1]), VECTORS),
    "einsum": (lambda x: tf.einsum("bd,cd->bc", x, x), VECTORS),
    "positive ones": (lambda x: tf.boolean_mask(x, x[:, 0] > 0.0), VECTORS),
    "unique": (lambda i: tf.unique(tf.reshape(i, [-1]))[1], IDS),
    "scattered": (lambda i: tf.math.bincount(i, minlength=7), IDS),
    "shuffled": (
        lambda x: tf.gather(x, tf.random.experimental.stateless_shuffle(
            tf.range(tf.shape(x)[0]), [1, 2])),
        VECTORS,
    ),
    "in a function": (tf.function(lambda x: x - tf.reduce_max(x)), VECTORS),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXED)
def test_what_may_mix_records_is_refused(name):
    concrete = traced(*MIXED[name])
    with pytest.raises(NoRule):
        Separation(concrete.inputs[:1]).check(concrete.outputs[0])


def test_a_weight_must_meet_records_along_the_first_axis():
    concrete = traced(lambda x: _time_major(x) * 2.0, SERIES)
    apart = Separation(concrete.inputs[:1])
    (product,) = [op for op in concrete.graph.get_operations() if op.type == "Mul"]
    with pytest.raises(NoRule):
        apart.check_use(product)


# ------------------------------------------------------------------ whole models


def contribution(loss, y, layers=lambda: []):
    """How far one record moves the sum of the clipped records, in units of C."""
    x = np.random.default_rng(3).normal(size=(len(y), WIDTH)).astype("float32")
    sums = []
    for weight in (1.0, 0.0):
        keras.utils.set_random_seed(1)
        model = keras_dpopt.DPSequential(
            [keras.Input((WIDTH,)), *layers(), keras.layers.Dense(1)]
        )
        optimizer = keras_dpopt.DPSGD(
            1.0,
            l2_norm_clip=1.0,
            noise_multiplier=0.0,
            expected_batch_size=1,
        )
        model.compile(optimizer, loss)
        weights = np.ones(len(y), "float32")
        model.train_on_batch(x[:8], y[:8], sample_weight=np.zeros(8))  # the trial's
        before = model.get_weights()
        weights[-1] = weight
        model.train_on_batch(x, y, sample_weight=weights)
        sums.append([a - b for a, b in zip(model.get_weights(), before, strict=True)])
    moved = [np.ravel(a - b) for a, b in zip(*sums, strict=True)]
    return np.linalg.norm(np.concatenate(moved)), model.private_step.microbatch


@pytest.mark.parametrize("loss", ["hinge", "squared_hinge"])
def test_one_odd_label_does_not_change_the_loss_of_the_others(loss):
    """Keras takes labels of 0 and 1 for -1 and 1, if all of the batch are such."""
    y = np.tile([0.0, 1.0], 20).astype("float32")[:, None]
    y[-1] = -1.0
    moved, microbatch = contribution(loss, y)
    assert moved <= 1.0 + 1e-5
    assert microbatch.engine.name == "bookkeeping"


class _Rare(keras.layers.Layer):
    """As any layer, until one record of the batch is an outlier."""

    def call(self, x):
        return ops.where(ops.any(ops.abs(x) > 100.0), -x, x)


def test_a_model_that_mixes_records_for_rare_data_trains_by_another_engine():
    y = np.ones((16, 1), "float32")
    moved, microbatch = contribution("mse", y, lambda: [keras.layers.Dense(4), _Rare()])
    assert moved <= 1.0 + 1e-5 and microbatch.engine.name == "vectorized"
    assert "not known to keep records apart" in microbatch.reasons["bookkeeping"]


def test_a_loss_of_the_users_is_computed_record_by_record():
    def loss(y, y_pred):
        return ops.mean(ops.square(y - y_pred)) / ops.maximum(1.0, ops.max(y))

    y = np.ones((16, 1), "float32")
    y[-1] = 1e3
    moved, microbatch = contribution(loss, y, lambda: [keras.layers.Dense(4, "silu")])
    assert moved <= 1.0 + 1e-5 and microbatch.engine.name == "bookkeeping"

"""Book-keeping engine: models of several parts, losses, half precision."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from bookkeeping_cases import (
    IMAGES,
    SERIES,
    TEXT,
    VECTORS,
    Lambda,
    M,
    case,
    check,
    draw,
    functional,
    mlp,
    model,
    tokens,
)
from keras import layers, ops

import keras_dpopt

LENGTHS = (np.arange(9) < np.array([3, 9, 5, 1])[:, None]).astype("float32")


# --- models --------------------------------------------------------------------------


class Called(keras_dpopt.DPModel):
    """A model that is what its `call` makes of its layers and weights."""

    def __init__(self, function, *parts, shapes=()):
        super().__init__()
        self.function, self.parts = function, list(parts)
        self.ws = [self.add_weight(shape=s, initializer="ones") for s in shapes]

    def call(self, x):
        return self.function(x, *self.parts, *self.ws)


def _thrice():
    layer = layers.Dense(6, "tanh")
    return functional((9, 6), lambda i: layer(layer(layer(i))))


def _branches():
    inner = keras.Sequential(
        [layers.Dense(4, "tanh"), keras.Sequential([layers.Dense(5)])]
    )

    def function(i):
        a, b = inner(i), layers.Dense(5, "relu")(i)
        c = layers.Multiply()([a, layers.Dense(5, "sigmoid")(b)])
        return layers.Concatenate()([layers.Add()([a, b]), c, inner(i)])

    return functional((9, 6), function)


def _frozen():
    made = model(
        layers.Dense(6, "tanh", trainable=False),
        layers.Dense(5),
        layers.BatchNormalization(trainable=False),
        layers.Dense(4),
    )
    made.build((None, 9, 6))
    made.layers[-1].kernel.trainable = False
    return made


def _tied(x, embedding, dense):
    return dense(embedding(x)) @ ops.transpose(embedding.embeddings)


def _outside(x, dense, last):
    kernel = dense.kernel if dense.built else 0.0 * dense(x)
    return last(dense(x) + x @ ops.transpose(kernel)) + ops.sum(kernel**2)


def _own(x, dense, w, g, b):
    return dense(ops.tanh(x @ (w * g) + b) ** 2 + ops.exp(b))


@tf.function(autograph=False)
def _function(x, w, b):
    return tf.nn.tanh(x @ w) @ tf.transpose(w) + b


MODELS = {
    "one layer three times": (_thrice, SERIES),
    "tied weights": (
        lambda: Called(_tied, layers.Embedding(7, 5), layers.Dense(5, "tanh")),
        TEXT,
    ),
    "outside of the layer": (
        lambda: Called(_outside, layers.Dense(6), layers.Dense(2)),
        SERIES,
    ),
    "the model's own weights": (
        lambda: Called(_own, layers.Dense(2), shapes=((6, 4), (), (4,))),
        SERIES,
    ),
    "nested, branches": (_branches, SERIES),
    "frozen parts": (_frozen, SERIES),
    "tf.function": (
        lambda: Called(
            lambda x, d, *ws: d(_function(x, *map(tf.convert_to_tensor, ws))),
            layers.Dense(2),
            shapes=((6, 5), (6,)),
        ),
        SERIES,
    ),
    "masked sequences": (
        lambda: model(layers.Embedding(7, 5, mask_zero=True), layers.Dense(3)),
        TEXT,
    ),
    "masked average": (
        lambda: model(
            layers.Masking(), layers.Dense(3), layers.GlobalAveragePooling1D()
        ),
        SERIES * LENGTHS[..., None],
    ),
    "masked LSTM": (
        lambda: model(layers.Masking(), layers.Bidirectional(layers.LSTM(2))),
        SERIES * LENGTHS[..., None],
    ),
    "convolutions": (
        lambda: model(
            layers.Conv2D(4, 3, padding="same"),
            layers.GroupNormalization(2),
            layers.Activation("relu"),
            layers.MaxPool2D(),
            layers.DepthwiseConv2D(2),
            layers.UpSampling2D(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3),
        ),
        IMAGES,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_model_equals_the_loop(name):
    make, x = MODELS[name]
    check(case(make(), x))


def test_a_decorated_call_is_refused_as_by_the_loop():
    """Its graph holds the variables themselves, so no gradient reaches the weights."""

    class Decorated(keras_dpopt.DPModel):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2)

        @tf.function
        def call(self, x):
            return self.dense(x)

    made = case(Decorated(), VECTORS)
    with pytest.raises(keras_dpopt.UnsupportedModelError, match="decorator off"):
        made.bookkeeping(1.0)


def test_a_custom_gradient_of_a_product_is_refused():
    """What it makes of the weights cannot be told from the operations within."""

    @tf.custom_gradient
    def product(x, w):
        return x @ w, lambda b: (b @ tf.transpose(w), 3.0 * (tf.transpose(x) @ b))

    made = model(Lambda(lambda x, w: product(x, tf.convert_to_tensor(w)), (6, 2)))
    with pytest.raises(NotImplementedError, match="IdentityN"):
        case(made, VECTORS).bookkeeping(1.0)


# --- losses --------------------------------------------------------------------------


class Fourth(keras.losses.Loss):
    """A loss class of a user."""

    def call(self, y_true, y_pred):
        return ops.mean((y_true - y_pred) ** 4, axis=-1)


def _two_outputs():
    inputs = keras.Input((9, 6))
    h = layers.Dense(5, "tanh")(inputs)
    flat = layers.Dense(4)(layers.Flatten()(h))
    return keras_dpopt.DPModel(inputs, {"a": layers.Dense(3)(h), "b": flat})


LOSSES = {
    "mean": {"loss": "mse"},
    "sum": {"loss": keras.losses.MeanAbsoluteError(reduction="sum")},
    "cosine": {"loss": "cosine_similarity"},
    "function": {"loss": lambda y, p: ops.mean(ops.abs(y - p) ** 3, axis=-1)},
    "function of rank 0": {"loss": lambda y, p: ops.mean(ops.abs(y - p) ** 3)},
    "function that mixes": {
        "loss": lambda y, p: ops.mean((p - 0.5 * ops.mean(p, 0) - y) ** 2)
    },
    "class": {"loss": Fourth(reduction="sum")},
    "classes": {
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "y": tokens(M, 9) % 3,
    },
    "a weight a record": {"sample_weight": np.float32([1.0, 2.0, 0.5, 0.1])},
    "a weight a step": {"sample_weight": np.abs(draw(M, 9, seed=8))},
    "weight a step, sum": {
        "sample_weight": np.abs(draw(M, 9, seed=8)),
        "loss": keras.losses.MeanSquaredError(reduction="sum"),
    },
    "copies": {"augmentation_multiplicity": 3},
}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_equals_the_loop(name):
    """Among them a function that would mix the records of a batch: it gets one."""
    check(case(model(layers.Dense(3)), SERIES, **LOSSES[name]))


def test_two_outputs_equal_the_loop():
    losses = {
        "a": keras.losses.MeanSquaredError(reduction="sum"),
        "b": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    }
    y = {"a": draw(M, 9, 3, seed=4), "b": np.arange(M)}
    weights = {"a": 0.3, "b": 2.0}
    check(case(_two_outputs(), SERIES, y, loss=losses, loss_weights=weights))


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("kind", ["mlp", "convolution", "text"])
def test_half_precision_equals_the_loop(policy, kind):
    """To the precision of the dtype, 2^-8 and 2^-11: batches round differently."""
    rounding = {"mixed_bfloat16": 2e-2, "mixed_float16": 2e-3}[policy]
    made, x = {
        "mlp": lambda: (mlp(dtype=policy), SERIES),
        "convolution": lambda: (
            model(
                layers.Conv2D(3, 3, dtype=policy),
                layers.GroupNormalization(3, dtype=policy),
            ),
            IMAGES,
        ),
        "text": lambda: (
            model(
                layers.Embedding(7, 5, dtype=policy),
                layers.LayerNormalization(dtype=policy),
                layers.Dense(3, dtype=policy),
            ),
            TEXT,
        ),
    }[kind]()
    check(case(made, x), tolerance=rounding, above=rounding)

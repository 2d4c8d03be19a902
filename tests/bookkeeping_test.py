"""Book-keeping engine: for every kind of layer, the sums of the loop engine.

Each layer is a model by itself: what the engine makes of a weight depends on the
operation that uses it, its input and the derivative by its result. Models of several
parts are in `bookkeeping_models_test.py`.
"""

import hypothesis
import hypothesis.strategies as st
import keras_hub
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
    model,
    tokens,
)
from keras import layers, ops

import keras_dpopt
from keras_dpopt.engines import norm_forms

VOLUMES = draw(M, 5, 5, 5, 2)


class Attention(layers.Layer):
    """Self-attention, as a layer of one input."""

    def __init__(self, cls, **arguments):
        super().__init__()
        self.inner = cls(**arguments)

    def build(self, shape):
        self.inner.build(shape, shape)

    def call(self, x):
        return self.inner(x, x, use_causal_mask=True)


class Tied(layers.Layer):
    """An embedding whose matrix makes the outputs, too."""

    def __init__(self, cls, **arguments):
        super().__init__()
        self.inner = cls(7, 5, **arguments)

    def call(self, x):
        return self.inner(ops.tanh(self.inner(x)), reverse=True)


def lora(layer, shape):
    """The layer with low-rank factors in the place of its kernel."""
    layer.build(shape)
    layer.enable_lora(2)
    return layer


def _einsum(equation, shape, bias=None):
    return lambda: layers.EinsumDense(equation, shape, bias_axes=bias)


def _batch(x):
    return ops.shape(x)[0]


LAYERS = {
    "Dense": (lambda: layers.Dense(3, "tanh"), VECTORS),
    "Dense of sequences": (lambda: layers.Dense(3, "gelu"), SERIES),
    "Dense without bias": (lambda: layers.Dense(3, use_bias=False), SERIES),
    "Dense of images": (lambda: layers.Dense(3), IMAGES),
    "Einsum ab,bc->ac": (_einsum("ab,bc->ac", 3, "c"), VECTORS),
    "Einsum ...x,xy->...y": (_einsum("...x,xy->...y", (9, 3), "y"), SERIES),
    "Einsum abc,cde->abde": (_einsum("abc,cde->abde", (9, 2, 3), "de"), SERIES),
    "Einsum abc,bcd->abd": (_einsum("abc,bcd->abd", (9, 3), "bd"), SERIES),
    "Einsum abc,bd->adc": (_einsum("abc,bd->adc", (4, 6)), SERIES),
    "Einsum abc,dbc->ad": (_einsum("abc,dbc->ad", 3, "d"), SERIES),
    "Conv1D": (lambda: layers.Conv1D(3, 3), SERIES),
    "Conv1D stride same": (
        lambda: layers.Conv1D(3, 4, strides=2, padding="same"),
        SERIES,
    ),
    "Conv1D causal dilated": (
        lambda: layers.Conv1D(3, 3, padding="causal", dilation_rate=2),
        SERIES,
    ),
    "Conv1D groups": (lambda: layers.Conv1D(4, 3, groups=2), SERIES),
    "Conv2D": (lambda: layers.Conv2D(3, (3, 2), activation="relu"), IMAGES),
    "Conv2D stride same": (
        lambda: layers.Conv2D(3, 3, strides=(2, 1), padding="same"),
        IMAGES,
    ),
    "Conv2D of one place": (lambda: layers.Conv2D(3, 8), IMAGES),
    "Conv2D of one padded place": (
        lambda: layers.Conv2D(3, 3, strides=8, padding="same"),
        IMAGES,
    ),
    "Conv2D dilated": (
        lambda: layers.Conv2D(3, 3, dilation_rate=(2, 3), padding="same"),
        IMAGES,
    ),
    "Conv2D groups": (lambda: layers.Conv2D(6, 3, groups=2, strides=2), IMAGES),
    "Conv3D": (lambda: layers.Conv3D(3, 3, padding="same", strides=2), VOLUMES),
    "Conv3D groups": (lambda: layers.Conv3D(4, 2, groups=2), VOLUMES),
    "DepthwiseConv1D": (lambda: layers.DepthwiseConv1D(3, depth_multiplier=2), SERIES),
    "DepthwiseConv2D": (lambda: layers.DepthwiseConv2D(3, strides=2), IMAGES),
    "DepthwiseConv2D dilated": (
        lambda: layers.DepthwiseConv2D(
            3, dilation_rate=2, padding="same", depth_multiplier=2
        ),
        IMAGES,
    ),
    "SeparableConv1D": (lambda: layers.SeparableConv1D(3, 3, strides=2), SERIES),
    "SeparableConv2D": (lambda: layers.SeparableConv2D(3, 3, padding="same"), IMAGES),
    "Conv1DTranspose": (lambda: layers.Conv1DTranspose(3, 3, strides=2), SERIES),
    "Conv2DTranspose": (
        lambda: layers.Conv2DTranspose(3, 3, strides=2, padding="same"),
        IMAGES,
    ),
    "Conv2DTranspose dilated": (
        lambda: layers.Conv2DTranspose(3, 2, dilation_rate=2),
        IMAGES,
    ),
    "Conv3DTranspose": (lambda: layers.Conv3DTranspose(2, 2, strides=2), VOLUMES),
    "WeightStandardizedConv2D": (
        lambda: keras_dpopt.layers.WeightStandardizedConv2D(3, 3),
        IMAGES,
    ),
    "Embedding": (lambda: layers.Embedding(7, 5), TEXT),
    "Embedding of one": (lambda: layers.Embedding(7, 5), TEXT[:, 0]),
    "PositionEmbedding": (lambda: keras_hub.layers.PositionEmbedding(12), SERIES),
    "TokenAndPosition": (
        lambda: keras_hub.layers.TokenAndPositionEmbedding(7, 9, 5, mask_zero=True),
        TEXT,
    ),
    "ReversibleEmbedding tied": (
        lambda: Tied(keras_hub.layers.ReversibleEmbedding),
        TEXT,
    ),
    "ReversibleEmbedding untied": (
        lambda: Tied(keras_hub.layers.ReversibleEmbedding, tie_weights=False),
        TEXT,
    ),
    "LayerNormalization": (lambda: layers.LayerNormalization(), SERIES),
    "LayerNormalization axes": (lambda: layers.LayerNormalization((1, 2)), SERIES),
    "GroupNormalization": (lambda: layers.GroupNormalization(2), IMAGES),
    "RMSNormalization": (lambda: layers.RMSNormalization(), SERIES),
    "PReLU": (lambda: layers.PReLU(), SERIES),
    "PReLU shared": (lambda: layers.PReLU(shared_axes=(1, 2)), IMAGES),
    "MultiHeadAttention": (
        lambda: Attention(layers.MultiHeadAttention, num_heads=2, key_dim=3),
        SERIES,
    ),
    "GroupQueryAttention": (
        lambda: Attention(
            layers.GroupQueryAttention,
            head_dim=3,
            num_query_heads=4,
            num_key_value_heads=2,
        ),
        SERIES,
    ),
    "TransformerEncoder": (
        lambda: keras_hub.layers.TransformerEncoder(8, 2, dropout=0.0),
        SERIES,
    ),
    "LoRA Dense": (lambda: lora(layers.Dense(5), (None, 9, 6)), SERIES),
    "LoRA EinsumDense": (
        lambda: lora(_einsum("abc,cde->abde", (9, 2, 3), "de")(), (None, 9, 6)),
        SERIES,
    ),
    "LoRA Embedding": (lambda: lora(layers.Embedding(7, 5), (None, 9)), TEXT),
    "LoRA Conv2D": (lambda: lora(layers.Conv2D(5, 3), (None, 8, 8, 4)), IMAGES),
    "LSTM": (lambda: layers.LSTM(3), SERIES),
    "GRU": (lambda: layers.GRU(3, return_sequences=True), SERIES),
    "GRU backwards": (
        lambda: layers.GRU(3, reset_after=False, go_backwards=True),
        SERIES,
    ),
    "SimpleRNN unrolled": (lambda: layers.SimpleRNN(3, unroll=True), SERIES),
    "RNN of cells": (
        lambda: layers.RNN([layers.LSTMCell(3), layers.GRUCell(2)]),
        SERIES,
    ),
    "ConvLSTM1D": (lambda: layers.ConvLSTM1D(2, 2), draw(M, 3, 5, 2)),
    "TimeDistributed Dense": (
        lambda: layers.TimeDistributed(layers.Dense(3)),
        SERIES,
    ),
    "TimeDistributed Conv2D": (
        lambda: layers.TimeDistributed(layers.Conv2D(3, 2, strides=2)),
        draw(M, 3, 4, 4, 2),
    ),
    "scale, bias": (lambda: Lambda(lambda x, w, b: x * w + b, (6,), (9, 6)), SERIES),
    "differences": (
        lambda: Lambda(lambda x, v, w: (x - v) * (w - x), (6,), (9, 1)),
        SERIES,
    ),
    "quotients": (
        lambda: Lambda(lambda x, v, w: x / (2 + v**2) + w / (3 + x**2), (6,), (1,)),
        SERIES,
    ),
    "maximum, minimum": (
        lambda: Lambda(
            lambda x, v, w: ops.maximum(ops.minimum(x, 1.5 * v), w - 1.5), (6,), ()
        ),
        SERIES,
    ),
    "powers": (
        lambda: Lambda(lambda x, w: ops.power(1 + ops.abs(x), w) + (w - x) ** 2, (6,)),
        SERIES,
    ),
    "scalar gain, exp": (
        lambda: Lambda(
            lambda x, w, g, b: ops.matmul(x, w * g) + ops.exp(b), (6, 3), (), (3,)
        ),
        SERIES,
    ),
    "low rank": (
        lambda: Lambda(
            lambda x, a, b: x @ (2.0 * ops.transpose(ops.matmul(a, b))), (3, 2), (2, 6)
        ),
        SERIES,
    ),
    "softmax": (
        lambda: Lambda(lambda x, w: x @ ops.softmax(w, axis=0), (6, 5)),
        SERIES,
    ),
    "stopped gradient": (
        lambda: Lambda(lambda x, w: x @ w + x @ ops.stop_gradient(w), (6, 5)),
        SERIES,
    ),
    "matrix of matrices": (
        lambda: Lambda(lambda x, w: ops.matmul(ops.transpose(w), x), (9, 4)),
        SERIES,
    ),
    "class token": (
        lambda: Lambda(
            lambda x, w: ops.concatenate([ops.tile(w, (_batch(x), 1, 1)), x], 1) ** 2,
            (1, 1, 6),
        ),
        SERIES,
    ),
    "repeated": (
        lambda: Lambda(
            lambda x, w: x * ops.tanh(ops.broadcast_to(w, (_batch(x), 9, 6))), (9, 6)
        ),
        SERIES,
    ),
}


@pytest.mark.filterwarnings("ignore:.*was passed an input with a mask")
@pytest.mark.parametrize("name", LAYERS)
def test_layer_equals_the_loop(name):
    make, x = LAYERS[name]
    check(case(_runs_here(model(make()), x), x))


def _runs_here(made, x):
    """The model, if TensorFlow can run it: some of its kernels need AVX512."""
    try:
        made(x)
    except tf.errors.InvalidArgumentError as error:
        if "CPU implementations do not yet support" not in str(error):
            raise
        pytest.skip("TensorFlow has no such kernel for this CPU")
    return made


# --- norm forms ----------------------------------------------------------------------


class _Gram:
    """In the place of `norm_forms.DenseForm`, it keeps to the factors."""

    def __new__(cls, part, records):
        joinable = norm_forms._joinable(part)
        return (norm_forms.FactoredForm if joinable else _DENSE)(part, records)


_DENSE = norm_forms.DenseForm
GRAM = {
    "Dense": (lambda: layers.Dense(5), SERIES),
    "Einsum": (_einsum("abc,cde->abde", (9, 2, 3), "de"), SERIES),
    "Embedding": (lambda: layers.Embedding(7, 5), TEXT),
    "tied": (lambda: Tied(keras_hub.layers.ReversibleEmbedding), TEXT),
    "LoRA": (lambda: lora(layers.Dense(5), (None, 9, 6)), SERIES),
    "scaled low rank": (
        lambda: Lambda(lambda x, a, b: x @ (2.0 * (a @ b)), (6, 2), (2, 5)),
        SERIES,
    ),
    "attention": LAYERS["MultiHeadAttention"],
    "LSTM": LAYERS["LSTM"],
    **{name: made for name, made in LAYERS.items() if name.startswith("Conv")},
}


@pytest.mark.parametrize("name", GRAM)
def test_gram_form_equals_the_loop(name, monkeypatch):
    """Layers as small as these would form their gradients; wide ones do not."""
    monkeypatch.setattr(norm_forms, "DenseForm", _Gram)
    monkeypatch.setattr(norm_forms, "OneByOneForm", _Gram)
    make, x = GRAM[name]
    check(case(_runs_here(model(make()), x), x), above=1e-3)


# --- any shapes ----------------------------------------------------------------------

_SIZES = st.integers(1, 5)
_SOME = hypothesis.settings(max_examples=4, derandomize=True, deadline=None)


@_SOME
@hypothesis.given(st.lists(_SIZES, min_size=1, max_size=4), st.integers(2, 6))
def test_dense_of_any_shape(shape, units):
    check(case(model(layers.Dense(units)), draw(M, *shape, 4)), above=1e-4)


@_SOME
@hypothesis.given(_SIZES, st.integers(2, 5))
def test_embedding_of_any_shape(length, width):
    check(case(model(layers.Embedding(7, width)), tokens(M, length)), above=1e-4)


@_SOME
@hypothesis.given(
    st.tuples(st.integers(4, 7), st.integers(4, 7)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.sampled_from(["valid", "same"]),
    st.booleans(),
    st.sampled_from([1, 2, 3]),
)
def test_convolution_of_any_shape(size, kernel, padding, dilated, step):
    steps = {"dilation_rate" if dilated else "strides": step}
    layer = layers.Conv2D(3, kernel, padding=padding, **steps)
    hypothesis.assume(
        all(s > step * (k - 1) for s, k in zip(size, kernel, strict=True))
    )
    check(case(model(layer), draw(M, *size, 2)))

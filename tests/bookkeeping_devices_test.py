"""Devices whose products of float32 matrices cut their factors: bounds cover that."""

import numpy as np
import pytest
import tensorflow as tf
from bookkeeping_cases import M, draw
from bookkeeping_guard_test import cancelling, dense, form, gradients, hold

from keras_dpopt.engines import norm_forms, rounding

assert form  # a fixture

# Explicit digits of the formats.
DIGITS = {"TF32": (10, rounding._TF32), "bfloat16": (7, rounding._BFLOAT16)}


@pytest.fixture(params=DIGITS)
def device(request, monkeypatch):
    """Products as on another device, and the error that belongs to it."""
    digits, error = DIGITS[request.param]

    def cut(tensor):
        if tensor.dtype != tf.float32:
            return tensor
        unit = 1 << (23 - digits)
        bits = tf.bitcast(tensor, tf.int32)
        return tf.bitcast((bits + unit // 2) // unit * unit, tf.float32)

    def with_cut(product):
        return lambda a, b, **arguments: product(cut(a), cut(b), **arguments)

    monkeypatch.setattr(tf, "matmul", with_cut(tf.matmul))
    monkeypatch.setattr(tf.linalg, "matvec", with_cut(tf.linalg.matvec))
    monkeypatch.setattr(norm_forms, "product_error", lambda: error)
    return digits


def rounded_up(digits, *shape, seed):
    """Numbers that the device makes larger, nearly as much as it can."""
    sign = np.sign(draw(*shape, seed=seed))
    return (sign * (1.0 + 2.0 ** -(digits + 1) + 2.0**-20)).astype("float32")


@pytest.mark.parametrize("tokens", [1, 9])
def test_no_record_adds_more_than_the_clip(device, form, tokens):
    x = rounded_up(device, M, tokens, 6, seed=1)
    y = rounded_up(device, M, tokens, 5, seed=2)
    hold(dense(x, y), gradients(x, y), in_factors=form == "gram", clip=0.1)


def test_cancelling_tokens(device, form):
    x, y = cancelling(1e3, 0.1)
    hold(dense(x, y), gradients(x, y), in_factors=form == "gram")


def test_without_the_error_a_record_adds_more(device, form, monkeypatch):
    """The Gram matrices of several tokens are cut as the sum is, and err alike."""
    tokens = 1 if form == "gram" else 9
    monkeypatch.setattr(norm_forms, "product_error", lambda: 0.0)
    x = rounded_up(device, M, tokens, 6, seed=1)
    y = rounded_up(device, M, tokens, 5, seed=2)
    with pytest.raises(AssertionError):
        hold(dense(x, y), gradients(x, y), in_factors=form == "gram", clip=0.1)


def test_the_error_is_that_of_the_devices_here(monkeypatch):
    found: list = []
    monkeypatch.setattr(
        tf.config, "list_physical_devices", lambda kind: [kind] * (kind in found)
    )
    enabled = tf.config.experimental
    monkeypatch.setattr(enabled, "tensor_float_32_execution_enabled", lambda: True)
    assert rounding.product_error() == 0.0
    found.append("GPU")
    assert rounding.product_error() == rounding._TF32 > 2.0**-9
    monkeypatch.setattr(enabled, "tensor_float_32_execution_enabled", lambda: False)
    assert rounding.product_error() == 0.0
    found.append("TPU")
    assert rounding.product_error() == rounding._BFLOAT16 > 2.0**-6

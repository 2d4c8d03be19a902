"""From the tensor that a use sees back to the weight that it is made of.

Between a weight w and its use may lie operations without data: a transposition, a
reshape, the product a b of two low-rank factors. They are the same function W(w) for
all records, so a record's gradient for w is J^T G_i with J the derivative of W.
"""

import math
from typing import Any

import tensorflow as tf

from keras_dpopt.engines.left_factors import Rows
from keras_dpopt.engines.mapping import vectorized_map
from keras_dpopt.engines.terms import Dense, Factored


def to_weight(term: Any, tensor: Any, path: tuple | None, weight: Any) -> Any:
    """Returns the term in the shape of the weight.

    Args:
        term: In the shape of `tensor`.
        tensor: What the use sees.
        path: From the weight to the tensor (see `weight_uses.Use`).
        weight: The weight.
    """
    if path is None:
        return _general(term, tensor, weight)
    for op, index in reversed(path):
        term = _RULES.get(op.type, _by_derivative)(term, op, index)
    return term


def _same(term, op, index):
    del op, index
    return term


def _negative(term, op, index):
    del op, index
    return term.scaled(-1.0)


def _add(term, op, index):
    if op.inputs[index].shape != op.outputs[0].shape:
        return _by_derivative(term, op, index)
    return term.scaled(-1.0) if op.type == "Sub" and index == 1 else term


def _multiply(term, op, index):
    other = op.inputs[1 - index]
    if other.shape.rank or op.inputs[index].shape != op.outputs[0].shape:
        return _by_derivative(term, op, index)
    return term.scaled(tf.cast(other, tf.float32))


def _reshape(term, op, index):
    shape = tuple(op.inputs[index].shape)
    if isinstance(term, Factored):
        split = _split(shape, term.rows)
        if split is not None:
            return Factored(term.left, term.right, shape, split, term.tokens)
    one = term.record
    return Dense(
        lambda: tf.reshape(term.dense(), [-1, *shape]),
        shape,
        one and (lambda i: tf.reshape(one(i), shape)),
    )


def _split(shape, rows: int) -> int | None:
    for split in range(len(shape) + 1):
        if math.prod(shape[:split]) == rows:
            return split
    return None


def _transpose(term, op, index):
    known = tf.get_static_value(op.inputs[1])
    if known is None:
        return _by_derivative(term, op, index)
    shape, order = tuple(op.inputs[index].shape), tuple(int(axis) for axis in known)
    if isinstance(term, Factored) and isinstance(term.left, Rows):
        split = term.split
        if order == (
            *range(len(order) - split, len(order)),
            *range(len(order) - split),
        ):
            # The two halves change places.
            left, right = Rows(term.right), term.left.values
            return Factored(left, right, shape, len(order) - split, term.tokens)
    back = sorted(range(len(order)), key=order.__getitem__)
    axes = [0, *(axis + 1 for axis in back)]
    return Dense(lambda: tf.transpose(term.dense(), axes), shape)


def _matmul(term, op, index):
    """W = a b: (l, r) becomes (l, b r) for a and (a^T l, r) for b."""
    flags = ("transpose_a", "transpose_b")
    plain = op.type == "MatMul" and not any(op.get_attr(flag) for flag in flags)
    factored = isinstance(term, Factored) and term.split == 1
    if not plain or not factored or not isinstance(term.left, Rows):
        return _by_derivative(term, op, index)
    shape = tuple(op.inputs[index].shape)
    other = tf.cast(op.inputs[1 - index], tf.float32)
    if index == 0:
        right = _times(term.right, other, transpose=True)
        return Factored(term.left, right, shape, 1, term.tokens)
    left = Rows(_times(term.left.values, other, transpose=False))
    return Factored(left, term.right, shape, 1, term.tokens)


def _times(tokens, matrix, transpose: bool):
    flat = tf.reshape(tokens, [-1, tokens.shape[-1]])
    product = tf.matmul(flat, matrix, transpose_b=transpose)
    shape = tf.concat([tf.shape(tokens)[:2], tf.shape(product)[1:]], 0)
    product = tf.reshape(product, shape)
    width = matrix.shape[0] if transpose else matrix.shape[1]
    return tf.ensure_shape(product, [None, tokens.shape[1], width])


def _by_derivative(term, op, index):
    return _general(term, op.outputs[0], op.inputs[index])


def _general(term, tensor, weight):
    def make():
        def one(gradient):
            gradient = tf.cast(gradient, tensor.dtype)
            return tf.gradients(
                tensor, [weight], [gradient], unconnected_gradients="zero"
            )[0]

        return tf.cast(vectorized_map(one, term.dense()), tf.float32)

    return Dense(make, tuple(weight.shape))


_RULES = {
    **dict.fromkeys(("Identity", "Cast"), _same),
    **dict.fromkeys(("Reshape", "ExpandDims", "Squeeze"), _reshape),
    **dict.fromkeys(("Add", "AddV2", "Sub"), _add),
    "Neg": _negative,
    "Mul": _multiply,
    "Transpose": _transpose,
    "MatMul": _matmul,
}

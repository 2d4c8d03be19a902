"""One rule a kind of operation: what it makes of input and cotangent for a weight.

For an operation z = f(x, w) and the derivative B of the records' losses by z, a rule
returns the term of w (see `terms.py`). There is one for each operation in which the
layers of Keras and keras_hub use weights, or else it raises `NoRule`.
"""

import dataclasses
import math
from typing import Any

import tensorflow as tf

from keras_dpopt.engines.left_factors import Patches, Rows, Units
from keras_dpopt.engines.mapping import vectorized_map
from keras_dpopt.engines.record_axis import NoRule, RecordAxis
from keras_dpopt.engines.terms import Dense, Factored


@dataclasses.dataclass(frozen=True)
class Call:
    """An operation as a rule sees it.

    Attributes:
        operation: The operation: its kind and its attributes.
        index: Which of the inputs comes from the weight.
        inputs: Tensors; those that belong to records have an axis of unknown size.
        result: A tensor of the shape of the result.
    """

    operation: Any
    index: int
    inputs: list[Any]
    result: Any

    @property
    def weight(self) -> Any:
        """The input that comes from the weight."""
        return self.inputs[self.index]

    def get_attr(self, name: str) -> Any:
        """Returns an attribute of the operation."""
        return self.operation.get_attr(name)


def term(call: Call, cotangent: Any, axis: RecordAxis) -> Any:
    """Returns the term of the weight, in the shape that the operation sees.

    Args:
        call: The operation.
        cotangent: Derivative of the records' losses by the operation's result.
        axis: See `RecordAxis`.

    Raises:
        NoRule: if there is no rule.
    """
    kind = call.operation.type
    if kind not in _RULES:
        raise NoRule(f"no rule for {kind} ({call.operation.name})")
    return _RULES[kind](call, cotangent, axis)


# --- products -----------------------------------------------------------------------


def _matmul(call, cotangent, axis):
    batched = call.operation.type != "MatMul"
    left, right = ("adj_x", "adj_y") if batched else ("transpose_a", "transpose_b")
    weight = call.weight
    if call.index != 1 or call.get_attr(left) or weight.shape.rank != 2:
        return _generic(call, cotangent, axis)
    transposed = call.get_attr(right)
    rows, columns = weight.shape
    inner, outer = (columns, rows) if transposed else (rows, columns)
    x = axis.tokens(call.inputs[0], inner)
    b = axis.tokens(cotangent, outer)
    tokens = x.shape[1]
    if transposed:
        x, b = b, x
    return Factored(Rows(x), b, tuple(weight.shape), 1, tokens)


def _gather(call, cotangent, axis):
    where = tf.get_static_value(call.inputs[2])
    if call.index != 0 or where != 0 or call.get_attr("batch_dims"):
        raise NoRule("a gather that is not along the first axis of the weight")
    weight, ids = call.inputs[0], call.inputs[1]
    width = weight.shape[1:].num_elements()
    tokens = axis.elements(ids)
    ids = tf.cast(tf.reshape(ids, tf.stack([axis.records, -1])), tf.int32)
    return Factored(
        Units(tf.ensure_shape(ids, [None, tokens]), weight.shape[0]),
        axis.tokens(cotangent, width),
        tuple(weight.shape),
        1,
        tokens,
    )


# --- elementwise --------------------------------------------------------------------


def _add(call, cotangent, axis):
    return _reduced(call.weight, cotangent, axis, call.result)


def _subtract(call, cotangent, axis):
    return _add(call, cotangent, axis).scaled(1.0 if call.index == 0 else -1.0)


def _multiply(call, cotangent, axis):
    other = tf.cast(call.inputs[1 - call.index], tf.float32)
    product = tf.cast(cotangent, tf.float32) * other
    return _reduced(call.weight, product, axis, call.result)


def _bias(call, cotangent, axis):
    if call.get_attr("data_format") != b"NHWC":
        raise NoRule("a bias that is not along the last axis")
    return _add(call, cotangent, axis)


def _elementwise(call, cotangent, axis):
    """Any other one: its derivative by a weight that is there for every element."""
    weight = call.weight
    inputs = list(call.inputs)
    inputs[call.index] = tf.broadcast_to(weight, tf.shape(call.result))
    (full,) = tf.gradients(
        _again(call.operation, inputs), [inputs[call.index]], [cotangent]
    )
    return _reduced(weight, full, axis, call.result)


def _reduced(weight, full, axis, like):
    """Sums `[m*n, ...]` over the axes along which the weight was repeated."""
    rank = like.shape.rank
    target = (1,) * (rank - weight.shape.rank) + tuple(weight.shape)
    if not rank or target[0] != 1 or like.shape[0] is not None:
        raise NoRule("a weight with an axis along the records")
    size = weight.shape.num_elements()
    if all(n == 1 for n in target[:-1]) and target[-1] == like.shape[-1]:
        values = axis.tokens(full, size)
        ones = tf.ones(tf.concat([tf.shape(values)[:2], [1]], 0))
        ones = tf.ensure_shape(ones, [None, values.shape[1], 1])
        return Factored(Rows(ones), values, tuple(weight.shape), 0, values.shape[1])

    def make():
        values = tf.cast(full, tf.float32)
        values = tf.reshape(
            values, tf.concat([[axis.records, -1], tf.shape(like)[1:]], 0)
        )
        repeated = [1, *(j + 1 for j in range(1, rank) if target[j] == 1)]
        if axis.rows(like) == 1 and len(repeated) == 1:
            return tf.reshape(values, [-1, *weight.shape])
        return tf.reshape(tf.reduce_sum(values, repeated), [-1, *weight.shape])

    return Dense(make, tuple(weight.shape))


# --- all others ---------------------------------------------------------------------


def _convolution(call, cotangent, axis):
    """With groups, as many convolutions: TensorFlow has none with groups on a CPU."""
    x, weight = call.inputs
    if call.index != 1:
        return _generic(call, cotangent, axis)
    groups = x.shape[-1] // weight.shape[-2]
    if groups == 1:
        patches = _patches(call, axis)
        if patches is None:
            return _generic(call, cotangent, axis)
        tokens, width = math.prod(patches.places), weight.shape[-1]
        values = axis.tokens(cotangent, width)
        return Factored(patches, values, tuple(weight.shape), 3, tokens)
    parts = zip(
        tf.split(x, groups, -1),
        tf.split(weight, groups, -1),
        tf.split(call.result, groups, -1),
        tf.split(cotangent, groups, -1),
        strict=True,
    )
    terms = [
        _generic(dataclasses.replace(call, inputs=[x, w], result=z), b, axis)
        for x, w, z, b in parts
    ]
    ones = [term.record for term in terms if term.record]
    return Dense(
        lambda: tf.concat([term.dense() for term in terms], -1),
        tuple(weight.shape),
        lambda i: tf.concat([one(i) for one in ones], -1),
    )


def _patches(call, axis) -> Patches | None:
    """The left factors of a plain convolution in two dimensions, of one image each."""
    x, weight = call.inputs
    if call.operation.type != "Conv2D" or call.get_attr("data_format") != b"NHWC":
        return None
    plain = list(call.get_attr("dilations")) == [1, 1, 1, 1] and _blocks(x) == 1
    sizes = [*x.shape[1:], *call.result.shape[1:]]
    if not plain or None in sizes or axis.rows(x) != 1:
        return None
    shape, strides = tuple(weight.shape), tuple(call.get_attr("strides")[1:3])
    places = tuple(call.result.shape[1:3])
    kind, explicit = call.get_attr("padding"), call.get_attr("explicit_paddings")
    vertical, horizontal = (0, 0), (0, 0)
    if kind == b"EXPLICIT":
        vertical, horizontal = tuple(explicit[2:4]), tuple(explicit[4:6])
    if kind == b"SAME":
        wanted = [
            max(0, (n - 1) * stride + size - have)
            for n, stride, size, have in zip(
                places, strides, shape[:2], x.shape[1:3], strict=True
            )
        ]
        vertical, horizontal = [(n // 2, n - n // 2) for n in wanted]

    def derivative(images, cotangents):
        return tf.raw_ops.Conv2DBackpropFilter(
            input=images,
            filter_sizes=shape,
            out_backprop=cotangents,
            strides=call.get_attr("strides"),
            padding=kind.decode(),
            explicit_paddings=explicit,
        )

    image = tf.cast(x, tf.float32)
    padding = (vertical, horizontal)
    return Patches(image, shape[:2], strides, padding, places, derivative)


def _generic(call, cotangent, axis):
    """The derivative of the operation alone, record by record."""
    weight = call.weight
    data = [
        i
        for i, t in enumerate(call.inputs)
        if i != call.index and t.shape.rank and t.shape[0] is None
    ]
    if not data:
        raise NoRule(f"{call.operation.type} has no input with an axis of records")

    def one(arguments):
        *own, cotangent = arguments
        inputs = list(call.inputs)
        for i, value in zip(data, own, strict=True):
            inputs[i] = value
        if call.operation.type in _WITH_SIZES:
            inputs[0] = tf.concat([tf.shape(own[0])[:1], inputs[0][1:]], 0)
        (gradient,) = tf.gradients(
            _again(call.operation, inputs), [weight], [cotangent]
        )
        return tf.cast(gradient, tf.float32)

    blocks = _blocks(call.inputs[data[0]])
    rows = [axis.split(call.inputs[i], call.inputs[i], blocks) for i in data]
    rows.append(axis.split(cotangent, call.result, blocks))
    shape = tuple(weight.shape)
    if call.operation.type in _FILTERS:
        # The map would be a loop, too: there is no operation for many filters.
        record = lambda i: one([t[i] for t in rows])  # noqa: E731
    else:
        record = None
    return Dense(lambda: vectorized_map(one, tuple(rows)), shape, record)


def _blocks(tensor) -> int:
    """How many blocks of space a dilated convolution has moved to the first axis."""
    while tensor.op.type in ("ExpandDims", "Pad", "PadV2"):
        tensor = tensor.op.inputs[0]
    if tensor.op.type != "SpaceToBatchND":
        return 1
    return math.prod(int(n) for n in tf.get_static_value(tensor.op.inputs[1]))


def _again(op, inputs):
    """Makes the operation again, with other inputs."""
    definition = op.op_def
    inferred = {arg.type_attr for arg in definition.input_arg}
    if definition.input_arg[0].number_attr:  # one argument, a list
        inferred.add(definition.input_arg[0].number_attr)
        inputs = [inputs]
    arguments = {
        arg.name: value for arg, value in zip(definition.input_arg, inputs, strict=True)
    }
    for attribute in definition.attr:
        if attribute.name not in inferred:
            arguments[attribute.name] = op.get_attr(attribute.name)
    return getattr(tf.raw_ops, op.type)(**arguments)


_FILTERS = ("Conv2D", "Conv3D", "Conv2DBackpropInput", "Conv3DBackpropInputV2")
_WITH_SIZES = ("Conv2DBackpropInput", "Conv3DBackpropInputV2")

_RULES: dict[str, Any] = {
    "MatMul": _matmul,
    "BatchMatMulV2": _matmul,
    "BatchMatMulV3": _matmul,
    "GatherV2": _gather,
    "BiasAdd": _bias,
    "Add": _add,
    "AddV2": _add,
    "BroadcastTo": _add,
    "Tile": _add,
    "Sub": _subtract,
    "Mul": _multiply,
    "Conv2D": _convolution,
    "Conv3D": _convolution,
    **dict.fromkeys(
        ("RealDiv", "DivNoNan", "Maximum", "Minimum", "Pow", "SquaredDifference"),
        _elementwise,
    ),
    **dict.fromkeys(
        ("DepthwiseConv2dNative", "Einsum", *_WITH_SIZES),
        _generic,
    ),
}

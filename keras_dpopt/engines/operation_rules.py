"""One rule a kind of operation: what it makes of input and cotangent for a weight.

For an operation z = f(x, w) and the derivative B of the records' losses by z, a rule
returns the term of w (see `terms.py`). There is one for each operation in which the
layers of Keras and keras_hub use weights; `NoRule` says that there is none.
"""

import dataclasses
import math
from typing import Any

import tensorflow as tf

from keras_dpopt.engines.mapping import vectorized_map
from keras_dpopt.engines.terms import Dense, Factored


class NoRule(NotImplementedError):
    """The engine cannot follow what the model does with a weight."""


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


class RecordAxis:
    """How the leading axis of a tensor belongs to the records.

    Layers fold time or copies into it: a tensor of `[m*n, ...]` has n rows a record, in
    the order of the records.

    Args:
        records: int32 scalar, m.
    """

    def __init__(self, records: Any):
        self.records = records
        self._known: dict[Any, int | None] = {}

    def split(self, tensor: Any, like: Any, blocks: int = 1) -> Any:
        """Returns `[m, n, ...]` of `[m*n, ...]`, whose shape is known from `like`.

        With `blocks`, of `[blocks*m, ...]`, as SpaceToBatchND orders it.
        """
        if not like.shape.rank or like.shape[0] is not None:
            raise NoRule(f"{like.op.type} has no leading axis of records")
        if blocks > 1:
            shape = tf.concat([[blocks, self.records], tf.shape(tensor)[1:]], 0)
            order = [1, 0, *range(2, like.shape.rank + 1)]
            moved = tf.transpose(tf.reshape(tensor, shape), order)
            return tf.ensure_shape(moved, [None, blocks, *like.shape[1:]])
        shape = tf.concat([[self.records, -1], tf.shape(tensor)[1:]], 0)
        return tf.ensure_shape(
            tf.reshape(tensor, shape), [None, self.rows(like), *like.shape[1:]]
        )

    def tokens(self, tensor: Any, width: int) -> Any:
        """Returns `[m, T, width]`, float32."""
        values = tf.cast(tensor, tf.float32)
        values = tf.reshape(values, tf.stack([self.records, -1, width]))
        size = self.elements(tensor)
        return tf.ensure_shape(values, [None, size and size // width, width])

    def elements(self, tensor: Any) -> int | None:
        """Returns how many entries a record has, where that is known."""
        key = tensor.ref()
        if key not in self._known:
            self._known[key] = None  # ends a circle
            self._known[key] = self._elements(tensor)
        return self._known[key]

    def rows(self, tensor: Any) -> int | None:
        """Returns n, where it is known."""
        size, rest = self.elements(tensor), tensor.shape[1:].num_elements()
        return size // rest if size and rest else None

    def _elements(self, tensor: Any) -> int | None:
        op = tensor.op
        if op.type == "Reshape":
            return self.elements(op.inputs[0])
        if op.type == "SpaceToBatchND":  # in another order
            return None
        if op.type == "Transpose":
            order = tf.get_static_value(op.inputs[1])
            stays = order is not None and len(order) and order[0] == 0
            return self.elements(op.inputs[0]) if stays else None
        rest = tensor.shape[1:].num_elements() if tensor.shape.rank else None
        if rest is None:
            return None
        if op.type in ("Placeholder", "PlaceholderWithDefault"):
            return rest
        for source in op.inputs:
            if source.shape.rank and source.shape[0] is None:
                rows = self.rows(source)
                return None if rows is None else rows * rest
        return None


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
    return Factored(x, b, tuple(weight.shape), 1, tokens)


def _gather(call, cotangent, axis):
    where = tf.get_static_value(call.inputs[2])
    if call.index != 0 or where != 0 or call.get_attr("batch_dims"):
        raise NoRule("a gather that is not along the first axis of the weight")
    weight, ids = call.inputs[0], call.inputs[1]
    width = weight.shape[1:].num_elements()
    tokens = axis.elements(ids)
    ids = tf.cast(tf.reshape(ids, tf.stack([axis.records, -1])), tf.int32)
    return Factored(
        tf.ensure_shape(ids, [None, tokens]),
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
    groups = x.shape[-1] // weight.shape[-2]
    if groups == 1 or call.index != 1:
        return _generic(call, cotangent, axis)
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
    return Dense(
        lambda: tf.concat([term.dense() for term in terms], -1), tuple(weight.shape)
    )


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

    def make():
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
            return gradient

        blocks = _blocks(call.inputs[data[0]])
        rows = [axis.split(call.inputs[i], call.inputs[i], blocks) for i in data]
        rows.append(axis.split(cotangent, call.result, blocks))
        return tf.cast(vectorized_map(one, tuple(rows)), tf.float32)

    return Dense(make, tuple(weight.shape))


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

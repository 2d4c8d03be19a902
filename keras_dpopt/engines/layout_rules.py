"""Where the records are in the result of an operation, kind by kind.

An operation keeps records apart if each entry of its result depends on entries of one
record. A rule here says so from the static arguments of the operation, or refuses by
`NoRule`: whatever is not known to keep records apart is taken to mix them.
"""

import dataclasses
import math
from typing import Any

from keras_dpopt.engines import layout_moves
from keras_dpopt.engines.layout import (
    Layout,
    Layouts,
    axes_of,
    joined,
    mixes,
    moved,
    only,
    rank_of,
    static,
    stays,
)


def result(op: Any, inputs: Layouts) -> Layout | None:
    """Returns the layout of an operation's results.

    Args:
        op: The operation; at least one of its inputs has a layout.
        inputs: Of its inputs.

    Raises:
        NoRule: if it may mix records.
    """
    rule = _RULES.get(op.type)
    if rule is None:
        raise mixes(op)
    return rule(op, inputs)


def _elementwise(op, inputs):
    """Broadcasting counts axes from the last."""
    found = [
        (t.shape.rank - x.axis, x.rows, x.blocks)
        for t, x in zip(op.inputs, inputs, strict=True)
        if x is not None and rank_of(op, t)
    ]
    if len(set(found)) != 1:
        raise mixes(op)
    ((behind, rows, blocks),) = set(found)
    return Layout(rank_of(op, op.outputs[0]) - behind, rows, blocks)


def _passed_on(op, inputs):
    """Of what is passed on as it is, or an element of a list."""
    return only(op, inputs, 0)


def _broadcast(op, inputs):
    return _elementwise(op, [only(op, inputs, 0), None])


def _no_value(op, inputs):
    """Zeros, or a shape: sizes here depend on the number of records alone."""
    del op, inputs


def _reduced(op, inputs):
    layout = only(op, inputs, 0)
    rank = rank_of(op, op.inputs[0])
    axes = axes_of(op, 1, rank)
    stays(op, layout, *axes)
    names = {attribute.name for attribute in op.op_def.attr}
    if "keep_dims" in names and op.get_attr("keep_dims"):
        return layout
    return moved(layout, layout.axis - sum(axis < layout.axis for axis in axes))


def _along(op, inputs):
    """Along the axes that the second input names: sums so far, reversal."""
    layout = only(op, inputs, 0)
    return stays(op, layout, *axes_of(op, 1, rank_of(op, op.inputs[0])))


def _last_axis(op, inputs):
    return stays(op, only(op, inputs, 0), rank_of(op, op.inputs[0]) - 1)


def _last_two_axes(op, inputs):
    rank = rank_of(op, op.inputs[0])
    return stays(op, only(op, inputs, 0), rank - 1, rank - 2)


def _cross_entropy(op, inputs):
    layout = joined(op, inputs)
    if layout is None or layout.axis != 0:
        raise mixes(op)
    return layout


def _matmul(op, inputs):
    layout = only(op, inputs, 0)
    if layout.axis != int(op.get_attr("transpose_a")):
        raise mixes(op)
    return moved(layout, 0)


def _batched_matmul(op, inputs):
    ranks = [rank_of(op, t) for t in op.inputs[:2]]
    behind = {
        (r - x.axis, x.rows, x.blocks)
        for r, x in zip(ranks, inputs, strict=False)
        if x is not None
    }
    if len(behind) != 1:
        raise mixes(op)
    ((place, rows, blocks),) = behind
    out = rank_of(op, op.outputs[0])
    if place > 2:
        return Layout(out - place, rows, blocks)
    # The rows of the left factor are rows of the product.
    if inputs[1] is not None or place != 2 - int(op.get_attr("adj_x")):
        raise mixes(op)
    return Layout(out - 2, rows, blocks)


def _einsum(op, inputs):
    left, right = op.get_attr("equation").decode().replace(" ", "").split("->")
    layout, labels = None, set()
    for term, t, x in zip(left.split(","), op.inputs, inputs, strict=True):
        if x is None:
            continue
        names = _labels(term, rank_of(op, t))
        name = names[x.axis]
        if names.count(name) != 1:
            raise mixes(op)
        labels.add(name)
        layout = joined(op, [layout and moved(layout, x.axis), x])
    out = _labels(right, rank_of(op, op.outputs[0]))
    if layout is None or len(labels) != 1 or out.count(*labels) != 1:
        raise mixes(op)
    return moved(layout, out.index(*labels))


def _labels(term: str, rank: int) -> list[str]:
    """A name for each axis; those of an ellipsis are counted from its end."""
    if "..." not in term:
        return list(term)
    before, after = term.split("...")
    number = rank - len(before) - len(after)
    return [*before, *(f"...{number - i}" for i in range(number)), *after]


def _bias(op, inputs):
    layout = only(op, inputs, 0)
    last = op.get_attr("data_format") == b"NHWC"
    return stays(op, layout, rank_of(op, op.inputs[0]) - 1 if last else 1)


def _images(op, inputs):
    """Convolutions and resizings: image by image along the first axis."""
    layout = only(op, inputs, 0)
    if layout.axis != 0:
        raise mixes(op)
    return layout


def _pooled(op, inputs):
    if op.get_attr("ksize")[0] != 1 or op.get_attr("strides")[0] != 1:
        raise mixes(op)
    return _images(op, inputs)


def _transposed_convolution(op, inputs):
    layout = only(op, inputs, 2)
    if layout.axis != 0:
        raise mixes(op)
    return layout


def _to_blocks(op, inputs):
    layout = _images(op, inputs)
    if layout.blocks != 1:
        raise mixes(op)
    return dataclasses.replace(layout, blocks=int(math.prod(static(op, 1))))


def _from_blocks(op, inputs):
    layout = _images(op, inputs)
    if layout.blocks != int(math.prod(static(op, 1))):
        raise mixes(op)
    return dataclasses.replace(layout, blocks=1)


def _names(text: str, rule) -> dict[str, Any]:
    return dict.fromkeys(text.split(), rule)


_RULES = {
    **layout_moves.RULES,
    **_names(
        "Abs Acos Acosh Add AddN AddV2 Asin Asinh Atan Atan2 Atanh Cast "
        "Ceil CheckNumerics ClipByValue Cos Cosh Digamma Div DivNoNan Elu Equal Erf "
        "Erfc Exp Expm1 Floor FloorDiv FloorMod Greater GreaterEqual IsFinite "
        "IsInf IsNan LeakyRelu Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot "
        "LogicalOr Maximum Minimum Mod Mul MulNoNan Neg NotEqual OnesLike Pow "
        "RealDiv Reciprocal Relu Relu6 Rint Round Rsqrt SelectV2 Selu "
        "Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Square SquaredDifference "
        "Sub Tan Tanh TruncateDiv TruncateMod Xdivy Xlogy",
        _elementwise,
    ),
    **_names("Shape ShapeN Size Rank ZerosLike TensorListLength", _no_value),
    **_names("TensorListElementShape TensorListReserve", _no_value),
    **_names("Sum Mean Max Min Prod All Any ArgMax ArgMin EuclideanNorm", _reduced),
    **_names("Cumsum Cumprod CumulativeLogsumexp ReverseV2", _along),
    **_names("Softmax LogSoftmax TopKV2", _last_axis),
    **_names("MatrixBandPart", _last_two_axes),
    **_names(
        "SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits",
        _cross_entropy,
    ),
    "BroadcastTo": _broadcast,
    "MatMul": _matmul,
    **_names("BatchMatMul BatchMatMulV2 BatchMatMulV3", _batched_matmul),
    "Einsum": _einsum,
    "BiasAdd": _bias,
    **_names(
        "Conv2D Conv3D DepthwiseConv2dNative ResizeBilinear ResizeNearestNeighbor "
        "ResizeBicubic ResizeArea",
        _images,
    ),
    **_names("MaxPool MaxPool3D AvgPool AvgPool3D", _pooled),
    **_names("Conv2DBackpropInput Conv3DBackpropInputV2", _transposed_convolution),
    **_names("DepthwiseConv2dNativeBackpropInput", _transposed_convolution),
    "SpaceToBatchND": _to_blocks,
    "BatchToSpaceND": _from_blocks,
    **_names("Identity PreventGradient StopGradient TensorListGetItem", _passed_on),
}

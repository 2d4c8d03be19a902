"""Where the records are after an operation that moves entries, kind by kind.

See `layout_rules.py`.
"""

from typing import Any

import tensorflow as tf

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


def reshaped(op: Any, inputs: Layouts, sizes: list[int | None]) -> Layout:
    """Each record is one piece of memory, if nothing is before its axis.

    In front of it the same number of pieces has to be before and after; behind it the
    entries of a record have to be whole rows.

    Args:
        op: The operation.
        inputs: As in `result`.
        sizes: Of its result; `None` where that is a multiple of m.
    """
    layout = only(op, inputs, 0)
    if layout.blocks != 1:
        raise mixes(op)
    old, new = op.inputs[0].shape, tf.TensorShape(sizes)
    before = old[: layout.axis].num_elements()
    rest = old[layout.axis + 1 :].num_elements()
    for axis, size in enumerate(new):
        if size is None:
            after = new[axis + 1 :].num_elements()
            known = before and rest and after
            if known and new[:axis].num_elements() == before:
                rows, parted = divmod(layout.rows * rest, after)
                if not parted:
                    return Layout(axis, rows)
            break
    raise mixes(op)


def _expanded(op, inputs):
    layout = only(op, inputs, 0)
    (axis,) = axes_of(op, 1, rank_of(op, op.outputs[0]))
    return moved(layout, layout.axis + (axis <= layout.axis))


def _squeezed(op, inputs):
    layout = only(op, inputs, 0)
    rank = rank_of(op, op.inputs[0])
    axes = {axis % rank for axis in op.get_attr("squeeze_dims")}
    if not axes:
        raise mixes(op)
    stays(op, layout, *axes)
    return moved(layout, layout.axis - sum(axis < layout.axis for axis in axes))


def _transposed(op, inputs):
    layout = only(op, inputs, 0)
    return moved(layout, [int(i) for i in static(op, 1)].index(layout.axis))


def _stacked(op, inputs):
    layout = joined(op, inputs)
    axis = op.get_attr("axis") % rank_of(op, op.outputs[0])
    return layout and moved(layout, layout.axis + (axis <= layout.axis))


def _unstacked(op, inputs):
    layout = only(op, inputs, 0)
    axis = op.get_attr("axis") % rank_of(op, op.inputs[0])
    stays(op, layout, axis)
    return moved(layout, layout.axis - (axis < layout.axis))


def _concatenated(op, inputs):
    layout = joined(op, inputs)
    if layout is None or inputs[-1] is not None:
        raise mixes(op)
    last = len(op.inputs) - 1
    return stays(op, layout, *axes_of(op, last, rank_of(op, op.outputs[0])))


def _split(op, inputs):
    value, axis = (1, 0) if op.type == "Split" else (0, 2)
    layout = only(op, inputs, value)
    return stays(op, layout, *axes_of(op, axis, rank_of(op, op.inputs[value])))


def _sliced(op, inputs):
    layout = only(op, inputs, 0)
    begin, size = static(op, 1), static(op, 2)
    if begin[layout.axis] != 0 or size[layout.axis] != -1:
        raise mixes(op)
    return layout


def _strided(op, inputs):
    """The axis of the records has to be taken whole: `[:]`."""
    layout = only(op, inputs, 0)
    masks = {
        name: op.get_attr(f"{name}_mask")
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    rank, number = rank_of(op, op.inputs[0]), op.inputs[1].shape.num_elements()
    strides = static(op, 3)
    if number is None:
        raise mixes(op)
    has = lambda name, i: bool(masks[name] >> i & 1)  # noqa: E731
    taken = sum(
        not has("ellipsis", i) and not has("new_axis", i) for i in range(number)
    )
    axis, new = 0, 0  # of the input, and of the result
    for i in range(number):
        if has("ellipsis", i):
            if axis <= layout.axis < axis + rank - taken:
                return moved(layout, new + layout.axis - axis)
            axis, new = axis + rank - taken, new + rank - taken
        elif has("new_axis", i):
            new += 1
        elif axis == layout.axis:
            whole = has("begin", i) and has("end", i) and strides[i] == 1
            if not whole or has("shrink_axis", i):
                raise mixes(op)
            return moved(layout, new)
        else:
            axis, new = axis + 1, new + (not has("shrink_axis", i))
    return moved(layout, new + layout.axis - axis)


def _padded(op, inputs):
    layout = only(op, inputs, 0)
    if any(static(op, 1)[layout.axis]):
        raise mixes(op)
    return layout


def _tiled(op, inputs):
    layout = only(op, inputs, 0)
    times = tf.get_static_value(op.inputs[1], partial=True)
    if times is None or times[layout.axis] != 1:
        raise mixes(op)
    return layout


def _gathered(op, inputs):
    """From a table by the records' indices, or from each record the same entries."""
    (axis,), batched = (
        axes_of(op, 2, rank_of(op, op.inputs[0])),
        op.get_attr("batch_dims"),
    )
    if inputs[0] is None:
        layout = only(op, inputs, 1)
        if layout.axis < batched:
            return layout
        return moved(layout, axis + layout.axis - batched)
    layout = only(op, inputs, 0, 1)
    if layout.axis < batched and None not in inputs[:2]:
        return layout
    if inputs[1] is not None or layout.axis < batched:
        raise mixes(op)
    stays(op, layout, axis)
    return moved(
        layout,
        layout.axis + (layout.axis > axis) * (rank_of(op, op.inputs[1]) - batched - 1),
    )


def _one_hot(op, inputs):
    layout = only(op, inputs, 0)
    axis = op.get_attr("axis") % rank_of(op, op.outputs[0])
    return moved(layout, layout.axis + (axis <= layout.axis))


def _list_of_slices(op, inputs):
    """A list has the layout of its elements."""
    layout = only(op, inputs, 0)
    stays(op, layout, 0)
    return moved(layout, layout.axis - 1)


def _stacked_list(op, inputs):
    layout = only(op, inputs, 0)
    return moved(layout, layout.axis + 1)


def _set_item(op, inputs):
    return only(op, inputs, 0, 2)


RULES = {
    "ExpandDims": _expanded,
    "Squeeze": _squeezed,
    "Transpose": _transposed,
    "Pack": _stacked,
    "Unpack": _unstacked,
    "ConcatV2": _concatenated,
    "Split": _split,
    "SplitV": _split,
    "Slice": _sliced,
    "StridedSlice": _strided,
    "Pad": _padded,
    "PadV2": _padded,
    "MirrorPad": _padded,
    "Tile": _tiled,
    "GatherV2": _gathered,
    "OneHot": _one_hot,
    "TensorListFromTensor": _list_of_slices,
    "TensorListStack": _stacked_list,
    "TensorListSetItem": _set_item,
}

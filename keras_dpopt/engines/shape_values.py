"""Sizes that a model computes from the number of its records."""

import math
from typing import Any

import tensorflow as tf

from keras_dpopt.engines import subgraphs
from keras_dpopt.engines.record_axis import NoRule

_SHAPES = ("Shape", "ShapeN", "Size")

# Numbers of records for which sizes are computed: what is a multiple of either is one
# of m. No layer has a static size like these.
_RECORDS = (1_000_003, 1_000_033)


def sizes(reshape: Any, layouts: dict) -> list[int | None]:
    """Returns the sizes of what a Reshape makes, `None` for multiples of m.

    Args:
        reshape: The operation.
        layouts: The layouts of tensors, by reference; `None` where a tensor is of no
            record.

    Raises:
        NoRule: if they depend on anything but m.
    """
    static, (source, shape) = reshape.outputs[0].shape, reshape.inputs
    if static.rank is not None and list(static).count(None) <= 1:
        return list(static)
    found = []
    for records in _RECORDS:
        values = _values(shape, layouts, records)
        if -1 in values:  # left to TensorFlow
            total = math.prod(_dims(source, layouts[source.ref()], records))
            values[values.index(-1)] = -total // math.prod(values)
        found.append(values)
    result: list[int | None] = []
    for first, second in zip(*found, strict=True):
        if first == second:
            result.append(first)
        elif first % _RECORDS[0] == 0 and second % _RECORDS[1] == 0:
            result.append(None)
        else:
            raise NoRule(f"{shape.name} holds a size that is no multiple of m")
    return result


def _values(shape, layouts, records: int) -> list[int]:
    """The sizes for a batch of so many records: runs what computes them, alone."""
    definition = tf.compat.v1.GraphDef()
    given, waiting, seen = {}, [shape.op], set()
    while waiting:
        op = waiting.pop()
        if op.name in seen:
            continue
        seen.add(op.name)
        if op.type in _SHAPES:
            for source, result in zip(op.inputs, op.outputs, strict=True):
                dims = _dims(source, layouts.get(source.ref()), records)
                value = math.prod(dims) if op.type == "Size" else dims
                given[result.name] = (value, result.dtype)
        elif op.type in ("Placeholder", "PlaceholderWithDefault"):
            raise NoRule(f"{shape.name} depends on what is not a shape")
        else:
            waiting += [t.op for t in op.inputs]
            node = definition.node.add()
            node.CopyFrom(op.node_def)
            # Nothing waits for checks here.
            node.input[:] = [name for name in node.input if name[0] != "^"]
    with tf.Graph().as_default() as graph:
        values = {n: tf.constant(v, dtype) for n, (v, dtype) in given.items()}
        (copy,) = subgraphs.imported(definition, (), (), [shape.name], values)
        with tf.compat.v1.Session(graph=graph) as session:
            return [int(size) for size in session.run(copy)]


def _dims(tensor, layout, records: int) -> list[int]:
    dims: list[Any] = [None]
    if tensor.shape.rank is not None:
        dims = tensor.shape.as_list()
    if layout is not None and layout.axis < len(dims):
        dims[layout.axis] = layout.rows * layout.blocks * records
    if None in dims:
        raise NoRule(f"the shape of {tensor.name} is not known")
    return dims

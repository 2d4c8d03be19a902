"""Weights inside a loop: recurrent layers.

A loop's body uses the weights once an iteration. To see what they meet there, the loop
is run again with a probe at the result of each use: zeros P_t that are added to it, so
that the derivative of the losses by P_t is the cotangent of the use in iteration t. Its
inputs are written down on the way. All iterations of a use are then one use, with t as
one more axis of the record.

    z_t = f(x_t, w) + P_t,     G_i = sum_t (term of w from x_it and dl_i/dP_it)
"""

import dataclasses
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import while_v2

from keras_dpopt.engines import subgraphs, weight_uses
from keras_dpopt.engines.operation_rules import Call
from keras_dpopt.engines.record_axis import NoRule

LOOPS = ("While", "StatelessWhile")


@dataclasses.dataclass(frozen=True)
class LoopCall:
    """What all iterations of a use in a loop's body are together.

    Attributes:
        tensor: The weight as the loop's body sees it, in the graph around the loop.
        same: Whether it is the loop's own input and not made of it in the body.
        call: The use, for `operation_rules.term`.
        cotangent: Of its result.
    """

    tensor: Any
    same: bool
    call: Call
    cotangent: Any


def calls(loop: Any, index: int, cotangents: list, records: Any) -> list[LoopCall]:
    """Finds the uses of one input of a loop in its body.

    Args:
        loop: The operation.
        index: Which of its inputs is a weight, or made of weights.
        cotangents: Of all its outputs; `None` where there is none.
        records: int32 scalar, m.
    """
    body = while_v2._get_graph(loop, "body", "_body_graph")
    if body.outputs[index] is not body.inputs[index]:
        raise NoRule("a loop changes a weight")
    data = [
        t
        for t in body.inputs
        if t.dtype == tf.variant or (t.shape.rank and t.shape[0] is None)
    ]
    (uses,) = weight_uses.find([body.inputs[index]], data)
    if any(use.operation.type in LOOPS for use in uses):
        raise NoRule("loops in loops")
    found = []
    for use, inputs, probe in _run_again(loop, body, uses, cotangents, records):
        same = use.tensor is body.inputs[index]
        tensor = loop.inputs[index] if same else _hoisted(loop, body, use.tensor)
        inputs[use.index] = tensor
        call = Call(use.operation, use.index, inputs, probe)
        found.append(LoopCall(tensor, same, call, probe))
    return found


def _run_again(loop, body, uses, cotangents, records):
    """Runs the loop with probes; returns `(use, inputs, cotangent)` for each use."""
    condition = while_v2._get_graph(loop, "cond", "_cond_graph")
    size = len(cotangents)
    wanted = [*body.outputs[:size], *(t for use in uses for t in _data_inputs(use))]
    definition, taps = _with_probes(body, uses, wanted)
    iterations = loop.inputs[1]
    shapes = [
        [records if size is None else size for size in use.operation.outputs[0].shape]
        for use in uses
    ]
    probes = [
        tf.zeros([iterations, *shape], use.operation.outputs[0].dtype)
        for use, shape in zip(uses, shapes, strict=True)
    ]
    read = [
        tf.TensorArray(p.dtype, size=iterations, element_shape=p.shape[1:]).unstack(p)
        for p in probes
    ]
    written = [
        tf.TensorArray(t.dtype, size=iterations, element_shape=t.shape)
        for use in uses
        for t in _data_inputs(use)
    ]

    def go_on(t, values, _):
        del t
        definition = condition.as_graph_def()
        (more,) = subgraphs.imported(
            definition, condition.inputs, values, [condition.outputs[0].name]
        )
        return more

    def step(t, values, written):
        probes = {f"{tap}_probe:0": array.read(t) for tap, array in taps_read}
        names = [str(moved.get(t.name, t.name)) for t in wanted]
        results = subgraphs.imported(definition, body.inputs, values, names, probes)
        values, seen = results[: len(values)], results[len(values) :]
        for old, new in zip(body.inputs[:size], values, strict=True):
            new.set_shape(old.shape)
        written = [a.write(t, x) for a, x in zip(written, seen, strict=True)]
        return t + 1, values, written

    moved = {use.operation.outputs[0].name: f"{tap}:0" for use, tap in taps}
    taps_read = [(tap, array) for (_, tap), array in zip(taps, read, strict=True)]
    _, values, written = tf.while_loop(
        go_on,
        step,
        (tf.constant(0), list(loop.inputs[:size]), written),
        maximum_iterations=iterations,
    )
    known = [(v, c) for v, c in zip(values, cotangents, strict=True) if c is not None]
    found = tf.gradients([v for v, _ in known], probes, [c for _, c in known])
    stacks = iter([_records_first(array.stack()) for array in written])
    for use, cotangent in zip(uses, found, strict=True):
        inputs = list(use.operation.inputs)
        for i, tensor in enumerate(use.operation.inputs):
            if i != use.index and _is_data(tensor):
                inputs[i] = next(stacks)
        if cotangent is not None:
            yield use, inputs, _records_first(cotangent)


def _with_probes(body, uses, wanted):
    """The body's definition with an addition behind each use."""
    # Only what is wanted: taking derivatives has added accumulators to the body.
    names = [t.op.name for t in wanted]
    definition = subgraphs.needed(body.as_graph_def(), names)
    taps = [(use, f"tap{i}") for i, use in enumerate(uses)]
    instead = {use.operation.name: tap for use, tap in taps}
    for node in definition.node:
        for i, name in enumerate(node.input):
            if subgraphs.read_name(name) in instead and not name.startswith("^"):
                node.input[i] = instead[subgraphs.read_name(name)]
    for use, tap in taps:
        kind = use.operation.outputs[0].dtype.as_datatype_enum
        probe = definition.node.add(name=f"{tap}_probe", op="Placeholder")
        probe.attr["dtype"].type = kind
        node = definition.node.add(
            name=tap, op="AddV2", input=[use.operation.name, probe.name]
        )
        node.attr["T"].type = kind
    return definition, taps


def _is_data(tensor) -> bool:
    return bool(tensor.shape.rank) and tensor.shape[0] is None


def _data_inputs(use):
    return [
        t for i, t in enumerate(use.operation.inputs) if i != use.index and _is_data(t)
    ]


def _records_first(stack):
    """`[m*T, ...]` of `[T, m, ...]`, in the order of the records."""
    order = [1, 0, *range(2, stack.shape.rank)]
    moved = tf.transpose(stack, order)
    flat = tf.reshape(moved, tf.concat([[-1], tf.shape(moved)[2:]], 0))
    return tf.ensure_shape(flat, [None, *moved.shape[2:]])


def _hoisted(loop, body, tensor):
    """A tensor that the body makes of weights alone, made outside of the loop."""
    definition = subgraphs.needed(body.as_graph_def(), [tensor.op.name])
    return subgraphs.imported(definition, body.inputs, loop.inputs, [tensor.name])[0]

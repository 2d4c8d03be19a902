"""Graphs within the graph: functions that a model calls, and copies of their parts."""

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import importer

from keras_dpopt.engines import weight_uses

FUNCTIONS = ("PartitionedCall", "StatefulPartitionedCall")


def needed(definition, names: Iterable[str]) -> Any:
    """The part of a definition that these operations need."""
    nodes = {node.name: node for node in definition.node}
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [read_name(i) for i in nodes[name].input]
    return _with_nodes(definition, (n for n in definition.node if n.name in found))


def read_name(name: str) -> str:
    """The operation that an input of a definition's node comes from."""
    return name.lstrip("^").split(":")[0]


def _with_nodes(definition, nodes) -> Any:
    nodes = list(nodes)
    changed = type(definition)()
    changed.library.CopyFrom(definition.library)
    changed.versions.CopyFrom(definition.versions)
    changed.node.extend(nodes)
    return changed


def imported(definition, placeholders, values, wanted: list[str], others=()) -> list:
    """Adds a definition to the graph, with values for its placeholders."""
    pairs = zip(placeholders, values, strict=False)
    given = {place.name: value for place, value in pairs} | dict(others)
    # XLA knows no placeholder, not even one that nothing uses.
    names = {read_name(name) for name in given}
    bare = _with_nodes(definition, (n for n in definition.node if n.name not in names))
    read = {read_name(name) for node in bare.node for name in node.input}
    used = {name: t for name, t in given.items() if read_name(name) in read}
    inside = [name for name in wanted if name not in given]
    made = importer.import_graph_def(bare, used, inside, name="again")
    results = dict(zip(inside, made, strict=True))
    return [given[name] if name in given else results[name] for name in wanted]


def uses_in_function(
    operation: Any, index: int, cotangents: Sequence[Any]
) -> list[tuple[weight_uses.Use, Any]]:
    """Finds what a called function does with one of its inputs.

    The body is put into the graph; of what is not needed for a gradient, nothing runs.

    Args:
        operation: The call.
        index: Of the input.
        cotangents: Of the results; `None` where there is none.

    Returns:
        Uses, whose paths begin at the input, and their cotangents.
    """
    name = operation.get_attr("f").name
    body = operation.graph._get_function(name).graph
    inputs = [tf.identity(t) for t in operation.inputs]
    # Taking derivatives has added outputs to the call.
    names = [t.name for t in body.outputs[: len(cotangents)]]
    results = imported(body.as_graph_def(), body.inputs, inputs, names)
    data = [t for i, t in enumerate(inputs) if i != index]
    (uses,) = weight_uses.find([inputs[index]], data)
    known = [(r, c) for r, c in zip(results, cotangents, strict=True) if c is not None]
    inner = [t for use in uses for t in use.results[:1]]
    found = tf.gradients([r for r, _ in known], inner, [c for _, c in known])
    return [(u, c) for u, c in zip(uses, found, strict=True) if c is not None]

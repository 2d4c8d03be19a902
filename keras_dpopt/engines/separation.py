"""A proof, from its graph, that a model keeps the records of a batch apart.

The book-keeping engine evaluates a batch as a whole, and clips what each record adds.
That bounds what a record changes only if no record has a part in what another adds. A
trial shows it for the rows that are tried, and not for an outlier that comes later: a
maximum over the batch, or a branch that any record can take, changes nothing until
then. So each operation between the records and their losses has to be one that is known
to keep them apart, with axes that are known before anything runs.

What is proved: of the entries of a tensor, each depends on the values of one record,
and it is known of which (`layout.Layout`). What may depend on the number of
records or on their places is left to the trial, which any row shows.
"""

from collections.abc import Iterable
from typing import Any

from tensorflow.python.framework import ops as framework_ops
from tensorflow.python.ops import while_v2

from keras_dpopt import tensorflow_compat
from keras_dpopt.engines import layout_moves, layout_rules, shape_values, subgraphs
from keras_dpopt.engines.layout import Layout, joined, mixes
from keras_dpopt.engines.loops import LOOPS
from keras_dpopt.engines.record_axis import NoRule

_BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")


class Separation:
    """The layouts of the tensors of a traced model.

    Args:
        rows: The records, tensors whose first axis is theirs.
    """

    def __init__(self, rows: Iterable[Any]):
        self._known: dict[Any, Layout | None] = {t.ref(): Layout(0) for t in rows}

    def check(self, tensor: Any) -> None:
        """Raises unless the tensor has one entry for each record on its first axis."""
        if self.layout(tensor) not in (None, Layout(0)):
            raise mixes(tensor.op)

    def check_use(self, operation: Any) -> None:
        """Raises unless records lie along the first axes, where a weight meets them."""
        for tensor in (*operation.inputs, *operation.outputs):
            layout = self.layout(tensor)
            if layout is not None and layout.axis != 0:
                raise mixes(operation)

    def layout(self, tensor: Any) -> Layout | None:
        """Returns the layout of a tensor; `None` if no record has a part in it.

        Raises:
            NoRule: if records may be mixed in it.
        """
        waiting = [tensor.op]
        while waiting:
            op = waiting[-1]
            # A function of one record at a time needs no proof.
            parts = tensorflow_compat.parts_by_record(op)
            needed = parts or op.inputs
            missing = [t.op for t in needed if t.ref() not in self._known]
            new = any(t.ref() not in self._known for t in op.outputs)
            if missing and new:
                waiting += missing
                continue
            waiting.pop()
            if new:
                inputs = [self._known[t.ref()] for t in needed]
                found = [joined(op, inputs)] if parts else self._layouts(op, inputs)
                self._known.update(
                    (t.ref(), x) for t, x in zip(op.outputs, found, strict=True)
                )
        return self._known[tensor.ref()]

    def _layouts(self, op, inputs) -> list[Layout | None]:
        if all(x is None for x in inputs):
            return [None] * len(op.outputs)
        if op.type in subgraphs.FUNCTIONS:
            body = op.graph._get_function(op.get_attr("f").name).graph
            return self._of_function(body, inputs)[: len(op.outputs)]
        if op.type in LOOPS:
            return self._of_loop(op, inputs)
        if op.type in _BRANCHES:
            return self._of_branches(op, inputs)
        if op.type == "Reshape":
            sizes = shape_values.sizes(op, self._known)
            return [layout_moves.reshaped(op, inputs, sizes)]
        _refuse_own_gradient(op)
        if op.type == "IdentityN":
            return list(inputs)
        return [layout_rules.result(op, inputs)] * len(op.outputs)

    def _of_function(self, body, inputs) -> list[Layout | None]:
        own = Separation(())
        for tensor, layout in zip(body.inputs, inputs, strict=True):
            own._known[tensor.ref()] = layout
        found = [own.layout(t) for t in body.outputs]
        self._known.update(own._known)
        return found

    def _of_loop(self, op, inputs):
        body = while_v2._get_graph(op, "body", "_body_graph")
        condition = while_v2._get_graph(op, "cond", "_cond_graph")
        layouts, before = list(inputs), None
        while layouts != before:  # a state that is no record's at first may become one
            before = layouts
            after = self._of_function(body, before)[: len(before)]
            layouts = [joined(op, [x, y]) for x, y in zip(before, after, strict=True)]
        if any(self._of_function(condition, layouts)):
            raise mixes(op)  # how often it runs would depend on records
        return layouts

    def _of_branches(self, op, inputs):
        if inputs[0] is not None:
            raise mixes(op)  # one record would choose for all
        name = "branches" if "Case" in op.type else None
        names = (
            [f.name for f in op.get_attr(name)]
            if name
            else [op.get_attr(f"{branch}_branch").name for branch in ("then", "else")]
        )
        found = [
            self._of_function(op.graph._get_function(n).graph, inputs[1:])
            for n in names
        ]
        number = len(op.outputs)
        return [
            joined(op, list(of))
            for of in zip(*(f[:number] for f in found), strict=True)
        ]


def _refuse_own_gradient(op) -> None:
    """Raises if the derivative of an operation is a function of the user's."""
    name = op.node_def.attr["_gradient_op_type"].s.decode()
    if not name:
        return
    pending: list[Any] = [framework_ops.gradient_registry.lookup(name)]
    seen: set[int] = set()
    while pending:
        function = pending.pop()
        if id(function) in seen or not callable(function):
            continue
        seen.add(id(function))
        module = (getattr(function, "__module__", None) or "").split(".")[0]
        if module not in ("tensorflow", "keras"):
            raise NoRule(f"{op.name} has a gradient of its own")
        for cell in getattr(function, "__closure__", None) or ():
            pending.append(cell.cell_contents)

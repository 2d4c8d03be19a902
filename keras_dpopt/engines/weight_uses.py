"""Where the weights of a traced model meet the data.

A traced forward pass is a graph. What depends on the weights alone (a transposed
kernel, the product of two low-rank factors) is the same for all records; the first
operation on the way from a weight to the loss whose result is different for each
record is a *use* of the weight. A record's gradient for the weight is the sum over its
uses of what the use makes of its input and of the derivative of the loss by its result.

Nothing of the model is touched: a layer that is called twice, a weight that two layers
share, one that belongs to the model itself or that is used outside its layer's `call`
are all just uses.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

# They tell nothing but a shape.
_SHAPE_OPERATIONS = ("Shape", "ShapeN", "Size", "Rank")


@dataclasses.dataclass(frozen=True)
class Use:
    """An operation in which a weight meets the data.

    Attributes:
        operation: The operation.
        index: Which of its inputs comes from the weight.
        results: The operation's results.
        path: The operations from the weight to that input, each with the index of the
            input that depends on the weight; `None` where they are not one chain.
    """

    operation: Any
    index: int
    results: tuple[Any, ...]
    path: tuple[tuple[Any, int], ...] | None

    @property
    def tensor(self) -> Any:
        """The input that comes from the weight."""
        return self.operation.inputs[self.index]


def find(weights: Sequence[Any], data: Iterable[Any]) -> list[list[Use]]:
    """Finds the uses of all weights in the graph that they are part of.

    Args:
        weights: Tensors of one graph.
        data: Tensors of the same graph, the records.

    Returns:
        For each weight, its uses.
    """
    graph = weights[0].graph
    of_data = _depending(graph, data)
    return [_uses(graph, weight, of_data) for weight in weights]


def _depending(graph, sources: Iterable[Any], cut: bool = True) -> set[str]:
    """Names of the operations whose results depend on the values of `sources`."""
    names = {t.ref() for t in sources}
    found: set[str] = set()
    for op in graph.get_operations():
        if cut and op.type in _SHAPE_OPERATIONS:
            continue
        if any(t.ref() in names or t.op.name in found for t in op.inputs):
            found.add(op.name)
    return found


def _uses(graph, weight, of_data: set[str]) -> list[Use]:
    of_weight = _depending(graph, [weight])
    known: dict[Any, Any] = {weight.ref(): ()}
    uses = []
    for op in graph.get_operations():
        if op.name not in of_weight:
            continue
        indices = [i for i, t in enumerate(op.inputs) if t.ref() in known]
        if not indices:
            continue  # behind a use
        if op.name in of_data or not _is_same_for_all(op):
            results = tuple(op.outputs)
            uses += [Use(op, i, results, known[op.inputs[i].ref()]) for i in indices]
            continue
        before = known[op.inputs[indices[0]].ref()]
        chain = len(indices) == 1 and len(op.outputs) == 1 and before is not None
        path = (*(before or ()), (op, indices[0])) if chain else None
        known.update((t.ref(), path) for t in op.outputs)
    return uses


def _is_same_for_all(operation) -> bool:
    """Whether no axis of the results is that of the records, whose size is unknown."""
    return all(t.shape.is_fully_defined() for t in operation.outputs)

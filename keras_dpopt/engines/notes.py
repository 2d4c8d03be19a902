"""What the book-keeping engine says of itself as it is traced."""

import dataclasses
from typing import Any


@dataclasses.dataclass
class WeightNote:
    """How the gradients of one weight are handled.

    Attributes:
        weight: Its path.
        operations: The kinds of operations that use it.
        form: The norm form: "product", "gram" or "instantiated".
        cost: Of one record, in multiplications, where it is known; see
            `norm_forms.choose`.
    """

    weight: str
    operations: tuple[str, ...]
    form: str
    cost: int | None


@dataclasses.dataclass
class EngineNotes:
    """The notes of one trace.

    Attributes:
        weights: One note for each part of the record that the loss depends on.
        record_bytes: What all tensors of one record take together. An upper bound of
            what a record adds to the memory, because most are freed on the way.
    """

    weights: list[WeightNote] = dataclasses.field(default_factory=list)
    record_bytes: int = 0

    def measure(self, graph: Any, elements: Any) -> None:
        """Adds up the tensors that have an axis of records.

        Args:
            graph: The traced graph.
            elements: Function from a tensor to its entries a record, or `None`.
        """
        self.record_bytes = sum(
            (elements(t) or 0) * t.dtype.size
            for op in graph.get_operations()
            for t in op.outputs
            if t.shape.rank and t.shape[0] is None and t.dtype.size
        )

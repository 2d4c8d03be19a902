"""The axis of the records in the tensors of a traced model."""

from typing import Any

import tensorflow as tf


class NoRule(NotImplementedError):
    """The engine cannot follow what the model does with a weight."""


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

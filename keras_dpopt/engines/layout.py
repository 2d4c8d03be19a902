"""Where the records are in a tensor, and what rules of operations ask of it."""

import dataclasses
from typing import Any

import tensorflow as tf

from keras_dpopt.engines.record_axis import NoRule


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the entries of a tensor belong to records, m of them.

    Attributes:
        axis: The axis on which they lie one after the other.
        rows: How many entries of that axis each record has, next to each other.
        blocks: How many copies of that axis SpaceToBatchND has put one after the other.
    """

    axis: int
    rows: int = 1
    blocks: int = 1


# What a rule gets: for each input its layout, or `None` where it is no record's.
Layouts = list[Layout | None]


def mixes(op: Any) -> NoRule:
    """The error for an operation that is not known to keep records apart."""
    return NoRule(f"{op.type} ({op.name}) is not known to keep records apart")


def joined(op: Any, layouts: Layouts) -> Layout | None:
    """The one layout of several, where each is that or `None`."""
    found = {layout for layout in layouts if layout is not None}
    if len(found) > 1:
        raise mixes(op)
    return found.pop() if found else None


def only(op, inputs: Layouts, *allowed: int) -> Layout:
    """The layout of the inputs that may have one; of the others none does."""
    if any(x is not None and i not in allowed for i, x in enumerate(inputs)):
        raise mixes(op)
    layout = joined(op, inputs)
    if layout is None:
        raise mixes(op)
    return layout


def rank_of(op, tensor) -> int:
    """Returns the rank of a tensor; refuses one that is not known."""
    if tensor.shape.rank is None:
        raise mixes(op)
    return tensor.shape.rank


def static(op, index: int) -> Any:
    """Returns the value of an input; refuses one that is not known."""
    value = tf.get_static_value(op.inputs[index])
    if value is None:
        raise mixes(op)
    return value


def axes_of(op, index: int, rank: int) -> set[int]:
    """Axes that an input names, counted from the front."""
    value = static(op, index).reshape(-1)
    return {int(axis) % rank for axis in value} if rank else set()


def moved(layout: Layout, axis: int) -> Layout:
    """Returns the layout with the records on another axis."""
    return dataclasses.replace(layout, axis=axis)


def stays(op, layout: Layout, *axes: int) -> Layout:
    """The layout, if the operation goes along other axes only."""
    if layout.axis in axes:
        raise mixes(op)
    return layout

"""Where TensorFlow's internals are touched, outside of `engines/`."""

from typing import Any


def is_op_determinism_enabled() -> bool:
    """Whether `tf.config.experimental.enable_op_determinism()` was called."""
    from tensorflow.python.framework import config

    return config.is_op_determinism_enabled()


def eager_mode() -> Any:
    """Returns a context in which operations run eagerly, even within a graph."""
    from tensorflow.python.eager import context

    return context.eager_mode()


_BY_RECORD = "_keras_dpopt_by_record"


def by_record(values: Any, parts: Any) -> Any:
    """Marks what a function of one record has made of the parts of each.

    Args:
        values: A tensor, one number a record.
        parts: The tensors it was made of, one slice a record.

    Returns:
        An equal tensor, from whose operation `parts_by_record` reads the parts.
    """
    import tensorflow as tf

    values = tf.identity(values)
    if not tf.executing_eagerly():
        names = [part.name.encode() for part in parts]
        value = tf.compat.v1.AttrValue(list=tf.compat.v1.AttrValue.ListValue(s=names))
        values.op._set_attr(_BY_RECORD, value)
    return values


def parts_by_record(operation: Any) -> list[Any]:
    """Returns the parts that `by_record` has noted; none for other operations."""
    names = operation.node_def.attr[_BY_RECORD].list.s
    return [operation.graph.get_tensor_by_name(name.decode()) for name in names]

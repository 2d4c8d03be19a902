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

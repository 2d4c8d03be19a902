"""TensorFlow's vectorized map, right and quiet."""

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_dpopt.engines.matmul_converter import sound_matmul


def vectorized_map(function: Callable, elements: Any) -> Any:
    """Returns `tf.vectorized_map(function, elements)`."""
    with sound_matmul(), _without_pfor_notes():
        return tf.vectorized_map(function, elements)


@contextlib.contextmanager
def _without_pfor_notes():
    """Keeps TensorFlow's notes on vectorizing from users.

    It logs "... uses a while_loop. Fix that!" for each convolution whose filter
    gradient it maps by a loop over the records, which costs least on a CPU; and pages
    of traces where it cannot vectorize, which `engines.select` says in one line.
    """
    notes = logging.Filter()
    notes.filter = lambda record: (
        not any(
            text in record.getMessage() for text in ("uses a while_loop", "while pfor")
        )
    )
    logger = tf.get_logger()
    logger.addFilter(notes)
    try:
        yield
    finally:
        logger.removeFilter(notes)

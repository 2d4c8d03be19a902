"""A few rows of the user's data, for what is tried before the training.

Looking at a data set must not take rows away from it: of a generator there are none.
"""

from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dpopt import data, preprocessing

# Batches that are looked at: one that is a Poisson sample may be empty.
_LOOKS = 8


def elements(x: Any, adapter: Any) -> Iterable[Any] | None:
    """The first elements of a data set, or `None` where looking at them takes them.

    Args:
        x: What the user gave.
        adapter: Keras' adapter of it.
    """
    if isinstance(x, keras.utils.PyDataset):
        return (x[i] for i in range(min(_LOOKS, adapter.num_batches or _LOOKS)))
    if isinstance(x, tf.data.Dataset):
        return iter(adapter.get_tf_dataset().take(_LOOKS))
    return None


def of_data_set(x: Any, adapter: Any, preprocess: Callable | None) -> dict | None:
    """Rows of a data set as the model gets them, or `None`."""
    for element in elements(x, adapter) or ():
        rows = data.element_rows(element)
        if preprocessing.number_of_rows(rows):
            return of_rows(rows, preprocess)
    return None


def of_rows(rows: dict, preprocess: Callable | None) -> dict | None:
    """Some of the rows, spread over all of them, as the model gets them."""
    if any(isinstance(t, tf.SparseTensor) for t in tf.nest.flatten(rows)):
        return None
    places = np.linspace(0, preprocessing.number_of_rows(rows) - 1, 3).astype(int)
    some = tf.nest.map_structure(
        lambda t: tf.gather(tf.convert_to_tensor(t), sorted(set(places))), rows
    )
    return preprocessing.run(preprocess, some)

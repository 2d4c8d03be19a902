"""How the ledger of a model gets into the files that Keras and TensorFlow save."""

from typing import Any

import numpy as np
import tensorflow as tf

from keras_dpopt import keras_compat, tensorflow_compat

_KEY = "privacy_ledger"


class LedgerSaving(keras_compat.KerasSaveable, tf.train.experimental.PythonState):
    """Saves what `to_json` returns in every file of weights, and loads it again.

    A subclass has `to_json()`, `load_json(text)`, and `note_missing()` for files
    without a ledger.
    """

    to_json: Any
    load_json: Any
    note_missing: Any

    def save_own_variables(self, store: Any) -> None:
        """Implements Keras' saving."""
        store[_KEY] = np.frombuffer(self.to_json().encode(), dtype=np.uint8)

    def load_own_variables(self, store: Any) -> None:
        """Implements Keras' loading."""
        if _KEY in store.keys():  # noqa: SIM118 - an H5 store is no dict
            self.load_json(bytes(np.asarray(store[_KEY])).decode())
        else:
            self.note_missing()

    def serialize(self) -> str:
        """Implements the saving of `tf.train.Checkpoint`."""
        with tensorflow_compat.eager_mode():  # `tf.saved_model.save` builds a graph
            return self.to_json()

    def deserialize(self, string_value: Any) -> None:
        """Implements the loading of `tf.train.Checkpoint`."""
        self.load_json(tf.compat.as_text(string_value))

    def _obj_type(self):
        return "Loss"  # of Keras' types the one that has no state of its own to skip

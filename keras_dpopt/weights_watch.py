"""Notices weights that anything but the private step has changed, while it trains."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_dpopt.digest import weights_digest

_UNKNOWN = 0


class WeightsWatch:
    """Compares the weights that a step finds with those that the last one left.

    Args:
        variables: The trainable variables.
    """

    def __init__(self, variables: Sequence[Any]):
        self._variables = list(variables)
        self._left = tf.Variable(_UNKNOWN, dtype=tf.int64, trainable=False)
        self._changes = tf.Variable(0, dtype=tf.int64, trainable=False)

    def start(self) -> None:
        """Takes the weights as they are, and forgets what was noticed before."""
        self._changes.assign(0)
        self.remember()

    def remember(self) -> None:
        """Takes the weights as they are: the private step has left them so."""
        self._left.assign(self._digest())

    def forget(self) -> None:
        """Takes whatever the next step finds: a file is being loaded."""
        self._left.assign(_UNKNOWN)

    def compare(self) -> None:
        """Counts a change if the weights are not those that were left."""
        known = self._left.read_value()
        other = tf.not_equal(known, self._digest()) & tf.not_equal(known, _UNKNOWN)
        self._changes.assign_add(tf.cast(other, tf.int64))

    def noticed(self) -> bool:
        """Whether anything else has changed the weights since `start`."""
        return int(self._changes.numpy()) > 0

    def _digest(self) -> tf.Tensor:
        values = [tf.convert_to_tensor(v.value) for v in self._variables]
        digest = weights_digest(values)
        # Never _UNKNOWN, as that of weights that are all zero would be.
        return tf.where(tf.equal(digest, _UNKNOWN), tf.constant(-1, tf.int64), digest)

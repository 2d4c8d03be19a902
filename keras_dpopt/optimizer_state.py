"""The variables of a private optimizer, by name."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dpopt.partial_sum import PartialSum


@dataclasses.dataclass(frozen=True)
class OptimizerState:
    """The state that the parts of an optimizer keep between steps.

    A plain object: Keras tracks the variables where they are made, and only there.

    Attributes:
        per_variable: For each trainable variable, its slots by name.
        scalars: By name, what is kept once for all variables: scalars and small arrays.
        mechanism: Structure of the mechanism's state.
        mechanism_is_secret: Whether that state would give the noise away. It is then
            in variables that neither Keras nor TensorFlow tracks.
        weights_digest: Digest of the weights that the last update left.
        partial_sum: Where a logical batch comes as several physical ones, the sum of
            those that have come; else `None`.
    """

    per_variable: tuple[dict[str, Any], ...]
    scalars: dict[str, Any]
    mechanism: Any
    mechanism_is_secret: bool
    weights_digest: Any
    partial_sum: PartialSum | None

    @classmethod
    def create(
        cls,
        optimizer: keras.optimizers.Optimizer,
        variables: Sequence[Any],
        slots: Mapping[str, float],
        scalars: Mapping[str, Any],
        mechanism: Any,
        mechanism_is_secret: bool = False,
        partial_sum: PartialSum | None = None,
    ) -> "OptimizerState":
        """Makes the variables.

        Args:
            optimizer: Owns the variables.
            variables: The trainable variables.
            slots: Names of the slots of each variable, with the value of their entries
                at first.
            scalars: Names of what is kept once, with its first value.
            mechanism: The mechanism's initial state, a structure of numbers and arrays.
            mechanism_is_secret: See the class.
            partial_sum: See the class.
        """

        def kept(value):
            if mechanism_is_secret:
                with tf.init_scope():
                    return tf.Variable(value, trainable=False, name="secret")
            return shared_variable(optimizer, "mechanism", value)

        return cls(
            tuple(
                {
                    name: optimizer.add_variable_from_reference(
                        variable,
                        name=name,
                        initializer=keras.initializers.Constant(first),
                    )
                    for name, first in slots.items()
                }
                for variable in variables
            ),
            {name: shared_variable(optimizer, name, v) for name, v in scalars.items()},
            tf.nest.map_structure(kept, mechanism),
            mechanism_is_secret,
            shared_variable(optimizer, "weights_digest", 0, "int64"),
            partial_sum,
        )

    def named(self) -> dict[str, Any]:
        """Returns all variables that may be saved, each by a name of its own."""
        named = {
            f"{name}.{i}": slot
            for i, slots in enumerate(self.per_variable)
            for name, slot in slots.items()
        }
        named.update(self.scalars)
        if not self.mechanism_is_secret:
            named.update(self._mechanism_named())
        named["weights_digest"] = self.weights_digest
        return named

    def secrets(self) -> dict[str, Any]:
        """Returns the variables that `BackupAndRestore` alone may write."""
        secrets = self._mechanism_named() if self.mechanism_is_secret else {}
        if self.partial_sum is not None:
            secrets |= self.partial_sum.variables()
        return secrets

    def _mechanism_named(self) -> dict[str, Any]:
        flat = tf.nest.flatten(self.mechanism)
        return {f"mechanism.{i}": variable for i, variable in enumerate(flat)}


def shared_variable(
    optimizer: keras.optimizers.Optimizer, name: str, value: Any, dtype: str = "float32"
) -> Any:
    """Adds a variable that is kept once, not for each trainable variable."""
    value = np.asarray(value)
    return optimizer.add_variable(
        value.shape,
        initializer=keras.initializers.Constant(value),
        dtype=dtype,
        aggregation="only_first_replica",
        name=name,
    )


def assign(variables: dict[str, Any], values: dict[str, Any]) -> None:
    """Assigns values to variables of the same names."""
    for name, value in values.items():
        variables[name].assign(value)

"""The variables of a private optimizer, by name."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class OptimizerState:
    """The state that the parts of an optimizer keep between steps.

    A plain object: Keras tracks the variables where they are made, and only there.

    Attributes:
        per_variable: For each trainable variable, its slots by name.
        scalars: Scalar slots by name.
        mechanism: Structure of the mechanism's state.
        weights_digest: Digest of the weights that the last update left.
    """

    per_variable: tuple[dict[str, Any], ...]
    scalars: dict[str, Any]
    mechanism: Any
    weights_digest: Any

    @classmethod
    def create(
        cls,
        optimizer: keras.optimizers.Optimizer,
        variables: Sequence[Any],
        slots: Iterable[str],
        scalars: Iterable[str],
        mechanism: Any,
    ) -> "OptimizerState":
        """Makes the variables.

        Args:
            optimizer: Owns the variables.
            variables: The trainable variables.
            slots: Names of the slots of each variable, zero at first.
            scalars: Names of the scalar slots, zero at first.
            mechanism: The mechanism's initial state, a structure of scalars.
        """
        slots = tuple(slots)
        return cls(
            tuple(
                {
                    name: optimizer.add_variable_from_reference(variable, name=name)
                    for name in slots
                }
                for variable in variables
            ),
            {name: scalar_variable(optimizer, name, 0.0) for name in scalars},
            tf.nest.map_structure(
                lambda value: scalar_variable(optimizer, "mechanism", float(value)),
                mechanism,
            ),
            scalar_variable(optimizer, "weights_digest", 0, "int64"),
        )

    def named(self) -> dict[str, Any]:
        """Returns all variables, each by a name of its own."""
        named = {
            f"{name}.{i}": slot
            for i, slots in enumerate(self.per_variable)
            for name, slot in slots.items()
        }
        named.update(self.scalars)
        for i, variable in enumerate(tf.nest.flatten(self.mechanism)):
            named[f"mechanism.{i}"] = variable
        named["weights_digest"] = self.weights_digest
        return named


def scalar_variable(
    optimizer: keras.optimizers.Optimizer, name: str, value: Any, dtype: str = "float32"
) -> Any:
    """Adds a scalar variable to an optimizer."""
    return optimizer.add_variable(
        (),
        initializer=keras.initializers.Constant(value),
        dtype=dtype,
        aggregation="only_first_replica",
        name=name,
    )


def assign(variables: dict[str, Any], values: dict[str, Any]) -> None:
    """Assigns values to variables of the same names."""
    for name, value in values.items():
        variables[name].assign(value)

"""What a mechanism is told of the steps that come, and what it makes of them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dpopt import validation


@dataclasses.dataclass(frozen=True)
class ComingSteps:
    """The steps of one fit, as far as they are known before it.

    Attributes:
        steps: Their number; `None` where the caller's data set does not tell.
        batch_size: B.
        train_size: N, or `None` where the caller's data set does not tell.
        drawn: Whether the library draws the batches.
        learning_rates: Returns the learning rate of each step, a float64 array.
    """

    steps: int | None
    batch_size: int
    train_size: int | None
    drawn: bool
    learning_rates: Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """How a mechanism wants the steps to be made, and accounted.

    Attributes:
        sampler: The sampler that it is accounted for.
        allows_other_samplers: Whether the user may choose another.
        phase: Fields of the ledger's `Phase` that are other than usual.
    """

    sampler: Any
    allows_other_samplers: bool = True
    phase: dict[str, Any] = dataclasses.field(default_factory=dict)


@keras.saving.register_keras_serializable(package="keras_dpopt")
class ConstantRate(keras.optimizers.schedules.LearningRateSchedule):
    """A constant learning rate that nothing can assign.

    Args:
        value: The rate.
    """

    def __init__(self, value: float):
        self.value = validation.check_positive("learning_rate", value)

    def __call__(self, step):
        """Returns the rate."""
        del step
        return keras.ops.convert_to_tensor(self.value, "float32")

    def get_config(self):
        """Returns the configuration."""
        return {"value": self.value}


def schedule_values(learning_rate: Any, first: int, steps: int | None) -> np.ndarray:
    """Returns the learning rate of each coming step.

    Args:
        learning_rate: A Keras schedule; a variable or a callable has no values ahead.
        first: Number of the first coming update.
        steps: How many.

    Raises:
        ValueError: if the learning rates are not known ahead.
    """
    if steps is None or isinstance(learning_rate, tf.Variable):
        raise ValueError(
            "The learning rates of the coming steps are not known. Pass a "
            "LearningRateSchedule, and data of known length."
        )
    numbers = tf.range(first, first + steps, dtype=tf.int64)
    values = tf.function(
        lambda: tf.map_fn(
            lambda k: tf.cast(learning_rate(k), tf.float32),
            numbers,
            fn_output_signature=tf.float32,
        )
    )()
    return values.numpy().astype(np.float64)

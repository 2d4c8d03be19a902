"""The loss of one record.

Keras computes one loss of a batch. Differential privacy needs the loss of each record
alone, evaluated as a batch of one, so that no record can move another's gradient:

    l_i = w_i * reduce_t l(y_it, f(x_i)_it)  +  add_loss and activity losses of record i

where `reduce` is the mean over the record's unmasked elements t ("sum": their sum).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from keras_dpopt import keras_compat
from keras_dpopt.types import UnsupportedModelError


@dataclasses.dataclass(frozen=True)
class RecordOutputs:
    """What the evaluation of one record gives.

    Attributes:
        loss: Scalar, l_i.
        y_pred: The model's output, with a leading axis of length 1.
        masks: Keras masks of the flattened `y_pred`, by index; only those that exist.
    """

    loss: Any
    y_pred: Any
    masks: dict[str, Any]


class RecordLoss:
    """Evaluates a compiled model on one record, at given values of its variables.

    Args:
        model: A built, compiled model.
        other_variables: The model's variables that are not trained, without the states
            of its seed generators.
        seed_states: The states of the seed generators.
    """

    def __init__(
        self,
        model: keras.Model,
        other_variables: Sequence[Any],
        seed_states: Sequence[Any],
    ):
        self._model = model
        self._trainable = list(model.trainable_variables)
        self._other = list(other_variables)
        self._seed_states = list(seed_states)
        self._overrides_loss = keras_compat.overrides_compute_loss(model)
        compiled = keras_compat.compiled_losses(model)
        self._compiled = compiled and keras_compat.record_loss(compiled, single_loss)

    def __call__(self, weights, other_values, seeds, record) -> RecordOutputs:
        """Evaluates the record.

        Args:
            weights: Values of the trainable variables.
            other_values: Values of the other variables.
            seeds: `[number of seed generators, 2]`, their states for this record.
            record: Dict with "x" and, where given, "y" and "sample_weight", without a
                batch axis.

        Raises:
            UnsupportedModelError: if a layer writes batch data into the model's state.
        """
        batch = tf.nest.map_structure(lambda t: t[tf.newaxis], record)
        x, y = batch["x"], batch.get("y")
        sample_weight = batch.get("sample_weight")
        mapping = [
            *zip(self._trainable, weights, strict=True),
            *zip(self._other, other_values, strict=True),
            *zip(self._seed_states, tf.unstack(seeds), strict=True),
        ]
        with keras.StatelessScope(mapping, collect_losses=True) as scope:
            before = keras_compat.state_of(scope)
            y_pred = keras_compat.call_for_training(self._model, x)
            loss = self._total(x, y, y_pred, sample_weight, scope)
            self._refuse_writes(before, keras_compat.state_of(scope))
        masks = {
            str(i): mask
            for i, mask in enumerate(
                map(keras_compat.keras_mask, tf.nest.flatten(y_pred))
            )
            if mask is not None
        }
        return RecordOutputs(ops.cast(loss, "float32"), y_pred, masks)

    def _total(self, x, y, y_pred, sample_weight, scope):
        if self._overrides_loss:
            # The user's own loss on a batch of one; Keras would divide its mean-type
            # reductions by the number of replicas.
            value = keras_compat.compute_loss(self._model, x, y, y_pred)
            if sample_weight is not None:
                value *= ops.mean(sample_weight)
            return value
        terms = []
        if self._compiled is not None:
            terms.append(self._compiled(y, y_pred, sample_weight))
        terms += [ops.cast(v, "float32") for v in keras_compat.collected_losses(scope)]
        if not terms:
            raise ValueError(
                "The model has no loss. Give `loss` to `compile()`, or call "
                "`add_loss()` in a layer."
            )
        return sum(terms[1:], terms[0])

    def _refuse_writes(self, before: dict, after: dict):
        """Only seed generators may write: other state would carry raw data out."""
        allowed = {id(v) for v in self._seed_states}
        changed = {
            key
            for key, value in after.items()
            if before.get(key) is not value and key not in allowed
        }
        if not changed:
            return
        names = sorted(
            f"{layer.name} ({type(layer).__name__})"
            for layer in keras_compat.flat_layers(self._model)
            if layer is not self._model
            and changed & {id(v) for v in keras_compat.own_variables(layer)}
        )
        raise UnsupportedModelError(
            f"Layer {', '.join(names) or 'of this model'} writes batch data into its "
            "state, which would leave the training unclipped and without noise. Use "
            "GroupNormalization or LayerNormalization instead of batch statistics, or "
            "freeze the layer (`layer.trainable = False`)."
        )


def single_loss(loss, y_true, y_pred, sample_weight):
    """Reduces one loss over the elements of one record (DESIGN rule 4).

    Args:
        loss: A `keras.losses.Loss`.
        y_true: Targets with a leading axis of length 1.
        y_pred: Predictions with a leading axis of length 1.
        sample_weight: `None`, shape `[1]` (multiplies the reduced loss), or a longer
            shape (multiplies the elements).

    Returns:
        Scalar.
    """
    if type(loss).__call__ is not keras_compat.Loss.__call__:
        value = ops.mean(loss(y_true, y_pred))
        return value if sample_weight is None else value * ops.mean(sample_weight)
    in_mask = keras_compat.keras_mask(y_pred)
    y_true, y_pred = keras.tree.map_structure(
        lambda t: ops.convert_to_tensor(t, dtype=loss.dtype), (y_true, y_pred)
    )
    values = ops.convert_to_tensor(loss.call(y_true, y_pred))
    mask = _joined(in_mask, keras_compat.keras_mask(values))
    weight = ops.ones_like(values)
    if mask is not None:
        weight = weight * _broadcast(ops.cast(mask, values.dtype), values)
    counted = ops.sum(weight)
    factor = 1.0
    if sample_weight is not None:
        sample_weight = ops.cast(sample_weight, values.dtype)
        if sample_weight.shape.num_elements() == 1:
            factor = ops.reshape(sample_weight, ())
        else:
            weight = weight * _broadcast(sample_weight, values)
            if loss.reduction == "mean_with_sample_weight":
                counted = ops.sum(weight)
    # Masked elements drop out by select: what they hold may not be finite.
    total = ops.sum(ops.where(weight == 0, 0.0, values * weight))
    if loss.reduction == "sum":
        return total * factor
    return ops.divide_no_nan(total, counted) * factor


def _joined(first, second):
    if first is None or second is None:
        return first if second is None else second
    return first & second


def _broadcast(weight, values):
    """Adds or drops last axes of length 1 until `weight` broadcasts to `values`."""
    while len(weight.shape) > len(values.shape) and weight.shape[-1] == 1:
        weight = weight[..., 0]
    while len(weight.shape) < len(values.shape):
        weight = weight[..., tf.newaxis]
    return ops.broadcast_to(weight, ops.shape(values))

"""The loss of one record.

Keras computes one loss of a batch. Differential privacy needs the loss of each record
alone, evaluated as a batch of one, so that no record can move another's gradient:

    l_i = w_i * reduce_t l(y_it, f(x_i)_it)  +  add_loss and activity losses of record i

where `reduce` is the mean over the record's unmasked elements t ("sum": their sum).

With K copies of a record (augmentation multiplicity, of De et al., "Unlocking
high-accuracy differentially private image classification through scale", 2022) it is
the mean over the copies,

    l_i = 1/K sum_k l_ik

which differ in what random layers draw for them. One gradient, of the mean, is clipped.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from keras_dpopt import keras_compat
from keras_dpopt.loss_reduction import row_losses, single_loss
from keras_dpopt.types import UnsupportedModelError


@dataclasses.dataclass(frozen=True)
class RecordOutputs:
    """What the evaluation of one record gives.

    Attributes:
        loss: Scalar, l_i.
        y_pred: The model's output, with a leading axis of length 1; of several copies,
            the first one's.
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
        copies: K, 1 or more: how often a record is evaluated.
        training: Whether the model runs as in training.

    Raises:
        ValueError: if `copies` is less than 1.

    Privacy:
        The copies of a record are one record. Their mean is taken before the gradient
        and the gradient is clipped once, so the sensitivity does not depend on K.
    """

    def __init__(
        self,
        model: keras.Model,
        other_variables: Sequence[Any],
        seed_states: Sequence[Any],
        copies: int = 1,
        training: bool = True,
    ):
        if copies < 1:
            raise ValueError(
                f"copies must be at least 1, got {copies}. 1 evaluates a record once."
            )
        self._copies, self._training = copies, training
        self._model = model
        self._trainable = list(model.trainable_variables)
        self._other = list(other_variables)
        self._seed_states = list(seed_states)
        self._overrides_loss = keras_compat.overrides_compute_loss(model)
        compiled = keras_compat.compiled_losses(model)
        self._compiled = compiled and keras_compat.record_loss(compiled, single_loss)
        self._of_rows = compiled and keras_compat.record_loss(compiled, row_losses)
        # A crop is drawn once for a batch: the copies would all get the same.
        self._in_one_call = not any(
            isinstance(layer, keras.layers.RandomCrop)
            for layer in keras_compat.flat_layers(model)
        )

    def __call__(self, weights, other_values, seeds, record) -> RecordOutputs:
        """Evaluates the record.

        All copies are one batch and one call of the model, in which random layers draw
        for each row. Where that is not the mean of the copies, the model is called once
        for each: with a layer that draws once for its batch (RandomCrop), and with
        layers that call `add_loss`, whose value may be a sum over the batch.

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
        values = [
            *zip(self._trainable, weights, strict=True),
            *zip(self._other, other_values, strict=True),
        ]
        states = tf.unstack(seeds)
        if self._in_one_call or self._copies == 1:
            outputs, _ = self._call(values, states, batch, self._copies)
            if outputs is not None:
                return outputs
            self._in_one_call = False
        evaluated = []
        for _ in range(self._copies):
            outputs, states = self._call(values, states, batch, 1)
            evaluated.append(outputs)
        loss = _mean([outputs.loss for outputs in evaluated])
        return dataclasses.replace(evaluated[0], loss=loss)

    def on_batch(self, weights, other_values, states, rows) -> RecordOutputs:
        """Evaluates all records of a batch in one call of the model.

        Args:
            weights: Values of the trainable variables.
            other_values: Values of the other variables.
            states: `[number of seed generators, 2]`, their states.
            rows: As `record`, with a batch axis of unknown size.

        Returns:
            The outputs, of which all have a batch axis; the loss of several copies is
            their mean.

        Raises:
            NotImplementedError: if the loss is more than what comes of the model's
                outputs.
            UnsupportedModelError: if a layer writes batch data into the model's state.
        """
        if self._overrides_loss or self._of_rows is None or not self._in_one_call:
            raise NotImplementedError(
                "the loss is the model's own, or copies are drawn"
            )
        copies = self._copies
        repeated = tf.nest.map_structure(
            lambda t: t if copies == 1 else tf.repeat(t, copies, axis=0), rows
        )
        mapping = [
            *zip(self._trainable, weights, strict=True),
            *zip(self._other, other_values, strict=True),
            *zip(self._seed_states, tf.unstack(states), strict=True),
        ]
        with keras.StatelessScope(mapping, collect_losses=True) as scope:
            before = keras_compat.state_of(scope)
            x = repeated["x"]
            y_pred = keras_compat.call_for_training(self._model, x, self._training)
            if keras_compat.collected_losses(scope):
                raise NotImplementedError("a layer adds a loss of its own")
            losses = self._of_rows(
                repeated.get("y"), y_pred, repeated.get("sample_weight")
            )
            self._refuse_writes(before, keras_compat.state_of(scope))
        losses = ops.mean(ops.reshape(ops.cast(losses, "float32"), (-1, copies)), 1)
        masks = _masks(y_pred)
        if copies > 1:
            first = lambda t: _in_copies(t, copies)[:, 0]  # noqa: E731
            y_pred, masks = tf.nest.map_structure(first, (y_pred, masks))
        return RecordOutputs(losses, y_pred, masks)

    def _call(self, values, states, batch, copies):
        """Calls the model once, on so many copies.

        Returns:
            `(RecordOutputs, states of the seed generators afterwards)`, with `None` in
            the place of the outputs if they are not those of the copies one by one.
        """
        x, y = batch["x"], batch.get("y")
        sample_weight = batch.get("sample_weight")
        mapping = [*values, *zip(self._seed_states, states, strict=True)]
        with keras.StatelessScope(mapping, collect_losses=True) as scope:
            before = keras_compat.state_of(scope)
            many = _repeated(x, copies)
            y_pred = keras_compat.call_for_training(self._model, many, self._training)
            if copies > 1 and keras_compat.collected_losses(scope):
                return None, states
            rows = [_row(y_pred, k, copies) for k in range(copies)]
            loss = _mean([self._total(x, y, r, sample_weight, scope) for r in rows])
            after = keras_compat.state_of(scope)
            self._refuse_writes(before, after)
        outputs = RecordOutputs(ops.cast(loss, "float32"), rows[0], _masks(rows[0]))
        return outputs, [after[id(state)] for state in self._seed_states]

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


def _masks(y_pred: Any) -> dict[str, Any]:
    """The Keras masks of outputs, by index; only those that exist."""
    masks = map(keras_compat.keras_mask, tf.nest.flatten(y_pred))
    return {str(i): mask for i, mask in enumerate(masks) if mask is not None}


def _mean(losses: list) -> Any:
    """The mean of scalars; one alone as it is, to the last bit."""
    if len(losses) == 1:
        return losses[0]
    return ops.mean(ops.stack([ops.cast(loss, "float32") for loss in losses]))


def _in_copies(t, copies):
    """`[m, copies, ...]` of `[m*copies, ...]`."""
    return tf.reshape(t, tf.concat([[-1, copies], tf.shape(t)[1:]], 0))


def _repeated(x: Any, copies: int) -> Any:
    """Repeats a batch of one `copies` times."""
    if copies == 1:
        return x
    return tf.nest.map_structure(
        lambda t: tf.tile(t, [copies] + [1] * (t.shape.rank - 1)), x
    )


def _row(y_pred: Any, index: int, copies: int) -> Any:
    """Row `index` of a batch of `copies`, as a batch of one, with its masks."""
    if copies == 1:
        return y_pred

    def cut(tensor):
        if tensor.shape.rank == 0 or tensor.shape[0] not in (None, copies):
            raise UnsupportedModelError(
                f"An output of shape {tensor.shape} for a batch of {copies} copies of "
                "a record has no row for each. Let the model keep the batch axis, or "
                "train it with one copy."
            )
        row = tensor[index : index + 1]
        mask = keras_compat.keras_mask(tensor)
        if mask is not None:
            keras_compat.set_keras_mask(row, mask[index : index + 1])
        return row

    return tf.nest.map_structure(cut, y_pred)

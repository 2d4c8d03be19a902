"""From the loss of a record's elements to the loss of the record.

    l_i = w_i * reduce_t l(y_it, f(x_i)_it)

where `reduce` is the mean over the record's unmasked elements t ("sum": their sum), and
an array w of one number for each element weighs the elements instead.
"""

import keras
import tensorflow as tf
from keras import ops

from keras_dpopt import keras_compat, tensorflow_compat


def single_loss(loss, y_true, y_pred, sample_weight):
    """Reduces one loss over the elements of one record, l_i of the module.

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
    return _reduced(loss, y_true, y_pred, sample_weight, rows=False)


def row_losses(loss, y_true, y_pred, sample_weight):
    """Returns `single_loss` of every record of a batch, `[m]`.

    Keras' own losses are called once, and any other function once for each record, so
    that it cannot mix them.
    """
    if _is_of_keras(loss):
        losses = _reduced(loss, y_true, y_pred, sample_weight, rows=True)
        if losses is not None:
            return losses
    mask = keras_compat.keras_mask(y_pred)
    parts = {"y": y_true, "y_pred": y_pred, "weight": sample_weight, "mask": mask}
    given = {name: part for name, part in parts.items() if part is not None}

    def one(record):
        row = tf.nest.map_structure(lambda t: t[tf.newaxis], record)
        if mask is not None:
            keras_compat.set_keras_mask(row["y_pred"], row["mask"])
        return single_loss(loss, row.get("y"), row["y_pred"], row.get("weight"))

    losses = tf.vectorized_map(one, given)
    return tensorflow_compat.by_record(losses, tf.nest.flatten(given))


def _is_of_keras(loss) -> bool:
    """Whether a loss is one of Keras' own, the function that it wraps included.

    Not a hinge loss: whether 0 stands for -1 there, the labels of the batch decide.
    """
    function = getattr(loss, "fn", loss)
    if function in (keras.losses.hinge, keras.losses.squared_hinge):
        return False
    modules = (type(loss).__module__, getattr(function, "__module__", None) or "")
    return all(module.split(".")[0] == "keras" for module in modules)


def _reduced(loss, y_true, y_pred, sample_weight, rows: bool):
    """The loss of all elements reduced to one number, or to one for each row.

    Returns `None` for rows if the loss has no number for each.
    """
    in_mask = keras_compat.keras_mask(y_pred)
    y_true, y_pred = keras.tree.map_structure(
        lambda t: ops.convert_to_tensor(t, dtype=loss.dtype), (y_true, y_pred)
    )
    values = ops.convert_to_tensor(loss.call(y_true, y_pred))
    if rows and (not values.shape.rank or values.shape[0] is not None):
        return None
    axes = list(range(1, values.shape.rank)) if rows else None
    mask = _joined(in_mask, keras_compat.keras_mask(values))
    weight = ops.ones_like(values)
    if mask is not None:
        weight = weight * _broadcast(ops.cast(mask, values.dtype), values)
    counted = ops.sum(weight, axis=axes)
    factor = 1.0
    if sample_weight is not None:
        sample_weight = ops.cast(sample_weight, values.dtype)
        if sample_weight.shape[1:].num_elements() == 1:
            factor = ops.reshape(sample_weight, (-1,) if rows else ())
        else:
            weight = weight * _broadcast(sample_weight, values)
            if loss.reduction == "mean_with_sample_weight":
                counted = ops.sum(weight, axis=axes)
    # Masked elements drop out by select: what they hold may not be finite.
    total = ops.sum(ops.where(weight == 0, 0.0, values * weight), axis=axes)
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

"""Diagnostics that look at raw gradients: their outputs are NOT private.

They change nothing in the training. What they return is a function of the records
without clip or noise, so each notes itself in the model's ledger, for the statement to
list, unless the rows are said to be held out.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dpopt import validation
from keras_dpopt.diagnostics_private import check_private_model
from keras_dpopt.diagnostics_records import RawRecords, note


@dataclasses.dataclass(frozen=True)
class GradientBias:
    """What `gradient_bias` returns. Not private.

    With g the mean of the records' gradients and c the mean of the clipped ones:

    Attributes:
        bias_norm: ||c - g||.
        gradient_norm: ||g||.
        cosine: <g, c> / (||g|| ||c||), the part of the bias that is of direction.
        norm_ratio: ||c|| / ||g||, the part that is of length.
        fraction_clipped: Fraction of the records whose gradient is longer than C; NaN
            where C is not known.
        norm_quantiles: For each level asked for, that quantile of the gradients' norms.
        records: Number of records.
    """

    bias_norm: float
    gradient_norm: float
    cosine: float
    norm_ratio: float
    fraction_clipped: float
    norm_quantiles: dict[float, float]
    records: int


def gradient_bias(
    model: Any,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    quantiles: Sequence[float] = (0.25, 0.5, 0.75, 0.9),
    held_out: bool = False,
    seed: int = 0,
) -> GradientBias:
    """Not private: measures what the clip does to the mean gradient of some records.

        Bias = E[g_priv] - g = (1/n) * sum_i (clip(g_i, C) - g_i)

    (Knolle et al., "Bias-Aware Minimisation", Fig. 2): the
    noise has mean zero, so that the clip alone is to blame. g_i is the gradient at the
    weights as they are, also for an optimizer whose record is another (FiBeR, BAM): the
    number can be compared between optimizers.

    The records are evaluated one after the other; take a few hundred.

    Args:
        model: A compiled private model.
        x: Arrays, as `fit` takes them.
        y: Targets.
        sample_weight: Weights.
        quantiles: Levels in [0, 1].
        held_out: The caller's word that the model does not train on these rows, which
            leaves the note in the statement out.
        seed: int, for random layers, which draw as in training.

    Returns:
        A `GradientBias`.

    Raises:
        TypeError: if the model is not private.
        ValueError: if it is not compiled.

    Privacy:
        Raw functions of the records, without noise. Do not publish them and do not
        tune by them, unless the rows are held out and may be published.

    Example:
        >>> import keras_dpopt
        >>> model = keras_dpopt.DPSequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> optimizer = keras_dpopt.DPSGD(l2_norm_clip=1e9, noise_multiplier=1.0)
        >>> model.compile(optimizer, loss="mse")
        >>> x, y = np.eye(2, dtype="float32"), np.ones((2, 1), "float32")
        >>> bias = gradient_bias(model, x, y)
        >>> bias.fraction_clipped, round(bias.cosine, 4)
        (0.0, 1.0)
    """
    records = RawRecords("gradient_bias", model, x, y, sample_weight, seed, held_out)
    optimizer = model.optimizer
    found = records.gradients()
    raw, clipped = _flat(found["raw"]), _flat(found["clipped"])
    norms = found["stacked"].numpy().astype(np.float64)
    clip = optimizer.mechanism.current_clip(optimizer.mechanism_state())
    raw_norm, clipped_norm = np.linalg.norm(raw), np.linalg.norm(clipped)
    with np.errstate(invalid="ignore", divide="ignore"):
        cosine = np.dot(raw, clipped) / (raw_norm * clipped_norm)
        ratio = clipped_norm / raw_norm
    return GradientBias(
        bias_norm=float(np.linalg.norm(clipped - raw)),
        gradient_norm=float(raw_norm),
        cosine=float(cosine),
        norm_ratio=float(ratio),
        fraction_clipped=(
            math.nan if clip is None else float(np.mean(norms > float(clip)))
        ),
        norm_quantiles={float(q): float(np.quantile(norms, q)) for q in quantiles},
        records=len(norms),
    )


def sharpness(
    model: Any,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    radius: float = 0.05,
    held_out: bool = False,
    seed: int = 0,
) -> float:
    """Not private: returns how much the loss rises along the gradient of a batch.

        loss(theta + radius * g/||g||) - loss(theta),   g = grad loss(theta),

    the first-order proxy of the maximum over a ball (Foret et al., "Sharpness-Aware
    Minimization", ICLR 2021, equation 2), with the mean loss of the records. The
    weights are passed as values.

    Args:
        model: A compiled private model.
        x: Arrays, as `fit` takes them.
        y: Targets.
        sample_weight: Weights.
        radius: Positive.
        held_out: As in `gradient_bias`.
        seed: As in `gradient_bias`.

    Returns:
        The rise of the loss; 0 where the gradient is zero.

    Raises:
        TypeError: if the model is not private.
        ValueError: if it is not compiled, or the radius is out of range.

    Privacy:
        As `gradient_bias`.
    """
    radius = validation.check_positive("radius", radius)
    records = RawRecords("sharpness", model, x, y, sample_weight, seed, held_out)
    found = records.gradients()
    norm = np.linalg.norm(_flat(found["raw"]))
    if not norm > 0.0:
        return 0.0
    raised = [
        w + tf.cast(radius / norm, w.dtype) * g
        for w, g in zip(records.weights, found["raw"], strict=True)
    ]
    here, there = records.mean_losses(records.weights, raised)
    return there - here


class _RawDiagnostic(keras.callbacks.Callback):
    """Measures some records after every few epochs, and notes itself in the ledger."""

    def __init__(self, x, y, sample_weight, every, held_out, seed):
        super().__init__()
        self._data = (x, y, sample_weight)
        self.every = validation.check_positive_integer("every", every)
        self.held_out, self._seed = held_out, seed
        self.history: list[dict[str, float]] = []

    def measure(self, model: Any, *rows: Any, **given: Any) -> dict[str, float]:
        """Returns what is to be logged, by name."""
        raise NotImplementedError

    def on_train_begin(self, logs=None):
        """Notes that raw data will be looked at."""
        del logs
        check_private_model(type(self).__name__, self.model)
        if not self.held_out:
            note(type(self).__name__, self.model)

    def on_epoch_end(self, epoch, logs=None):
        """Measures, and adds the values to the logs."""
        if (epoch + 1) % self.every:
            return
        # It has noted itself, so the function need not.
        given = {"held_out": True, "seed": self._seed}
        values = self.measure(self.model, *self._data, **given)
        self.history.append({"epoch": epoch, **values})
        if logs is not None:
            logs.update(values)


class NonPrivateGradientBias(_RawDiagnostic):
    """NOT private: logs what the clip does to the mean gradient; see `gradient_bias`.

    The logs get "nonprivate_gradient_bias", "nonprivate_gradient_cosine",
    "nonprivate_norm_ratio" and "nonprivate_fraction_clipped".

    Args:
        x: Arrays, as `fit` takes them; a few hundred rows.
        y: Targets.
        sample_weight: Weights.
        every: Positive int, after every how many epochs it is measured.
        held_out: The caller's word that the model does not train on these rows.
        seed: int, for random layers.

    Attributes:
        history: A dict for each measurement, with "epoch".

    Raises:
        TypeError: at the beginning of `fit`, if the model is not private.

    Privacy:
        The values are raw functions of the records, and the privacy statement lists
        the callback unless the rows are held out.

    Example:
        >>> callback = NonPrivateGradientBias(np.eye(2), np.ones((2, 1)), held_out=True)
        >>> callback.history
        []
    """

    def __init__(
        self, x, y=None, sample_weight=None, *, every=1, held_out=False, seed=0
    ):
        super().__init__(x, y, sample_weight, every, held_out, seed)

    def measure(self, model, *rows, **given):
        """Returns the numbers."""
        bias = gradient_bias(model, *rows, **given)
        return {
            "nonprivate_gradient_bias": bias.bias_norm,
            "nonprivate_gradient_cosine": bias.cosine,
            "nonprivate_norm_ratio": bias.norm_ratio,
            "nonprivate_fraction_clipped": bias.fraction_clipped,
        }


class NonPrivateSharpness(_RawDiagnostic):
    """NOT private: logs how much the loss rises along its gradient; see `sharpness`.

    The logs get "nonprivate_sharpness".

    Args:
        x: Arrays, as `fit` takes them; a few hundred rows.
        y: Targets.
        sample_weight: Weights.
        radius: Positive.
        every: Positive int, after every how many epochs it is measured.
        held_out: The caller's word that the model does not train on these rows.
        seed: int, for random layers.

    Attributes:
        history: A dict for each measurement, with "epoch".

    Raises:
        TypeError: at the beginning of `fit`, if the model is not private.

    Privacy:
        As `NonPrivateGradientBias`.

    Example:
        >>> NonPrivateSharpness(np.eye(2), np.ones((2, 1)), radius=0.1).radius
        0.1
    """

    def __init__(
        self,
        x,
        y=None,
        sample_weight=None,
        *,
        radius=0.05,
        every=1,
        held_out=False,
        seed=0,
    ):
        super().__init__(x, y, sample_weight, every, held_out, seed)
        self.radius = validation.check_positive("radius", radius)

    def measure(self, model, *rows, **given):
        """Returns the number."""
        rise = sharpness(model, *rows, radius=self.radius, **given)
        return {"nonprivate_sharpness": rise}


def _flat(tensors: Sequence[Any]) -> np.ndarray:
    return np.concatenate([np.ravel(t).astype(np.float64) for t in tensors])

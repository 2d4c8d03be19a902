"""Predictions averaged over a posterior of the weights, or over dropout masks."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dpopt import calibration, data, keras_compat, posterior_sources, validation


@dataclasses.dataclass(frozen=True)
class PosteriorPrediction:
    """What `posterior_predict` returns, in the structure of the model's outputs.

    Attributes:
        mean: Mean over the samples, `[n, ...]`.
        variance: Variance over the samples with divisor S - 1, the estimate of the
            posterior predictive variance; NaN where S is 1.
        num_samples: S. The mean has the standard error sqrt(variance / S).
        samples: All outputs, `[S, n, ...]`, if they were to be kept; else `None`.
    """

    mean: Any
    variance: Any
    num_samples: int
    samples: Any = None

    def calibration(self, labels: Any, bins: int = 15) -> calibration.CalibrationReport:
        """Returns how far the mean can be trusted as a probability.

        Args:
            labels: See `keras_dpopt.calibration`.
            bins: See `keras_dpopt.calibration.calibration_report`.

        Returns:
            The `CalibrationReport`.

        Raises:
            ValueError: if the model has several outputs, or no probabilities.

        Privacy:
            Not private: use held-out data.
        """
        if not isinstance(self.mean, np.ndarray):
            raise ValueError(
                "The model has several outputs. Give the one to "
                "keras_dpopt.calibration.calibration_report."
            )
        return calibration.calibration_report(self.mean, labels, bins)


def posterior_predict(
    model: keras.Model,
    x: Any,
    num_samples: int = 32,
    *,
    samples: Any = None,
    activation: Callable[[Any], Any] | None = None,
    batch_size: int = 32,
    seed: int | None = None,
    keep_samples: bool = False,
) -> PosteriorPrediction:
    """Predicts by the average over samples of the weights, or over dropout masks.

        mean = (1/S) * sum_s a(f(x; theta_s)),  variance = sum_s (a(f) - mean)^2 / (S-1)

    with theta_s, in this order of preference,

    - the weights given as `samples`;
    - draws from N(m, scale^2) where the optimizer keeps a Gaussian posterior (`DPIVON`,
      `DPBayesByBackprop`), m being the model's weights;
    - the model's weights, with random layers (dropout, Gaussian noise, those that have
      a `keras.random.SeedGenerator`) drawing as in training: Monte Carlo dropout (Gal
      and Ghahramani, "Dropout as a Bayesian Approximation", ICML 2016). All else is as
      in `predict`: batch normalization takes its moving averages, augmentation layers
      pass their input on.

    The weights are passed as values: no variable of the model is written. Mean and
    variance are updated sample by sample, so that memory does not grow with S.

    Args:
        model: The model, private or not. Dropout draws for each row of a batch, unless
            a `noise_shape` has 1 for the batch axis.
        x: Inputs as `predict` takes them: arrays, or a structure of them; or batches:
            a `tf.data.Dataset`, `keras.utils.PyDataset` or generator, read once.
        num_samples: S, a positive int, where they are drawn.
        samples: A `PosteriorSamples`, or a list of samples, each the list of values of
            `model.trainable_variables`. All of them are used.
        activation: Maps the model's output (or structure of outputs) to what is to be
            averaged, as `keras.ops.softmax` for logits: the average of probabilities
            is not the softmax of averaged logits.
        batch_size: Rows in a batch, for arrays.
        seed: int for a repeatable result with batches of the same size.
        keep_samples: Whether all S outputs are kept, for S times the memory.

    Returns:
        A `PosteriorPrediction` of NumPy arrays, float32 or, of a float64 output,
        float64.

    Raises:
        TypeError: if `x` is of another kind.
        ValueError: if there is nothing to sample from, the samples do not fit the
            model, or there is no input.

    Privacy:
        Post-processing of released weights: it costs nothing, and draws with none of
        the secret keys. Nothing protects `x` itself.

    Example:
        >>> layers = [keras.Input((3,)), keras.layers.Dropout(0.5)]
        >>> model = keras.Sequential([*layers, keras.layers.Dense(2)])
        >>> result = posterior_predict(model, np.ones((4, 3)), num_samples=8, seed=1)
        >>> result.mean.shape, result.variance.shape, result.samples
        ((4, 2), (4, 2), None)
    """
    source = posterior_sources.make(model, num_samples, samples, seed)
    evaluate = source.evaluate
    if not getattr(model, "run_eagerly", False):
        evaluate = tf.function(evaluate, autograph=False, reduce_retracing=True)
    structure, parts = None, []
    for number, batch in enumerate(_batches(model, x, batch_size)):
        moments, kept = _Moments(), []
        for s in range(source.size):
            sample = tf.constant(s, tf.int64), tf.constant(number, tf.int64)
            output = evaluate(batch, source.values(s), *sample)
            if activation is not None:
                output = activation(output)
            structure = output
            flat = [np.asarray(leaf) for leaf in keras.tree.flatten(output)]
            moments.add(flat)
            if keep_samples:
                kept.append([_result(leaf, leaf) for leaf in flat])
        stacked = [np.stack(leaves) for leaves in zip(*kept, strict=True)]
        parts.append((moments.mean(), moments.variance(), stacked))
    if not parts:
        raise ValueError("There is no input to predict for. Pass at least one row.")

    def joined(index: int, axis: int = 0) -> Any:
        leaves = zip(*(part[index] for part in parts), strict=True)
        arrays = [np.concatenate(leaf, axis=axis) for leaf in leaves]
        return keras.tree.pack_sequence_as(structure, arrays)

    return PosteriorPrediction(
        mean=joined(0),
        variance=joined(1),
        num_samples=source.size,
        samples=joined(2, axis=1) if keep_samples else None,
    )


# --- data and moments ---------------------------------------------------------------


def _batches(model: Any, x: Any, batch_size: int) -> Iterator[Any]:
    size = validation.check_positive_integer("batch_size", batch_size)
    # Of a model with a preprocessor, as in a private model around a keras_hub task.
    preprocess = getattr(model, "preprocess_samples", None)
    if preprocess is not None:
        x = x if keras_compat.is_data_set(x) else (x,)
        x = data.preprocessed_batches(x, size, preprocess)
    if not keras_compat.is_data_set(x):
        rows = data.rows_in_memory(x, None, None, None, preprocessed=False)
        for first in range(0, rows.size, size):
            yield tf.nest.map_structure(
                lambda t, i=first: tf.convert_to_tensor(t[i : i + size]),
                rows.values["x"],
            )
        return
    for element in _elements(x):
        taken, *_ = keras_compat.unpack_x_y_sample_weight(element)
        yield keras.tree.map_structure(tf.convert_to_tensor, taken)


def _elements(x: Any) -> Any:
    if isinstance(x, keras.utils.PyDataset) and x.num_batches is not None:
        return (x[i] for i in range(x.num_batches))
    endless = (
        x.cardinality() == tf.data.INFINITE_CARDINALITY
        if isinstance(x, tf.data.Dataset)
        else isinstance(x, keras.utils.PyDataset)
    )
    if endless:
        raise ValueError(
            "The data set has no end. Pass one without `repeat()`, and give a "
            "PyDataset its `__len__`."
        )
    if not isinstance(x, tf.data.Dataset) and not inspect.isgenerator(x):
        raise TypeError(
            f"posterior_predict does not read a {type(x).__name__}. Pass arrays, a "
            "tf.data.Dataset, a keras.utils.PyDataset or a generator."
        )
    return x


class _Moments:
    """Mean and variance of arrays that come one after the other (Welford, 1962)."""

    def __init__(self):
        self._count, self._mean, self._squares, self._like = 0, [], [], []

    def add(self, leaves: list[np.ndarray]) -> None:
        """Takes in one sample."""
        values = [leaf.astype(np.float64) for leaf in leaves]
        if not self._count:
            self._like = leaves
            self._mean = [np.zeros_like(v) for v in values]
            self._squares = [np.zeros_like(v) for v in values]
        self._count += 1
        for v, mean, squares in zip(values, self._mean, self._squares, strict=True):
            before = v - mean
            mean += before / self._count
            squares += before * (v - mean)

    def mean(self) -> list[np.ndarray]:
        """Returns the means."""
        return [
            _result(m, like) for m, like in zip(self._mean, self._like, strict=True)
        ]

    def variance(self) -> list[np.ndarray]:
        """Returns the unbiased variances; NaN of one sample."""
        divisor = self._count - 1 or np.nan
        pairs = zip(self._squares, self._like, strict=True)
        return [_result(squares / divisor, like) for squares, like in pairs]


def _result(values: np.ndarray, like: np.ndarray) -> np.ndarray:
    return values.astype(np.float64 if like.dtype == np.float64 else np.float32)

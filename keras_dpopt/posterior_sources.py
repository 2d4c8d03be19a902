"""What `posterior_predict` samples from: weights, or what random layers draw.

Everything is passed to the model as values, within a `keras.StatelessScope`: whatever
the model writes is dropped.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dpopt import keras_compat, prng, validation
from keras_dpopt.posterior_samples import PosteriorSamples


class RandomLayers:
    """Evaluates a model at sample s; this one, with random layers as in training.

    The draws come from keys of their own, never from those of the optimizer.

    Args:
        model: The model.
        size: S.
        seed: See `posterior_predict`.
    """

    def __init__(self, model: Any, size: int, seed: int | None):
        self._model = model
        self._seed_states = keras_compat.seed_states(model)
        self._layer_key, self._weight_key = (
            prng.new_key() if seed is None else prng.key_from_seed(seed, purpose)
            for purpose in ("posterior layers", "posterior weights")
        )
        self.size = size

    def values(self, s: int) -> tuple:
        """Returns what `evaluate` needs of sample s from the host."""
        del s
        return ()

    def mapping(self, values: tuple, sample: Any) -> list:
        """Returns pairs of a variable and its value in this sample."""
        del values, sample
        return []

    def mode(self) -> Any:
        """Returns a context in which the model is called."""
        return _random_as_in_training(self._model)

    def evaluate(self, x: Any, values: tuple, sample: Any, batch: Any) -> Any:
        """Returns the model's outputs for a batch, by its number."""
        # Random layers draw anew in each sample and each batch.
        states = [
            (state, prng.per_record_seeds(self._layer_key, sample, batch, i))
            for i, state in enumerate(self._seed_states)
        ]
        mapping = [*self.mapping(values, sample), *states]
        with keras.StatelessScope(mapping), self.mode():
            return keras_compat.call_nested(self._model, x, False, None)


class GaussianWeights(RandomLayers):
    """Weights drawn from the optimizer's posterior."""

    def __init__(self, model: Any, size: int, seed: int | None):
        super().__init__(model, size, seed)
        optimizer = model.optimizer
        scales = optimizer.posterior_scale() if optimizer.built else []
        if not scales or not all(np.isfinite(np.asarray(s)).all() for s in scales):
            raise ValueError(
                f"The posterior of {type(optimizer).__name__} has no scale before the "
                "model is trained. Call `fit` first."
            )
        self._variables = keras_compat.optimizer_variables_of(optimizer)
        means = [tf.convert_to_tensor(v.value) for v in self._variables]
        self._posterior = (means, scales)

    def values(self, s: int) -> tuple:
        """Returns means and scales."""
        del s
        return self._posterior

    def mapping(self, values: tuple, sample: Any) -> list:
        """Returns m + scale*e, drawn for this sample alone."""
        drawn = [
            mean + scale * prng.standard_normal(self._weight_key, sample, i, mean.shape)
            for i, (mean, scale) in enumerate(zip(*values, strict=True))
        ]
        return list(zip(self._variables, drawn, strict=True))

    def mode(self) -> Any:
        """Returns a context that changes nothing."""
        return contextlib.nullcontext()


class GivenWeights(RandomLayers):
    """Weights that the caller has."""

    def __init__(self, model: Any, samples: list, seed: int | None):
        super().__init__(model, len(samples), seed)
        self._variables = model.trainable_variables
        shapes = [tuple(v.shape) for v in self._variables]
        for sample in samples:
            if [np.shape(array) for array in sample] != shapes:
                raise ValueError(
                    "A sample does not have the shapes of the model's trainable "
                    "variables. Pass lists of the values of "
                    "`model.trainable_variables`, in that order."
                )
        self._samples = samples

    def values(self, s: int) -> tuple:
        """Returns the weights."""
        pairs = zip(self._samples[s], self._variables, strict=True)
        return tuple(tf.convert_to_tensor(array, v.dtype) for array, v in pairs)

    def mapping(self, values: tuple, sample: Any) -> list:
        """Returns the weights as they are."""
        del sample
        return list(zip(self._variables, values, strict=True))

    def mode(self) -> Any:
        """Returns a context that changes nothing."""
        return contextlib.nullcontext()


def make(
    model: Any, num_samples: int, samples: Any = None, seed: int | None = None
) -> RandomLayers:
    """Returns what a model is sampled from; see `posterior_predict`.

    Args:
        model: The model.
        num_samples: S, where samples are drawn.
        samples: A `PosteriorSamples`, a list of samples, or `None`.
        seed: int or `None`.

    Raises:
        ValueError: if there is nothing to sample from, or the samples do not fit.
    """
    size = validation.check_positive_integer("num_samples", num_samples)
    if samples is not None:
        given = samples.weights if isinstance(samples, PosteriorSamples) else samples
        if not len(given):
            raise ValueError(
                "There are no samples of the weights. Train longer than `burn_in` "
                "releases with the PosteriorSamples among the callbacks of `fit`."
            )
        return GivenWeights(model, list(given), seed)
    if hasattr(getattr(model, "optimizer", None), "posterior_scale"):
        return GaussianWeights(model, size, seed)
    if not _random_layers(model):
        raise ValueError(
            f"Model {model.name!r} has nothing to sample from: no optimizer with a "
            "posterior, no random layer. Train it with DPIVON or DPBayesByBackprop, "
            "give it a Dropout layer, or pass the `samples` that a PosteriorSamples "
            "callback has kept (of DPSGLD, say)."
        )
    return RandomLayers(model, size, seed)


# --- random layers ------------------------------------------------------------------


def _random_layers(model: Any) -> list:
    """The layers that draw random numbers in training, without augmentation."""
    found, cells = [], set()
    for layer in keras_compat.flat_layers(model):
        if isinstance(layer, keras.layers.RNN):
            # It draws the masks of its cells, and must be told itself.
            inside = [c for c in keras_compat.flat_layers(layer) if c is not layer]
            cells |= set(map(id, inside))
            if any(map(_drops, inside)):
                found.append(layer)
        elif not _is_augmentation(layer) and any(
            isinstance(v, keras.random.SeedGenerator) for v in vars(layer).values()
        ):
            found.append(layer)
    return [layer for layer in found if id(layer) not in cells]


def _drops(cell: Any) -> bool:
    rates = (getattr(cell, name, 0.0) for name in ("dropout", "recurrent_dropout"))
    return any(isinstance(rate, int | float) and rate > 0 for rate in rates)


def _is_augmentation(layer: Any) -> bool:
    return any(".layers.preprocessing" in c.__module__ for c in type(layer).__mro__)


@contextlib.contextmanager
def _random_as_in_training(model: Any) -> Iterator[None]:
    """Lets random layers draw while the model is called for inference.

    It sets `call` on the single layers for the time of one call. `training=True` for
    the whole model would reach batch normalization and augmentation too.
    """
    layers = {id(layer): layer for layer in keras_compat.flat_layers(model)}
    # A random layer may pass its own `training` on to these.
    calm = (keras.layers.BatchNormalization,)
    chosen = {
        key: False
        for key, layer in layers.items()
        if isinstance(layer, calm) or _is_augmentation(layer)
    }
    chosen.update((id(layer), True) for layer in _random_layers(model))
    changed = []
    try:
        for key, training in chosen.items():
            layer = layers[key]
            if "training" in inspect.signature(layer.call).parameters:
                changed.append((layer, vars(layer).get("call")))
                object.__setattr__(layer, "call", _with(layer.call, training))
        yield
    finally:
        for layer, own in changed:
            object.__delattr__(layer, "call")
            if own is not None:
                object.__setattr__(layer, "call", own)


def _with(call: Callable, training: bool) -> Callable:
    return lambda *args, **kwargs: call(*args, **{**kwargs, "training": training})

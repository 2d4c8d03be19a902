"""The private models: `DPModel`, `DPSequential` and `make_private`."""

from typing import Any

import keras

from keras_dpopt import data, keras_compat
from keras_dpopt.training import PrivateTraining
from keras_dpopt.types import UnsupportedModelError

_PACKAGE = "keras_dpopt"


@keras.saving.register_keras_serializable(_PACKAGE)
class DPModel(PrivateTraining, keras.Model):
    """A `keras.Model` that trains with differential privacy, and in no other way.

    Used as `keras.Model` is: `DPModel(inputs, outputs)` for a functional model, or as
    the base of a class with a `call`.

    Args:
        *args: As of `keras.Model`.
        **kwargs: As of `keras.Model`.

    Privacy:
        `fit` and `train_on_batch` release the weights after each step. Every step is a
        Gaussian release of the sum of clipped record gradients; the unit is one row
        (record) of the data; neighbours differ in one record's contribution, which is
        there or zeroed, N being public. `privacy_statement` says what it came to.
        Metrics and losses that training logs are computed on raw data and not private.

    Example:
        >>> inputs = keras.Input((4,))
        >>> model = DPModel(inputs, keras.layers.Dense(2)(inputs))
        >>> model.privacy_statement(delta=1e-5).epsilon
        0.0
    """

    def __new__(cls, *args, **kwargs):
        """Makes a functional model where `keras.Model` would."""
        # Keras turns a class that is constructed with (inputs, outputs) into a
        # functional one by rewriting its bases, for good. A class of its own keeps
        # DPModel fit for subclassing.
        if cls is DPModel and keras_compat.functional_init_arguments(args, kwargs):
            return super().__new__(DPFunctional, *args, **kwargs)
        return super().__new__(cls, *args, **kwargs)

    # Keras revives a functional model only if its constructor is spelled like this.
    def __init__(self, *args, **kwargs):
        if keras_compat.functional_init_arguments(args, kwargs):
            keras_compat.replace_base(type(self), DPModel, DPFunctional)
        super().__init__(*args, **kwargs)


@keras.saving.register_keras_serializable(_PACKAGE, name="DPFunctional")
class DPFunctional(DPModel, keras_compat.Functional):
    """What `DPModel(inputs, outputs)` makes."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


@keras.saving.register_keras_serializable(_PACKAGE)
class DPSequential(PrivateTraining, keras.Sequential):
    """A `keras.Sequential` that trains with differential privacy; see `DPModel`.

    Args:
        layers: As of `keras.Sequential`.
        trainable: As of `keras.Sequential`.
        name: As of `keras.Sequential`.

    Privacy:
        As `DPModel`.

    Example:
        >>> model = DPSequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> model.privacy_statement(delta=1e-5).epsilon
        0.0
    """

    def __init__(self, layers=None, trainable=True, name=None):
        super().__init__(layers, trainable=trainable, name=name)


@keras.saving.register_keras_serializable(_PACKAGE)
class PrivateModel(DPModel):
    """What `make_private` returns: a private model around a Keras model.

    Attributes that it lacks are looked up in the model inside, so that a task's
    `generate` or `preprocessor` is at hand.

    Args:
        base_model: The model inside; its layers and weights are used as they are.
        **kwargs: As of `keras.Model`.
    """

    def __init__(self, base_model, **kwargs):
        kwargs.setdefault("name", f"private_{base_model.name}")
        super().__init__(**kwargs)
        self.base_model = base_model
        if hasattr(base_model, "output_names"):
            self.output_names = list(base_model.output_names)
        if base_model.built:
            self.built = True

    def build(self, input_shape):
        """Builds the model inside."""
        if not self.base_model.built:
            self.base_model.build(input_shape)
        self.built = True

    def call(self, inputs, training=None, mask=None):
        """Calls the model inside."""
        return keras_compat.call_nested(self.base_model, inputs, training, mask)

    def _preprocess(self):
        return getattr(self.base_model, "preprocess_samples", None)

    def evaluate(
        self,
        x=None,
        y=None,
        batch_size=None,
        verbose: int | str = "auto",
        sample_weight=None,
        steps=None,
        callbacks=None,
        return_dict=False,
        **kwargs,
    ):
        """Evaluates as in Keras, preprocessing as the model inside does."""
        if self._preprocess() and not kwargs.get("_use_cached_eval_dataset"):
            x = self._preprocessed((x, y, sample_weight), batch_size)
            y = batch_size = sample_weight = None
        return super().evaluate(
            x,
            y,
            batch_size=batch_size,
            verbose=verbose,
            sample_weight=sample_weight,
            steps=steps,
            callbacks=callbacks,
            return_dict=return_dict,
            **kwargs,
        )

    def predict(
        self,
        x,
        batch_size=None,
        verbose: int | str = "auto",
        steps=None,
        callbacks=None,
    ):
        """Predicts as in Keras, preprocessing as the model inside does."""
        if self._preprocess():
            x, batch_size = self._preprocessed((x,), batch_size), None
        return super().predict(
            x,
            batch_size=batch_size,
            verbose=verbose,
            steps=steps,
            callbacks=callbacks,
        )

    def test_on_batch(self, x, y=None, sample_weight=None, return_dict=False):
        """Evaluates one batch as in Keras, preprocessing as the model inside does."""
        if self._preprocess():
            x, y, sample_weight = self._one_batch((x, y, sample_weight))
        return super().test_on_batch(x, y, sample_weight, return_dict)

    def predict_on_batch(self, x):
        """Predicts one batch as in Keras, preprocessing as the model inside does."""
        return super().predict_on_batch(self._one_batch((x,))[0])

    def _preprocessed(self, given, batch_size):
        given = given[0] if keras_compat.is_data_set(given[0]) else given
        return data.preprocessed_batches(given, batch_size or 32, self._preprocess())

    def _one_batch(self, rows):
        if not self._preprocess():
            return rows
        size = len(keras.tree.flatten(rows[0])[0])
        batch = next(iter(self._preprocessed(rows, max(1, size))))
        return keras_compat.unpack_x_y_sample_weight(batch)

    def get_layer(self, name=None, index=None):
        """Returns a layer of the model inside."""
        return self.base_model.get_layer(name, index)

    def get_config(self):
        """Returns the configuration: that of the model inside."""
        return {
            "base_model": keras.saving.serialize_keras_object(self.base_model),
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Makes the model inside, and wraps it again."""
        base_model = keras.saving.deserialize_keras_object(
            config["base_model"], custom_objects=custom_objects
        )
        return cls(base_model, name=config["name"])

    def __getattr__(self, name: str) -> Any:
        # Only called for names that are not found; never before the model is there.
        if name.startswith("_") or "base_model" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.base_model, name)


def make_private(
    model: keras.Model, *, public_pretraining: bool = False
) -> PrivateModel:
    """Makes a private model of a Keras model, sharing its layers and weights.

    Args:
        model: A functional, sequential or subclassed model, or a keras_hub task. It may
            be private already: its ledger goes on.
        public_pretraining: Says that whatever the model was trained on is public. The
            statement lists it.

    Returns:
        A `PrivateModel`, not compiled.

    Raises:
        TypeError: if `model` is no Keras model.
        ValueError: if the model's own optimizer has stepped, so that its weights may
            have been trained on the private data without protection.
        UnsupportedModelError: if the model has a training step or loss of its own,
            which the private step would replace.

    Privacy:
        As `DPModel`. Training the given model itself afterwards is outside the
        guarantee; the statement says so if it happens.

    Example:
        >>> plain = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> private = make_private(plain)
        >>> private.base_model is plain
        True
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"make_private takes a Keras model, got {type(model).__name__}. Pass a "
            "functional, sequential or subclassed keras.Model."
        )
    if not isinstance(model, PrivateTraining):
        own = keras_compat.overridden_training(model)
        if own:
            raise UnsupportedModelError(
                f"{type(model).__name__} has its own {', '.join(own)}, which private "
                "training would replace. Derive the class from keras_dpopt.DPModel "
                "and keep to `call` and `compute_loss` on a batch of one."
            )
        steps = keras_compat.steps_without_privacy(model)
        if steps and not public_pretraining:
            raise ValueError(
                f"The model has been trained without privacy ({steps} steps), and its "
                "weights keep that data. Start from untrained weights, or, if that "
                "data is public, pass public_pretraining=True."
            )
    private = PrivateModel(model)
    if public_pretraining:
        private.privacy_ledger.note_public()
    private.privacy_ledger.sync()
    private.privacy_ledger.remember_weights()
    return private

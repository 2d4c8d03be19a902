"""What of a private optimizer is saved, and what never is."""

import warnings
from typing import Any

import keras

from keras_dpopt.types import MixIn

_COUNT = "release_count"


class OptimizerSaving(MixIn):
    """Part of the private optimizers: names, saves and loads their state.

    Names do not depend on the names of layers. Keys, and state that gives the noise
    away, are not among them; loading draws fresh keys.
    """

    def named_variables(self) -> dict[str, Any]:
        """Returns all that is saved, by names that do not depend on layer names."""
        named = {
            "iterations": self.iterations,
            "expected_batch_size": self.batch_size_variable,
        }
        if self._train_size is not None:
            named["train_size"] = self._train_size
        if isinstance(self._learning_rate, keras.Variable):
            named["learning_rate"] = self._learning_rate
        if self._state is not None:
            named.update(self._state.named())
        if self.built and self.use_ema:
            for i, v in enumerate(self._model_variables_moving_average):
                named[f"average.{i}"] = v
        return named

    def secret_variables(self) -> dict[str, Any]:
        """Returns what gives noise or data away; `BackupAndRestore` alone saves it."""
        return {} if self._state is None else self._state.secrets()

    def save_own_variables(self, store):
        """Saves the state and the release count, without the secret keys."""
        for name, variable in self.named_variables().items():
            store[name] = variable.numpy()
        store[_COUNT] = self.release_count.numpy()

    def load_own_variables(self, store):
        """Loads the state and draws fresh keys, so that no old draw is used again.

        State of another optimizer is left alone, with a warning, as in Keras.
        """
        self.keys.refresh()
        saved = {name: store[name] for name in store.keys()}  # noqa: SIM118
        self.skip_releases(int(saved.pop(_COUNT, 0)))
        named = self.named_variables()
        if saved and not _fits(saved, named):
            warnings.warn(
                f"The saved optimizer state does not fit this {type(self).__name__}, "
                "which starts anew. Compile the model with the optimizer that it was "
                "saved with, and build it, before loading.",
                stacklevel=2,
            )
            return
        if self._initial_batch_size:
            saved.pop("expected_batch_size", None)  # the constructor's word stands
        for name, value in saved.items():
            named[name].assign(value)

    def get_config(self):
        """Returns the configuration; the seed is a secret and never in it."""
        base = super().get_config()
        kept = ("name", "learning_rate", "weight_decay", "use_ema", "ema_momentum")
        config = {key: base[key] for key in (*kept, "ema_overwrite_frequency")}
        config.update(
            **self.mechanism.get_config(),
            expected_batch_size=self._initial_batch_size,
            microbatch_size=self.microbatch_size,
            logical_batch_steps=self.logical_batch_steps,
            gradient_engine=self.gradient_engine,
            augmentation_multiplicity=self.augmentation_multiplicity,
            ema_warmup=self.ema_warmup,
        )
        return config


def _fits(saved: dict[str, Any], named: dict[str, Any]) -> bool:
    return set(saved) == set(named) and all(
        tuple(saved[name].shape) == tuple(v.shape) for name, v in named.items()
    )

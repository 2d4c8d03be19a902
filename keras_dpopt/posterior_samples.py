"""Weights kept while training, as samples of a posterior."""

import os
from typing import Any

import keras
import numpy as np

from keras_dpopt import validation
from keras_dpopt.training import PrivateTraining


class PosteriorSamples(keras.callbacks.Callback):
    """Keeps the weights of some of the steps, for `posterior_predict`.

    With `DPSGLD` the weights after each step are samples of the posterior, once the
    first ones are left out; neighbours are alike, so only some are kept (Welling and
    Teh, "Bayesian Learning via Stochastic Gradient Langevin Dynamics", ICML 2011). With
    another optimizer they are an ensemble of snapshots.

    Kept are the trainable weights after the releases burn_in + k*thinning, k = 1, 2,
    ..., counted by the optimizer over all its fits. Where several steps make one call
    (`steps_per_execution`), the weights at the end of the call are kept.

    Args:
        burn_in: Non-negative int, how many first releases are left out.
        thinning: Positive int, every how many releases weights are kept.
        max_samples: Positive int, how many are kept; the oldest go first.

    Attributes:
        weights: A list of samples, oldest first; each the list of arrays of the model's
            `trainable_variables`.
        releases: After how many releases each was taken.

    Raises:
        TypeError: at the beginning of `fit`, if the model is not private.

    Privacy:
        Each sample is the result of a release that the ledger of the model counts:
        keeping it costs nothing more. `save` writes weights and no ledger, so keep the
        privacy statement with the file.

    Example:
        >>> samples = PosteriorSamples(burn_in=500, thinning=20, max_samples=30)
        >>> len(samples)
        0
    """

    def __init__(self, burn_in: int = 0, thinning: int = 1, max_samples: int = 32):
        super().__init__()
        self.burn_in = validation.check_count("burn_in", burn_in)
        self.thinning = validation.check_positive_integer("thinning", thinning)
        self.max_samples = validation.check_positive_integer("max_samples", max_samples)
        self.weights: list[list[np.ndarray]] = []
        self.releases: list[int] = []
        self._last = 0

    def __len__(self) -> int:
        """Returns how many samples there are."""
        return len(self.weights)

    def on_train_begin(self, logs=None):
        """Takes note of where the count stands."""
        del logs
        if not isinstance(self.model, PrivateTraining):
            raise TypeError(
                "PosteriorSamples counts the releases of a private model, got "
                f"{type(self.model).__name__}. Use keras_dpopt.DPModel, DPSequential "
                "or make_private(model)."
            )
        self._last = self._number()

    def on_train_batch_end(self, batch, logs=None):
        """Keeps the weights where the count asks for it."""
        del batch, logs
        number = self._number()
        if number <= max(0, self._last):
            return
        self._last = number
        model: Any = self.model
        self.weights.append([v.numpy() for v in model.trainable_variables])
        self.releases.append(model.optimizer.releases())
        del self.weights[: -self.max_samples], self.releases[: -self.max_samples]

    def _number(self) -> int:
        """The number k of the last sample that was due; 0 or less before the first."""
        model: Any = self.model
        return (model.optimizer.releases() - self.burn_in) // self.thinning

    def save(self, path: str | os.PathLike) -> None:
        """Writes the samples to an `.npz` file.

        Args:
            path: Its name; NumPy adds the ending where it is missing.
        """
        arrays = {
            f"sample_{s}_weight_{i}": array
            for s, sample in enumerate(self.weights)
            for i, array in enumerate(sample)
        }
        settings = [self.burn_in, self.thinning, self.max_samples]
        counts = [len(sample) for sample in self.weights]
        np.savez(
            path,
            settings=np.array(settings, np.int64),
            releases=np.array(self.releases, np.int64),
            counts=np.array(counts, np.int64),
            **arrays,  # type: ignore[arg-type]
        )

    @classmethod
    def load(cls, path: str | os.PathLike) -> "PosteriorSamples":
        """Returns a callback with the samples of a file that `save` has written.

        Args:
            path: Its name.

        Raises:
            ValueError: if it is another kind of file.
        """
        with np.load(path, allow_pickle=False) as file:
            if not {"settings", "releases", "counts"} <= set(file.files):
                raise ValueError(
                    f"{path} does not hold posterior samples. Pass a file that "
                    "PosteriorSamples.save has written."
                )
            samples = cls(*file["settings"].tolist())
            samples.releases = file["releases"].tolist()
            samples.weights = [
                [file[f"sample_{s}_weight_{i}"] for i in range(count)]
                for s, count in enumerate(file["counts"].tolist())
            ]
        return samples

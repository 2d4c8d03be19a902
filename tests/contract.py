"""What the contract tests share: how each class differs from DPSGD, and small runs.

Exceptions are in `KINDS` and nowhere else. A class that is not in the table is held to
everything that DPSGD is held to.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

REQUIRED = {"l2_norm_clip": 1.0, "noise_multiplier": 1.1}

every_optimizer = pytest.mark.parametrize(
    "cls", helpers.OPTIMIZERS.values(), ids=helpers.OPTIMIZERS
)


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a class differs from DPSGD.

    Attributes:
        arguments: What it needs besides `REQUIRED` to make a step of a batch that
            nobody drew: the number of training records, say; and what takes noise of
            its own out of the way.
        whole: What it needs besides to have all records in each batch.
        takes_batches: Whether it trains on batches of the caller's.
        own_mechanism: Whether clipping styles and a dp_sum_query are refused.
        infinite_clip: Whether it takes an infinite clip, without noise.
        assigns_rate: Whether its learning rate can be assigned.
        legal: Values that are legal here and bad elsewhere.
        changed: Values of its own arguments for the tests of the configuration: what
            words can be, and what must go together. Those that are not in a set are
            changed as `_changed` of the contract test does.
        linear: Arguments that make the first update -lr * factor * gradient, from
            weights of zero.
        factor: That factor.
        draws: From the white noise of the first two steps, z_0 and z_1, to the noise of
            the gradients in units of sigma*C.
        views: How many gradients long the record is.
        stages: Releases a step.
        evaluations: How often a record is evaluated.
        samples_weights: Whether the points are drawn at random.
    """

    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    whole: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    takes_batches: bool = True
    own_mechanism: bool = False
    infinite_clip: bool = True
    assigns_rate: bool = True
    legal: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    changed: tuple[Mapping[str, Any], ...] = ({},)
    linear: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    factor: float = 1.0
    draws: Callable = lambda z: z
    views: int = 1
    stages: int = 1
    evaluations: int = 1
    samples_weights: bool = False


# An epsilon or a floor that the second moment is nothing against.
_FLAT = {"linear": {"epsilon": 1e4}, "factor": 1e-4}
_FLOORED = {"linear": {"variance_floor": 1e8}, "factor": 1e-4}

KINDS = {
    "BAM": Kind(changed=({"base": "adam"},), evaluations=2),
    "DOPPLER": Kind(
        changed=(
            {"base": "adam", "second_moment": "raw", "noise_correction": "unfiltered"},
            {"a": (), "b": (0.5, 0.25), "base": "adamw", "noise_correction": "exact"},
        )
    ),
    "DPAdam": Kind(**_FLAT),
    "DPAdamBC": Kind(**_FLOORED),
    "DPAdamW": Kind(**_FLAT),
    "DPAdamWBC": Kind(**_FLOORED),
    # N of the KL term; the record is the pair of a gradient for mu and one for rho.
    "DPBayesByBackprop": Kind(
        arguments={"train_size": 7}, views=2, samples_weights=True
    ),
    # Accounted for an order of the records; earlier noise is part of the next.
    "DPFTRL": Kind(
        whole={"restart": None},
        takes_batches=False,
        own_mechanism=True,
        changed=({"restart": None},),
        draws=lambda z: [z[0], z[1] - z[0]],
    ),
    # N of the posterior. With beta_2 = 1 its precision stays.
    "DPIVON": Kind(
        arguments={"ess": 7.0},
        legal={"beta_2": 1.0},
        changed=(
            {"ess": 9.0, "hessian": "price", "mc_samples": 3},
            {"curvature_scale": 2.0, "clip_radius": 3.0},
        ),
        linear={"beta_2": 1.0},
        samples_weights=True,
    ),
    "DPRMSprop": Kind(linear={"epsilon": 1e8}, factor=1e-4),
    "DPSAM": Kind(stages=2),
    "DPSAT": Kind(changed=({"direction": "last_update"},)),
    # Noise and learning rate are one, and known before the first step; N makes the
    # drift. At a temperature of nearly zero the noise multiplier is the given one.
    "DPSGLD": Kind(
        arguments={"train_size": 7, "temperature": 1e-20},
        own_mechanism=True,
        infinite_clip=False,
        assigns_rate=False,
        factor=7 / 2,
    ),
    "DiSK": Kind(
        changed=(
            {"base": "adamw", "filter_init": "zero", "noise_correction": "exact"},
            {"base": "sgd", "momentum": 0.5, "noise_correction": None},
        ),
        linear={"base": "sgd"},
        evaluations=2,
    ),
    "FiBeR": Kind(
        changed=({"noise_correction": "unfiltered"},),
        linear={"epsilon": 1e4},
        factor=0.9e-4,  # Its filter takes omega of the first gradient.
        evaluations=2,
    ),
    "MFDPFTRL": Kind(
        whole={"strategy": "blt"},
        takes_batches=False,
        own_mechanism=True,
        changed=(
            {"strategy": "blt", "amplified": False, "coefficients": None},
            {"bands": 2, "coefficients": (1.0, 0.5)},
        ),
        linear={"bands": 2, "coefficients": (1.0, 0.5)},
        draws=lambda z: [1.25**0.5 * z[0], 1.25**0.5 * (z[1] - 0.5 * z[0])],
    ),
}


def kind(cls) -> Kind:
    """Returns the exceptions of a class."""
    return KINDS.get(cls.__name__, Kind())


def own_arguments(cls) -> dict[str, Any]:
    """The arguments of the class itself, with their defaults."""
    parameters = inspect.signature(cls.__init__).parameters.values()
    return {
        p.name: p.default
        for p in parameters
        if p.default is not p.empty and p.name not in ("learning_rate", *REQUIRED)
    }


def make(cls, learning_rate=0.1, *, whole=True, **arguments):
    """Any class, such that it can make a step; see `Kind`."""
    given = {**REQUIRED, **kind(cls).arguments}
    if whole:
        given.update(kind(cls).whole)
    return cls(learning_rate, **{**given, **arguments})


def train(model, x, y, steps: int = 1):
    """Trains; every step has all rows, if they are as many as the batch size."""
    if kind(type(model.optimizer)).takes_batches:
        for _ in range(steps):
            model.train_on_batch(x, y)
    else:
        model.fit(x, y, epochs=steps, verbose=0)
    return model


class Watch:
    """The privatized gradients of the first steps, also of steps in a graph.

    Args:
        model: A model with a private optimizer.
        steps: How many there will be.
    """

    def __init__(self, model, steps: int):
        self._optimizer = optimizer = model.optimizer
        views = kind(type(optimizer)).views
        self._values = [
            tf.Variable(tf.zeros((steps, *v.shape)))
            for v in [*model.trainable_variables] * views
        ]
        self._stddevs = tf.Variable(tf.zeros(steps))
        apply = optimizer.apply

        def watching(grads, *args, **kwargs):
            step = optimizer.iterations.value
            for variable, value in zip(self._values, grads.values, strict=True):
                variable[step].assign(value)
            self._stddevs[step].assign(grads.noise_stddev)
            return apply(grads, *args, **kwargs)

        object.__setattr__(optimizer, "apply", watching)

    def gradient(self, step: int) -> list[np.ndarray]:
        """Returns the gradient of a step."""
        return [v[step].numpy() for v in self._values]

    def stddev(self, step: int) -> float:
        """Returns the `noise_stddev` of a step."""
        return float(self._stddevs[step])


class Record(keras.callbacks.Callback):
    """Weights and the optimizer's state after each step."""

    def __init__(self):
        super().__init__()
        self.weights: list = []
        self.states: list = []

    def on_train_begin(self, logs=None):
        self.weights.append(self.model.get_weights())

    def on_train_batch_end(self, batch, logs=None):
        self.weights.append(self.model.get_weights())
        named = self.model.optimizer.named_variables()
        self.states.append({name: v.numpy() for name, v in named.items()})


FALSE_ALARM = 1e-4  # Chance that right noise fails one call of `is_normal`.


def is_normal(draws, stddev: float) -> bool:
    """Kolmogorov's test; 2000 draws tell 2/3 and 3/2 of it with p below 1e-14."""
    return stats.kstest(np.ravel(draws) / stddev, "norm").pvalue > FALSE_ALARM


def check_normal(draws, stddev: float):
    """Asserts that draws are normal at this scale, and at no other."""
    assert is_normal(draws, stddev)
    assert not is_normal(draws, stddev * 2 / 3)
    assert not is_normal(draws, stddev * 3 / 2)

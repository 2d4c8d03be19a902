"""Audit of what a temporal filter does to the noise, by two runs. Not private.

The paper of `FiBeR`, section 5.3 and appendix E.4.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dpopt import data, keras_compat, prng, validation
from keras_dpopt.diagnostics_private import (
    check_known_noise,
    check_private_model,
    filtered_gradient,
)
from keras_dpopt.keys import SecretKeys

# Blocks of steps that the standard error is taken from.
_BLOCKS = 20


@dataclasses.dataclass(frozen=True)
class AttenuationReport:
    """What `attenuation_audit` returns; `print` shows it as a table. Not private.

    Arrays have an entry for each projection.

    Attributes:
        steps: Steps that the numbers are of, those of the warm-up left out.
        gain: A(omega) that the filter claims, the variance of noise after it over that
            before it.
        rho: Var(u'(f - f')) / Var(u'(g - g')), `[projections]`.
        ratio: The same of all projections together.
        standard_error: Of `ratio`, from the spread over blocks of steps.
        noise_share: r = Var(u'(g - g')) / (2 s^2), which is 1 where the difference of
            the two runs is noise alone, `[projections]`.
        correlation: Of signal and filtered noise in the first run, `[projections]`.
        cross_term: |E[s n]| / E[n^2], `[projections]`.
        variation: Standard deviation over mean of the variance of u'f in a sliding
            window, `[projections]`. Of stationary white noise it is about
            sqrt(2 / window).
        window: The window's length.
    """

    steps: int
    gain: float
    rho: np.ndarray
    ratio: float
    standard_error: float
    noise_share: np.ndarray
    correlation: np.ndarray
    cross_term: np.ndarray
    variation: np.ndarray
    window: int

    def __str__(self):
        rows = [
            ("gain of the filter, A", f"{self.gain:.4f}"),
            ("measured", f"{self.ratio:.4f} +- {self.standard_error:.4f}"),
            ("noise share of the difference", _mean(self.noise_share)),
            ("correlation of signal and noise", _mean(self.correlation)),
            ("cross term", _mean(self.cross_term)),
            (f"variation of the variance in {self.window}", _mean(self.variation)),
        ]
        title = f"Attenuation of the noise over {self.steps} steps (not private)"
        return "\n".join([title, *(f"  {name:<34}{value}" for name, value in rows)])


def attenuation_audit(
    make_model: Callable[[], Any],
    x: Any,
    y: Any = None,
    *,
    batch_size: int,
    steps: int,
    warmup: int | None = None,
    projections: int = 8,
    window: int = 100,
    seed: int = 0,
) -> AttenuationReport:
    """Not private: compares the noise before and after an optimizer's filter.

    Two models from the same weights train on the same batches, with the same layer
    randomness and independent noise. With g, f the gradient before and after the filter
    and u a fixed unit vector, over the steps t after a warm-up,

        rho = Var_t(u'(f_t - f'_t)) / Var_t(u'(g_t - g'_t))        against A,
        r   = Var_t(u'(g_t - g'_t)) / (2 s^2)                      against 1

    (section 5.3). Where r is above 1, the runs have drifted apart, and the difference
    is not noise alone. Of the first run also, with n the noise sent through the filter
    by itself and signal u'f - n, the proxies of appendix E.4 for what a correction of
    the second moment assumes: correlation, cross term and the variation of a variance.
    In appendix E.4's run the first two were 0.14 and 0.15.

    The projections are orthonormal.

    Args:
        make_model: Returns a new compiled private model, with an optimizer whose noise
            is independent and of known size. It is called twice; the audit sets the
            weights of the second model and the keys of both.
        x: Arrays, as `fit` takes them. Synthetic or public data: see Privacy.
        y: Targets.
        batch_size: Expected size of the Poisson batches.
        steps: Positive int.
        warmup: First steps that are left out; an eighth of them by default.
        projections: How many vectors u, at most the number of weights.
        window: Steps in a sliding window, at most those after the warm-up.
        seed: int, for keys and projections.

    Returns:
        An `AttenuationReport`.

    Raises:
        TypeError: if `make_model` makes no private model.
        ValueError: if the noise is correlated, unknown or zero, or a number is out of
            range.

    Privacy:
        Not private: the two runs use known keys, and the noise is subtracted from the
        gradients. Do not run it on private data.

    Example:
        >>> import keras, keras_dpopt
        >>> def make_model():
        ...     layers = [keras.Input((3,)), keras.layers.Dense(2)]
        ...     model = keras_dpopt.DPSequential(layers)
        ...     optimizer = keras_dpopt.FiBeR(0.0, l2_norm_clip=1.0, noise_multiplier=1)
        ...     model.compile(optimizer, loss="mse")
        ...     return model
        >>> x, y = np.ones((8, 3), "float32"), np.ones((8, 2), "float32")
        >>> report = attenuation_audit(make_model, x, y, batch_size=4, steps=60)
        >>> round(report.gain, 4), report.rho.shape
        (0.8462, (8,))
    """
    steps = validation.check_positive_integer("steps", steps)
    warmup = steps // 8 if warmup is None else warmup
    window = min(validation.check_positive_integer("window", window), steps - warmup)
    if not 0 <= warmup <= steps - 2 * _BLOCKS:
        raise ValueError(
            f"{steps} steps with a warm-up of {warmup} leave too few to estimate a "
            f"variance. Take at least {2 * _BLOCKS} more steps than the warm-up."
        )
    models = [make_model(), make_model()]
    for model in models:
        check_private_model("attenuation_audit", model)
        check_known_noise(model.optimizer)
        rows = data.rows_in_memory(x, y, None, None, preprocessed=False).values
        specs = lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype)  # noqa: E731
        keras_compat.build_for(model, tf.nest.map_structure(specs, rows))
    models[1].set_weights(models[0].get_weights())
    shapes = [v.shape for v in models[0].trainable_variables]
    directions = _directions(shapes, projections, seed)
    logs = []
    for number, model in enumerate(models):
        _set_keys(model.optimizer, seed, number)
        with _logged(model.optimizer, directions, steps) as log:
            model.fit(x, y, batch_size=batch_size, steps_per_epoch=steps, verbose=0)
        gradient, filtered, noise, stddev = np.split(log.numpy(), 4, axis=1)
        logs.append(_Series(gradient, filtered, noise, stddev))
    return _report(models[0].optimizer, logs[0], logs[1], warmup, window)


@dataclasses.dataclass(frozen=True)
class _Series:
    """What a run has logged: `[steps, projections]` each."""

    gradient: np.ndarray
    filtered: np.ndarray
    noise: np.ndarray
    stddev: np.ndarray

    def __post_init__(self):
        for field in dataclasses.fields(self):
            values = np.asarray(getattr(self, field.name), np.float64)
            object.__setattr__(self, field.name, values)


def _report(optimizer, first, second, warmup, window) -> AttenuationReport:
    before = (first.gradient - second.gradient)[warmup:]
    after = (first.filtered - second.filtered)[warmup:]
    before, after = (d - d.mean(axis=0) for d in (before, after))
    if not (first.stddev > 0).all():
        raise ValueError(
            "The gradient has no noise to audit. Set a positive noise_multiplier."
        )
    expected = 2.0 * np.mean(first.stddev[warmup:] ** 2, axis=0)
    ratio = np.mean(after**2) / np.mean(before**2)
    # Of a ratio of means, by the delta method; blocks are nearly independent, because
    # a filter's memory is short against them.
    influence = (after**2 - ratio * before**2) / np.mean(before**2)
    blocks = [block.mean() for block in np.array_split(influence, _BLOCKS)]
    noise = filtered_series(optimizer.filter, first.noise)
    signal, noise = (first.filtered - noise)[warmup:], noise[warmup:]
    variance = np.array(
        [
            first.filtered[start : start + window].var(axis=0)
            for start in range(warmup, len(first.filtered) - window + 1)
        ]
    )
    centred = [part - part.mean(axis=0) for part in (signal, noise)]
    lengths = [np.sqrt(np.mean(part**2, axis=0)) for part in centred]
    with np.errstate(invalid="ignore", divide="ignore"):  # NaN of a signal of zero
        correlation = np.mean(centred[0] * centred[1], axis=0) / np.prod(
            lengths, axis=0
        )
    return AttenuationReport(
        steps=len(before),
        gain=float(getattr(optimizer.filter, "steady_gain", 1.0)),
        rho=np.mean(after**2, axis=0) / np.mean(before**2, axis=0),
        ratio=float(ratio),
        standard_error=float(np.std(blocks, ddof=1) / np.sqrt(len(blocks))),
        noise_share=np.mean(before**2, axis=0) / expected,
        correlation=correlation,
        cross_term=np.abs(np.mean(signal * noise, axis=0)) / np.mean(noise**2, axis=0),
        variation=variance.std(axis=0) / variance.mean(axis=0),
        window=window,
    )


def filtered_series(filter_: Any, series: np.ndarray) -> np.ndarray:
    """Sends a series through a temporal filter, from its initial state on.

    Args:
        filter_: A part of `filters.py`.
        series: `[steps, ...]`.

    Returns:
        The filter's outputs, in that shape.
    """
    slots = {
        name: tf.fill(series.shape[1:], np.float64(first))
        for name, first in filter_.slots.items()
    }
    scalars = {n: tf.constant(v, tf.float64) for n, v in filter_.scalars.items()}

    def step(state, given):
        _, old_slots, old_scalars = state
        number, value = given
        shared, _, new_scalars = filter_.begin(
            old_scalars, number, tf.constant(0.0, tf.float64), False
        )
        if shared is not None:
            shared = tf.cast(shared, tf.float64)
        output, new_slots = filter_.update(old_slots, value, shared)
        return output, new_slots, new_scalars

    @tf.function(autograph=False)
    def run(values):
        numbers = tf.range(1, len(series) + 1)
        start = (tf.zeros_like(values[0]), slots, scalars)
        return tf.scan(step, (numbers, values), start)[0]

    return run(tf.constant(series, tf.float64)).numpy()


def _directions(shapes, projections: int, seed: int) -> list[tf.Tensor]:
    """Orthonormal vectors `[projections, size]`, cut into the variables."""
    sizes = [int(np.prod(shape)) for shape in shapes]
    projections = validation.check_positive_integer("projections", projections)
    if projections > sum(sizes):
        raise ValueError(
            f"{projections} projections are more than the {sum(sizes)} weights. Take "
            "fewer."
        )
    draw = np.random.default_rng(seed).normal(size=(sum(sizes), projections))
    vectors = np.linalg.qr(draw)[0].T.astype(np.float32)
    cuts = np.cumsum(sizes)[:-1]
    return [tf.constant(part) for part in np.split(vectors, cuts, axis=1)]


def _set_keys(optimizer: Any, seed: int, number: int) -> None:
    """The same keys for both runs, but for that of the noise."""
    shared = SecretKeys(seed).export()["keys"]
    noise = prng.key_from_seed(seed, f"audit noise {number}")
    optimizer.keys.restore({"keys": [noise, *shared[1:]], "seeded": True})


@contextlib.contextmanager
def _logged(optimizer: Any, directions: list, steps: int) -> Iterator[tf.Variable]:
    """Logs the projections of gradient, filtered gradient and noise of each step.

    It stands in the place of `apply` in a train function that is traced meanwhile, and
    sees privatized gradients.
    """
    size = directions[0].shape[0]
    log = tf.Variable(tf.zeros([steps, 4 * size]), trainable=False)
    apply = optimizer.apply
    shapes = [v.shape for v in keras_compat.optimizer_variables_of(optimizer)]

    def project(values):
        parts = [
            tf.linalg.matvec(u, tf.reshape(value, [-1]))
            for u, value in zip(directions, values, strict=True)
        ]
        return tf.add_n(parts)

    def applied(gradient, *args, **kwargs):
        step = tf.identity(optimizer.iterations.value)  # `apply` counts it up
        # The release has been counted; its noise is a function of key, number, stream.
        number = optimizer.release_count.value - 1
        first = (optimizer.query.stages - 1) * len(shapes) * optimizer.query.views
        noise = [
            gradient.noise_stddev
            * prng.standard_normal(optimizer.keys.noise, number, first + i, shape)
            for i, shape in enumerate(shapes)
        ]
        values = gradient.values[: len(shapes)]
        row = [project(values), None, project(noise)]
        result = apply(gradient, *args, **kwargs)
        filtered = filtered_gradient(optimizer)
        row[1] = project(values if filtered is None else filtered)
        row.append(tf.fill([size], gradient.noise_stddev))
        log.scatter_nd_update(tf.reshape(step, [1, 1]), [tf.concat(row, axis=0)])
        return result

    object.__setattr__(optimizer, "apply", applied)
    try:
        yield log
    finally:
        object.__delattr__(optimizer, "apply")


def _mean(values: np.ndarray) -> str:
    return f"{values.mean():.4f} ({values.min():.4f} to {values.max():.4f})"

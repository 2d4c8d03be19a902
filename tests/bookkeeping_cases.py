"""What the tests of the book-keeping engine share: a model, rows and two ways to sum.

The reference are the records of the loop engine (`engines.base.clipped_record`, left
unclipped), clipped and added up in float64 NumPy.
"""

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_dpopt
from keras_dpopt import engines, keras_compat
from keras_dpopt.clipping_styles import FlatClipping
from keras_dpopt.engines import base
from keras_dpopt.microbatch import MicrobatchSum, values_of

BOOKKEEPING, LOOP = engines.ENGINES["bookkeeping"], engines.ENGINES["loop"]
M = 4  # rows


def draw(*shape, seed=0, scale=1.0):
    """Normal numbers, float32."""
    values = np.random.default_rng(seed).normal(size=shape, scale=scale)
    return values.astype("float32")


def tokens(*shape, seed=0):
    """Token ids below 7; 0 is among them."""
    return np.random.default_rng(seed).integers(0, 7, shape).astype("int32")


VECTORS, SERIES, IMAGES = draw(M, 6), draw(M, 9, 6), draw(M, 8, 8, 4)
TEXT = tokens(M, 9)


def model(*layers):
    """A private model of these layers."""
    return keras_dpopt.DPSequential(layers)


def functional(shape, function, dtype="float32"):
    """A private model of one input."""
    inputs = keras.Input(shape, dtype=dtype)
    return keras_dpopt.DPModel(inputs, function(inputs))


def mlp(**arguments):
    """Two dense layers."""
    dense = keras.layers.Dense
    return model(dense(5, "tanh", **arguments), dense(3, **arguments))


def convolutional():
    """A convolution and a dense layer."""
    convolution = keras.layers.Conv2D(3, 3, activation="relu")
    return model(convolution, keras.layers.Flatten(), keras.layers.Dense(2))


def text():
    """An embedding and a dense layer."""
    return model(keras.layers.Embedding(7, 5), keras.layers.Dense(3))


class Lambda(keras.layers.Layer):
    """A function of the inputs as a layer, and of its own weights of given shapes."""

    def __init__(self, function, *shapes):
        super().__init__()
        self.function, self.shapes = function, shapes

    def build(self, _):
        self.ws = [self.add_weight(shape=s, initializer="ones") for s in self.shapes]

    def call(self, x):
        return self.function(x, *self.ws)


def flat(values) -> np.ndarray:
    """A record or a sum as one float64 vector."""
    parts = [np.asarray(v, np.float64) for v in tf.nest.flatten(values)]
    return np.concatenate([np.ravel(part) for part in parts])


def _numbers(outputs) -> list:
    return [np.asarray(t, np.float64) for t in tf.nest.flatten(outputs)]


def relative(got, want) -> float:
    """The norm of the difference, relative to that of the second."""
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@dataclasses.dataclass
class Case:
    """A compiled, built model and rows.

    Attributes:
        microbatch: Of the model.
        rows: Dict with "x", "y" and, where given, "sample_weight".
        points: Of the optimizer's query; of several, each near other weights.
        seeds: Of all rows.
    """

    microbatch: MicrobatchSum
    rows: dict
    points: tuple
    seeds: Any
    _traced: dict = dataclasses.field(default_factory=dict)

    @property
    def size(self) -> int:
        """How many rows there are."""
        return tf.nest.flatten(self.rows)[0].shape[0]

    def problem(self, preprocess=None, clip_factors=None, **arguments):
        """What is asked of an engine."""
        other = values_of(self.microbatch._other)
        return self.microbatch._problem(
            self.points, other, preprocess, clip_factors, **arguments
        )

    def records(self) -> tuple[np.ndarray, list]:
        """The loop's unclipped records `[m, parameters]`, and the outputs."""
        problem = self.problem(preprocess=lambda record: record)
        one = tf.function(
            lambda row, seeds: base.clipped_record(problem, row, seeds),
            autograph=False,
        )
        found, outputs = [], []
        for i in range(self.size):
            row = tf.nest.map_structure(lambda t, i=i: t[i], self.rows)
            values, of_row = one(row, self.seeds[i])
            found.append(flat(values))
            outputs.append(_numbers(of_row))
        return np.stack(found), [np.stack(t) for t in zip(*outputs, strict=True)]

    def bookkeeping(self, clip, *, rows=None, count=None, static=False, jit=False):
        """The engine's sum, the factors that it clipped with, bounds and outputs.

        With `static` it gets the padding, too, as XLA needs it.
        """

        key = (clip, static or jit, jit)
        if key not in self._traced:
            self._traced[key] = self._function(*key)
        (sums, factors, bounds), outputs = self._traced[key](
            self.rows if rows is None else rows,
            self.seeds,
            tf.constant(self.size if count is None else count),
        )
        joint = np.sqrt(np.sum(np.square(bounds), axis=1))
        return flat(sums), np.asarray(factors)[:, 0], joint, _numbers(outputs)

    def _function(self, clip, static, jit):
        def clip_factors(bounds):
            factors = FlatClipping().factors(bounds, clip, None)
            return factors, lambda sums, mask: (tuple(sums), factors, bounds)

        problem = self.problem(clip_factors=clip_factors, static_shapes=static)
        return tf.function(
            lambda *arguments: BOOKKEEPING.clipped_sum(problem, *arguments),
            jit_compile=jit or None,
            autograph=False,
        )

    def sum(self, engine, count=None) -> np.ndarray:
        """The sum of an engine as a step makes it, with the optimizer's own clip."""
        self.microbatch.engine = engine
        model = self.microbatch._model
        weights = values_of(model.trainable_variables)
        state = model.optimizer.step_state(weights, tf.constant(0, tf.int64))
        count = tf.constant(self.size if count is None else count)
        points = self.microbatch.points(state)
        return flat(self.microbatch(points, self.rows, self.seeds, count)[0])


def case(
    made,
    x,
    y=None,
    *,
    sample_weight=None,
    loss: Any = "mse",
    loss_weights=None,
    cls=keras_dpopt.DPSGD,
    jit=False,
    spread=0.4,
    **arguments,
) -> Case:
    """Compiles and builds a model, and draws its weights around 0 or 1."""
    arguments = {
        "l2_norm_clip": 1.0,
        "noise_multiplier": 0.0,
        "expected_batch_size": M,
        **arguments,
    }
    optimizer = cls(0.1, **arguments)
    made.compile(optimizer, loss=loss, loss_weights=loss_weights, jit_compile=jit)
    if y is None:
        y = tf.nest.map_structure(lambda t: draw(*t.shape, seed=5), made(x))
    rows = {"x": x, "y": y}
    if sample_weight is not None:
        rows["sample_weight"] = sample_weight
    rows = tf.nest.map_structure(tf.convert_to_tensor, rows)
    spec = lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype)  # noqa: E731
    keras_compat.build_for(made, tf.nest.map_structure(spec, rows))
    for i, weight in enumerate(made.trainable_variables):
        middle = np.round(np.mean(weight))
        weight.assign(middle + draw(*weight.shape, seed=100 + i, scale=spread))
    microbatch = MicrobatchSum(made, jit, run_eagerly=not jit)
    zero = tf.constant(0, tf.int64)
    state = optimizer.step_state(values_of(made.trainable_variables), zero)
    points = tuple(
        dataclasses.replace(point, weights=tuple(_moved(point.weights, j)))
        for j, point in enumerate(optimizer.query.points(state))
    )
    size = tf.nest.flatten(rows)[0].shape[0]
    return Case(microbatch, rows, points, microbatch.seeds(zero, tf.range(size)))


def _moved(weights, j):
    """The weights of point j: a two-point query has both at one before it updates."""
    for i, weight in enumerate(weights):
        yield weight + 0.1 * j * draw(*weight.shape, seed=50 * j + i)


def check(
    made: Case, tolerance: float = 1e-5, above: float = 2e-5, jit: bool = False
) -> None:
    """Compares the engines, at a clip that about half of the rows are cut to.

    Args:
        made: The case.
        tolerance: What rounding may change, relatively.
        above: How far a bound may be above the norm of an ordinary record.
        jit: Whether XLA compiles the engine.
    """
    records, outputs = made.records()
    norms = np.linalg.norm(records, axis=1)
    clip = float(np.sqrt(np.prod(np.sort(norms)[len(norms) // 2 - 1 :][:2])))
    assert 0 < norms.min() < clip < norms.max()
    got, factors, bounds, again = made.bookkeeping(clip, jit=jit)
    assert (bounds >= norms * (1 - tolerance / 10)).all()
    assert (bounds <= norms * (1 + above)).all()
    clipped = np.minimum(1.0, clip / norms)
    np.testing.assert_allclose(factors, clipped, rtol=above)
    assert relative(got, clipped @ records) <= max(tolerance, above)
    want = factors @ records
    # A weight of which little comes has to be right, too.
    sizes = [w.shape.num_elements() for w in made.points[0].weights]
    ends = np.cumsum(sizes * (len(want) // sum(sizes)))[:-1]
    for a, b in zip(np.split(got, ends), np.split(want, ends), strict=True):
        allowed = np.linalg.norm(b) + 0.1 * np.linalg.norm(want)
        assert np.linalg.norm(b) > 0
        assert np.linalg.norm(a - b) <= tolerance * allowed
    for a, b in zip(again, outputs, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)

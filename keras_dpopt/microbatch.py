"""The sum of clipped records of one microbatch, and the engine that computes it.

The computation is a function of its own: it gets every value as an argument, so XLA can
compile it, and its graph can be searched for what it must not do.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dpopt import data, engines, keras_compat, losses, prng, step_checks
from keras_dpopt.engines import EngineNotes, GradientEngine, GradientProblem
from keras_dpopt.engines.rounding import product_error
from keras_dpopt.queries import Point, StepState

# Bytes that the tensors of a microbatch may have together where `microbatch_size` is
# left to us; what is alive at a time is about a third of them.
_MEMORY = 2**31


class MicrobatchSum:
    """Computes the sum of the clipped records of one microbatch.

    Args:
        model: A built, compiled private model; its optimizer is a built `DPOptimizer`.
        jit_compile: Whether XLA compiles the function. Never more: the number of
            microbatches changes from step to step, and XLA would compile again for
            each.
        run_eagerly: Whether to run without graphs.

    Attributes:
        engine: The gradient engine, once it is chosen.
        reasons: By name, why not an engine that would be faster.
        notes: What the book-keeping engine says of the model.
    """

    def __init__(self, model: keras.Model, jit_compile: bool, run_eagerly: bool):
        self._model, self._optimizer = model, model.optimizer
        self._trainable = list(model.trainable_variables)
        self._seed_states = keras_compat.seed_states(model)
        seeds = {id(state) for state in self._seed_states}
        self._other = [v for v in model.non_trainable_variables if id(v) not in seeds]
        self._jit_compile = jit_compile
        self._run_eagerly = run_eagerly
        self.engine: Any = None
        self.reasons: dict[str, str] = {}
        self.notes = EngineNotes()
        self._product_error = product_error()

    def points(self, state: StepState) -> tuple:
        """What the function of one microbatch gets to know its points from.

        The points themselves, computed once for all microbatches. Under XLA the state
        that they are made of, so that what is compiled is the whole computation, the
        sampling of weights included.
        """
        if self._jit_compile:
            return state.tensors()
        points = self._optimizer.query.points(state)
        return tuple((p.coefficient, p.weights, p.scales) for p in points)

    def __call__(self, points: tuple, rows, seeds, count) -> tuple:
        """Returns the sum of the clipped records, and the model's outputs.

        Args:
            points: What `points` returned.
            rows: The rows of the microbatch, `[m, ...]`.
            seeds: What `seeds` returned for them.
            count: int32 scalar: so many of the rows are records.
        """
        return self._sum(self.engine, points, rows, seeds, count, self._run_eagerly)

    def _sum(self, engine, points, rows, seeds, count, run_eagerly):
        mechanism = self._optimizer.mechanism
        params = mechanism.sample_params(self._optimizer.mechanism_state())
        run, given = self._function(engine, params)
        arguments = (points, *given, rows, seeds, count)
        if run_eagerly:
            return run.python_function(*arguments)
        self._check_graph(run.get_concrete_function(*arguments).graph)
        return run(*arguments)

    def _function(self, engine, params) -> tuple[Any, tuple]:
        """The function of one microbatch, and what it gets beside points and rows."""
        mechanism = self._optimizer.mechanism

        def run(given, other, params, rows, seeds, count):
            problem = self._problem(
                self._read_points(given),
                other,
                functools.partial(mechanism.preprocess_record, params),
                mechanism.clip_factors
                and functools.partial(mechanism.clip_factors, params),
                static_shapes=bool(self._jit_compile),
            )
            return engine.clipped_sum(problem, rows, seeds, count)

        run = tf.function(run, autograph=False, jit_compile=self._jit_compile or None)
        return run, (values_of(self._other), params)

    def _check_graph(self, graph) -> None:
        step_checks.refuse_state(graph)
        step_checks.refuse_metric_reads(graph, self._model)

    def _problem(
        self, points, other, preprocess, clip_factors, training=True, **arguments
    ):
        """What is asked of an engine, at these points."""
        record_loss = losses.RecordLoss(
            self._model,
            self._other,
            self._seed_states,
            self._optimizer.augmentation_multiplicity,
            training,
        )
        return GradientProblem(
            evaluate=lambda w, s, record: record_loss(w, other, s, record),
            preprocess=preprocess,
            points=points,
            query=self._optimizer.query,
            loss_scale=self._loss_scale(),
            names=tuple(v.path for v in self._trainable),
            evaluate_batch=lambda w, s, rows: record_loss.on_batch(w, other, s, rows),
            clip_factors=clip_factors,
            **arguments,
        )

    def _loss_scale(self) -> float:
        # float16 gradients below 6e-8 vanish; 2^10 leaves room above as well.
        layers = keras_compat.flat_layers(self._model)
        float16 = any(layer.compute_dtype == "float16" for layer in layers)
        return 1024.0 if float16 else 1.0

    def seeds(self, step, positions):
        """States of all seed generators for the records at these positions."""
        return tf.stack(
            [
                prng.per_record_seeds(self._optimizer.keys.layers, step, positions, i)
                for i in range(len(self._seed_states))
            ],
            axis=1,
        )

    def _read_points(self, given: tuple) -> tuple[Point, ...]:
        if self._jit_compile:
            return self._optimizer.query.points(StepState(*given))
        return tuple(Point(*parts) for parts in given)

    def size(self) -> int:
        """Returns how many records a microbatch has: the user's number, or ours.

        The book-keeping engine takes a whole batch at a time if its memory allows:
        `_MEMORY`, held against the sum of all tensors of a record. The other engines
        hold a gradient for each record.
        """
        if self._product_error != product_error():
            raise ValueError(
                "TF32 was turned on or off after the model was compiled, and bounds of "
                "norms are for what it was. Compile the model again."
            )
        given = self._optimizer.microbatch_size
        if given:
            return given
        shares = self._model.distribute_strategy.num_replicas_in_sync
        shares *= self._optimizer.logical_batch_steps
        batch_size = -(-self._optimizer.expected_batch_size // shares)
        if self.engine.name == "bookkeeping":
            by_memory = max(1, _MEMORY // max(1, self.notes.record_bytes))
            # Poisson batches are seldom larger than by 4 standard deviations. XLA
            # computes the padding, too: half a microbatch of it, on average.
            deviation = math.isqrt(batch_size)
            most = 2 * deviation if self._jit_compile else batch_size + 4 * deviation
            return min(by_memory, max(most + 1, 8))
        parameters = sum(math.prod(v.shape) for v in self._trainable)
        return data.microbatch_size(parameters, batch_size)

    def choose_engine(self, row_specs: dict, rows: dict | None = None) -> None:
        """Chooses the gradient engine for batches of rows of these specs.

        Args:
            row_specs: Specs with an axis of records.
            rows: Some real rows, if any are at hand: made-up ones stand in for them.
        """
        specs = tf.nest.map_structure(
            lambda s: tf.TensorSpec(s.shape[1:], s.dtype), row_specs
        )
        self.engine, self.reasons = engines.select(
            self._optimizer.gradient_engine,
            lambda engine: self.try_engine(engine, specs, rows),
            self._model.name,
        )
        if self._run_eagerly:
            # Only a graph can be searched for writes.
            self.try_engine(self.engine, specs, rows)

    def why_not(self, name: str, rows: dict) -> str:
        """Returns why an engine cannot serve the model; empty where it can."""
        specs = tf.nest.map_structure(
            lambda t: tf.TensorSpec(t.shape[1:], t.dtype), rows
        )
        engine, notes = engines.ENGINES[name], self.notes
        try:
            return engines.reason_against(
                engine, lambda e: self.try_engine(e, specs, rows)
            )
        finally:
            self.notes = notes

    def trial_sum(self, engine: GradientEngine, rows: dict) -> Callable:
        """Returns a function that computes the clipped sum of rows, of no step."""
        zero = tf.constant(0, tf.int64)
        count = tf.nest.flatten(rows)[0].shape[0]
        optimizer, weights = self._optimizer, values_of(self._trainable)
        state = optimizer.step_state(weights, zero)
        params = optimizer.mechanism.sample_params(optimizer.mechanism_state())
        run, given = self._function(engine, params)
        seeds = self.seeds(zero, tf.range(count))
        arguments = (self.points(state), *given, rows, seeds, tf.constant(count))
        return lambda: run(*arguments)[0]

    def try_engine(
        self, engine: GradientEngine, row_specs: dict, rows: dict | None = None
    ) -> None:
        """Runs an engine on a few rows; raises where it cannot serve the model.

        The book-keeping engine is tried on real rows (see `engines/trial.py`): what
        follows from them is which engine computes the same sums, or an error. The
        others get rows of zeros.
        """
        if engine.name == "bookkeeping":
            if self._optimizer.mechanism.clip_factors is None:
                raise NotImplementedError("the dp_sum_query clips whole records")
            made_up = tf.nest.map_structure(_made_up, row_specs)
            real = rows if rows and tf.nest.flatten(rows)[0].shape[0] else made_up
            self._try_bookkeeping(engine, real)
            return
        rows = tf.nest.map_structure(_zeros, row_specs)
        optimizer, zero = self._optimizer, tf.constant(0, tf.int64)
        weights = values_of(self._trainable)
        seeds = self.seeds(zero, tf.range(2))
        released: tuple = ()
        for _ in range(optimizer.query.stages):
            points = self.points(optimizer.step_state(weights, zero, released))
            self._sum(engine, points, rows, seeds, tf.constant(2), False)
            specs = optimizer.query.record_specs(weights)
            released += (tuple(tf.zeros(s.shape, tf.float32) for s in specs),)

    def _try_bookkeeping(self, engine: GradientEngine, rows: dict) -> None:
        number = tf.nest.flatten(rows)[0].shape[0]
        # Fewer rows than are wanted are taken again.
        rows = tf.nest.map_structure(
            lambda t: tf.gather(t, [i % number for i in range(engines.TRIED)]), rows
        )
        state = self._optimizer.step_state(
            values_of(self._trainable), tf.constant(0, tf.int64)
        )
        points = tuple(
            dataclasses.replace(point, weights=_near(point.weights, j))
            for j, point in enumerate(self._optimizer.query.points(state))
        )
        other = values_of(self._other)
        self.notes = EngineNotes()
        engines.try_bookkeeping(
            engine,
            lambda *clip: self._problem(points, other, *clip, notes=self.notes),
            rows,
            self.seeds(tf.constant(0, tf.int64), tf.range(engines.TRIED)),
            half=any(
                layer.compute_dtype in ("float16", "bfloat16")
                for layer in keras_compat.flat_layers(self._model)
            ),
            check=self._check_graph,
        )


def _zeros(spec):
    shape = [32 if size is None else size for size in spec.shape]
    return tf.zeros([2, *shape], spec.dtype)


def _made_up(spec):
    """Rows that differ, of values that every layer accepts: integers are 0 or 1."""
    shape = [32 if size is None else size for size in spec.shape]
    draw = np.random.default_rng(0).normal(size=(engines.TRIED, *shape))
    dtype = spec.dtype
    if dtype == tf.string:
        return tf.zeros(draw.shape, dtype)
    return tf.cast(draw if dtype.is_floating else draw > 0, dtype)


def _near(weights, stream: int) -> tuple:
    """Weights at which a layer that starts at zero has a gradient, too."""
    generator = np.random.default_rng(stream)

    def moved(weight):
        size = 0.1 * (float(tf.sqrt(tf.reduce_mean(tf.square(weight)))) + 0.1)
        return weight + size * generator.normal(size=weight.shape).astype("float32")

    return tuple(moved(weight) for weight in weights)


def values_of(variables) -> tuple:
    """Returns the variables' values."""
    return tuple(tf.convert_to_tensor(v.value) for v in variables)

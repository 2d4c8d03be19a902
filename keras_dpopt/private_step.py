"""One private training step, as the data flows.

logical batch -> record gradients, clipped and summed, microbatch by microbatch
              -> noise, once -> filter, update rule, weights
"""

import functools
from typing import Any

import keras
import tensorflow as tf

from keras_dpopt import engines, keras_compat, losses, prng, step_checks
from keras_dpopt.engines import GradientEngine, GradientProblem
from keras_dpopt.queries import Point, StepState
from keras_dpopt.types import ClippedSum
from keras_dpopt.weights_watch import WeightsWatch


class PrivateStep:
    """The training step of a built, compiled private model.

    Args:
        model: The model; its optimizer is a built `DPOptimizer`.
        jit_compile: Whether XLA compiles the function of one microbatch. Never more:
            the number of microbatches changes from step to step, and XLA would compile
            again for each.
        run_eagerly: Whether to run without graphs.
    """

    def __init__(self, model: keras.Model, jit_compile: bool, run_eagerly: bool):
        self._model = model
        self._optimizer = model.optimizer
        self._trainable = list(model.trainable_variables)
        wide = [w for w in self._trainable if w.dtype != "float32"]
        if wide:
            raise ValueError(
                f"Weights of dtype {wide[0].dtype} do not train privately: sums, noise "
                "and state are float32. Use the dtype policy float32, mixed_float16 or "
                "mixed_bfloat16."
            )
        self._seed_states = keras_compat.seed_states(model)
        seeds = {id(state) for state in self._seed_states}
        self._other = [v for v in model.non_trainable_variables if id(v) not in seeds]
        self._own_loss = keras_compat.overrides_compute_loss(model)
        self._jit_compile = jit_compile
        self._run_eagerly = run_eagerly
        # Batches of the epoch that a resumed run had applied already: their steps lie
        # below this number.
        self.resume_step = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.engine: Any = None  # a GradientEngine, once chosen
        self.watch = WeightsWatch(self._trainable)

    def __call__(self, batch: dict) -> None:
        """Does the step for a logical batch of `data.py`."""
        optimizer = self._optimizer
        due = self._is_due(batch["step"])
        self.watch.compare()
        weights = self._values(self._trainable)
        regularization, penalty = self._regularization(weights)
        number = tf.identity(optimizer.release_count.value)
        last, released = optimizer.query.stages - 1, ()
        for stage in range(last + 1):
            state = optimizer.step_state(weights, number, released)
            points = self._points(state)
            total = self._sum_of_microbatches(batch, due, points, penalty, stage)
            if stage < last:
                released += (self._released(due, total, stage),)

        def update():
            gradient = optimizer.release(self._clipped(total), last)
            optimizer.apply(gradient, self._trainable, regularization, state)
            self.watch.remember()
            return tf.constant(True)

        tf.cond(due, update, lambda: tf.constant(False))

    def _points(self, state: StepState) -> tuple:
        """What the function of one microbatch gets to know its points from.

        The points themselves, computed once for all microbatches. Under XLA the state
        that they are made of, so that what is compiled is the whole computation, the
        sampling of weights included.
        """
        if self._jit_compile:
            return state.tensors()
        points = self._optimizer.query.points(state)
        return tuple((p.coefficient, p.weights, p.scales) for p in points)

    def _read_points(self, given: tuple) -> tuple[Point, ...]:
        if self._jit_compile:
            return self._optimizer.query.points(StepState(*given))
        return tuple(Point(*parts) for parts in given)

    def _clipped(self, total) -> ClippedSum:
        mechanism = self._optimizer.mechanism
        params = mechanism.sample_params(self._optimizer.mechanism_state())
        return ClippedSum(total, mechanism.sensitivity(params))

    def _released(self, due, total, stage: int) -> tuple:
        """What an earlier stage of the step releases, for the points of the next."""
        weights = self._values(self._trainable)
        specs = self._optimizer.query.record_specs(weights)
        return tf.cond(
            due,
            lambda: self._optimizer.release(self._clipped(total), stage).values,
            lambda: tuple(tf.zeros(spec.shape, tf.float32) for spec in specs),
        )

    def choose_engine(self, row_specs: dict) -> None:
        """Chooses the gradient engine for batches of rows of these specs."""
        specs = tf.nest.map_structure(
            lambda s: tf.TensorSpec(s.shape[1:], s.dtype), row_specs
        )
        self.engine = engines.select(
            self._optimizer.gradient_engine,
            lambda engine: self.try_engine(engine, specs),
            self._model.name,
        )
        if self._run_eagerly:
            # Only a graph can be searched for writes.
            self.try_engine(self.engine, specs)

    def try_engine(self, engine: GradientEngine, row_specs: dict) -> None:
        """Runs an engine on two rows of zeros; raises where it cannot serve the model.

        Zeros, not data: the choice of an engine tells nothing about a record.
        """

        def zeros(spec):
            shape = [32 if size is None else size for size in spec.shape]
            return tf.zeros([2, *shape], spec.dtype)

        rows = tf.nest.map_structure(zeros, row_specs)
        optimizer, zero = self._optimizer, tf.constant(0, tf.int64)
        weights = self._values(self._trainable)
        seeds = self._seeds(zero, tf.range(2))
        released: tuple = ()
        for _ in range(optimizer.query.stages):
            points = self._points(optimizer.step_state(weights, zero, released))
            self._microbatch_sum(engine, points, rows, seeds, tf.constant(2), False)
            specs = optimizer.query.record_specs(weights)
            released += (tuple(tf.zeros(s.shape, tf.float32) for s in specs),)

    def _is_due(self, step):
        """Whether this batch is the next release, within the limit."""
        number = self._optimizer.release_count.value
        allowed = number < self._optimizer.step_limit.value
        applied = step < self.resume_step
        expected = tf.equal(step, number) | tf.logical_not(allowed) | applied
        check = tf.debugging.Assert(
            expected, ["A batch was drawn for step", step, "and came at step", number]
        )
        with tf.control_dependencies([check] if check is not None else []):
            return tf.equal(step, number) & allowed & tf.logical_not(applied)

    def _sum_of_microbatches(self, batch, due, points, penalty, stage):
        rows, count, step = batch["rows"], batch["count"], batch["step"]
        flat = tf.nest.flatten(rows)
        size = flat[0].shape[1]
        # A step that is not due reads no record at all.
        microbatches = tf.where(due, tf.shape(flat[0])[0], 0)
        mechanism = self._optimizer.mechanism
        zero = mechanism.zero_sum(
            [
                tf.zeros(spec.shape, tf.float32)
                for spec in self._optimizer.query.record_specs(self._trainable)
            ]
        )

        def body(j, total):
            part_rows = tf.nest.map_structure(lambda t: t[j], rows)
            seeds = self._seeds(step, j * size + tf.range(size))
            part_count = tf.minimum(count - j * size, size)
            part, outputs = self._microbatch_sum(
                self.engine, points, part_rows, seeds, part_count, self._run_eagerly
            )
            if stage == 0:
                self._report(part_rows, outputs, part_count, penalty)
            return j + 1, tf.nest.map_structure(tf.add, total, part)

        _, total = tf.while_loop(
            lambda j, _: j < microbatches, body, (0, zero), parallel_iterations=1
        )
        return total

    def _microbatch_sum(self, engine, points, rows, seeds, count, run_eagerly):
        """The sum of clipped records of one microbatch, in a function of its own.

        It gets every value as an argument, so XLA can compile it, and a function of its
        own can be searched for what it must not do.
        """
        mechanism, query = self._optimizer.mechanism, self._optimizer.query
        record_loss = losses.RecordLoss(
            self._model,
            self._other,
            self._seed_states,
            self._optimizer.augmentation_multiplicity,
        )

        def run(given, other, params, rows, seeds, count):
            problem = GradientProblem(
                evaluate=lambda w, s, record: record_loss(w, other, s, record),
                preprocess=functools.partial(mechanism.preprocess_record, params),
                points=self._read_points(given),
                query=query,
                loss_scale=self._loss_scale(),
                names=tuple(v.path for v in self._trainable),
            )
            return engine.clipped_sum(problem, rows, seeds, count)

        arguments = (
            points,
            self._values(self._other),
            mechanism.sample_params(self._optimizer.mechanism_state()),
            rows,
            seeds,
            count,
        )
        if run_eagerly:
            return run(*arguments)
        run = tf.function(run, autograph=False, jit_compile=self._jit_compile or None)
        graph = run.get_concrete_function(*arguments).graph
        step_checks.refuse_state(graph)
        step_checks.refuse_metric_reads(graph, self._model)
        return run(*arguments)

    def _loss_scale(self) -> float:
        # float16 gradients below 6e-8 vanish; 2^10 leaves room above as well.
        layers = keras_compat.flat_layers(self._model)
        float16 = any(layer.compute_dtype == "float16" for layer in layers)
        return 1024.0 if float16 else 1.0

    def _seeds(self, step, positions):
        """States of all seed generators for the records at these positions."""
        return tf.stack(
            [
                prng.per_record_seeds(self._optimizer.keys.layers, step, positions, i)
                for i in range(len(self._seed_states))
            ],
            axis=1,
        )

    def _regularization(self, weights):
        """Gradients of the weight regularizers, and their value: no data in either."""
        gradients, penalty = [], tf.constant(0.0)
        for variable, value in zip(self._trainable, weights, strict=True):
            # A `compute_loss` of the model's own has them in, if it wants them.
            if variable.regularizer is None or self._own_loss:
                gradients.append(None)
                continue
            with tf.GradientTape() as tape:
                tape.watch(value)
                loss = tf.cast(variable.regularizer(value), tf.float32)
            gradients.append(tape.gradient(loss, value))
            penalty += loss
        return gradients, penalty

    def _report(self, rows, outputs, count, penalty):
        """Feeds the loss trackers and metrics with the records, without the padding."""
        take = lambda t: t[:count]  # noqa: E731
        rows, outputs = tf.nest.map_structure(take, (rows, outputs))
        flat = tf.nest.flatten(outputs["y_pred"])
        for index, mask in outputs["masks"].items():
            keras_compat.set_keras_mask(flat[int(index)], mask)
        y_pred = tf.nest.pack_sequence_as(outputs["y_pred"], flat)
        y, sample_weight = rows.get("y"), rows.get("sample_weight")
        model = self._model

        def report():
            keras_compat.update_loss_trackers(
                model, outputs["loss"] + penalty, y, y_pred, sample_weight, count
            )
            model.compute_metrics(rows["x"], y, y_pred, sample_weight=sample_weight)

        step_checks.guarded_report(model, report)

    def _values(self, variables):
        return tuple(tf.convert_to_tensor(v.value) for v in variables)

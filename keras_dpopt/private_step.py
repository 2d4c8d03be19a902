"""One private training step, as the data flows.

logical batch -> record gradients, clipped and summed, microbatch by microbatch
              -> sum over the replicas -> noise, once -> filter, update rule, weights
"""

import functools

import keras
import tensorflow as tf

from keras_dpopt import distribution, keras_compat, step_checks
from keras_dpopt.microbatch import MicrobatchSum, values_of
from keras_dpopt.types import ClippedSum
from keras_dpopt.weights_watch import WeightsWatch


class PrivateStep:
    """The training step of a built, compiled private model.

    Args:
        model: The model; its optimizer is a built `DPOptimizer`.
        jit_compile: Whether XLA compiles the function of one microbatch.
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
        self._own_loss = keras_compat.overrides_compute_loss(model)
        self.microbatch = MicrobatchSum(model, jit_compile, run_eagerly)
        # Batches of the epoch that a resumed run had applied already: their places
        # lie below this number.
        self.resume_place = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.watch = WeightsWatch(self._trainable)

    @classmethod
    def chosen(cls, model, row_specs: dict, rows: dict | None) -> "PrivateStep":
        """Makes the step of a built model; see `MicrobatchSum.choose_engine`."""
        step = cls(model, model.jit_microbatch, model.run_eagerly)
        step.microbatch.choose_engine(row_specs, rows)
        return step

    def __call__(self, batch: dict) -> None:
        """Does the step for a logical batch of `data.py`."""
        optimizer = self._optimizer
        due = self._is_due(batch["step"], batch["part"])
        weights = values_of(self._trainable)
        regularization, penalty = self._regularization(weights)
        number = tf.identity(optimizer.release_count.value)
        last, released = optimizer.query.stages - 1, ()
        for stage in range(last + 1):
            state = optimizer.step_state(weights, number, released)
            drawn = optimizer.draw_ahead(number, stage)
            points = self.microbatch.points(state)
            total = self._sum_of_microbatches(batch, due, points, penalty, stage)
            if stage < last:
                release = functools.partial(self._released, due, stage, drawn)
                released += (distribution.once(release, total, batch),)
        distribution.once(
            functools.partial(self._update, due, last, drawn, regularization, state),
            total,
            batch,
        )

    def _update(self, due, stage, drawn, regularization, state, total):
        optimizer = self._optimizer
        self.watch.compare()

        def update(whole):
            gradient = optimizer.release(self._clipped(whole), stage, drawn)
            optimizer.apply(gradient, self._trainable, regularization, state)
            self.watch.remember()
            return tf.constant(True)

        def part():
            whole, complete = optimizer.add_part(total)
            if complete is True:
                return update(whole)
            return tf.cond(complete, lambda: update(whole), lambda: tf.constant(False))

        return tf.cond(due, part, lambda: tf.constant(False))

    def _clipped(self, total) -> ClippedSum:
        mechanism = self._optimizer.mechanism
        params = mechanism.sample_params(self._optimizer.mechanism_state())
        return ClippedSum(total, mechanism.sensitivity(params))

    def _released(self, due, stage: int, drawn, total) -> tuple:
        """What an earlier stage of the step releases, for the points of the next."""
        weights = values_of(self._trainable)
        specs = self._optimizer.query.record_specs(weights)
        return tf.cond(
            due,
            lambda: self._optimizer.release(self._clipped(total), stage, drawn).values,
            lambda: tuple(tf.zeros(spec.shape, tf.float32) for spec in specs),
        )

    def _is_due(self, step, part):
        """Whether this batch is the next one of the next release, within the limit."""
        number = self._optimizer.release_count.value
        allowed = number < self._optimizer.step_limit.value
        place = self.place(step, part)
        is_next = tf.equal(place, self.place(number, self._optimizer.parts_come))
        applied = place < self.resume_place
        check = tf.debugging.Assert(
            is_next | tf.logical_not(allowed) | applied,
            ["A batch was drawn for step", step, "and came at step", number],
        )
        with tf.control_dependencies([check] if check is not None else []):
            return is_next & allowed & tf.logical_not(applied)

    def place(self, step, part):
        """The number of a physical batch: of this part of the batch for a step."""
        return step * self._optimizer.logical_batch_steps + part

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
            positions = distribution.positions(batch, j * size + tf.range(size))
            parts = self._optimizer.logical_batch_steps
            positions = positions * parts + tf.cast(batch["part"], tf.int32)
            seeds = self.microbatch.seeds(step, positions)
            part_count = tf.minimum(count - j * size, size)
            part, outputs = self.microbatch(points, part_rows, seeds, part_count)
            if stage == 0:
                self._report(part_rows, outputs, part_count, penalty)
            return j + 1, tf.nest.map_structure(tf.add, total, part)

        _, total = tf.while_loop(
            lambda j, _: j < microbatches, body, (0, zero), parallel_iterations=1
        )
        return total

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

"""What the training step asks of a private optimizer: plan, points, release."""

import tensorflow as tf

from keras_dpopt import arguments, digest, keras_compat, run_plan
from keras_dpopt.queries import StepState
from keras_dpopt.types import MixIn, PrivatizedGradient


class StepInterface(MixIn):
    """Part of the private optimizers: sizes, plan, points and the release of a step."""

    @property
    def expected_batch_size(self) -> int | None:
        """The constant divisor B, or `None` while nothing has set it."""
        return int(self.batch_size_variable.numpy()) or None

    def resolve_batch_size(self, batch_size: int | None) -> int:
        """Fixes the divisor B to `batch_size`, or to what the constructor got.

        Args:
            batch_size: That of a fit on arrays; `None` where the caller makes the
                batches.

        Raises:
            ValueError: if neither is there, or both and they differ.
        """
        resolved = arguments.resolve_batch_size(
            self.expected_batch_size, batch_size, takes_batch_size=False
        )
        self.batch_size_variable.assign(resolved)
        return resolved

    def resolve_sizes(self, batch_size: int | None, train_size: int | None) -> None:
        """Fixes the divisor B, and N for the parts that need it, or raises."""
        self.resolve_batch_size(batch_size)
        self.resolve_train_size(train_size)

    def resolve_train_size(self, train_size: int | None) -> None:
        """Fixes N, for the parts that need it.

        Raises:
            ValueError: if they do, and nothing tells it.
        """
        if self._train_size is None:
            return
        if train_size:
            self._train_size.assign(train_size)
        elif not int(self._train_size.numpy()):
            raise ValueError(
                f"{type(self).__name__} needs the number of training records. Pass "
                "arrays or `train_size` to `fit`, or fix it in the constructor."
            )

    @property
    def l2_norm_clip(self) -> float | None:
        """C; where it changes, the first one."""
        return self.mechanism.l2_norm_clip

    @property
    def noise_multiplier(self) -> float | None:
        """sigma; `None` where a dp_sum_query has it."""
        return self.mechanism.noise_multiplier

    def plan_run(
        self, steps: int | None, train_size: int | None, drawn: bool
    ) -> run_plan.RunPlan:
        """Returns how the coming steps are to be made, and accounted.

        Args:
            steps: Their number, where it is known.
            train_size: N, where it is known.
            drawn: Whether the library draws the batches.
        """
        size = self.resolve_batch_size(None)
        return self.mechanism.plan_run(
            self.coming_steps(steps, size, train_size, drawn)
        )

    def coming_steps(
        self, steps: int | None, batch_size: int, train_size: int | None, drawn: bool
    ) -> run_plan.ComingSteps:
        """Returns what a mechanism is told of the coming steps; see `plan_run`."""
        # A fit without steps is planned as one of one step.
        steps = None if steps is None else max(1, steps)
        if self._train_size is not None:
            train_size = train_size or int(self._train_size.numpy())

        def learning_rates():
            first = int(self.iterations.numpy())
            return run_plan.schedule_values(self._learning_rate, first, steps)

        return run_plan.ComingSteps(
            steps, batch_size, train_size, drawn, learning_rates
        )

    def noise_multipliers(self, batch_size: int | None = None) -> tuple[float, ...]:
        """Returns the noise multipliers of one step, as the constructor's sigma has it.

        A mechanism that plans its run tells the ledger others: `DPSGLD` those of the
        schedule (sigma is the least here), `DPFTRL` those of a whole tree.

        Args:
            batch_size: B; `None` takes that of the optimizer.
        """
        state = self.mechanism_state() if self.built else self.mechanism.initial_state()
        size = batch_size or self.expected_batch_size
        return self.mechanism.noise_multipliers(state, size) * self.query.stages

    def step_state(self, weights, number, released=()) -> StepState:
        """Returns what the query is given, at these weights and this release.

        Args:
            weights: Values of the trainable variables.
            number: int64 scalar, the number of the release.
            released: What earlier stages of the step have released.
        """
        slots = {
            name: tuple(
                tf.convert_to_tensor(of[name].value) for of in self._state.per_variable
            )
            for name in (*self.query.slots, *self.query.reads)
        }
        if "last_update" in slots:
            # d is the change made by the last update. If anything else has assigned
            # the weights since, there was no such change at these weights.
            same = tf.equal(
                digest.weights_digest(weights), self._state.weights_digest.value
            )
            slots["last_update"] = tuple(
                tf.where(same, d, 0.0) for d in slots["last_update"]
            )
        train_size = self._train_size
        if train_size is not None:
            train_size = tf.cast(train_size.value, tf.float32)
        return StepState(
            weights, slots, self.keys.weights, number, train_size, released
        )

    def restart_run(self) -> None:
        """Begins a new run of a mechanism that one fit is one run of."""
        if self.built and self._state.mechanism_is_secret:
            tf.nest.map_structure(
                lambda v, first: v.assign(first),
                self._state.mechanism,
                self.mechanism.initial_state(),
            )

    def mechanism_state(self):
        """Returns the mechanism's state as tensors."""
        return tf.nest.map_structure(tf.convert_to_tensor, self._state.mechanism)

    @property
    def parts_come(self):
        """int64 scalar: parts of the next logical batch whose sum is kept."""
        partial_sum = self._state.partial_sum
        return tf.constant(0, tf.int64) if partial_sum is None else partial_sum.count

    def add_part(self, total):
        """Adds the clipped sum of a physical batch to those before it.

        Returns:
            The sum, and whether it is that of a whole logical batch.
        """
        partial_sum = self._state.partial_sum
        return (total, True) if partial_sum is None else partial_sum.add(total)

    def drop_parts(self) -> None:
        """Forgets the physical batches of a logical one that was not completed."""
        if self._state is not None and self._state.partial_sum is not None:
            self._state.partial_sum.drop()

    def draw_ahead(self, number, stage: int = 0):
        """Draws the noise of a release before its sum is there; see `release`.

        Where batches come in parts it draws nothing: most steps release nothing.

        Args:
            number: int64 scalar, the number of the step.
            stage: Which of the releases of the step it is.
        """
        if self.logical_batch_steps > 1:
            return None
        return self.mechanism.draw_ahead(
            self.query.record_specs(keras_compat.optimizer_variables_of(self)),
            self.keys.noise,
            number,
            stage * self._record_parts(),
        )

    def release(self, clipped_sum, stage: int = 0, drawn=None) -> PrivatizedGradient:
        """Lets the mechanism noise a clipped sum; counts the step first.

        Args:
            clipped_sum: The `ClippedSum`.
            stage: Which of the releases of the step it is; the first one counts.
            drawn: What `draw_ahead` returned for it, if it was called.
        """
        number = tf.identity(self.release_count.value)
        if stage == 0:
            with tf.control_dependencies([number]):
                counted = self.release_count.value.assign_add(1)
        else:
            counted, number = number, number - 1
        # The count comes before the noise and before any weight: a step that is cut
        # short is a step that counts.
        checks = self.schedule_checks() if self.mechanism.follows_schedule else []
        train_size = self._train_size
        mechanism = self.mechanism.for_step(
            tf.cast(self.learning_rate, tf.float32),
            None if train_size is None else tf.cast(train_size.value, tf.float32),
        )
        with tf.control_dependencies([counted, *checks]):
            gradient, new_state = mechanism.release(
                clipped_sum,
                self.mechanism_state(),
                self.keys.noise,
                number,
                tf.cast(self.batch_size_variable.value, tf.float32),
                stage * self._record_parts(),
                drawn,
            )
        tf.nest.map_structure(
            lambda v, new: v.assign(new), self._state.mechanism, new_state
        )
        return gradient

    def _record_parts(self) -> int:
        return len(keras_compat.optimizer_variables_of(self)) * self.query.views

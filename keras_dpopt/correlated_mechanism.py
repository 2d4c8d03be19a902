"""The Gaussian mechanism with noise that is correlated from step to step.

    g_t = (1/B) * (sum_i clip(u_i, C) + sigma*s*C*w_t),      w = S^{-1} z

with S a strategy (`toeplitz.py`) and s its sensitivity under the participation schema
that the batches keep to, in units of C. One fit is one run: seen as a whole, it is one
Gaussian release of noise multiplier sigma (or one a group of steps).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dpopt import prng, validation
from keras_dpopt.planned_mechanism import PlannedMechanism, variable
from keras_dpopt.run_plan import ComingSteps


class CorrelatedMechanism(PlannedMechanism):
    """Base class: buffers, and the release.

    A subclass says in `plan_run` which strategy serves the coming steps, and calls
    `_begin_plan`.

    Args:
        l2_norm_clip: C > 0, finite unless there is no noise.
        noise_multiplier: sigma >= 0.
        stream: The recursion of the strategy, of `noise_streams.py`.
        parameters: Of the stream, at first.

    Attributes:
        state_is_secret: Earlier noise, with which later noise could be told.

    Privacy:
        The ledger counts a run as one release from its first step on; a step beyond the
        horizon that the run was planned for fails.
    """

    is_correlated = True

    def __init__(
        self, l2_norm_clip: float, noise_multiplier: float, stream: Any, parameters: Any
    ):
        super().__init__(l2_norm_clip, noise_multiplier)
        self._stream = stream
        self._shapes: Sequence[Any] = ()
        with tf.init_scope():
            # In variables, so that a traced step follows the plan of each fit. They
            # are public: functions of the settings alone.
            self._parameters = variable(parameters)
            self._scale = variable(np.float32(0.0))
            self._row_norms = variable(np.ones(1, np.float32), [None])

    def built_for(self, groups, shapes=()) -> "CorrelatedMechanism":
        """Returns the mechanism for variables of these shapes."""
        built = super().built_for(groups, shapes)
        built._shapes = [tuple(shape) for shape in shapes]
        return built  # type: ignore[return-value]

    def initial_state(self) -> Any:
        """Returns the state before the first step of a run."""
        buffers = tuple(
            np.zeros((self._stream.buffers, *shape), np.float32)
            for shape in self._shapes
        )
        return {**super().initial_state(), "buffers": buffers}

    def _begin_plan(
        self, steps: int, parameters: Any, scale: float, row_norms: np.ndarray
    ) -> None:
        """Sets what the steps of the coming run read.

        Args:
            steps: Their number.
            parameters: Of the stream.
            scale: s, or what else the noise is to be multiplied by besides sigma*C.
            row_norms: Standard deviation of w_t for each step t.
        """
        # Float32 may round the sensitivity down.
        rounded = np.float32(scale * (1 + 1e-6))
        row_norms = np.asarray(row_norms, np.float32)
        self._parameters.assign(parameters)
        self._scale.assign(rounded)
        self._row_norms.assign(row_norms)
        self._set_plan(steps, np.asarray(parameters), rounded, row_norms)

    def _check_drawn(self, coming: ComingSteps) -> None:
        if not coming.drawn or coming.steps is None:
            raise ValueError(
                "Correlated noise is accounted for an order of the records in which "
                "each comes back after a fixed number of steps at the earliest, and "
                "batches of your own need not keep to it. Pass arrays to `fit`."
            )

    def draw_ahead(self, specs, key, step, first_stream: int = 0):
        """See `GaussianMechanism.draw_ahead`: the noise depends on that of before."""
        return None

    def release(
        self,
        clipped,
        state,
        key,
        step,
        expected_batch_size,
        first_stream: int = 0,
        drawn: None = None,
    ):
        """See `GaussianMechanism.release`."""
        self._check_sensitivity(clipped)
        stddev = tf.constant(self._query.stddev, tf.float32) * self._scale
        position, following = self._at(state, key)
        with tf.control_dependencies([position]):
            parameters, number = tf.identity(self._parameters), tf.cast(step, tf.int64)
        noised, buffers = [], []
        for i, (total, kept) in enumerate(
            zip(clipped.values, state["buffers"], strict=True)
        ):

            def draw(back, stream=first_stream + i, shape=total.shape):
                return prng.standard_normal(key, number - back, stream, shape)

            noise, kept = self._stream.next(parameters, kept, draw, state["step"])
            noised.append(total + stddev * tf.ensure_shape(noise, total.shape))
            buffers.append(kept)
        marginal = stddev * self._row_norms[position]
        clip = tf.constant(self.l2_norm_clip, tf.float32)
        gradient = self._gradient(noised, marginal, clip, expected_batch_size)
        return gradient, {**following, "buffers": tuple(buffers)}


def separation(train_size: int, batch_size: int) -> int:
    """Returns how many steps a record stays away in cyclic order, ceil(N / B)."""
    validation.check_positive_integer("batch_size", batch_size)
    return -(-train_size // batch_size)

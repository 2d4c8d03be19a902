"""The Gaussian mechanism whose noise is that of Langevin dynamics."""

import copy
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dpopt import validation
from keras_dpopt.gaussian_noise import add_noise
from keras_dpopt.noise_plan import plan_of
from keras_dpopt.planned_mechanism import PlannedMechanism, variable
from keras_dpopt.run_plan import ComingSteps, RunPlan

# The step computes its multiplier in float32; the ledger's must not be above it.
_MARGIN = 1.0 + 1e-6


class LangevinMechanism(PlannedMechanism):
    """Noise that makes a step of size eta one of Langevin dynamics.

        sigma_t = max(sigma_min, 2*B*sqrt(temperature) / (N*C*sqrt(eta_t)))

    Args:
        l2_norm_clip: C > 0, finite.
        noise_multiplier: sigma_min >= 0, of the steps whose own noise would be less.
        temperature: Positive.
        train_size: N; `None` takes that of the fit.

    Attributes:
        follows_schedule: The optimizer checks that the steps come in the order of the
            plan that the ledger has.

    Privacy:
        A step is a Gaussian release of noise multiplier sigma_t, which is known before
        the first step: learning rates are a schedule. Whatever moves N, B or the
        learning rate after that, no step has less noise than the ledger has for it.
    """

    follows_schedule = True

    def __init__(
        self,
        l2_norm_clip: float,
        noise_multiplier: float,
        temperature: float,
        train_size: int | None,
    ):
        super().__init__(l2_norm_clip, noise_multiplier)
        validation.check_positive("l2_norm_clip", self.l2_norm_clip)
        self.temperature = validation.check_positive("temperature", temperature)
        self._train_size: Any = train_size
        self._learning_rate: Any = None
        with tf.init_scope():
            self._planned = variable(np.ones(1, np.float32), [None])

    def plan_run(self, coming: ComingSteps) -> RunPlan:
        """Returns the plan with the multiplier of each step."""
        if coming.steps is None:
            raise ValueError(
                "The noise of Langevin dynamics follows the learning rate, and is "
                "accounted before the first step. Pass a data set of known length, or "
                "`steps_per_epoch`."
            )
        rates = np.asarray(coming.learning_rates(), np.float64)
        if not (np.isfinite(rates).all() and (rates > 0).all()):
            raise ValueError(
                "A learning rate of the schedule is not positive and finite, and no "
                "noise is right for it. Pass a schedule that stays positive."
            )
        size = self._train_size or coming.train_size
        multipliers = self._multiplier(rates, size, coming.batch_size, np)
        plan = plan_of(multipliers.tolist())
        planned = np.concatenate(
            [np.full(count, sigma, np.float32) for sigma, count in plan]
        )
        self._planned.assign(planned)
        self._set_plan(len(planned), planned)
        fields: dict[str, Any] = {"noise_multipliers": (min(m for m, _ in plan),)}
        if len(plan) > 1:
            fields["noise_plan"] = plan
        return RunPlan(self.sampler, True, fields)

    def _multiplier(self, rate, train_size, batch_size, np_like):
        own = 2.0 * batch_size * self.temperature**0.5 / np_like.sqrt(rate)
        return np_like.maximum(
            own / (train_size * self.l2_norm_clip), self.noise_multiplier
        )

    def for_step(self, learning_rate, train_size) -> "LangevinMechanism":
        """Returns the mechanism of a step with this learning rate."""
        chosen = copy.copy(self)
        chosen._learning_rate = learning_rate
        chosen._train_size = self._train_size or train_size
        return chosen

    def release(
        self,
        clipped,
        state,
        key,
        step,
        expected_batch_size,
        first_stream: int = 0,
        drawn: Any = None,
    ):
        """See `GaussianMechanism.release`."""
        self._check_sensitivity(clipped)
        position, following = self._at(state, key)
        with tf.control_dependencies([position]):
            planned = self._planned[position]
        own = self._multiplier(
            self._learning_rate, self._train_size, expected_batch_size, tf
        )
        multiplier = _MARGIN * tf.maximum(tf.cast(own, tf.float32), planned)
        stddev = multiplier * self.l2_norm_clip
        noised = add_noise(clipped.values, stddev, key, step, first_stream, drawn)
        clip = tf.constant(self.l2_norm_clip, tf.float32)
        return self._gradient(noised, stddev, clip, expected_batch_size), following

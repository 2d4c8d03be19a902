"""A Gaussian mechanism whose run is planned, and accounted, before its first step."""

import hashlib
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dpopt.gaussian_mechanism import GaussianMechanism


class PlannedMechanism(GaussianMechanism):
    """Base class: ties each step to the plan that the ledger has.

    A subclass calls `_set_plan` in `plan_run`, and makes its noise behind the checks of
    `_at`. The plan is in variables that no save and no restore touches; the state says
    how far the run is, and under which key and plan it began.

    Attributes:
        state_is_secret: The state is kept where the keys are: it is zero in a new run,
            and only the exact replay of an interruption goes on with it.

    Privacy:
        A step fails if it lies beyond the plan, or if key or plan are no longer those
        of the run.
    """

    state_is_secret = True

    def __init__(self, l2_norm_clip: Any, noise_multiplier: Any):
        super().__init__(l2_norm_clip, noise_multiplier)
        with tf.init_scope():
            self._horizon = variable(np.int64(0))
            self._plan = variable(np.int64(0))

    def initial_state(self) -> Any:
        """Returns the state before the first step of a run."""
        return {name: np.int64(0) for name in ("step", "key", "plan")}

    def plan_digest(self) -> int:
        """Returns a digest of the plan, which holds for all steps of a run."""
        return int(self._plan.numpy())

    def _set_plan(self, steps: int, *content: Any) -> None:
        """Sets the number of steps, and the digest of what else they read."""
        self._horizon.assign(steps)
        parts = (np.int64(steps), *content)
        joined = b"".join(np.asarray(part).tobytes() for part in parts)
        plan_digest = hashlib.blake2b(joined, digest_size=8).digest()
        self._plan.assign(int.from_bytes(plan_digest, "big", signed=True))

    def _at(self, state, key) -> tuple[Any, dict[str, Any]]:
        """Returns the position in the run, and the next state, behind the checks."""
        key, plan = tf.cast(key, tf.int64), tf.identity(self._plan)
        with tf.control_dependencies(self._checks(state, key, plan)):
            position = tf.identity(state["step"])
            return position, {
                "step": position + 1,
                "key": tf.identity(key),
                "plan": tf.identity(plan),
            }

    def _checks(self, state, key, plan) -> list:
        """Ops that fail where the step does not belong to the planned run."""
        is_first = tf.equal(state["step"], 0)
        same_key = tf.equal(state["key"], key)
        same_plan = tf.equal(state["plan"], plan)
        checks = (
            tf.debugging.assert_less(
                state["step"],
                tf.identity(self._horizon),
                "A step beyond the run that its noise was planned for.",
            ),
            tf.debugging.Assert(
                is_first | same_key,
                ["Weights were loaded within a run of planned noise. Fit again."],
            ),
            tf.debugging.Assert(
                is_first | same_plan,
                ["Another run was planned within one of planned noise. Fit again."],
            ),
        )
        return [check for check in checks if check is not None]


def variable(value: Any, shape: Any = None) -> tf.Variable:
    """Returns a variable for a part of a plan, of this shape or that of the value."""
    return tf.Variable(value, trainable=False, shape=shape)

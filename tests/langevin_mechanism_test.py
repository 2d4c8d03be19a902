"""The noise of Langevin dynamics is never less than the ledger has for a step.

The learning rate, N and B of a step may be moved after the plan was made: by a backup
of another fit, by a schedule that is changed, by sizes that a refused fit has resolved.
"""

import numpy as np
import pytest
import tensorflow as tf

from keras_dpopt.langevin_mechanism import LangevinMechanism
from keras_dpopt.run_plan import ComingSteps
from keras_dpopt.types import ClippedSum

N, B = 1000, 10
RATES = (1e-4, 1e-4, 4e-4)
PLANNED = [2 * B / (N * np.sqrt(rate)) for rate in RATES]  # 2, 2, 1


def _planned(noise_multiplier=0.0):
    mechanism = LangevinMechanism(1.0, noise_multiplier, 1.0, None)
    plan = mechanism.plan_run(ComingSteps(3, B, N, True, lambda: np.array(RATES)))
    return mechanism, plan


def _state(mechanism):
    return tf.nest.map_structure(tf.constant, mechanism.initial_state())


def _stddev(mechanism, state, rate, train_size=N, key=1):
    """The noise of one step on the sum, and the next state."""
    chosen = mechanism.for_step(tf.constant(rate), tf.constant(float(train_size)))
    clipped = ClippedSum((tf.zeros(3),), mechanism.l2_norm_clip)
    gradient, state = chosen.release(
        clipped, state, tf.constant(key, tf.int64), tf.constant(0, tf.int64), float(B)
    )
    return float(gradient.noise_stddev) * B, state


def test_the_plan_is_that_of_the_schedule():
    mechanism, plan = _planned()
    assert plan.phase["noise_plan"] == ((pytest.approx(2.0), 2), (pytest.approx(1), 1))
    state = _state(mechanism)
    for rate, want in zip(RATES, PLANNED, strict=True):
        stddev, state = _stddev(mechanism, state, rate)
        np.testing.assert_allclose(stddev, want, rtol=3e-6)
        assert stddev >= want * (1 - 1e-7)


def test_a_least_multiplier():
    mechanism, plan = _planned(noise_multiplier=1.5)
    assert plan.phase["noise_plan"] == ((pytest.approx(2.0), 2), (1.5, 1))
    state = {**_state(mechanism), "step": tf.constant(2, tf.int64)}
    state["key"] = tf.constant(1, tf.int64)
    state["plan"] = tf.constant(mechanism.plan_digest(), tf.int64)
    stddev, _ = _stddev(mechanism, state, RATES[2])
    np.testing.assert_allclose(stddev, 1.5, rtol=3e-6)


@pytest.mark.parametrize(
    "moved", [{"rate": 1.0}, {"rate": 1e-4, "train_size": 10**9}], ids=["rate", "N"]
)
def test_a_step_has_the_noise_of_the_plan_whatever_was_moved(moved):
    mechanism, _ = _planned()
    stddev, _ = _stddev(mechanism, _state(mechanism), **moved)
    assert stddev >= PLANNED[0] * (1 - 1e-7)


def test_a_step_with_a_smaller_rate_has_the_noise_of_its_rate():
    mechanism, _ = _planned()
    stddev, _ = _stddev(mechanism, _state(mechanism), 1e-6)
    np.testing.assert_allclose(stddev, 20.0, rtol=3e-6)


def test_steps_outside_of_the_plan_fail():
    mechanism, _ = _planned()
    state = _state(mechanism)
    for rate in RATES:
        _, state = _stddev(mechanism, state, rate)
    with pytest.raises(tf.errors.InvalidArgumentError, match="beyond the run"):
        _stddev(mechanism, state, RATES[2])


def test_another_key_or_plan_fails():
    mechanism, _ = _planned()
    _, state = _stddev(mechanism, _state(mechanism), RATES[0])
    with pytest.raises(tf.errors.InvalidArgumentError, match="loaded within"):
        _stddev(mechanism, state, RATES[1], key=2)
    mechanism.plan_run(ComingSteps(3, B, N, True, lambda: np.array(RATES) / 4))
    with pytest.raises(tf.errors.InvalidArgumentError, match="planned within"):
        _stddev(mechanism, state, RATES[1])


def test_unknown_steps_and_rates_are_refused():
    mechanism, _ = _planned()
    with pytest.raises(ValueError, match="known length"):
        mechanism.plan_run(ComingSteps(None, B, N, False, lambda: np.array(RATES)))
    for rates in ([0.0], [-1.0], [np.nan], [np.inf]):
        with pytest.raises(ValueError, match="positive and finite"):
            mechanism.plan_run(ComingSteps(1, B, N, True, lambda r=rates: np.array(r)))

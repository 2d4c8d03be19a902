"""Queries: where the gradient of a record is taken, and how often."""

import helpers
import numpy as np
import pytest
import tensorflow as tf

import keras_dpopt
from keras_dpopt import queries

WEIGHTS = (np.array([1.0, 2.0]), np.array(3.0))
CHANGE = (np.array([0.5, -1.0]), np.array(0.25))


def _state(weights=WEIGHTS, **slots):
    return queries.StepState(weights, slots, key=1, number=0)


def test_gradient_query():
    (point,) = queries.GradientQuery().points(_state())
    assert point.coefficient == 1.0
    assert all(a is b for a, b in zip(point.weights, WEIGHTS, strict=True))
    assert queries.GradientQuery().slots == ()


def test_two_points():
    query = queries.TwoPointQuery(kappa=0.6, gamma=0.7)
    ahead, here = query.points(_state(last_update=CHANGE))
    a = 0.4 / 0.42
    np.testing.assert_allclose([ahead.coefficient, here.coefficient], [a, 1 - a])
    for got, weight, change in zip(ahead.weights, WEIGHTS, CHANGE, strict=True):
        np.testing.assert_allclose(got, weight + 0.7 * change)
    assert all(a is b for a, b in zip(here.weights, WEIGHTS, strict=True))
    assert query.slots == ("last_update",)


@pytest.mark.parametrize("gamma", [0.1, 0.7, 5.0])
def test_one_point_at_kappa_1(gamma):
    query = queries.TwoPointQuery(1.0, gamma)
    (point,) = query.points(_state())  # d is not needed, and no state kept.
    assert point.coefficient == 1.0
    assert all(a is b for a, b in zip(point.weights, WEIGHTS, strict=True))
    assert query.slots == ()


@pytest.mark.parametrize("kappa", [0.5, 0.6, 0.7, 0.3])
def test_one_point_at_weight_1(kappa):
    gamma = (1 - kappa) / kappa
    query = queries.TwoPointQuery(kappa, gamma)
    (point,) = query.points(_state(last_update=CHANGE))
    assert point.coefficient == 1.0
    np.testing.assert_allclose(point.weights[0], WEIGHTS[0] + gamma * CHANGE[0])
    assert query.slots == ("last_update",)


@pytest.mark.parametrize("kappa", [0.0, -0.1, 1.1, np.nan, "0.5", None])
def test_kappa_outside_its_range(kappa):
    with pytest.raises((ValueError, TypeError), match="kappa"):
        queries.TwoPointQuery(kappa, 0.7)


@pytest.mark.parametrize("gamma", [0.0, -0.1, np.inf, np.nan, "0.5", None])
def test_gamma_outside_its_range(gamma):
    with pytest.raises((ValueError, TypeError), match="gamma"):
        queries.TwoPointQuery(0.6, gamma)


# ------------------------------------------------------------------------ in training


def _forward_calls(engine, optimizer):
    problem = helpers.golden()["problem"]
    model = helpers.QuarticModel(problem["theta0"])
    model.compile(optimizer=optimizer, loss=helpers.quartic_loss(0.3))
    assert optimizer.gradient_engine == engine
    model.calls = 0
    data = np.array(problem["centers"], "f4"), np.array(problem["H"], "f4")
    model.train_on_batch(*data)
    model.train_on_batch(*data)
    return model.calls


@pytest.mark.parametrize("engine", helpers.ENGINES)
def test_two_evaluations_only_where_both_have_weight(engine):
    common = {
        "l2_norm_clip": 1.0,
        "noise_multiplier": 1.0,
        "expected_batch_size": 4,
        "gradient_engine": engine,
    }
    one = _forward_calls(engine, keras_dpopt.DPSGD(0.1, **common))
    at = lambda kappa, gamma: _forward_calls(  # noqa: E731
        engine, keras_dpopt.FiBeR(0.1, kappa=kappa, gamma=gamma, **common)
    )
    assert one >= 1
    assert at(1.0, 0.7) == one
    assert at(0.6, 0.4 / 0.6) == one
    # One of the calls in `one` only builds the model.
    assert at(0.6, 0.7) == one + 1


def _fiber_model(engine="vectorized"):
    optimizer = keras_dpopt.FiBeR(
        0.05,
        omega=1.0,
        l2_norm_clip=np.inf,
        noise_multiplier=0.0,
        noise_correction=None,
        expected_batch_size=4,
        gradient_engine=engine,
    )
    problem = helpers.golden()["problem"]
    model = helpers.QuarticModel(problem["theta0"])
    model.compile(optimizer=optimizer, loss=helpers.quartic_loss(0.0))
    data = np.array(problem["centers"], "f4"), np.array(problem["H"], "f4")
    return model, data


@pytest.mark.parametrize("engine", helpers.ENGINES)
@pytest.mark.parametrize("assigned", [False, True])
def test_look_ahead_uses_the_last_update_unless_weights_were_assigned(engine, assigned):
    """DESIGN rule 16: d is zero after any outside assignment."""
    model, (centers, curvature) = _fiber_model(engine)
    gradient = helpers.watch_gradients(model)
    theta0 = model.theta.numpy()
    model.train_on_batch(centers, curvature)
    theta1 = model.theta.numpy()
    change = theta1 - theta0
    if assigned:
        change = 0.0 * change
        theta1 = theta1 + np.float32(0.125)
        model.theta.assign(theta1)
    model.train_on_batch(centers, curvature)
    # On a quadratic loss, u = grad at theta + a*gamma*d, a*gamma = (1-kappa)/kappa.
    point = theta1 + (0.4 / 0.6) * change
    want = np.mean(curvature * (point - centers), axis=0)
    np.testing.assert_allclose(gradient[0].numpy(), want, atol=2e-6)
    # The test can tell the two cases apart.
    assert (
        np.abs(np.mean(curvature, axis=0) * (0.4 / 0.6) * (theta1 - theta0)).min()
        > 1e-3
    )


def test_change_includes_what_constraints_and_decay_did():
    """SPEC section 7(d)6: d is the actual change of the weights."""
    model, (centers, curvature) = _fiber_model()
    model.theta.constraint = lambda w: tf.clip_by_value(w, -0.31, 0.51)
    model.optimizer.weight_decay = 0.5
    before = model.theta.numpy()
    model.train_on_batch(centers, curvature)
    after = model.theta.numpy()
    np.testing.assert_array_equal(
        helpers.slot(model.optimizer, "last_update"), after - before
    )
    assert after[0] == np.float32(0.51)

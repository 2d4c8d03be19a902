"""Closed forms of the posterior methods (SPEC sections 11, 12 and 14)."""

import golden_cases
import helpers
import keras
import numpy as np
import scipy.stats
import tensorflow as tf
from golden_cases import IDENTITIES, PROBLEM, THETA0, applied, close

import keras_dpopt
from keras_dpopt import prng

GRADIENTS = np.array(PROBLEM["G"])


def _h_hat(precision, new, beta_2, delta):
    """The estimate that moved the precision: p' = p*(1 + x + x^2/2) for x >= -1."""
    x = np.sqrt(2 * new / precision - 1) - 1
    return precision - delta + precision * x / (1 - beta_2)


def test_positive_part_of_pure_noise():
    """SPEC section 12: clipping at zero leaves 0.484 of the noise's variance."""
    entry = IDENTITIES["positive_part_noise_bias"]
    size, s, ess, delta = 100_000, 0.3, 50.0, 1e-4
    optimizer = helpers.make_optimizer(keras_dpopt.DPIVON, ess=ess, beta_2=0.9)
    variable = keras.Variable(np.zeros(size), dtype="float32")
    optimizer.build([variable])
    # All quantiles of the normal distribution, once each.
    z = scipy.stats.norm.ppf((np.arange(size) + 0.5) / size)
    optimizer.apply(helpers.privatized([s * z], s))
    new = helpers.slot(optimizer, "precision").astype("f8")
    h_hat = _h_hat(1.0 + delta, new, 0.9, delta)
    bias = h_hat.mean() / (ess * s**2)
    np.testing.assert_allclose(bias, entry["E_max_z2_minus_1_0"], rtol=3e-4)
    assert h_hat.min() > -1e-4


def test_ivon_keeps_the_precision_positive(monkeypatch):
    """(h'+delta)/(h+delta) = 1 + x + x^2/2, whatever the estimate is."""
    monkeypatch.setattr(
        prng, "standard_normal", lambda key, step, stream, shape: tf.ones(shape)
    )
    entry = IDENTITIES["ivon_h_update_factor"]
    ess, h, delta = 50.0, 1.0, 0.01
    optimizer = helpers.make_optimizer(
        keras_dpopt.DPIVON,
        ess=ess,
        hess_init=h,
        weight_decay=delta,
        beta_2=0.0,
        hessian="price",
    )
    optimizer.build([keras.Variable(np.zeros(5), dtype="float32")])
    # x = (h_hat - h) / (h + delta), where h_hat = sqrt(ess*(h + delta)) * e * g.
    h_hat = h + np.array(entry["x"]) * (h + delta)
    optimizer.apply(helpers.privatized([h_hat / np.sqrt(ess * (h + delta))]))
    factor = helpers.slot(optimizer, "precision") / (h + delta)
    close(factor, entry["factor"], 10.0)


def test_ivon_on_a_quadratic(monkeypatch):
    """SPEC section 11(e)."""
    entry = IDENTITIES["ivon_quadratic"]
    curvature, delta = np.array(entry["H"]), entry["delta"]
    e = np.array([[1.0, 1.0, 1.0], [0.3, -1.7, 0.9]])  # Of two steps.

    def antithetic(key, step, stream, shape):
        del key
        row = tf.gather(tf.constant(e, tf.float32), tf.cast(step, tf.int32))
        return (1.0 if stream == 0 else -1.0) * tf.reshape(row, shape)

    monkeypatch.setattr(prng, "standard_normal", antithetic)
    optimizer = keras_dpopt.DPIVON(
        1.0,
        ess=entry["ess"],
        weight_decay=delta,
        beta_1=0.0,
        beta_2=0.5,
        hessian="price",
        mc_samples=2,
        rescale_lr=False,
        expected_batch_size=1,
        **golden_cases.NO_NOISE,
    )
    model = helpers.QuarticModel(THETA0)
    model.compile(optimizer=optimizer, loss=helpers.quartic_loss(0.0))
    optimizer.build(model.trainable_variables)
    optimizer.named_variables()["precision.0"].assign(curvature + delta)
    data = np.array([entry["c"]], "f4"), np.array([curvature], "f4")
    model.train_on_batch(*data)
    # One Newton step to the minimum; h = H is a fixed point.
    close(model.theta.numpy(), entry["one_step_newton"])
    close(model.theta.numpy(), entry["minimiser"])
    close(helpers.slot(optimizer, "precision"), curvature + delta)
    close(optimizer.posterior_scale()[0].numpy(), entry["posterior_std"])
    model.train_on_batch(*data)
    # A pair of opposite draws estimates H*e^2 exactly.
    new = helpers.slot(optimizer, "precision").astype("f8")
    h_hat = _h_hat(curvature + delta, new, 0.5, delta)
    np.testing.assert_allclose(h_hat, curvature * e[1] ** 2, rtol=2e-5, atol=1e-5)


def test_ivon_estimates_the_hessian_of_a_quadratic():
    """On the library's own draws: the mean of Price's estimator is H."""
    entry, copies = IDENTITIES["ivon_quadratic"], 50_000
    curvature, delta = np.repeat(entry["H"], copies), entry["delta"]
    optimizer = keras_dpopt.DPIVON(
        ess=entry["ess"],
        weight_decay=delta,
        beta_2=0.999,
        hessian="price",
        seed=1,
        expected_batch_size=1,
        **golden_cases.NO_NOISE,
    )
    model = helpers.QuarticModel(np.zeros(3 * copies))
    model.compile(optimizer=optimizer, loss=helpers.quartic_loss(0.0))
    model.train_on_batch(np.array([np.repeat(entry["c"], copies)]), curvature[None])
    new = helpers.slot(optimizer, "precision").astype("f8")
    h_hat = _h_hat(1.0 + delta, new, 0.999, delta).reshape(3, copies)
    mean, error = h_hat.mean(axis=1), h_hat.std(axis=1) / np.sqrt(copies)
    assert (np.abs(mean - entry["H"]) < 5 * error).all()
    both = np.hypot(error, entry["price_stderr"])
    assert (np.abs(mean - entry["price_mean_400k"]) < 5 * both).all()
    assert (error < 0.1).all()


def test_ivon_without_learning_of_the_hessian():
    """SPEC section 11(e): b2 = 1 leaves h, an infinite ess leaves no sample."""
    thetas, optimizer = applied(
        keras_dpopt.DPIVON,
        learning_rate=0.1,
        ess=1e30,
        beta_1=0.0,
        beta_2=1.0,
        weight_decay=0.01,
    )
    close(helpers.slot(optimizer, "precision"), np.full(3, 1.01))
    want, theta = [], THETA0
    for gradient in GRADIENTS:
        theta = theta - 0.1 * (gradient + 0.01 * theta)
        want.append(theta)
    close(thetas, want)
    state = optimizer.step_state([tf.constant(thetas[-1])], 0)
    (point,) = optimizer.query.points(state)
    np.testing.assert_array_equal(point.weights[0], thetas[-1])


def test_kl_term_vanishes_at_the_prior():
    """SPEC section 14(e): at mu = 0, s = s0."""
    prior = 0.8
    optimizer = helpers.make_optimizer(
        keras_dpopt.DPBayesByBackprop,
        prior_stddev=prior,
        rho_init=float(np.log(np.expm1(prior))),
        train_size=1,
    )
    variable = keras.Variable(np.zeros(3), dtype="float32")
    optimizer.build([variable])
    optimizer.apply(helpers.privatized([np.zeros(3), np.zeros(3)]))
    np.testing.assert_allclose(variable.numpy(), 0.0, atol=1e-8)
    close(optimizer.posterior_scale()[0].numpy(), np.full(3, prior))

"""Where one method must be another one, or a closed form (SPEC section 22).

Of whole methods; `GOLDEN` says where the other golden identities are. Tolerance: both
sides are float32 and do the same operations, or a few others; see `golden_test.py`.
"""

import functools
import pathlib

import golden_cases
import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf
from golden_cases import IDENTITIES, METHODS, PROBLEM, THETA0, applied, close

import keras_dpopt

# Where the test of each entry is. The last one has deltas of a paper's table; here the
# caller states delta.
GOLDEN = {
    "identities_test.py": {
        "kappa1_disk_equals_dpadamw_max_abs": "test_one_method_is_another",
        "kappa1_omega1_fiber_equals_dpadamwbc_max_abs": "test_one_method_is_another",
        "bam_lambda0_equals_dpsgd_max_abs": "test_one_method_is_another",
        "quadratic_no_clip_gamma_independence_max_abs": "test_quadratic_without_clip",
        "quadratic_bam_approx_equals_exact_max_abs": "test_quadratic_without_clip",
        "momentum_styles_equal_for_constant_lr_max_abs": "test_styles_of_momentum",
        "momentum_styles_differ_under_schedule_max_abs": "test_styles_of_momentum",
    },
    "filter_identities_test.py": {
        "A_omega": "test_noise_gain_of_the_innovation_filter",
        "A_state": "test_noise_gain_of_the_average",
        "A_doppler": "test_noise_gain_of_the_low_pass_filter",
        "two_point_a": "test_two_point_weight",
        "omega1_identity_max_abs": "test_filter_that_passes_all",
        "doppler_constant_gradient_identity": "test_constant_gradient_passes",
        "ramp_slope0.01_error_after_400": "test_ramp",
    },
    "posterior_identities_test.py": {
        "positive_part_noise_bias": "test_positive_part_of_pure_noise",
        "ivon_quadratic": "test_ivon_on_a_quadratic",
        "ivon_h_update_factor": "test_ivon_keeps_the_precision_positive",
    },
    None: {"delta_table8": None},
}


def test_every_golden_identity_is_tested():
    assert sorted(n for names in GOLDEN.values() for n in names) == sorted(IDENTITIES)
    for file, names in GOLDEN.items():
        if file is not None:
            text = (pathlib.Path(__file__).parent / file).read_text()
            for test in names.values():
                assert f"def {test}(" in text


# ------------------------------------------------------------------ one loop, two names

COMMON = {
    "l2_norm_clip": 1.0,
    "noise_multiplier": 0.5,
    "expected_batch_size": 4,
    "seed": 5,
    "gradient_engine": "loop",
}
ADAMW = {"learning_rate": 0.05, "weight_decay": 0.1}
N, ETA, PRIOR = 40, 1e-3, 2.0  # Of the Langevin dynamics.
SGLD_SIGMA = 2 * 4 / (N * np.sqrt(ETA))  # SPEC section 13.
# Name: class and arguments of a method, and the one that it must be; the strength of an
# L2 regularizer (l2/2 * theta^2) of the latter.
SAME = {
    "DiSK, kappa 1, is DP-AdamW": (
        (keras_dpopt.DiSK, {**ADAMW, "kappa": 1.0, "base": "adamw"}),
        (keras_dpopt.DPAdamW, ADAMW),
        0.0,
    ),
    "FiBeR, kappa 1, omega 1, is DP-AdamW-BC": (
        (keras_dpopt.FiBeR, {**ADAMW, "kappa": 1.0, "omega": 1.0, "epsilon": 0.0}),
        (keras_dpopt.DPAdamWBC, ADAMW),
        0.0,
    ),
    "BAM, lambda 0, is DP-SGD": (
        (keras_dpopt.BAM, {"learning_rate": 0.1, "lambda_": 0.0}),
        (keras_dpopt.DPSGD, {"learning_rate": 0.1}),
        0.0,
    ),
    "DP-SAT, rho 0, is DP-SGD": (
        (keras_dpopt.DPSAT, {"learning_rate": 0.1, "rho": 0.0, "momentum": 0.0}),
        (keras_dpopt.DPSGD, {"learning_rate": 0.1}),
        0.0,
    ),
    "DP-SGLD is DP-SGD": (
        (
            keras_dpopt.DPSGLD,
            {
                "learning_rate": ETA,
                "prior_precision": PRIOR,
                "train_size": N,
                "noise_multiplier": 0.0,
            },
        ),
        (
            keras_dpopt.DPSGD,
            {"learning_rate": ETA * N / 2, "noise_multiplier": SGLD_SIGMA},
        ),
        PRIOR / N,
    ),
    "DP-BBP, no scale, is DP-SGD": (
        (
            keras_dpopt.DPBayesByBackprop,
            # softplus(-40) is 4e-18: no sample leaves the mean.
            {
                "learning_rate": 0.1,
                "prior_stddev": 0.5,
                "rho_init": -40.0,
                "train_size": N,
            },
        ),
        (keras_dpopt.DPSGD, {"learning_rate": 0.1}),
        1 / (N * 0.5**2),
    ),
}


def _trajectory(method, l2=0.0, quartic=0.3, **more):
    """Four steps on the toy problem of the golden values."""
    cls, arguments = method
    model = helpers.QuarticModel(THETA0)
    if l2:
        model.theta.regularizer = keras.regularizers.L2(l2 / 2)
    optimizer = cls(**{**COMMON, **arguments, **more})
    model.compile(optimizer=optimizer, loss=helpers.quartic_loss(quartic))
    thetas = []
    for _ in range(4):
        model.train_on_batch(*golden_cases.data())
        thetas.append(model.theta.numpy())
    return np.array(thetas)


@functools.cache
def _plain_sgd():
    return _trajectory(SAME["BAM, lambda 0, is DP-SGD"][1])


@pytest.mark.parametrize("name", SAME)
def test_one_method_is_another(name):
    method, other, l2 = SAME[name]
    plain = other == SAME["BAM, lambda 0, is DP-SGD"][1] and not l2
    want = _plain_sgd() if plain else _trajectory(other, l2)
    scale = np.abs(want).max(axis=0)
    # DP-AdamW-BC and FiBeR may divide by the root of the floor.
    close(_trajectory(method), want, np.maximum(scale, 1.0))
    assert np.abs(want - THETA0).max() > 0.02


@pytest.mark.parametrize(
    ("cls", "variants"),
    [
        (
            # a*gamma is (1-kappa)/kappa; 3/7 is the one-point case.
            keras_dpopt.DiSK,
            [{"gamma": 0.5}, {"gamma": 3.0}, {"gamma": 3 / 7}],
        ),
        (
            keras_dpopt.BAM,
            [
                {"exact": True, "lambda_": 0.2},
                {"radius": 0.05, "lambda_": 0.2},
                {"radius": 1.0, "lambda_": 0.2},
            ],
        ),
    ],
)
def test_quadratic_without_clip(cls, variants):
    """The radius of BAM and the look-ahead of DiSK do not matter there."""
    run = functools.partial(_trajectory, quartic=0.0, **golden_cases.NO_NOISE)
    first, *others = [run((cls, {"learning_rate": 0.1, **v})) for v in variants]
    for other in others:
        np.testing.assert_allclose(first, other, atol=1e-5)
    assert np.abs(first[-1] - THETA0).max() > 0.05


# ------------------------------------------------------- on given privatized gradients

GRADIENTS = np.array(PROBLEM["G"])


def test_rmsprop_is_keras_rmsprop():
    for arguments in ({}, {"rho": 0.5, "epsilon": 1e-3}, {"weight_decay": 0.1}):
        twin = keras.optimizers.RMSprop(0.05, **arguments)
        variable = keras.Variable(THETA0, dtype="float32")
        want = []
        for gradient in GRADIENTS:
            twin.apply([tf.constant(gradient, tf.float32)], [variable])
            want.append(variable.numpy())
        got, _ = applied(keras_dpopt.DPRMSprop, learning_rate=0.05, **arguments)
        close(got, want)


def test_rmsprop_without_memory_is_sign_descent():
    got, _ = applied(
        keras_dpopt.DPRMSprop,
        learning_rate=0.05,
        rho=0.0,
        epsilon=0.0,
        epsilon_inside_root=False,
    )
    close(got, THETA0 - 0.05 * np.cumsum(np.sign(GRADIENTS), axis=0))


def test_reductions_of_adam_bc():
    """SPEC sections 4(e) and 5(e)."""
    adam, bc = keras_dpopt.DPAdam, keras_dpopt.DPAdamBC
    plain, _ = applied(adam, learning_rate=0.05, epsilon=0.0)
    nothing_taken_out, _ = applied(bc, learning_rate=0.05, variance_floor=1e-30)
    close(nothing_taken_out, plain)
    # All taken out: momentum with rate eta/sqrt(floor).
    momentum, _ = applied(keras_dpopt.DOPPLER, learning_rate=0.5, a=(-0.9,), b=(0.1,))
    floored, _ = applied(bc, sigma_w=10.0, learning_rate=0.05, variance_floor=0.01)
    close(floored, momentum)
    decaying, _ = applied(
        keras_dpopt.DPAdamWBC, sigma_w=0.03, learning_rate=0.05, weight_decay=0.0
    )
    close(decaying, applied(bc, sigma_w=0.03, learning_rate=0.05)[0])


def test_reductions_of_adam():
    """SPEC section 2(e)."""
    adam = functools.partial(applied, keras_dpopt.DPAdam)
    plain, _ = adam(learning_rate=0.05, epsilon=0.0)
    close(adam(1e-3 * GRADIENTS, learning_rate=0.05, epsilon=0.0)[0], plain)
    momentum, _ = applied(keras_dpopt.DOPPLER, learning_rate=0.5, a=(-0.9,), b=(0.1,))
    close(adam(learning_rate=0.5e6, epsilon=1e6)[0], momentum)


def test_styles_of_momentum():
    """SPEC section 1(d): torch keeps the rate out of the velocity, Keras does not."""

    def torch_style(rates):
        theta, buffer = THETA0, 0.0
        for rate, gradient in zip(rates, GRADIENTS, strict=True):
            buffer = 0.9 * buffer + gradient
            theta = theta - rate * buffer
            yield theta

    sgd = functools.partial(applied, keras_dpopt.DPSGD, momentum=0.9)
    constant, _ = sgd(learning_rate=0.1)
    close(constant, list(torch_style([0.1] * 4)))
    rates = METHODS["dp_sgd_momentum_torch_style"]["lr"]
    falling, _ = sgd(learning_rate=0.1, rates=rates)
    trace = METHODS["dp_sgd_momentum_torch_style"]["trace"]
    torch = np.array([want["theta"] for want in trace])
    np.testing.assert_allclose(list(torch_style(rates)), torch, rtol=1e-12)
    difference = IDENTITIES["momentum_styles_differ_under_schedule_max_abs"]
    np.testing.assert_allclose(np.abs(falling - torch).max(), difference, rtol=1e-5)

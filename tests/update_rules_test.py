"""Update rules: without noise and clipping, each optimizer is its Keras twin.

Tolerance: both sides are float32, and the gradients are sums in another order. Keras'
Adam computes 1 - beta_2^k with a beta_2 rounded to float32, which is off by 1.3e-5 of
it, so half of that in a step (SPEC section 0); SGD has no such difference.
"""

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dpopt
from keras_dpopt import types, update_rules

N, BATCH = 24, 8
TINY = 1e-12  # An epsilon that is the same inside and outside the bias correction.
OPEN = {"l2_norm_clip": np.inf, "noise_multiplier": 0.0}

SGD = (keras_dpopt.DPSGD, keras.optimizers.SGD)
ADAM = (keras_dpopt.DPAdam, keras.optimizers.Adam)
ADAMW = (keras_dpopt.DPAdamW, keras.optimizers.AdamW)
RMSPROP = (keras_dpopt.DPRMSprop, keras.optimizers.RMSprop)
TWINS = {
    "sgd": (SGD, {"learning_rate": 0.5}),
    "momentum": (SGD, {"learning_rate": 0.2, "momentum": 0.9}),
    "nesterov": (SGD, {"learning_rate": 0.2, "momentum": 0.9, "nesterov": True}),
    "sgd decay": (
        SGD,
        {"learning_rate": 0.2, "momentum": 0.5, "weight_decay": 0.05},
    ),
    "adam": (ADAM, {"learning_rate": 0.05, "epsilon": TINY}),
    "adam betas": (
        ADAM,
        {"learning_rate": 0.05, "epsilon": TINY, "beta_1": 0.5, "beta_2": 0.9},
    ),
    "adam decay": (
        ADAM,
        {"learning_rate": 0.05, "epsilon": TINY, "weight_decay": 0.1},
    ),
    "adamw": (ADAMW, {"learning_rate": 0.05, "epsilon": TINY, "weight_decay": 0.1}),
    "rmsprop": (RMSPROP, {"learning_rate": 0.02}),
    "rmsprop decay": (
        RMSPROP,
        {"learning_rate": 0.02, "rho": 0.5, "epsilon": 1e-3, "weight_decay": 0.1},
    ),
}
RULES = ["momentum", "nesterov", "adamw", "rmsprop"]
NON_NEG, MAX_NORM = keras.constraints.NonNeg(), keras.constraints.MaxNorm(0.3)
SCHEDULES = {
    "exponential": lambda: keras.optimizers.schedules.ExponentialDecay(0.2, 3, 0.5),
    "pieces": lambda: keras.optimizers.schedules.PiecewiseConstantDecay(
        [2, 5], [0.2, 0.05, 0.3]
    ),
    "cosine": lambda: keras.optimizers.schedules.CosineDecay(
        0.01, 8, warmup_target=0.2, warmup_steps=4
    ),
}


def _close(ours, twin, what="weights", tolerance=2e-5):
    """Equal to `tolerance` of the largest weight."""
    assert len(ours) == len(twin)
    for a, b in zip(ours, twin, strict=True):
        error = np.abs(a - b).max()
        assert error <= tolerance * max(1.0, np.abs(b).max()), (what, error, a, b)


def _fit(*models):
    """The same by `fit`."""
    data = tf.data.Dataset.from_tensor_slices(helpers.classes(N)).batch(BATCH)
    for model in models:
        model.fit(data, epochs=4, verbose=0)


def _train(*models):
    """Twelve steps on batches of their own; a third of the time that `fit` needs."""
    x, y = helpers.classes(N)
    for step in range(12):
        rows = slice(step % 3 * BATCH, (step % 3 + 1) * BATCH)
        for model in models:
            model.train_on_batch(x[rows], y[rows])


def _pair(twins, arguments, engine="loop", **dense):
    """A private model and its Keras twin, at the same weights."""
    private, plain = twins
    ours = helpers.mlp(keras_dpopt.DPSequential, **dense)
    twin = helpers.mlp(keras.Sequential, **dense)
    arguments = {k: v() if callable(v) else v for k, v in arguments.items()}
    optimizer = private(
        **arguments, **OPEN, expected_batch_size=BATCH, gradient_engine=engine
    )
    ours.compile(optimizer=optimizer, loss=helpers.CROSSENTROPY)
    twin.compile(optimizer=plain(**arguments), loss=helpers.CROSSENTROPY)
    _close(ours.get_weights(), twin.get_weights(), tolerance=0)
    return ours, twin


@pytest.mark.parametrize("name", TWINS)
def test_twin(name):
    twins, arguments = TWINS[name]
    by_fit = name in ("nesterov", "adamw")  # As a user runs it.
    ours, twin = _pair(twins, arguments, engine="auto" if by_fit else "loop")
    start = [w.copy() for w in ours.get_weights()]
    (_fit if by_fit else _train)(ours, twin)
    _close(ours.get_weights(), twin.get_weights())
    assert all(
        np.abs(a - b).max() > 0.01
        for a, b in zip(start, ours.get_weights(), strict=True)
    )
    assert int(ours.optimizer.iterations) == int(twin.optimizer.iterations) == 12


@pytest.mark.parametrize(
    ("name", "schedule"), zip(RULES, [*SCHEDULES, "pieces"], strict=True)
)
def test_twin_with_schedule(name, schedule):
    twins, arguments = TWINS[name]
    ours, twin = _pair(twins, {**arguments, "learning_rate": SCHEDULES[schedule]})
    _train(ours, twin)
    _close(ours.get_weights(), twin.get_weights())
    np.testing.assert_allclose(
        float(ours.optimizer.learning_rate), float(twin.optimizer.learning_rate)
    )


@pytest.mark.parametrize(("name", "overwrite"), [("sgd", 3), ("adamw", None)])
def test_twin_with_ema(name, overwrite):
    """During training, and after the end of `fit`, which writes the average back."""
    twins, arguments = TWINS[name]
    arguments = {
        **arguments,
        "use_ema": True,
        "ema_momentum": 0.8,
        "ema_overwrite_frequency": overwrite,
    }
    ours, twin = _pair(twins, arguments)
    x, y = helpers.classes(BATCH)
    for step in range(7):
        ours.train_on_batch(x, y)
        twin.train_on_batch(x, y)
        _close(ours.get_weights(), twin.get_weights(), f"weights, step {step}")
        for a, b in zip(
            ours.optimizer._model_variables_moving_average,
            twin.optimizer._model_variables_moving_average,
            strict=True,
        ):
            _close([a.numpy()], [b.numpy()], f"average, step {step}")
    before = [w.copy() for w in ours.get_weights()]
    _fit(ours, twin)
    _close(ours.get_weights(), twin.get_weights(), "after fit")
    assert np.abs(before[0] - ours.get_weights()[0]).max() > 1e-3


@pytest.mark.parametrize(
    ("name", "constraint"),
    [("sgd", NON_NEG), ("momentum", MAX_NORM), ("adamw", MAX_NORM)],
)
def test_twin_with_constraint(name, constraint):
    twins, arguments = TWINS[name]
    ours, twin = _pair(twins, arguments, kernel_constraint=constraint)
    x, y = helpers.classes(BATCH)
    for step in range(6):
        ours.train_on_batch(x, y)
        twin.train_on_batch(x, y)
        _close(ours.get_weights(), twin.get_weights(), f"step {step}")
    kernel = ours.get_weights()[0]
    np.testing.assert_allclose(constraint(kernel), kernel, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "regularizer"), [("sgd", "L1"), ("momentum", "L2"), ("adamw", "L2")]
)
def test_twin_with_regularizer(name, regularizer):
    """The regularizer acts once a step, and not once a record."""
    twins, arguments = TWINS[name]
    regularizer = getattr(keras.regularizers, regularizer)(0.1)
    ours, twin = _pair(twins, arguments, kernel_regularizer=regularizer)
    free, _ = _pair(twins, arguments)
    x, y = helpers.classes(BATCH)
    for step in range(6):
        for model in (ours, twin, free):
            losses = model.train_on_batch(x, y, return_dict=True)
            if model is ours:
                loss = losses["loss"]
            elif model is twin:
                np.testing.assert_allclose(loss, losses["loss"], rtol=1e-5)
        _close(ours.get_weights(), twin.get_weights(), f"step {step}")
    kernels = ours.get_weights()[0], free.get_weights()[0]
    assert np.abs(kernels[0] - kernels[1]).max() > 0.01


def test_regularizer_is_neither_clipped_nor_noised():
    """A regularizer's gradient is added after the noise: in full, whatever C is."""
    optimizer = keras_dpopt.DPSGD(
        1.0, l2_norm_clip=1e-3, noise_multiplier=0.0, expected_batch_size=10**6
    )
    model = helpers.mlp(kernel_regularizer=keras.regularizers.L2(0.25))
    model.compile(optimizer=optimizer, loss=helpers.CROSSENTROPY)
    kernel = model.get_weights()[0]
    model.train_on_batch(*helpers.classes(4))
    # The records move it by at most 4 * 1e-3 / 1e6.
    np.testing.assert_allclose(model.get_weights()[0], kernel * 0.5, atol=1e-6)


@pytest.mark.parametrize("name", ["sgd decay", "adamw"])
def test_twin_with_weights_excluded_from_decay(name):
    twins, arguments = TWINS[name]
    ours, twin = _pair(twins, arguments)
    for model in (ours, twin):
        model.optimizer.exclude_from_weight_decay(var_names=["bias"])
    _train(ours, twin)
    _close(ours.get_weights(), twin.get_weights())
    decayed, _ = _pair(twins, arguments)
    _train(decayed)
    assert np.abs(decayed.get_weights()[1] - ours.get_weights()[1]).max() > 1e-4


def test_learning_rate_can_be_set():
    ours, twin = _pair(*TWINS["momentum"])
    x, y = helpers.classes(BATCH)
    for rate in (0.3, 0.0, 0.05):
        for model in (ours, twin):
            model.optimizer.learning_rate = rate
            model.train_on_batch(x, y)
    _close(ours.get_weights(), twin.get_weights())


# ----------------------------------------------------------------- FiBeR's reductions


@pytest.mark.parametrize("noise_correction", [None, "filtered"])
def test_fiber_without_its_parts_is_dp_adamw(noise_correction):
    """omega = 1, kappa = 1, nothing subtracted: the noise and the clip included."""
    common = {
        "weight_decay": 0.1,
        "l2_norm_clip": 0.5,
        "noise_multiplier": 1.0 if noise_correction is None else 0.0,
        "expected_batch_size": BATCH,
        "seed": 5,
        "gradient_engine": "loop",
    }
    fiber = keras_dpopt.FiBeR(
        0.05,
        kappa=1.0,
        omega=1.0,
        noise_correction=noise_correction,
        variance_floor=1e-30,
        **common,
    )
    adamw = keras_dpopt.DPAdamW(0.05, **common)
    models = []
    for optimizer in (fiber, adamw):
        model = helpers.mlp()
        model.compile(optimizer=optimizer, loss=helpers.CROSSENTROPY)
        _train(model)
        models.append(model.get_weights())
    _close(*models, tolerance=1e-6)


def test_each_part_of_fiber_matters():
    """Power of the test above: any one part makes a difference."""
    plain = {"kappa": 1.0, "omega": 1.0, "noise_correction": None}
    weights = []
    for part in (None, *plain):
        arguments = {k: v for k, v in plain.items() if k != part}
        optimizer = keras_dpopt.FiBeR(
            0.05,
            l2_norm_clip=0.5,
            noise_multiplier=1.0,
            expected_batch_size=BATCH,
            seed=5,
            gradient_engine="loop",
            **arguments,
        )
        model = helpers.mlp()
        model.compile(optimizer=optimizer, loss=helpers.CROSSENTROPY)
        _train(model)
        weights.append(model.get_weights()[0])
    for other in weights[1:]:
        assert np.abs(weights[0] - other).max() > 1e-3


def _quadratic_trajectory(gamma, clip, quartic=0.0, engine="loop"):
    optimizer = keras_dpopt.FiBeR(
        0.05,
        kappa=0.6,
        gamma=gamma,
        l2_norm_clip=clip,
        noise_multiplier=0.0,
        expected_batch_size=4,
        gradient_engine=engine,
    )
    problem = helpers.golden()["problem"]
    model = helpers.QuarticModel(problem["theta0"])
    model.compile(optimizer=optimizer, loss=helpers.quartic_loss(quartic))
    trajectory = []
    for _ in range(8):
        model.train_on_batch(
            np.array(problem["centers"], "f4"), np.array(problem["H"], "f4")
        )
        trajectory.append(model.theta.numpy())
    return np.array(trajectory)


def test_quadratic_trajectory_does_not_depend_on_gamma():
    """SPEC section 7(e): a*gamma is constant, so u is; 2/3 is the one-point case."""
    first, *others = [
        _quadratic_trajectory(gamma, np.inf) for gamma in (0.5, 3.0, 2 / 3, 0.7)
    ]
    for other in others:
        np.testing.assert_allclose(first, other, atol=1e-5)
    # Power: a loss that is not quadratic tells the values of gamma apart.
    bent = [_quadratic_trajectory(gamma, np.inf, 0.9) for gamma in (0.5, 3.0)]
    assert np.abs(bent[0] - bent[1]).max() > 1e-4


# ----------------------------------------------------------------------- pure functions


def test_variance_of_a_changing_noise_is_averaged_with_the_weights_of_v():
    rule = update_rules.Adam(0.9, 0.99, 1e-8, variance_floor=0.0)
    scalars = {"noise_velocity": 0.0}
    variances = [1.0, 4.0, 0.25]
    for k, variance in enumerate(variances, 1):
        shared, scalars = rule.begin(
            scalars, types.StepScalars(k, noise_variance=variance)
        )
        weights = 0.01 * 0.99 ** np.arange(k - 1, -1, -1)
        want = np.dot(weights, variances[:k]) / (1 - 0.99**k)
        np.testing.assert_allclose(shared["noise_variance"], want, rtol=1e-5)


@pytest.mark.parametrize("floor", [0.0, 1e-8, 1e-2])
def test_variance_floor(floor):
    """Where the noise explains all of v_hat, the floor is what is left."""
    rule = update_rules.Adam(0.9, 0.999, 1e-3, variance_floor=floor)
    shared, _ = rule.begin(
        {"noise_velocity": 0.0}, types.StepScalars(1, noise_variance=4.0)
    )
    g = np.array([0.5, 3.0], "f4")
    slots = {"momentum": np.zeros(2, "f4"), "velocity": np.zeros(2, "f4")}
    step, _ = rule.update(slots, types.RuleInput(g, g), 0.1, shared)
    v_bar = np.maximum(g.astype("f8") ** 2 - 4.0, floor)
    np.testing.assert_allclose(step, 0.1 * g / (np.sqrt(v_bar) + 1e-3), rtol=1e-4)

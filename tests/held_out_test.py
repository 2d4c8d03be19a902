"""Every method against float64 NumPy on a problem that no golden value is of.

Five parameters in two variables, six records, a divisor B = 7 that is not their number,
a clip that some records reach; noise and sampled weights are the library's own draws.
Tolerance: as `golden_test.py` states it, without the margin of the clip.
"""

import helpers
import keras
import numpy as np
import pytest
import reference_methods as reference
from golden_cases import close

import keras_dpopt
from keras_dpopt import clipping, prng

SEED, STEPS, TRAIN_SIZE = 11, 5, 30
SHAPES = ((2,), (3,))
CLIP, SIGMA, BATCH = 1.5, 0.3, 7


class SplitModel(keras_dpopt.DPModel):
    """`helpers.QuarticModel` with its parameters in two variables."""

    def __init__(self, theta0):
        super().__init__()
        self.parts = [
            self.add_weight(shape=shape, name=f"part{i}")
            for i, shape in enumerate(SHAPES)
        ]
        for part, value in zip(self.parts, np.split(theta0, [2]), strict=True):
            part.assign(value)

    def call(self, x):
        return keras.ops.concatenate(self.parts) - x


def _normals(purpose):
    """(t, k) -> the k-th vector of the step: streams k*2 and k*2 + 1."""
    key = prng.key_from_seed(SEED, purpose)

    def vector(t, k):
        parts = [
            prng.standard_normal(key, t, k * len(SHAPES) + i, shape).numpy()
            for i, shape in enumerate(SHAPES)
        ]
        return np.concatenate(parts).astype(np.float64)

    return vector


def _toy():
    generator = np.random.default_rng(20)
    # Float32 values, so that both sides have the same problem.
    draw = lambda *args: generator.uniform(*args).astype("f4").astype("f8")  # noqa: E731
    return reference.Toy(
        theta0=draw(-1, 1, 5),
        curvature=draw(0.1, 1.2, (6, 5)),
        centers=draw(-1.2, 1.2, (6, 5)),
        quartic=0.4,
        clip=CLIP,
        sigma=SIGMA,
        batch_size=BATCH,
        noise=_normals("noise"),
        draw=_normals("weights"),
    )


TOY = _toy()
VARIANCE = TOY.sigma_w**2
BETAS = {"beta_1": 0.8, "beta_2": 0.95}
SECOND_ORDER = {"a": (-1.2, 0.5), "b": (0.3, -0.1, 0.2)}
# Optimizers whose noise is correlated: the tests of the matrix mechanisms have them.
CORRELATED = {"DPFTRL", "MFDPFTRL"}
FALLING, COLD = 0.08, 5e-3  # Learning rates that halve every second step.
_at = reference.at_theta


def _adam(**more):
    return reference.adam(0.8, 0.95, **more)


def _noise_after(make_filter):
    """The exact variance of the noise after a filter."""
    gains = reference.noise_gains(make_filter, STEPS)
    return [VARIANCE * gain for gain in gains]


def _ema():
    return reference.ema(0.4, True)


def _innovation():
    return reference.innovation(0.6)


def _low_pass():
    return reference.low_pass(**SECOND_ORDER)


# Name: the class with its learning rate and arguments; function from the learning rate
# of step t to the reference.
CASES = {
    "nesterov": (
        (keras_dpopt.DPSGD, FALLING, {"momentum": 0.8, "nesterov": True}),
        lambda rate: reference.train(TOY, rate, _at, reference.sgd(0.8, True)),
    ),
    "Adam": (
        (keras_dpopt.DPAdam, 0.05, {**BETAS, "epsilon": 0.01}),
        lambda rate: reference.train(TOY, rate, _at, _adam(eps=0.01)),
    ),
    "AdamW": (
        (keras_dpopt.DPAdamW, FALLING, {**BETAS, "weight_decay": 0.3}),
        lambda rate: reference.train(TOY, rate, _at, _adam(eps=1e-8), decay=0.3),
    ),
    "AdamBC": (
        (keras_dpopt.DPAdamBC, 0.05, {**BETAS, "variance_floor": 1e-3}),
        lambda rate: reference.train(
            TOY, rate, _at, _adam(variances=[VARIANCE] * STEPS, floor=1e-3)
        ),
    ),
    "AdamWBC, corrected from the third step on": (
        (
            keras_dpopt.DPAdamWBC,
            FALLING,
            {
                **BETAS,
                "variance_floor": 1e-3,
                "correction_start": 2,
                "weight_decay": 0.2,
            },
        ),
        lambda rate: reference.train(
            TOY,
            rate,
            _at,
            _adam(variances=[VARIANCE] * STEPS, floor=1e-3, start=2),
            decay=0.2,
        ),
    ),
    "RMSprop": (
        (
            keras_dpopt.DPRMSprop,
            0.03,
            {
                "rho": 0.8,
                "epsilon": 0.02,
                "epsilon_inside_root": False,
                "weight_decay": 0.1,
            },
        ),
        lambda rate: reference.train(
            TOY, rate, _at, reference.rmsprop(0.8, 0.02), decay=0.1
        ),
    ),
    "DiSK of momentum": (
        (
            keras_dpopt.DiSK,
            0.1,
            {"kappa": 0.4, "gamma": 0.9, "base": "sgd", "momentum": 0.6},
        ),
        lambda rate: reference.train(
            TOY, rate, reference.two_points(0.4, 0.9), reference.sgd(0.6), _ema()
        ),
    ),
    "DiSK-CORR, exact": (
        (
            keras_dpopt.DiSK,
            FALLING,
            {
                **BETAS,
                "kappa": 0.4,
                "gamma": 2.0,
                "base": "adamw",
                "noise_correction": "exact",
                "variance_floor": 1e-3,
            },
        ),
        lambda rate: reference.train(
            TOY,
            rate,
            reference.two_points(0.4, 2.0),
            _adam(eps=1e-8, variances=_noise_after(_ema), floor=1e-3),
            _ema(),
            decay=0.04,
        ),
    ),
    "FiBeR, exact": (
        (
            keras_dpopt.FiBeR,
            FALLING,
            {
                **BETAS,
                "kappa": 0.5,
                "gamma": 1.7,
                "omega": 0.6,
                "variance_floor": 1e-3,
                "noise_correction": "exact",
                "weight_decay": 0.2,
            },
        ),
        lambda rate: reference.train(
            TOY,
            rate,
            reference.two_points(0.5, 1.7),
            _adam(eps=1e-8, variances=_noise_after(_innovation), floor=1e-3),
            _innovation(),
            decay=0.2,
        ),
    ),
    "DOPPLER of momentum": (
        (keras_dpopt.DOPPLER, FALLING, {**SECOND_ORDER, "momentum": 0.5}),
        lambda rate: reference.train(TOY, rate, _at, reference.sgd(0.5), _low_pass()),
    ),
    "DOPPLER of Adam, raw": (
        (
            keras_dpopt.DOPPLER,
            0.05,
            {
                **BETAS,
                **SECOND_ORDER,
                "base": "adam",
                "second_moment": "raw",
                "noise_correction": "unfiltered",
                "variance_floor": 1e-3,
            },
        ),
        lambda rate: reference.train(
            TOY,
            rate,
            _at,
            _adam(eps=1e-8, variances=[VARIANCE] * STEPS, floor=1e-3, of_raw=True),
            _low_pass(),
        ),
    ),
    "DOPPLER of AdamW, exact": (
        (
            keras_dpopt.DOPPLER,
            0.05,
            {
                **BETAS,
                **SECOND_ORDER,
                "base": "adamw",
                "noise_correction": "exact",
                "variance_floor": 1e-3,
                "weight_decay": 0.3,
            },
        ),
        lambda rate: reference.train(
            TOY,
            rate,
            _at,
            _adam(eps=1e-8, variances=_noise_after(_low_pass), floor=1e-3),
            _low_pass(),
            decay=0.3,
        ),
    ),
    "IVON, two samples": (
        (
            keras_dpopt.DPIVON,
            0.1,
            {
                "ess": 40.0,
                "hess_init": 0.7,
                "weight_decay": 0.05,
                "beta_1": 0.8,
                "beta_2": 0.9,
                "mc_samples": 2,
                "curvature_scale": 6.0,
                "clip_radius": 0.5,
            },
        ),
        lambda rate: reference.ivon(
            TOY, rate, 40, 0.7, 0.05, 0.8, 0.9, 2, scale=6.0, xi=0.5
        ),
    ),
    "IVON of Price, three samples": (
        (
            keras_dpopt.DPIVON,
            0.1,
            {
                "ess": 40.0,
                "hess_init": 0.7,
                "weight_decay": 0.05,
                "beta_2": 0.9,
                "hessian": "price",
                "mc_samples": 3,
            },
        ),
        lambda rate: reference.ivon(TOY, rate, 40, 0.7, 0.05, 0.9, 0.9, 3, price=True),
    ),
    "SGLD": (
        (
            keras_dpopt.DPSGLD,
            COLD,
            {
                "prior_precision": 3.0,
                "temperature": 0.2,
                "train_size": TRAIN_SIZE,
                "noise_multiplier": 2.5,  # Of the first steps; then the dynamics'.
            },
        ),
        lambda rate: reference.sgld(TOY, rate, TRAIN_SIZE, 3.0, 0.2, 2.5),
    ),
    "Bayes by Backprop": (
        (
            keras_dpopt.DPBayesByBackprop,
            FALLING,
            {"prior_stddev": 0.7, "rho_init": -1.0, "train_size": TRAIN_SIZE},
        ),
        lambda rate: reference.bayes_by_backprop(TOY, rate, TRAIN_SIZE, 0.7, -1.0),
    ),
    "SAT": (
        (keras_dpopt.DPSAT, FALLING, {"rho": 0.3, "nesterov": True}),
        lambda rate: reference.train(
            TOY, rate, reference.after_ascent(0.3), reference.sgd(0.9, True)
        ),
    ),
    "SAT along the last update": (
        (
            keras_dpopt.DPSAT,
            0.05,
            {"rho": 0.3, "direction": "last_update", "weight_decay": 0.5},
        ),
        lambda rate: reference.train(
            TOY,
            rate,
            reference.after_ascent(0.3, along_update=True),
            reference.sgd(0.9),
            decay=0.5,
        ),
    ),
    "SAM": (
        (keras_dpopt.DPSAM, 0.1, {"rho": 0.2, "momentum": 0.5}),
        lambda rate: reference.train(
            TOY, rate, reference.two_queries(0.2), reference.sgd(0.5)
        ),
    ),
    "BAM": (
        (
            keras_dpopt.BAM,
            0.05,
            {**BETAS, "lambda_": 0.3, "radius": 0.2, "base": "adamw"},
        ),
        lambda rate: reference.train(
            TOY, rate, reference.bias_aware(0.3, 0.2), _adam(eps=1e-8), decay=0.01
        ),
    ),
    "BAM, exact": (
        (keras_dpopt.BAM, FALLING, {"lambda_": 0.3, "exact": True, "momentum": 0.5}),
        lambda rate: reference.train(
            TOY, rate, reference.bias_aware(0.3), reference.sgd(0.5)
        ),
    ),
}


def _rates(first):
    """A constant learning rate or a falling one, for Keras and for the reference."""
    if first not in (FALLING, COLD):
        return first, lambda t: first
    schedule = keras.optimizers.schedules.ExponentialDecay(first, 2, 0.5)
    return schedule, lambda t: first * 0.5 ** (t / 2)


def _thetas(case, engine):
    (cls, first, arguments), make_reference = case
    rate, rate_at = _rates(first)
    common = {"l2_norm_clip": CLIP, "noise_multiplier": SIGMA}
    optimizer = cls(
        rate,
        **{**common, **arguments},
        expected_batch_size=BATCH,
        gradient_engine=engine,
        seed=SEED,
    )
    model = SplitModel(TOY.theta0)
    model.compile(optimizer=optimizer, loss=helpers.quartic_loss(TOY.quartic))
    data = TOY.centers.astype("f4"), TOY.curvature.astype("f4")
    for _, want in zip(range(STEPS), make_reference(rate_at), strict=False):
        model.train_on_batch(*data)
        yield np.concatenate([part.numpy() for part in model.parts]), want


@pytest.mark.parametrize("number", range(len(CASES)), ids=CASES)
def test_held_out(number, monkeypatch):
    # No margin of the clip: golden_test.py.
    monkeypatch.setattr(clipping, "_UNIT_ROUNDOFF", 0.0)
    case = list(CASES.values())[number]
    largest = np.abs(TOY.theta0)
    # The tests of golden values have the loop, for every method.
    for got, want in _thetas(case, "vectorized"):
        largest = np.maximum(largest, np.abs(want))
        close(got, want, largest, atol=3e-6)
    assert np.abs(want - TOY.theta0).max() > 0.02


def test_the_problem_has_power():
    """Some records are clipped, and some variances are at the floor; not all."""
    norms = np.linalg.norm(TOY.gradients(TOY.theta0), axis=1)
    assert 2 <= (norms > CLIP).sum() <= 4
    g = TOY.private(TOY.gradients(TOY.theta0), 0)
    assert 0 < (g**2 - VARIANCE < 1e-3).sum() < 5


def test_all_optimizers_are_held_out():
    tested = {cls.__name__ for (cls, *_), _ in CASES.values()}
    assert tested == set(helpers.OPTIMIZERS) - CORRELATED

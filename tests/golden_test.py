"""Golden values: float64 traces of the reference against the float32 library.

Tolerance: a value of the library is the result of a few tens of float32 operations on
quantities of one magnitude, so it is held to 1e-5 of that magnitude (float32 rounds to
6e-8): rtol 1e-5, and atol 1e-6 times the largest quantity that it was computed from.
Where theta jumps to 49 (SPEC section 10(d)3), that is the quantity for d = theta' -
theta, and nothing is known better than 49 * 6e-8 there.

In closed loop there is one deliberate difference: a record is clipped by an upper bound
of its norm, 136 * 2^-24 = 8.1e-6 of it above the norm (clipping.py). With that margin
set to zero the traces are held to the tolerance above; with it, to the margin of a
record of length C, and what follows from it, to 3e-5.
"""

import helpers
import numpy as np
import pytest
import tensorflow as tf

import keras_dpopt
from keras_dpopt import (
    clipping,
    filters,
    mechanisms,
    prng,
    queries,
    step_checks,
    update_rules,
)

GOLDEN = helpers.golden()
PROBLEM = GOLDEN["problem"]
METHODS = GOLDEN["methods"]
THETA0 = np.array(PROBLEM["theta0"])
STEPS = 4

OPEN_LOOP = (
    "dp_sgd",
    "dp_sgd_momentum_keras_style",
    "dp_sgd_nesterov_keras_style",
    "dp_adam",
    "dp_adamw",
    "fiber_openloop_a",
    "fiber_openloop_b",
    "fiber_no_corr_openloop_a",
    "fiber_no_corr_openloop_b",
    "fiber_bc_corr_openloop_a",
    "fiber_bc_corr_openloop_b",
)
CLOSED_LOOP = (
    "dp_sgd_closedloop",
    "dp_adamw_closedloop",
    "fiber_closedloop",
    "fiber_closedloop_lownoise",
    "fiber_no_corr_closedloop",
    "fiber_no_corr_closedloop_lownoise",
    "fiber_bc_corr_closedloop",
    "fiber_bc_corr_closedloop_lownoise",
    "fiber_single_point_closedloop",
)
OF_PARTS = (
    "clip_abadi",
    "privatise_step0",
    "filter_innovation",
    "filter_innovation_r_omega0.9",
)
# Of other conventions, which this library does not follow (SPEC sections 0 to 2).
OTHER_CONVENTIONS = (
    "dp_sgd_momentum_torch_style",
    "dp_sgd_nesterov_torch_style",
    "dp_sgd_ema_momentum_debiased",
    "dp_adam_keras_epsilon_hat",
    "dp_adam_coupled_l2",
)
# Of optimizers that are not in the library yet.
LATER = ("dp_adambc", "dp_adamw_bc")


def close(actual, expected, scale=1.0, rtol=1e-5, atol=1e-6):
    actual, expected = np.asarray(actual), np.asarray(expected)
    bound = rtol * np.abs(expected) + atol * np.asarray(scale)
    error = np.abs(actual - expected)
    assert (error <= bound).all(), f"{actual} is not {expected}: {error / bound}"


def test_every_golden_method_of_this_librarys_classes_is_exercised():
    families = ("dp_sgd", "dp_adam", "fiber_", "filter_innovation")
    concerned = {
        name
        for name in METHODS
        if name.startswith(families) and not name.startswith(LATER)
    }
    assert concerned - set(OTHER_CONVENTIONS) == {
        *OPEN_LOOP,
        *CLOSED_LOOP,
        *OF_PARTS,
    } - {"clip_abadi", "privatise_step0"}
    assert {*OPEN_LOOP, *CLOSED_LOOP, *OF_PARTS, *OTHER_CONVENTIONS} <= set(METHODS)


# -------------------------------------------------------------------------- open loop


def _noise_correction(name):
    if "no_corr" in name:
        return None
    return "unfiltered" if "bc_corr" in name else "filtered"


def _fiber_arguments(name, entry):
    base = METHODS["fiber_closedloop"]  # Some entries state what differs only.
    take = lambda key: entry.get(key, base[key])  # noqa: E731
    return {
        "learning_rate": take("lr"),
        "omega": take("omega"),
        "variance_floor": take("eps_v"),
        "beta_1": take("beta1"),
        "beta_2": take("beta2"),
        "epsilon": take("eps"),
        "weight_decay": take("weight_decay"),
        "noise_correction": _noise_correction(name),
    }


def _optimizer(name, **common):
    """The optimizer of a golden entry, and the learning rate of each step."""
    entry = METHODS[name]
    common = {"l2_norm_clip": 1.0, "noise_multiplier": 0.5, **common}
    if name.startswith("dp_sgd"):
        rates = np.broadcast_to(entry["lr"], STEPS)
        optimizer = keras_dpopt.DPSGD(
            float(rates[0]),
            momentum=entry.get("momentum", 0.0),
            nesterov="nesterov" in name,
            **common,
        )
        return optimizer, rates
    if name.startswith("dp_adam"):
        arguments = {
            "beta_1": entry["beta1"],
            "beta_2": entry["beta2"],
            "epsilon": entry["eps"],
        }
        cls = keras_dpopt.DPAdam
        if "adamw" in name:
            cls = keras_dpopt.DPAdamW
            arguments["weight_decay"] = entry["weight_decay"]
        optimizer = cls(entry["lr"], **arguments, **common)
        return optimizer, np.full(STEPS, entry["lr"])
    arguments = _fiber_arguments(name, entry)
    if "single_point" in name:
        arguments.update(kappa=1.0)
    elif "closedloop" in name:
        arguments.update(kappa=0.6, gamma=0.7)
    optimizer = keras_dpopt.FiBeR(**arguments, **common)
    return optimizer, np.full(STEPS, arguments["learning_rate"])


def _v_bar(optimizer, step):
    """max(v_hat - n_hat, floor) from the saved moments, in float64."""
    rule = optimizer.rule
    debias = 1.0 - rule.beta_2**step
    v_hat = helpers.slot(optimizer, "velocity") / debias
    if rule.variance_floor is None:
        return v_hat
    noise = helpers.scalar_slot(optimizer, "noise_velocity") / debias
    return np.maximum(v_hat - noise, rule.variance_floor)


@pytest.mark.parametrize("name", OPEN_LOOP)
def test_open_loop(name):
    entry = METHODS[name]
    optimizer, rates = _optimizer(name)
    # Two variables with the same gradient: one's slots must not reach the other.
    variables = [tf.keras.Variable(THETA0, dtype="float32") for _ in range(2)]
    optimizer.build(variables)
    scale = np.abs([want["theta"] for want in entry["trace"]]).max(axis=0)
    for t, want in enumerate(entry["trace"]):
        optimizer.learning_rate = rates[t]
        gradient = helpers.privatized(
            [PROBLEM["G"][t]] * 2, entry.get("sigma_w", 0.125)
        )
        optimizer.apply(gradient)
        for variable in variables:
            close(variable.numpy(), want["theta"], scale)
        assert int(optimizer.iterations) == t + 1
        if "m" in want:
            close(helpers.slot(optimizer, "momentum", 1), want["m"])
            close(helpers.slot(optimizer, "velocity", 1), want["v"], 1e-3)
            close(_v_bar(optimizer, t + 1), want["v_bar"], 0.1)
        elif entry.get("momentum"):
            close(helpers.slot(optimizer, "momentum", 1), want["buf"])
        if name.startswith("fiber"):
            close(helpers.slot(optimizer, "filtered", 1), want["g_used"])


@pytest.mark.parametrize(
    ("ours", "other"),
    [
        ("dp_sgd_momentum_keras_style", "dp_sgd_momentum_torch_style"),
        ("dp_adam", "dp_adam_keras_epsilon_hat"),
        ("fiber_openloop_b", "fiber_bc_corr_openloop_b"),
    ],
)
def test_power(ours, other):
    """The tolerance tells the conventions apart."""
    ours, other = (METHODS[name]["trace"] for name in (ours, other))
    with pytest.raises(AssertionError):
        for a, b in zip(ours, other, strict=True):
            close(a["theta"], b["theta"], np.abs(b["theta"]))


# ------------------------------------------------------------------------ closed loop


def _fixed_noise(key, step, stream, shape):
    del key
    assert stream == 0 and tuple(shape) == (3,)
    return tf.gather(tf.constant(PROBLEM["Z"], tf.float32), tf.cast(step, tf.int32))


def _closed_loop_model(name, engine, **compile_arguments):
    sigma = METHODS[name].get("noise_multiplier", PROBLEM["noise_multiplier"])
    optimizer, _ = _optimizer(
        name,
        l2_norm_clip=PROBLEM["clip_norm"],
        noise_multiplier=sigma,
        expected_batch_size=PROBLEM["batch_size"],
        gradient_engine=engine,
    )
    model = helpers.QuarticModel(THETA0)
    model.compile(
        optimizer=optimizer,
        loss=helpers.quartic_loss(PROBLEM["quartic"]),
        **compile_arguments,
    )
    return model


def _data():
    return np.array(PROBLEM["centers"], "f4"), np.array(PROBLEM["H"], "f4")


def _watch_records(monkeypatch):
    """The unclipped records that reach the mechanism, one after the other."""
    seen = []
    clip_record = clipping.clip_record

    def note(values):
        seen.append(values)
        return values

    def watching(record, limit):
        values = tf.numpy_function(note, [record[0]], tf.float32)
        return clip_record([tf.ensure_shape(values, record[0].shape)], limit)

    monkeypatch.setattr(clipping, "clip_record", watching)
    # The watcher is a Python function, which no model may have.
    monkeypatch.setattr(step_checks, "refuse_state", lambda graph: None)
    return seen


@pytest.mark.parametrize("engine", helpers.ENGINES)
@pytest.mark.parametrize("name", CLOSED_LOOP)
def test_closed_loop(name, engine, monkeypatch):
    monkeypatch.setattr(prng, "standard_normal", _fixed_noise)
    monkeypatch.setattr(clipping, "_UNIT_ROUNDOFF", 0.0)  # No margin; see above.
    records = _watch_records(monkeypatch) if engine == "loop" else None
    model = _closed_loop_model(name, engine)
    gradient = helpers.watch_gradients(model)
    before, largest = THETA0, np.abs(THETA0)
    for t, want in enumerate(METHODS[name]["trace"]):
        if records is not None:
            records.clear()
        model.train_on_batch(*_data())
        theta = np.array(want["theta"])
        largest = np.maximum(largest, np.abs(theta))
        close(gradient[0].numpy(), want["g"])
        close(model.theta.numpy(), theta, largest)
        if name == "dp_sgd_closedloop":
            continue
        if records is not None:
            # A cubic of theta: three times its relative error.
            u = np.array(want["u"])
            close(records, u, 1 + np.abs(u))
        # The slots remember v as (1 - b2) times squares: of about 1e-3.
        close(helpers.slot(model.optimizer, "momentum"), want["m"], 0.1)
        close(helpers.slot(model.optimizer, "velocity"), want["v"], 1e-3)
        close(_v_bar(model.optimizer, t + 1), want["v_bar"])
        if name.startswith("fiber"):
            close(helpers.slot(model.optimizer, "filtered"), want["g_filt"])
        if model.optimizer.query.uses_last_update:
            change = helpers.slot(model.optimizer, "last_update")
            close(change, want["d"], largest)
            close(change, theta - before, largest)
        before = theta


def _fit(model, name):
    model.fit(*_data(), batch_size=4, epochs=STEPS, verbose=0)
    theta = METHODS[name]["trace"][-1]["theta"]
    close(model.theta.numpy(), theta, np.abs(theta), rtol=3e-5)


@pytest.mark.parametrize("name", CLOSED_LOOP)
def test_closed_loop_by_fit(name, monkeypatch):
    """As a user runs it: margin included, by `fit`, which takes all rows at b = N."""
    monkeypatch.setattr(prng, "standard_normal", _fixed_noise)
    _fit(_closed_loop_model(name, "auto"), name)


def test_closed_loop_by_microbatches(monkeypatch):
    monkeypatch.setattr(prng, "standard_normal", _fixed_noise)
    name = "fiber_closedloop_lownoise"
    model = _closed_loop_model(name, "vectorized")
    model.optimizer.microbatch_size = 3
    _fit(model, name)


@pytest.mark.parametrize("engine", helpers.ENGINES)
def test_closed_loop_eagerly(engine, monkeypatch):
    monkeypatch.setattr(prng, "standard_normal", _fixed_noise)
    name = "fiber_closedloop_lownoise"
    _fit(_closed_loop_model(name, engine, run_eagerly=True), name)


# ------------------------------------------------------------------------------ parts


def test_clip_abadi():
    entry = METHODS["clip_abadi"]
    gradients = tf.constant(entry["grads"], tf.float32)
    clipped = [clipping.clip_record([g], entry["C"])[0].numpy() for g in gradients]
    # `clip_record` may take away up to 2e-5 of a record, to be on the safe side.
    np.testing.assert_allclose(clipped, entry["clipped"], rtol=2e-5)
    np.testing.assert_allclose(np.sum(clipped, axis=0), entry["sum"], rtol=4e-5)
    norms = [float(clipping.norm_upper_bound([g]).bound) for g in gradients]
    np.testing.assert_allclose(norms, entry["norms"], rtol=2e-5)


def test_privatise_step0(monkeypatch):
    monkeypatch.setattr(prng, "standard_normal", _fixed_noise)
    mechanism = mechanisms.GaussianMechanism(1.0, 0.5)
    total = tf.constant(METHODS["clip_abadi"]["sum"], tf.float32)
    gradient, _ = mechanism.release(
        mechanisms.ClippedSum((total,), 1.0), (), tf.constant(1, tf.int64), 0, 4.0
    )
    entry = METHODS["privatise_step0"]
    close(gradient.values[0].numpy(), entry["g"])
    close(float(gradient.noise_stddev), entry["sigma_w"])
    close(float(gradient.noise_stddev) ** 2, entry["sigma_w_sq"])


@pytest.mark.parametrize("omega", [1.0, 0.9, 0.5, 0.1])
def test_filter_innovation(omega):
    innovation = filters.InnovationFilter(omega)
    slots = {"filtered": np.zeros(3, "f4"), "residual": np.zeros(3, "f4")}
    residuals = []
    for t in range(STEPS):
        filtered, slots = innovation.update(slots, np.array(PROBLEM["G"][t], "f4"))
        close(filtered, METHODS["filter_innovation"][str(omega)][t], 0.3)
        residuals.append(slots["residual"])
    if omega == 0.9:
        close(residuals, METHODS["filter_innovation_r_omega0.9"], 0.3)


@pytest.mark.parametrize("omega", GOLDEN["identities"]["A_omega"])
def test_noise_gain_of_the_filter(omega):
    """Closed form = Lyapunov = impulse response = what `propagate` tends to."""
    entry = GOLDEN["identities"]["A_omega"][omega]
    innovation = filters.InnovationFilter(float(omega))
    for key in ("A_closed", "A_lyapunov", "A_impulse"):
        # The impulse sum of the reference is cut off after finitely many terms.
        np.testing.assert_allclose(innovation.steady_gain, entry[key], rtol=1e-9)
    noise = dict.fromkeys(innovation.noise_slots, 0.0)
    slots = {"filtered": 0.0, "residual": 0.0}
    exact, impulse = [], []
    for t in range(5000):
        (steady, now), noise = innovation.propagate(noise, 1.0)
        exact.append(now)
        filtered, slots = innovation.update(slots, float(t == 0))
        impulse.append(filtered)
    assert steady == innovation.steady_gain
    np.testing.assert_allclose(exact[:5], entry["A_t_first5"], rtol=1e-12)
    np.testing.assert_allclose(impulse[:6], entry["h_first6"], rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(np.cumsum(np.square(impulse)), exact, rtol=1e-9)
    np.testing.assert_allclose(exact[-1], entry["A_closed"], rtol=1e-9)
    np.testing.assert_allclose(
        [noise["noise_covariance_fr"], noise["noise_variance_r"]],
        [entry["cov_gr"], entry["var_r"]],
        rtol=1e-9,
    )
    np.testing.assert_allclose(np.sum(impulse), entry["dc_gain"], rtol=1e-9)


def test_exact_correction():
    """SPEC section 10(d)2: the noise's part of E[v_hat], in units of sigma_w^2."""
    sigma_w = 0.03
    optimizer = keras_dpopt.FiBeR(
        0.05, l2_norm_clip=1.0, noise_multiplier=1.0, noise_correction="exact"
    )
    optimizer.build([tf.keras.Variable(np.zeros(3), dtype="float32")])
    parts = []
    for k in range(1, 102):
        optimizer.apply(helpers.privatized([np.ones(3)], sigma_w))
        noise = helpers.scalar_slot(optimizer, "noise_velocity")
        parts.append(noise / (1.0 - 0.999**k) / sigma_w**2)
    # The printed digits: six decimals.
    np.testing.assert_allclose(parts[:3], [0.81, 0.826208, 0.832584], atol=2e-6)
    np.testing.assert_allclose(parts[100], 0.845770, atol=2e-6)
    # And the sum itself, with the variances of the reference.
    gains = GOLDEN["identities"]["A_omega"]["0.9"]["A_t_first5"]
    for k in range(1, 6):
        weights = 0.001 * 0.999 ** np.arange(k - 1, -1, -1)
        want = np.dot(weights, gains[:k]) / (1 - 0.999**k)
        np.testing.assert_allclose(parts[k - 1], want, rtol=1e-5)


@pytest.mark.parametrize("name", GOLDEN["identities"]["two_point_a"])
def test_two_point_weight(name):
    want = GOLDEN["identities"]["two_point_a"][name]
    kappa, _, gamma = name.removeprefix("kappa").partition("_gamma")
    query = queries.TwoPointQuery(float(kappa), float(gamma or 0.7))
    np.testing.assert_allclose(query.weight, want, rtol=1e-12)


def test_ramp():
    """A ramp is followed without a lag (identities: ramp_slope0.01)."""
    innovation = filters.InnovationFilter(0.9)
    slots = {"filtered": 0.0, "residual": 0.0}
    for t in range(400):
        filtered, slots = innovation.update(slots, 0.01 * t)
    want = GOLDEN["identities"]["ramp_slope0.01_error_after_400"]
    np.testing.assert_allclose(
        filtered - 0.01 * 399, want["innovation_omega0.9"], atol=1e-12
    )


def test_adam_powers_keep_their_digits():
    """1 - b2^k: float32(0.999)^k would be off by 1.3e-5 of it (SPEC section 0)."""
    rule = update_rules.Adam(0.9, 0.999, 1e-8)
    for k in (1, 2, 10, 1000, 10**6):
        shared, _ = rule.begin({}, tf.constant(k, tf.int64), 0.0)
        want = {"debias_1": 0.9, "debias_2": 0.999}
        for name, beta in want.items():
            exact = -np.expm1(k * np.log(beta))
            np.testing.assert_allclose(shared[name], exact, rtol=3e-7)

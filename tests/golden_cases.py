"""The golden methods, each as an optimizer of this library; and those that are not.

`OPEN_LOOP`, `CLOSED_LOOP` and `POSTERIOR` say for each golden entry which class and
which arguments it stands for. `golden_test.py`, `golden_closed_loop_test.py` and
`golden_posterior_test.py` hold every one of them to its trace.
"""

import helpers
import keras
import numpy as np
import tensorflow as tf

import keras_dpopt
from keras_dpopt import clipping, dp_optimizer, prng, step_checks, update_rules

GOLDEN = helpers.golden()
PROBLEM = GOLDEN["problem"]
METHODS = GOLDEN["methods"]
IDENTITIES = GOLDEN["identities"]
THETA0 = np.array(PROBLEM["theta0"])
STEPS = 4
SEED = 7  # Makes the keys known: see `FixedDraws`.


def close(actual, expected, scale=1.0, rtol=1e-5, atol=1e-6):
    """Holds a float32 value to `rtol`, and to `atol` of what it was computed from."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    bound = rtol * np.abs(expected) + atol * np.asarray(scale)
    error = np.abs(actual - expected)
    assert (error <= bound).all(), f"{actual} is not {expected}: {error / bound}"


# ------------------------------------------------------------------- which optimizer


def _adam(entry) -> dict:
    """Arguments of all Adams. Some entries state only what differs from FiBeR's."""
    take = lambda key: entry.get(key, METHODS["fiber_closedloop"][key])  # noqa: E731
    return {
        "learning_rate": take("lr"),
        "beta_1": take("beta1"),
        "beta_2": take("beta2"),
    }


def _adamw(entry) -> dict:
    take = lambda key: entry.get(key, METHODS["fiber_closedloop"][key])  # noqa: E731
    return {
        **_adam(entry),
        "epsilon": take("eps"),
        "weight_decay": take("weight_decay"),
    }


def _dp_sgd(entry, **more):
    rates = np.broadcast_to(entry["lr"], STEPS)
    momentum = entry.get("momentum", 0.0)
    return keras_dpopt.DPSGD, {
        "learning_rate": float(rates[0]),
        "momentum": momentum,
        **more,
    }


def _dp_adam(entry):
    return keras_dpopt.DPAdam, {**_adam(entry), "epsilon": entry["eps"]}


def _dp_adamw(entry):
    return keras_dpopt.DPAdamW, _adamw(entry)


def _dp_adambc(entry):
    floor = entry["gamma_floor"]
    return keras_dpopt.DPAdamBC, {**_adam(entry), "variance_floor": floor}


def _dp_adamw_bc(entry):
    arguments = _adamw(entry)
    del arguments["epsilon"]
    floor = entry.get("gamma_floor", 1e-8)
    return keras_dpopt.DPAdamWBC, {**arguments, "variance_floor": floor}


def _dp_rmsprop(entry):
    return keras_dpopt.DPRMSprop, {
        "learning_rate": entry["lr"],
        "rho": entry["rho"],
        "epsilon": entry["nu" if "nu" in entry else "eps"],
        "epsilon_inside_root": "eps" in entry,
    }


def _dpagd_adam(entry):
    # Of no class of its own: the base class takes any rule.
    rule = update_rules.Adam(
        entry["beta1"], entry["beta2"], entry["nu"], bias_correction=False
    )
    return dp_optimizer.DPOptimizer, {"learning_rate": entry["lr"], "rule": rule}


def _ema_momentum(entry):
    # SPEC section 9(e): momentum as a debiased average is a low-pass filter.
    b1 = entry["beta1"]
    return keras_dpopt.DOPPLER, {
        "learning_rate": entry["lr"],
        "a": (-b1,),
        "b": (1.0 - b1,),
    }


def _doppler_sgd(entry):
    arguments = {"learning_rate": entry["lr"], "a": entry["a"], "b": entry["b"]}
    return keras_dpopt.DOPPLER, arguments


def _doppler_adam(entry):
    return keras_dpopt.DOPPLER, {
        **_adam(entry),
        "a": entry["a"],
        "b": entry["b"],
        "base": "adam",
        "epsilon": entry["eps"],
    }


def _disk(entry, base="adamw", corrected=False):
    arguments = {
        "learning_rate": entry.get("lr", 0.05),
        "kappa": entry["kappa"],
        "gamma": entry.get("gamma", 0.5),
        "filter_init": entry.get("ema_init", "zero"),
        "base": base,
    }
    if base == "adamw":
        arguments |= _adamw(entry)
    if corrected:
        arguments |= {"noise_correction": "filtered", "variance_floor": 1e-8}
    return keras_dpopt.DiSK, arguments


def _disk_corr(entry):
    return _disk(entry, corrected=True)


def _fiber(correction, single_point=False):
    def make(entry):
        base = METHODS["fiber_closedloop"]
        return keras_dpopt.FiBeR, {
            **_adamw(entry),
            "kappa": 1.0 if single_point else base["kappa"],
            "gamma": base["gamma"],
            "omega": entry.get("omega", base["omega"]),
            "variance_floor": entry.get("eps_v", base["eps_v"]),
            "noise_correction": correction,
        }

    return make


OPEN_LOOP = {
    "dp_sgd": _dp_sgd,
    "dp_sgd_momentum_keras_style": _dp_sgd,
    "dp_sgd_nesterov_keras_style": lambda entry: _dp_sgd(entry, nesterov=True),
    # At a constant learning rate the two styles are one.
    "dp_sgd_nesterov_torch_style": lambda entry: _dp_sgd(entry, nesterov=True),
    "dp_sgd_ema_momentum_debiased": _ema_momentum,
    "dp_adam": _dp_adam,
    "dp_adam_coupled_l2": _dp_adam,  # With the gradient of a weight regularizer.
    "dp_adamw": _dp_adamw,
    "dp_adambc_a": _dp_adambc,
    "dp_adambc_b": _dp_adambc,
    "dp_adamw_bc_a": _dp_adamw_bc,
    "dp_adamw_bc_b": _dp_adamw_bc,
    "dp_rmsprop_outside": _dp_rmsprop,
    "dp_rmsprop_keras_inside": _dp_rmsprop,
    "dpagd_adam_no_bias_correction": _dpagd_adam,
    "doppler_sgd": _doppler_sgd,
    "doppler_adam": _doppler_adam,
    "disk_adamw_openloop": _disk,
    "disk_corr_openloop_a": _disk_corr,
    "disk_corr_openloop_b": _disk_corr,
    "fiber_openloop_a": _fiber("filtered"),
    "fiber_openloop_b": _fiber("filtered"),
    "fiber_no_corr_openloop_a": _fiber(None),
    "fiber_no_corr_openloop_b": _fiber(None),
    "fiber_bc_corr_openloop_a": _fiber("unfiltered"),
    "fiber_bc_corr_openloop_b": _fiber("unfiltered"),
}
# Sharpness-aware methods have an older kind of entry, without state.
_SAT = lambda entry, **more: (  # noqa: E731
    keras_dpopt.DPSAT,
    {
        "learning_rate": entry["lr"],
        "rho": entry["rho"],
        "momentum": entry.get("base_momentum", 0.0),
        **more,
    },
)
_SAM = lambda entry, **more: (  # noqa: E731
    keras_dpopt.DPSAM,
    {"learning_rate": entry["lr"], "rho": entry["rho"], "momentum": 0.0, **more},
)
_BAM = lambda entry, **more: (  # noqa: E731
    keras_dpopt.BAM,
    {"learning_rate": entry["lr"], "lambda_": entry["lam"], **more},
)
NO_NOISE = {"l2_norm_clip": np.inf, "noise_multiplier": 0.0}
CLOSED_LOOP = {
    "dp_sgd_closedloop": _dp_sgd,
    "dp_adamw_closedloop": _dp_adamw,
    "dp_adamw_bc_closedloop_lownoise": _dp_adamw_bc,
    "disk_sgd_closedloop": lambda entry: _disk(entry, base="sgd"),
    "disk_adamw_closedloop": _disk,
    "disk_corr_closedloop": _disk_corr,
    "disk_corr_closedloop_lownoise": _disk_corr,
    "fiber_closedloop": _fiber("filtered"),
    "fiber_closedloop_lownoise": _fiber("filtered"),
    "fiber_no_corr_closedloop": _fiber(None),
    "fiber_no_corr_closedloop_lownoise": _fiber(None),
    "fiber_bc_corr_closedloop": _fiber("unfiltered"),
    "fiber_bc_corr_closedloop_lownoise": _fiber("unfiltered"),
    "fiber_single_point_closedloop": _fiber("filtered", single_point=True),
    # What is not private is the private method without clip and noise.
    "sam": lambda entry: _SAM(entry, **NO_NOISE),
    "dp_sam_double_query": _SAM,
    "dp_sat": _SAT,
    "dp_sat_momentum_variant": lambda entry: _SAT(entry, direction="last_update"),
    "bam_approx": lambda entry: _BAM(entry, radius=entry["r"]),
    "bam_exact": lambda entry: _BAM(entry, exact=True),
}


def _ivon(entry, hessian):
    more = {} if "noise_multiplier" in entry else NO_NOISE
    return keras_dpopt.DPIVON, {
        "learning_rate": entry["lr"],
        "ess": entry["ess"],
        "hess_init": entry["hess_init"],
        "weight_decay": entry["weight_decay"],
        "beta_1": entry["beta1"],
        "beta_2": entry["beta2"],
        "hessian": hessian,
        "mc_samples": entry.get("mc_samples", 1),
        "clip_radius": entry.get("clip_radius", np.inf),
        "rescale_lr": entry["rescale_lr"],
        **more,
    }


def _price(entry):
    return _ivon(entry, "price")


def _gradsq(entry):
    return _ivon(entry, "gradsq")


def _sgld(entry):
    return keras_dpopt.DPSGLD, {
        "learning_rate": entry["step"],
        "prior_precision": entry["prior_precision"],
        "train_size": entry["N"],
        # The entry without a clip gets one that no record reaches: the noise of the
        # dynamics is sigma*C whatever C is, but it must have one.
        "l2_norm_clip": entry.get("C", 100.0),
        "noise_multiplier": 0.0,
    }


def _bbp(entry):
    return keras_dpopt.DPBayesByBackprop, {
        "learning_rate": entry["lr"],
        "prior_stddev": entry["prior_std"],
        "rho_init": entry["rho0"],
        "train_size": entry["N"],
    }


POSTERIOR = {
    "ivon_price_mc1": _price,
    "ivon_price_mc2": _price,
    "ivon_price_clip_radius": _price,
    "ivon_price_no_rescale": _price,
    "ivon_gradsq_mc1": _gradsq,
    "dp_ivon_gradsq": _gradsq,
    "dp_ivon_gradsq_mc2": _gradsq,
    "sgld": _sgld,
    "dp_sgld": _sgld,
    "dp_bbp_kl_outside_clip": _bbp,
}
# Tested in golden_test.py as parts.
PARTS = (
    "clip_abadi",
    "privatise_step0",
    "filter_ema_disk",
    "filter_innovation",
    "filter_innovation_r_omega0.9",
    "filter_doppler",
)
ELSEWHERE = {
    "clip_abadi_opacus_eps1e-6": "clipping_styles_test.py",
    "clip_auto_s": "clipping_styles_test.py",
    "clip_auto_v": "clipping_styles_test.py",
    "clip_rescale_to_unit_norm": "mechanisms_test.py",
    "adaptive_clipping": "clipping_styles_test.py",
    "augmult": "losses_test.py",
    "weight_standardisation": "layers_test.py",
    "param_ema_warmup": "keras_compat_test.py",
    "mf_dp_ftrl": "toeplitz_test.py",
}
OTHER_CONVENTIONS = {
    "dp_sgd_momentum_torch_style": "Torch keeps the learning rate out of the velocity. "
    "Here it is inside, as in Keras; the two differ under a schedule only.",
    "dp_adam_keras_epsilon_hat": "Keras adds epsilon to the root of v before the bias "
    "correction; here it is added after, as in the paper (SPEC section 0).",
    "dp_bbp_kl_inside_clip": "The KL term in each record before the clip is biased by "
    "it. Here it is added after the noise, the default of SPEC section 14.",
}


# Engines make records, so each kind of record is in both; the rest, which differs from
# one of these below the privacy line or in numbers only, is in the loop alone.
BOTH_ENGINES = (
    "dp_sgd_closedloop",
    "fiber_closedloop_lownoise",
    "dp_sam_double_query",
    "dp_sat",
    "bam_approx",
    "bam_exact",
    "ivon_price_mc2",
    "dp_ivon_gradsq_mc2",
    "dp_sgld",
    "dp_bbp_kl_outside_clip",
)


def runs(names) -> list[tuple[str, str]]:
    """Entry and engine of each run in closed loop."""
    return [
        (name, engine)
        for name in names
        for engine in (helpers.ENGINES if name in BOTH_ENGINES else ["loop"])
    ]


def make(name, **common):
    """The optimizer of a golden entry."""
    cases = {**OPEN_LOOP, **CLOSED_LOOP, **POSTERIOR}
    entry = METHODS[name]
    cls, arguments = cases[name](entry)
    sigma = entry.get("noise_multiplier", PROBLEM["noise_multiplier"])
    clip = PROBLEM["clip_norm"]
    common = {"l2_norm_clip": clip, "noise_multiplier": sigma, **common}
    return cls(**{**common, **arguments}, seed=SEED)


def applied(cls, gradients=PROBLEM["G"], sigma_w=0.0, rates=None, **arguments):
    """Weights after each gradient, and the optimizer."""
    optimizer = helpers.make_optimizer(cls, **arguments)
    variable = keras.Variable(THETA0, dtype="float32")
    optimizer.build([variable])
    thetas = []
    for t, gradient in enumerate(gradients):
        if rates is not None:
            optimizer.learning_rate = rates[t]
        optimizer.apply(helpers.privatized([gradient], sigma_w))
        thetas.append(variable.numpy())
    return np.array(thetas), optimizer


# ------------------------------------------------------------------------------ draws


class FixedDraws:
    """Stands in for `prng.standard_normal`, with rows of the golden draws.

    A draw has an address (key, step, stream). What it is for shows in its key: an
    optimizer that is made with `seed=SEED` has the keys `prng.key_from_seed(SEED,
    purpose)`, purpose "noise" for the mechanism and "weights" for the samples of the
    posterior. The stream is the number of the tensor: of a record's second half or of
    a step's second release, 1 (each method has one variable); of the second sample of
    the weights, 1. The step is the number of the release, from 0 on.

    A draw at any other address is NaN, which no golden value is close to.

    Args:
        tables: By (purpose, stream), the draws of the steps.
    """

    def __init__(self, tables):
        self._tables = {
            address: tf.constant(rows, tf.float32) for address, rows in tables.items()
        }

    def __call__(self, key, step, stream, shape):
        value = tf.fill(shape, np.float32(np.nan))
        for (purpose, of_stream), rows in self._tables.items():
            if of_stream == stream:
                same = tf.equal(
                    tf.cast(key, tf.int64), prng.key_from_seed(SEED, purpose)
                )
                row = tf.gather(rows, tf.cast(step, tf.int32))
                value = tf.where(same, tf.reshape(row, shape), value)
        return value


def draws_of(name) -> FixedDraws:
    """The draws of a golden entry."""
    z, e1, e2 = (PROBLEM[key] for key in ("Z", "E1", "E2"))
    tables = {("noise", 0): z}
    if name == "dp_sam_double_query":  # "uses Z[2t], Z[2t+1]"
        tables = {("noise", 0): z[::2], ("noise", 1): z[1::2]}
    elif name == "sam":  # Two releases without noise.
        tables[("noise", 1)] = z
    elif "sgld" in name:  # theta + sqrt(eta)*Z[t], where a mechanism's noise is -Z[t].
        tables = {("noise", 0): np.negative(z)}
    elif name.startswith("dp_bbp"):  # "concat(Z[t],E2[t])", sample "E1[t]"
        tables |= {("noise", 1): e2, ("weights", 0): e1}
    elif "ivon" in name:
        tables[("weights", 0)] = e1
        if METHODS[name].get("mc_samples", 1) == 2:
            tables[("weights", 1)] = e2
            if "price" in name:  # A record of two halves.
                tables[("noise", 1)] = z
    return FixedDraws(tables)


# ------------------------------------------------------------------------ closed loop


def model_of(name, engine, **compile_arguments):
    """The toy problem of the golden values, with the optimizer of an entry."""
    optimizer = make(
        name, expected_batch_size=PROBLEM["batch_size"], gradient_engine=engine
    )
    model = helpers.QuarticModel(THETA0)
    model.compile(
        optimizer=optimizer,
        loss=helpers.quartic_loss(PROBLEM["quartic"]),
        **compile_arguments,
    )
    return model


def data():
    """Its four records."""
    return np.array(PROBLEM["centers"], "f4"), np.array(PROBLEM["H"], "f4")


def points_ahead(model) -> list[np.ndarray]:
    """Where the next step takes its gradient, as far as it is known before the step."""
    optimizer = model.optimizer
    state = optimizer.step_state([model.theta.value], optimizer.release_count.value)
    return [point.weights[0].numpy() for point in optimizer.query.points(state)]


def watch_records(monkeypatch) -> list[np.ndarray]:
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


def v_bar(optimizer, step):
    """max(v_hat - n_hat, floor) from the saved moments, in float64."""
    rule = optimizer.rule
    debias = 1.0 - rule.beta_2**step if rule.bias_correction else 1.0
    v_hat = helpers.slot(optimizer, "velocity") / debias
    if rule.variance_floor is None:
        return v_hat
    noise = helpers.scalar_slot(optimizer, "noise_velocity") / debias
    return np.maximum(v_hat - noise, rule.variance_floor)

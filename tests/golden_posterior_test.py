"""Golden values of the methods that keep or sample a posterior over the weights.

Tolerances and tables are those of `golden_test.py` and `golden_cases.py`.
"""

import golden_cases
import helpers
import numpy as np
import pytest
from golden_cases import METHODS, THETA0, close

from keras_dpopt import clipping, prng


@pytest.fixture
def run(monkeypatch):
    """Function from (name, engine) to the model and the variables of its gradient."""

    def start(name, engine, **compile_arguments):
        monkeypatch.setattr(prng, "standard_normal", golden_cases.draws_of(name))
        # No margin; golden_test.py.
        monkeypatch.setattr(clipping, "_UNIT_ROUNDOFF", 0.0)
        model = golden_cases.model_of(name, engine, **compile_arguments)
        model.optimizer.build(model.trainable_variables)
        return model, helpers.watch_gradients(model)

    return start


@pytest.mark.parametrize(
    ("name", "engine"),
    golden_cases.runs(n for n in golden_cases.POSTERIOR if "ivon" in n),
)
def test_ivon(name, engine, run):
    model, gradient = run(name, engine)
    optimizer, entry = model.optimizer, METHODS[name]
    samples = entry.get("mc_samples", 1)
    for want in entry["trace"]:
        points = golden_cases.points_ahead(model)
        close(points, want["theta_sampled"])
        assert len(points) == samples
        precision = helpers.slot(optimizer, "precision")
        model.train_on_batch(*golden_cases.data())
        close(gradient[0].numpy(), want["grad"])
        close(model.theta.numpy(), want["mean"])
        close(helpers.slot(optimizer, "momentum"), want["momentum"])
        close(
            helpers.slot(optimizer, "precision") - entry["weight_decay"], want["h"], 2.0
        )
        close(optimizer.posterior_scale()[0].numpy(), want["post_std"], 0.2)
        if samples > 1 and "price" in name:
            # The second half of the record: mean_s e_s*g_s.
            h_hat = np.sqrt(entry["ess"] * precision) * gradient[1].numpy()
            close(h_hat, want["h_hat"], 20.0)


@pytest.mark.parametrize(("name", "engine"), golden_cases.runs(["sgld", "dp_sgld"]))
def test_sgld(name, engine, run):
    model, _ = run(name, engine)
    for want in METHODS[name]["trace"]:
        model.train_on_batch(*golden_cases.data())
        # The multiplier has a margin of 1e-6 of it (langevin_mechanism.py).
        close(model.theta.numpy(), want)


def test_sgld_is_the_sgd_that_the_entry_says(run):
    """The noise multiplier of the dynamics, as the ledger has it."""
    entry = METHODS["dp_sgld"]["equivalent_dpsgd"]
    model, gradient = run("dp_sgld", "loop")
    model.train_on_batch(*golden_cases.data())
    (phase,) = model.privacy_ledger.sync().phases
    np.testing.assert_allclose(
        phase.noise_multipliers, [entry["noise_multiplier"]], rtol=1e-6
    )
    drift = gradient[0].numpy() + entry["l2"] * THETA0
    close(model.theta.numpy(), THETA0 - entry["lr"] * drift)


@pytest.mark.parametrize("engine", helpers.ENGINES)
def test_bayes_by_backprop(engine, run):
    name = "dp_bbp_kl_outside_clip"
    model, gradient = run(name, engine)
    entry = METHODS[name]
    mu, rho = THETA0, np.full(3, entry["rho0"])
    for want in entry["trace"]:
        model.train_on_batch(*golden_cases.data())
        # The entry's gradient has the KL term in.
        s, slope = np.log1p(np.exp(rho)), 1 / (1 + np.exp(-rho))
        kl = np.concatenate([mu, (s - 1 / s) * slope]) / entry["N"]
        close(np.concatenate([part.numpy() for part in gradient]) + kl, want["grad"])
        mu, rho = np.array(want["mu"]), np.array(want["rho"])
        close(model.theta.numpy(), want["mu"])
        close(helpers.slot(model.optimizer, "rho"), rho, 3.0)
        close(model.optimizer.posterior_scale()[0].numpy(), np.log1p(np.exp(rho)), 0.1)


@pytest.mark.parametrize("name", ["ivon_price_mc1", "dp_bbp_kl_outside_clip"])
def test_by_xla_in_microbatches(name, run):
    """XLA gets the sampling of the weights too."""
    model, _ = run(name, "vectorized", jit_compile=True)
    model.optimizer.microbatch_size = 3
    for want in METHODS[name]["trace"]:
        model.train_on_batch(*golden_cases.data())
        close(model.theta.numpy(), want["mean" if "mean" in want else "mu"])

"""Golden values of the methods on the toy problem: clip, noise, step.

Tolerances and tables are those of `golden_test.py` and `golden_cases.py`.
"""

import golden_cases
import helpers
import numpy as np
import pytest
from golden_cases import METHODS, STEPS, THETA0, close

from keras_dpopt import clipping, prng

LOW_NOISE = "fiber_closedloop_lownoise"


@pytest.mark.parametrize(
    ("name", "engine"), golden_cases.runs(golden_cases.CLOSED_LOOP)
)
def test_closed_loop(name, engine, monkeypatch):
    monkeypatch.setattr(prng, "standard_normal", golden_cases.draws_of(name))
    monkeypatch.setattr(clipping, "_UNIT_ROUNDOFF", 0.0)  # No margin; golden_test.py.
    trace = METHODS[name]["trace"]
    key = next((key for key in ("u", "per_example") if key in trace[0]), None)
    watched = engine == "loop" and key is not None
    records = golden_cases.watch_records(monkeypatch) if watched else None
    model = golden_cases.model_of(name, engine)
    model.optimizer.build(model.trainable_variables)
    gradient = helpers.watch_gradients(model)
    before, largest = THETA0, np.abs(THETA0)
    for t, want in enumerate(trace):
        if "eps" in want and model.optimizer.query.stages == 1:
            (point,) = golden_cases.points_ahead(model)
            close(point - model.theta.numpy(), want["eps"])
        if records is not None:
            records.clear()
        model.train_on_batch(*golden_cases.data())
        theta = np.array(want["theta"])
        largest = np.maximum(largest, np.abs(theta))
        close(gradient[0].numpy(), want["g" if "g" in want else "grad"])
        close(model.theta.numpy(), theta, largest)
        if records is not None:
            # A cubic of theta: three times its relative error.
            u = np.array(want[key])
            close(records, u, 1 + np.abs(u))
        _check_state(model.optimizer, t, want, theta - before, largest)
        before = theta
    assert t + 1 == (2 if name == "dp_sam_double_query" else STEPS)


def _check_state(optimizer, t, want, change, largest):
    if "v_bar" in want:
        # The slots remember v as (1 - b2) times squares: of about 1e-3.
        close(helpers.slot(optimizer, "momentum"), want["m"], 0.1)
        close(helpers.slot(optimizer, "velocity"), want["v"], 1e-3)
        close(golden_cases.v_bar(optimizer, t + 1), want["v_bar"])
    if "filtered" in optimizer.filter.slots:
        close(helpers.slot(optimizer, "filtered"), want["g_filt"])
    if "last_update" in optimizer.query.slots:
        close(helpers.slot(optimizer, "last_update"), change, largest)
        if "d" in want:
            close(change, want["d"], largest)


def _fit(model, name):
    model.fit(*golden_cases.data(), batch_size=4, epochs=STEPS, verbose=0)
    theta = METHODS[name]["trace"][-1]["theta"]
    close(model.theta.numpy(), theta, np.abs(theta), rtol=3e-5)


@pytest.mark.parametrize("name", ["fiber_closedloop", "dp_sat"])
def test_closed_loop_by_fit(name, monkeypatch):
    """As a user runs it: margin included, by `fit`, which takes all rows at b = N."""
    monkeypatch.setattr(prng, "standard_normal", golden_cases.draws_of(name))
    _fit(golden_cases.model_of(name, "auto"), name)


@pytest.mark.parametrize(
    ("name", "jit_compile"), [(LOW_NOISE, False), ("bam_exact", True)]
)
def test_closed_loop_by_microbatches(name, jit_compile, monkeypatch):
    monkeypatch.setattr(prng, "standard_normal", golden_cases.draws_of(name))
    model = golden_cases.model_of(name, "vectorized", jit_compile=jit_compile)
    model.optimizer.microbatch_size = 3
    _fit(model, name)


def test_closed_loop_eagerly(monkeypatch):
    monkeypatch.setattr(prng, "standard_normal", golden_cases.draws_of(LOW_NOISE))
    _fit(golden_cases.model_of(LOW_NOISE, "loop", run_eagerly=True), LOW_NOISE)

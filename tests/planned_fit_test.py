"""The epsilon of a fit told before it, and noise multipliers calibrated by it."""

import helpers
import keras
import numpy as np
import pytest
import tiny

import keras_dpopt
from keras_dpopt.gaussian_mechanism import GaussianSumQuery

N, B, EPOCHS, DELTA = 30, 7, 3, 1e-3
FIT = {"train_size": N, "batch_size": B, "epochs": EPOCHS, "delta": DELTA}
X, Y = tiny.rows(N)
SCHEDULE = keras.optimizers.schedules.ExponentialDecay(0.01, 5, 0.5)
ADAPTIVE = keras_dpopt.AdaptiveClipping(count_noise_stddev=40.0)
OWN_SETTINGS = {
    "amplified": ("MFDPFTRL", {"amplified": True, "bands": 2}),
    "blt": ("MFDPFTRL", {"strategy": "blt"}),
    "one tree": ("DPFTRL", {"restart": None}),
    "schedule": ("DPSGLD", {"learning_rate": SCHEDULE}),
    "small N": ("DPSGLD", {"train_size": 10}),
    "adaptive": ("DPSGD", {"clipping": ADAPTIVE}),
    "per layer": ("DPSAM", {"clipping": "per_layer"}),
}
CASES = {**{n: (n, {}) for n in helpers.OPTIMIZERS}, **OWN_SETTINGS}
every_case = pytest.mark.parametrize("case", CASES)


def maker(case):
    name, settings = CASES[case]

    def make(sigma):
        private = {"l2_norm_clip": 1.0, "noise_multiplier": sigma, **settings}
        return getattr(keras_dpopt, name)(**private)

    return make


def stated(optimizer, fits=1, **arguments):
    """What the statement says after fits of these sizes."""
    model = tiny.classifier(optimizer)
    for _ in range(fits):
        tiny.fit(model, X, Y, batch_size=B, epochs=EPOCHS, **arguments)
    return model.privacy_statement(DELTA).epsilon


@every_case
def test_it_is_what_the_statement_says_after_the_fit(case):
    optimizer = maker(case)(1.5)
    planned = optimizer.planned_epsilon(**FIT)
    assert optimizer.expected_batch_size is None and not optimizer.built
    assert planned == stated(optimizer)
    # As well with an optimizer that has trained, here at its place in the schedule.
    if CASES[case][0] != "DPSGLD":
        assert optimizer.planned_epsilon(**FIT) == planned


@every_case
def test_the_calibrated_fit_costs_the_target(case):
    make = maker(case)
    # Of DP-SGLD a target that its own noise does not meet.
    target = 0.25 * make(0.0).planned_epsilon(**FIT) if "SGLD" in CASES[case][0] else 2
    sigma = keras_dpopt.noise_multiplier(target_epsilon=target, optimizer=make, **FIT)
    assert sigma > 0
    # The noise plan of a schedule is rounded: epsilon is not smooth there.
    assert (
        (0.99 if case == "schedule" else 0.9999) * target
        < (make(sigma).planned_epsilon(**FIT))
        <= target
    )


def test_of_one_release_a_step_the_function_changes_nothing():
    plain = keras_dpopt.noise_multiplier(target_epsilon=2.0, **FIT)
    for name in ("DPSGD", "FiBeR", "adaptive"):
        make = maker(name)
        with_function = keras_dpopt.noise_multiplier(
            target_epsilon=2.0, optimizer=make, **FIT
        )
        assert with_function == pytest.approx(plain, rel=1e-6), name
    for name, factor in (("DPSAM", 2**0.5),):
        with_function = keras_dpopt.noise_multiplier(
            target_epsilon=2.0, optimizer=maker(name), **FIT
        )
        assert with_function == pytest.approx(factor * plain, rel=1e-4)


def test_noise_of_its_own_that_is_enough():
    make = maker("DPSGLD")
    own = make(0.0).planned_epsilon(**FIT)
    sigma = keras_dpopt.noise_multiplier(
        target_epsilon=1.01 * own, optimizer=make, **FIT
    )
    assert sigma == 0.0


@pytest.mark.parametrize("name", ["DPSGD", "DPSAM"])
def test_fixed_sizes(name):
    sampler = keras_dpopt.FixedSizeSampler()
    make = maker(name)
    sigma = keras_dpopt.noise_multiplier(
        target_epsilon=2.0, optimizer=make, sampler=sampler, **FIT
    )
    planned = make(sigma).planned_epsilon(sampler=sampler, **FIT)
    assert 1.9998 < planned <= 2.0
    assert planned == stated(make(sigma), sampler=sampler)
    if name == "DPSGD":
        plain = {"sampler": sampler, **FIT}
        assert keras_dpopt.epsilon(noise_multiplier=sigma, **plain) == planned
        assert keras_dpopt.noise_multiplier(target_epsilon=2.0, **plain) == sigma
        poisson = keras_dpopt.PoissonSampler()
        assert keras_dpopt.epsilon(noise_multiplier=2.0, sampler=poisson, **FIT) == (
            keras_dpopt.epsilon(noise_multiplier=2.0, **FIT)
        )


@pytest.mark.parametrize("once", [False, True])
def test_the_recipes_for_data_sets(once):
    """A batch of all records, and an epoch for each step or for each epoch."""
    steps = EPOCHS * -(-N // B)
    sizes = {"train_size": N, "batch_size": N, "delta": DELTA}
    sigma = keras_dpopt.noise_multiplier(
        target_epsilon=2.0, epochs=EPOCHS if once else steps, **sizes
    )
    model = tiny.classifier(tiny.private_sgd(noise_multiplier=sigma))
    model.optimizer.resolve_batch_size(B)
    data = tiny.tf.data.Dataset.from_tensor_slices((X, Y)).batch(B)
    tiny.fit(model, data, epochs=EPOCHS, once_per_epoch=once, train_size=N)
    assert 1.9998 < model.privacy_statement(DELTA).epsilon <= 2.0


def test_pld():
    sgd = maker("DPSGD")(1.5)
    by_pld = sgd.planned_epsilon(accountant="pld", **FIT)
    assert by_pld == keras_dpopt.epsilon(noise_multiplier=1.5, accountant="pld", **FIT)
    assert by_pld < sgd.planned_epsilon(**FIT)


def test_the_run_that_is_on_goes_on():
    """Planning within a fit leaves the plan of that fit alone."""
    asked = []

    class Ask(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            optimizer = self.model.optimizer
            asked.append(optimizer.planned_epsilon(**{**FIT, "epochs": 9}))

    for case in ("MFDPFTRL", "DPFTRL", "schedule"):
        optimizer = maker(case)(1.5)
        digest = optimizer.mechanism.plan_digest()
        optimizer.planned_epsilon(**FIT)
        assert optimizer.mechanism.plan_digest() == digest
        model = tiny.classifier(optimizer)
        tiny.fit(model, X, Y, batch_size=B, epochs=EPOCHS, callbacks=[Ask()])
        assert tiny.steps(model) == EPOCHS * -(-N // B)
    assert all(np.isfinite(asked))


def test_foreign_queries_are_planned_too():
    optimizer = keras_dpopt.DPSGD(dp_sum_query=GaussianSumQuery(1.0, 1.5))
    planned = optimizer.planned_epsilon(**FIT)
    assert planned == keras_dpopt.epsilon(noise_multiplier=1.5, **FIT)


@pytest.mark.parametrize(
    "optimizer, error, message",
    [
        (keras_dpopt.DPSGD, TypeError, "must be a function of the noise multiplier"),
        (maker("DPSGD")(1.0), TypeError, "must be a function of the noise multiplier"),
        (lambda sigma: sigma, TypeError, "returns a private optimizer"),
        (lambda sigma: maker("DPSGD")(0.5), ValueError, "pass its argument on"),
        (lambda sigma: maker("DPSGD")(0.0), ValueError, "pass its argument on"),
    ],
)
def test_functions_that_are_none(optimizer, error, message):
    with pytest.raises(error, match=message):
        keras_dpopt.noise_multiplier(target_epsilon=2.0, optimizer=optimizer, **FIT)


def test_what_fit_refuses_is_refused():
    with pytest.raises(ValueError, match="order of its own.*Leave `sampler` out"):
        maker("DPFTRL")(1.0).planned_epsilon(
            sampler=keras_dpopt.FixedSizeSampler(), **FIT
        )
    with pytest.raises(ValueError, match="batch_size=7 differs"):
        tiny.private_sgd(expected_batch_size=5).planned_epsilon(**FIT)
    with pytest.raises(TypeError, match="planned_epsilon needs `delta`"):
        tiny.private_sgd().planned_epsilon(train_size=5, epochs=1, batch_size=5)
    with pytest.raises(TypeError, match="not one whose batches can be accounted"):
        keras_dpopt.epsilon(noise_multiplier=1.0, sampler="poisson", **FIT)


# --- targets that no noise reaches ---------------------------------------------------

LARGE = {"train_size": 60000, "batch_size": 256, "epochs": 10}


@pytest.mark.parametrize(
    "target, delta, accountant, cause",
    [
        (0.01, 1e-300, "rdp", "stays above 0.667, whatever the noise"),
        (0.01, 1e-300, "pld", "stays above 0.667, whatever the noise"),
        (1e-5, 1e-12, "rdp", "jumps from"),
        (1e-5, 1e-12, "pld", "jumps from"),
    ],
)
def test_the_message_names_a_target_that_would_do(target, delta, accountant, cause):
    arguments = {"delta": delta, "accountant": accountant, **LARGE}
    with pytest.raises(ValueError, match=cause) as raised:
        keras_dpopt.noise_multiplier(target_epsilon=target, **arguments)
    message = str(raised.value)
    assert f"target_epsilon={target:g} at delta={delta:g}" in message
    assert ("accountant='pld'" in message) == (accountant == "rdp" and delta > 1e-100)
    (_, rest) = message.split("Pass a target_epsilon of ")
    would_do = float(rest.split()[0])
    sigma = keras_dpopt.noise_multiplier(target_epsilon=would_do, **arguments)
    reached = keras_dpopt.epsilon(noise_multiplier=sigma, **arguments)
    assert 0.99 * would_do < reached <= would_do

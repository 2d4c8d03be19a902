"""What is said of a budget: that it ended the training, or allows no step of a fit."""

import pytest
import runs

import keras_dpopt
from keras_dpopt import accounting

DELTA = 1e-5


def budget(target, **arguments):
    return keras_dpopt.PrivacyBudget(target_epsilon=target, delta=DELTA, **arguments)


def after(steps):
    """Epsilon of so many steps of `runs.fit`, and a hair."""
    event = accounting.poisson_event((1.0,), runs.N, runs.BATCH)
    return 1.000001 * accounting.compose_epsilon([(event, steps)], DELTA)


# --- no step at all ------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer, words",
    [
        (runs.sgd(), "Nothing is spent, but .* after the first step, epsilon would be"),
        (runs.sgd(noise_multiplier=0.0), "would be unbounded. Pass a noise_multiplier"),
        (
            keras_dpopt.MFDPFTRL(l2_norm_clip=1.0, noise_multiplier=1.0, bands=2),
            "which costs as much as the run that it begins, epsilon would be",
        ),
    ],
)
def test_a_first_fit_that_is_too_expensive(optimizer, words):
    model = runs.model(optimizer)
    with pytest.raises(RuntimeError, match=words) as raised:
        runs.fit(model, callbacks=[budget(0.1)])
    message = str(raised.value)
    assert "is spent, so" not in message and "noise_multiplier" in message
    assert "(epsilon 0.1 at delta 1e-05, by RDP)" in message
    assert runs.steps(model) == 0


def test_the_cost_that_is_named_is_that_of_the_step():
    model = runs.model()
    with pytest.raises(RuntimeError, match="Raise noise_multiplier") as raised:
        runs.fit(model, callbacks=[budget(0.1)])
    runs.fit(model, callbacks=[budget(99.0)], steps_per_epoch=1)
    epsilon = model.privacy_statement(DELTA).epsilon
    assert f"after the first step, epsilon would be {epsilon:.4g}." in str(raised.value)


def test_a_later_fit_that_is_too_expensive():
    model = runs.model()
    runs.fit(model, callbacks=[budget(4 * after(3))])
    model.compile(
        runs.sgd(noise_multiplier=0.0), loss="sparse_categorical_crossentropy"
    )
    with pytest.raises(RuntimeError, match="too small for this fit: epsilon is .* now"):
        runs.fit(model)


def test_a_spent_budget_says_how_much_is_spent():
    model = runs.model()
    runs.fit(model, epochs=9, callbacks=[budget(after(5))])
    with pytest.raises(RuntimeError, match="is spent, so") as raised:
        runs.fit(model)
    epsilon = model.privacy_statement(DELTA).epsilon
    assert f"epsilon is {epsilon:.4g}, and after another step" in str(raised.value)


# --- the line at the end -------------------------------------------------------------


def line(capsys):
    return [s for s in capsys.readouterr().out.splitlines() if "PrivacyBudget" in s]


@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_the_line_says_after_how_many_steps(capsys, steps_per_execution):
    model = runs.model(steps_per_execution=steps_per_execution)
    runs.fit(model, epochs=9, callbacks=[budget(after(5))])
    epsilon = model.privacy_statement(DELTA).epsilon
    assert line(capsys) == [
        f"PrivacyBudget: budget reached after 5 of 27 steps: epsilon {epsilon:.4g} of "
        f"{after(5):g} at delta 1e-05."
    ]


def test_a_later_fit_counts_its_own_steps(capsys):
    model = runs.model()
    runs.fit(model)
    runs.fit(model, epochs=9, initial_epoch=4, callbacks=[budget(after(5))])
    (said,) = line(capsys)
    assert "after 2 of 15 steps" in said


def test_no_line_where_the_last_step_was_made(capsys):
    runs.fit(runs.model(), epochs=2, callbacks=[budget(after(6))])
    runs.fit(runs.model(), epochs=2, callbacks=[budget(after(9))])
    runs.fit(runs.model(), epochs=9, callbacks=[budget(after(5), verbose=0)])
    assert not line(capsys)


def test_of_two_budgets_the_one_that_is_reached_says_so(capsys):
    others = [keras_dpopt.PrivacyBudget(99.0, 1e-3), budget(after(5))]
    runs.fit(runs.model(), epochs=9, callbacks=others)
    (said,) = line(capsys)
    assert "at delta 1e-05" in said


def test_steps_that_are_not_known_are_not_named(capsys):
    x, y = runs.data()
    model = runs.model(runs.sgd(expected_batch_size=10, noise_multiplier=9.0))

    def batches():
        while True:
            yield x[:10], y[:10]

    def fit(**arguments):
        return model.fit(batches(), verbose=0, **arguments)

    fit(steps_per_epoch=1, callbacks=[budget(99.0)])
    target = 1.5 * model.privacy_statement(DELTA).epsilon
    fit(steps_per_epoch=50, epochs=2, callbacks=[budget(target)])
    (said,) = line(capsys)
    made = runs.steps(model) - 1
    assert f"after {made} of 100 steps" in said


def test_a_resumed_run_counts_from_where_it_goes_on(capsys, tmp_path):
    def fit(*others):
        made = runs.model()
        backup = keras_dpopt.BackupAndRestore(tmp_path / "backup", save_freq=1)
        callbacks = [backup, budget(after(9)), *others]
        runs.fit(made, epochs=3, callbacks=callbacks)
        return made

    with pytest.raises(runs.Interrupted):
        fit(runs.Interrupt(batches=4))
    # Nine steps are what was planned: the budget has not ended it.
    assert runs.steps(fit()) == 9
    assert not line(capsys)

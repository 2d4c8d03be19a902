"""Tests of several budgets at once: in the ledger, in a fit, through files."""

import json

import keras
import pytest
import runs

import keras_dpopt
from keras_dpopt.ledger import Budget, Ledger
from keras_dpopt.phase import Phase

_DELTA = 1e-5


def _phase(**changes):
    fields = {
        "optimizer": "DPSGD",
        "sampling": "poisson",
        "noise_multipliers": (1.1,),
        "l2_norm_clip": 1.0,
        "expected_batch_size": 256,
        "train_size": 60000,
    }
    return Phase(**{**fields, **changes})


def _after(model, steps, delta=_DELTA, accountant="rdp"):
    """The epsilon of this many steps of a model that has made some, and a hair."""
    phase = model.privacy_ledger.sync().phases[0].blank()
    phases = [Phase(**{**vars(phase), "steps": steps, "epochs_begun": 1})]
    return 1.000001 * Ledger(phases).epsilon(delta, accountant)


def _trained():
    model = runs.model()
    runs.fit(model)
    return model


# ------------------------------------------------------------------------- the ledger


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(
    "others", [(5.0, 1e-3), (2.0, 1e-7), (3.0, 1e-5, "pld")], ids=str
)
def test_all_budgets_hold_whatever_their_order(others, swap):
    alone = []
    both = Ledger()
    pair = [(3.0, _DELTA), others]
    for budget in pair[::-1] if swap else pair:
        ledger = Ledger()
        for each in (ledger, both):
            each.set_budget(*budget)
        ledger.begin(_phase())
        alone.append(ledger.steps_left())
    both.begin(_phase())
    assert len(both.budgets) == 2
    assert both.steps_left() == min(alone)
    assert alone[0] != alone[1]
    both.set_steps(min(alone))
    for budget in both.budgets:
        assert both.epsilon(budget.delta, budget.accountant) <= budget.target_epsilon
    spent = both.spent_budget()
    assert spent == both.budgets[alone.index(min(alone))]


def test_setting_replaces_the_one_of_the_same_delta_and_accountant():
    ledger = Ledger()
    for budget in [(3.0, 1e-5), (3.0, 1e-5, "pld"), (3.0, 1e-6), (2.0, 1e-5)]:
        ledger.set_budget(*budget)
    assert ledger.budgets == (
        Budget(2.0, 1e-5),
        Budget(3.0, 1e-5, "pld"),
        Budget(3.0, 1e-6),
    )
    assert not ledger.notes


def test_a_raised_target_is_noted():
    ledger = Ledger()
    ledger.set_budget(3.0, 1e-5)
    ledger.set_budget(3.0, 1e-5)
    assert not ledger.notes
    ledger.set_budget(4.5, 1e-5)
    assert ledger.notes == (
        "The privacy budget at delta 1e-05 (RDP) was raised from 3 to 4.5.",
    )
    assert ledger.budgets == (Budget(4.5, 1e-5),)


def test_combining_takes_the_smaller_target_of_each():
    ledger, other = Ledger(), Ledger()
    for budget in [(5.0, 1e-5), (1.0, 1e-6)]:
        ledger.set_budget(*budget)
    for budget in [(3.0, 1e-5), (2.0, 1e-6), (7.0, 1e-6, "pld")]:
        other.set_budget(*budget)
    for _ in range(2):  # the second time changes nothing
        ledger.combine(other)
        assert ledger.budgets == (
            Budget(3.0, 1e-5),
            Budget(1.0, 1e-6),
            Budget(7.0, 1e-6, "pld"),
        )
    assert not ledger.notes
    assert other.budgets[0] == Budget(3.0, 1e-5)


def test_json_keeps_all_budgets_and_a_doubled_one_is_the_smaller():
    budgets = [Budget(5.0, 1e-5), Budget(2.0, 1e-6, "pld")]
    ledger = Ledger(budgets=budgets)
    assert Ledger.from_json(ledger.to_json()).budgets == tuple(budgets)
    content = json.loads(ledger.to_json())
    content["budgets"].append({"target_epsilon": 4.0, "delta": 1e-5})
    loaded = Ledger.from_json(json.dumps(content))
    assert loaded.budgets == (Budget(4.0, 1e-5), budgets[1])


def test_by_epochs_the_strictest_budget_ends_it_too():
    ledger = Ledger()
    phase = _phase(sampling="caller", once_per_epoch=True, noise_multipliers=(7.0,))
    two = Ledger([Phase(**{**vars(phase), "steps": 2, "epochs_begun": 2})])
    ledger.set_budget(1.01 * two.epsilon(_DELTA), _DELTA)
    ledger.set_budget(99.0, 1e-3)
    ledger.begin(phase)
    for steps in (5, 10):
        ledger.begin_epoch()
        assert ledger.steps_left(limit=50) == 50
        assert ledger.spent_budget() is None
        ledger.set_steps(steps)
        assert ledger.steps_left(limit=50) == 50
        assert ledger.spent_budget() is None
    ledger.begin_epoch()
    assert ledger.steps_left(limit=50) == 0
    assert ledger.spent_budget() == ledger.budgets[0]


# ----------------------------------------------------------------------------- in fit


@pytest.mark.parametrize("strict_first", [True, False])
def test_two_budgets_in_one_fit_both_hold(strict_first):
    model = _trained()
    strict, loose = _after(model, 7), _after(model, 12, 1e-3)
    callbacks = [
        keras_dpopt.PrivacyBudget(strict, _DELTA),
        keras_dpopt.PrivacyBudget(loose, 1e-3),
    ]
    history = runs.fit(
        model, epochs=20, callbacks=callbacks if strict_first else callbacks[::-1]
    )
    assert runs.steps(model) == 7
    assert model.privacy_statement(_DELTA).epsilon <= strict
    assert model.privacy_statement(1e-3).epsilon <= loose
    for name, delta in (("epsilon_at_1e-05", _DELTA), ("epsilon_at_0.001", 1e-3)):
        shown = history.history[name][-1]
        assert shown == pytest.approx(model.privacy_statement(delta).epsilon)
    assert "epsilon" not in history.history
    with pytest.raises(RuntimeError, match=r"at delta 1e-05, by RDP\) is spent"):
        runs.fit(model)
    assert runs.steps(model) == 7


def test_a_later_budget_at_another_delta_does_not_lift_an_earlier_one():
    model = _trained()
    model.privacy_ledger.set_budget(_after(model, 5), _DELTA, "rdp")
    runs.fit(model, epochs=9, callbacks=[keras_dpopt.PrivacyBudget(99.0, 1e-3)])
    assert runs.steps(model) == 5


def test_two_spent_budgets_can_be_raised_in_one_fit():
    model = _trained()
    deltas = (_DELTA, 1e-3)

    def budgets(steps):
        pairs = [(_after(model, steps, delta), delta) for delta in deltas]
        return [keras_dpopt.PrivacyBudget(*pair) for pair in pairs]

    runs.fit(model, epochs=9, callbacks=budgets(4))
    assert runs.steps(model) == 4
    # One alone does not open it again, and the message names the other.
    with pytest.raises(RuntimeError, match=r"at delta 0\.001, by RDP\) is spent"):
        runs.fit(model, callbacks=budgets(6)[:1])
    runs.fit(model, epochs=9, callbacks=budgets(6))
    assert runs.steps(model) == 6
    for delta in ("1e-05", "0.001"):
        assert f"The privacy budget at delta {delta} (RDP) was raised" in (
            runs.notes(model)
        )
    assert "was raised from" in str(model.privacy_statement(_DELTA))


# ---------------------------------------------------------------------- through files


def test_the_budget_of_a_file_is_kept_beside_those_of_the_model(tmp_path):
    model = _trained()
    model.privacy_ledger.set_budget(_after(model, 5), _DELTA, "rdp")
    model.save_weights(tmp_path / "w.weights.h5")
    other = runs.model()
    other.privacy_ledger.set_budget(99.0, 1e-3, "rdp")
    other.privacy_ledger.set_budget(99.0, _DELTA, "rdp")
    other.load_weights(tmp_path / "w.weights.h5")
    budgets = other.privacy_ledger.sync().budgets
    assert {b.key: b.target_epsilon for b in budgets} == {
        (1e-3, "rdp"): 99.0,
        (_DELTA, "rdp"): _after(model, 5),
    }
    runs.fit(other, epochs=9)
    assert runs.steps(other) == 5


def test_a_saved_model_keeps_all_budgets(tmp_path):
    model = _trained()
    model.privacy_ledger.set_budget(2.0, 1e-6, "rdp")
    model.privacy_ledger.set_budget(3.0, _DELTA, "pld")
    model.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    assert loaded.privacy_ledger.sync().budgets == (
        Budget(2.0, 1e-6),
        Budget(3.0, _DELTA, "pld"),
    )


def test_the_budget_of_a_backup_can_be_raised(tmp_path):
    model = _trained()
    target = _after(model, 4)

    def fit(target, *others):
        made = runs.model()
        backup = keras_dpopt.BackupAndRestore(tmp_path / "backup")
        callbacks = [backup, keras_dpopt.PrivacyBudget(target, _DELTA), *others]
        runs.fit(made, epochs=9, callbacks=callbacks)
        return made

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if self.model.optimizer.releases() == 4:
                raise runs.Interrupted

    with pytest.raises(runs.Interrupted):
        fit(target, Stop())
    with pytest.raises(RuntimeError, match="is spent"):
        fit(target)
    raised = fit(_after(model, 8))
    assert runs.steps(raised) == 8
    assert "was raised" in runs.notes(raised)

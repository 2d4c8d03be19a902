"""Tests of ledger.py and phase.py."""

import dataclasses
import json
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp

from keras_dpopt import accounting
from keras_dpopt.ledger import Ledger
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


def _caller(**changes):
    return _phase(sampling="caller", **changes)


def _ledger(*phases_and_steps):
    ledger = Ledger()
    for phase, steps in phases_and_steps:
        ledger.begin(phase)
        ledger.set_steps(steps)
    return ledger


def _rdp_epsilon(*events, relation=accounting.ZERO_OUT):
    accountant = rdp.RdpAccountant(neighboring_relation=relation)
    for event, count in events:
        accountant.compose(event, count)
    return accountant.get_epsilon(_DELTA)


def _poisson(sigma=1.1, q=256 / 60000):
    return dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))


# --- recording -------------------------------------------------------------------


def test_an_empty_ledger_has_released_nothing():
    ledger = Ledger()
    assert (ledger.total_steps, ledger.phases, ledger.notes) == (0, (), ())
    assert ledger.epsilon(_DELTA) == ledger.epsilon(_DELTA, "pld") == 0.0
    assert ledger.relation is accounting.ZERO_OUT


def test_a_phase_begun_without_steps_costs_nothing():
    ledger = Ledger()
    ledger.begin(_phase(noise_multipliers=(0.0,)))
    assert ledger.epsilon(_DELTA) == 0.0
    ledger.begin(_phase())
    assert len(ledger.phases) == 1
    ledger.set_steps(1)
    assert 0 < ledger.epsilon(_DELTA) < 1


def test_the_same_kind_goes_on_with_its_phase():
    ledger = _ledger((_phase(), 10), (_phase(noise_multipliers=(2.0,)), 5))
    ledger.begin(_phase())
    assert ledger.phases[-1].steps == 10
    ledger.set_steps(12)
    assert [phase.steps for phase in ledger.phases] == [5, 12]
    assert ledger.total_steps == 17


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": "FiBeR"},
        {"noise_multipliers": (1.0,)},
        {"noise_multipliers": (1.1, 20.0)},
        {"l2_norm_clip": 2.0},
        {"expected_batch_size": 255},
        {"train_size": 60001},
        {"sampling": "fixed_size"},
        {"sampling": "caller"},
        {"sampling": "caller", "once_per_epoch": True},
        {"sampling": "caller", "assume": "poisson"},
        {"seeded": True},
        {"notes": ("a note",)},
    ],
)
def test_another_kind_is_another_phase(change):
    ledger = _ledger((_phase(), 10), (_phase(**change), 5))
    assert [phase.steps for phase in ledger.phases] == [10, 5]


def test_steps_never_shrink():
    ledger = _ledger((_phase(), 10))
    with pytest.raises(ValueError, match="cannot forget: 10 steps .* 9 is less"):
        ledger.set_steps(9)
    ledger.set_steps(10)
    assert ledger.total_steps == 10


def test_steps_need_a_phase_and_a_phase_begins_without_steps():
    with pytest.raises(RuntimeError, match="Call `begin` first"):
        Ledger().set_steps(1)
    with pytest.raises(ValueError, match="begins without steps, not with 3"):
        Ledger().begin(_phase(steps=3, epochs_begun=1))


def test_the_phases_cannot_be_changed_from_outside():
    ledger = _ledger((_phase(), 10))
    with pytest.raises(dataclasses.FrozenInstanceError):
        ledger.phases[0].steps = 0  # type: ignore[misc]
    assert isinstance(ledger.phases, tuple)
    assert isinstance(ledger.notes, tuple)


def test_notes_are_kept_once_and_in_order():
    ledger = Ledger(notes=["b"])
    for text in ("a", "b", "a", "c"):
        ledger.note(text)
    assert ledger.notes == ("b", "a", "c")


# --- epsilon ---------------------------------------------------------------------


def test_epsilon_is_that_of_the_composition():
    ledger = _ledger(
        (_phase(), 2350),
        (_phase(noise_multipliers=(2.0,), expected_batch_size=600), 50),
        (_caller(noise_multipliers=(30.0,), train_size=None), 4),
    )
    expected = _rdp_epsilon(
        (_poisson(), 2350),
        (_poisson(2.0, 0.01), 50),
        (dp_accounting.GaussianDpEvent(30.0), 4),
    )
    assert ledger.epsilon(_DELTA) == pytest.approx(expected, rel=1e-12)


def test_epsilon_depends_on_the_content_alone():
    kinds = [(_phase(), 70), (_phase(noise_multipliers=(3.0,)), 30), (_caller(), 2)]
    forwards, backwards = _ledger(*kinds), _ledger(*kinds[::-1])
    value = forwards.epsilon(_DELTA)
    assert backwards.epsilon(_DELTA) == pytest.approx(value, rel=1e-12)
    assert forwards.epsilon(_DELTA) == value
    assert Ledger.from_json(forwards.to_json()).epsilon(_DELTA) == value


def test_one_fit_equals_the_public_epsilon():
    steps = accounting.training_steps(60000, 256, 10)
    for accountant in accounting.ACCOUNTANTS:
        value = _ledger((_phase(), steps)).epsilon(_DELTA, accountant)
        assert value == accounting.epsilon(
            noise_multiplier=1.1,
            delta=_DELTA,
            train_size=60000,
            batch_size=256,
            epochs=10,
            accountant=accountant,
        )


def test_composed_mechanisms_are_one_release():
    z_d = (0.9**-2 - 10.0**-2) ** -0.5  # SPEC 19: the pair costs z = 0.9
    pair = _ledger((_phase(noise_multipliers=(z_d, 10.0)), 100))
    single = _ledger((_phase(noise_multipliers=(0.9,)), 100))
    assert pair.epsilon(_DELTA) == pytest.approx(single.epsilon(_DELTA), rel=1e-12)


@pytest.mark.parametrize(
    "change", [{"noise_multipliers": (0.0,)}, {"l2_norm_clip": math.inf}]
)
def test_without_noise_or_clipping_one_step_is_infinite(change):
    ledger = _ledger((_phase(), 10), (_phase(**change), 1))
    assert ledger.epsilon(_DELTA) == math.inf
    assert ledger.epsilon(_DELTA, "pld") == math.inf


# --- batches that the caller made ------------------------------------------------


def test_callers_batches_assume_nothing_by_default():
    ledger = _ledger((_caller(noise_multipliers=(20.0,)), 40))
    unsampled = _rdp_epsilon((dp_accounting.GaussianDpEvent(20.0), 40))
    assert ledger.epsilon(_DELTA) == pytest.approx(unsampled, rel=1e-12)
    assert ledger.epsilon(_DELTA, assumption="nothing") == ledger.epsilon(_DELTA)
    by_poisson = _rdp_epsilon((_poisson(20.0), 40))
    assert ledger.epsilon(_DELTA, assumption="poisson") == pytest.approx(by_poisson)
    once = _rdp_epsilon((dp_accounting.GaussianDpEvent(20.0), 1))
    assert ledger.epsilon(_DELTA, assumption="once_per_epoch") == pytest.approx(once)


def test_declared_poisson_is_the_headline():
    ledger = _ledger((_caller(assume="poisson"), 40))
    expected = _rdp_epsilon((_poisson(), 40))
    assert ledger.epsilon(_DELTA) == pytest.approx(expected, rel=1e-12)
    assert ledger.epsilon(_DELTA, assumption="nothing") > 10 * expected


def test_once_per_epoch_counts_the_epochs_in_which_steps_were_made():
    ledger = Ledger()
    ledger.begin(_caller(once_per_epoch=True, noise_multipliers=(5.0,)))
    steps = 0
    for epoch in range(1, 4):
        ledger.begin_epoch()
        ledger.begin_epoch()  # without a step in between: nothing was released
        for _ in range(10):
            steps += 1
            ledger.set_steps(steps)
        assert ledger.phases[-1].epochs_begun == epoch
        expected = _rdp_epsilon((dp_accounting.GaussianDpEvent(5.0), epoch))
        assert ledger.epsilon(_DELTA) == pytest.approx(expected, rel=1e-12)
    ledger.begin_epoch()
    assert ledger.epsilon(_DELTA) == pytest.approx(expected, rel=1e-12)


def test_once_per_epoch_counts_across_fits_and_reloads():
    phase = _caller(once_per_epoch=True, noise_multipliers=(5.0,))
    ledger = _ledger((phase, 10))
    ledger.begin(phase)  # a second fit is another epoch, even if nobody says so
    ledger.set_steps(20)
    ledger = Ledger.from_json(ledger.to_json())
    ledger.begin(phase)
    ledger.set_steps(10)
    expected = _rdp_epsilon((dp_accounting.GaussianDpEvent(5.0), 3))
    assert ledger.epsilon(_DELTA) == pytest.approx(expected, rel=1e-12)


def test_once_per_epoch_never_counts_more_than_the_steps():
    phase = _caller(once_per_epoch=True, steps=2, epochs_begun=5)
    (release,) = phase.releases(accounting.ZERO_OUT)
    assert release == (dp_accounting.GaussianDpEvent(1.1), 2)


def test_poisson_cannot_be_assumed_without_train_size():
    ledger = _ledger((_caller(train_size=None), 3))
    assert ledger.epsilon(_DELTA) > 0
    with pytest.raises(ValueError, match="without the number of training examples"):
        ledger.epsilon(_DELTA, assumption="poisson")
    with pytest.raises(ValueError, match="Unknown assumption 'shuffled'"):
        ledger.epsilon(_DELTA, assumption="shuffled")


def test_assumptions_do_not_touch_the_batches_of_the_library():
    ledger = _ledger((_phase(), 100))
    for assumption in ("nothing", "once_per_epoch", "poisson"):
        value = ledger.epsilon(_DELTA, assumption=assumption)
        assert value == ledger.epsilon(_DELTA)


# --- fixed-size batches ----------------------------------------------------------


def test_fixed_size_batches_turn_the_ledger_to_replace_one():
    fixed = _phase(sampling="fixed_size", noise_multipliers=(2.2,))
    ledger = _ledger((_caller(noise_multipliers=(50.0,)), 4))
    ledger.begin(fixed)
    assert ledger.relation is accounting.ZERO_OUT
    ledger.set_steps(300)
    assert ledger.relation is accounting.REPLACE_ONE
    sampled = dp_accounting.SampledWithoutReplacementDpEvent(
        60000, 256, dp_accounting.GaussianDpEvent(1.1)
    )
    expected = _rdp_epsilon(
        (dp_accounting.GaussianDpEvent(25.0), 4),
        (sampled, 300),
        relation=accounting.REPLACE_ONE,
    )
    assert ledger.epsilon(_DELTA) == pytest.approx(expected, rel=1e-12)


def test_poisson_batches_are_bounded_without_sampling_under_replace_one():
    fixed = _phase(sampling="fixed_size", noise_multipliers=(100.0,))
    ledger = _ledger((_phase(noise_multipliers=(40.0,)), 6), (fixed, 1))
    bound = _rdp_epsilon((dp_accounting.GaussianDpEvent(20.0), 6))
    assert ledger.epsilon(_DELTA) == pytest.approx(bound, rel=1e-3)
    # Replacing is removing and adding: by group privacy of two, the true divergence
    # is far below this bound. It must not be below that of removing alone.
    assert ledger.epsilon(_DELTA) > _rdp_epsilon((_poisson(40.0), 6))


def test_fixed_size_batches_have_no_pld():
    ledger = _ledger((_phase(sampling="fixed_size"), 3))
    with pytest.raises(ValueError, match="accountant='rdp'"):
        ledger.epsilon(_DELTA, "pld")


# --- budgets ---------------------------------------------------------------------


@pytest.mark.parametrize("accountant", accounting.ACCOUNTANTS)
def test_max_steps_within_is_the_largest(accountant):
    ledger = _ledger((_phase(noise_multipliers=(2.0,)), 100))
    target = 0.9
    most = ledger.max_steps_within(target, _DELTA, accountant, _phase())
    assert most > 100
    ledger.begin(_phase())
    ledger.set_steps(most)
    assert ledger.epsilon(_DELTA, accountant) <= target
    ledger.set_steps(most + 1)
    assert ledger.epsilon(_DELTA, accountant) > target


def test_max_steps_within_sees_that_fixed_size_changes_the_relation():
    fixed = _phase(sampling="fixed_size", noise_multipliers=(8.0,))
    ledger = _ledger((_phase(noise_multipliers=(40.0,)), 6))
    assert ledger.epsilon(_DELTA) < 0.1
    alone = Ledger().max_steps_within(1.0, _DELTA, "rdp", fixed)
    after = ledger.max_steps_within(1.0, _DELTA, "rdp", fixed)
    assert 0 < after < alone
    ledger.begin(fixed)
    ledger.set_steps(after)
    assert 0.9 < ledger.epsilon(_DELTA) <= 1.0


def test_steps_left_follows_the_budget_to_the_end():
    ledger = Ledger()
    assert ledger.steps_left(limit=77) == 77
    ledger.set_budget(0.9, _DELTA)
    ledger.begin(_phase())
    most = ledger.steps_left()
    ledger.set_steps(most - 3)
    assert ledger.steps_left() == 3
    ledger.set_steps(most)
    assert ledger.steps_left() == 0
    ledger.set_steps(most + 100)
    assert ledger.steps_left() == 0
    assert ledger.steps_left(limit=0) == 0


def test_steps_left_of_once_per_epoch_goes_by_epochs():
    ledger = Ledger()
    ledger.set_budget(1.0, _DELTA)
    ledger.begin(_caller(once_per_epoch=True, noise_multipliers=(7.0,)))
    two, three = (_rdp_epsilon((dp_accounting.GaussianDpEvent(7.0), n)) for n in (2, 3))
    assert two <= 1.0 < three
    steps = 0
    for _ in range(2):
        ledger.begin_epoch()
        assert ledger.steps_left(limit=50) == 50
        for _ in range(5):
            steps += 1
            ledger.set_steps(steps)
            assert ledger.steps_left(limit=50) == 50
    ledger.begin_epoch()
    assert ledger.steps_left(limit=50) == 0
    assert ledger.epsilon(_DELTA) <= 1.0


def test_the_budget_goes_by_the_headline():
    ledger = Ledger()
    ledger.set_budget(1.0, _DELTA)
    ledger.begin(_caller())
    assert ledger.steps_left() == 0  # q = 1 at sigma 1.1
    ledger.begin(_caller(assume="poisson"))
    assert ledger.steps_left() > 1000


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0.0, _DELTA), "`target_epsilon` must be positive"),
        ((1.0, 1.0), "`delta` must lie strictly between"),
        ((1.0, _DELTA, "zcdp"), "Unknown accountant 'zcdp'"),
    ],
)
def test_budgets_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        Ledger().set_budget(*arguments)


# --- combining -------------------------------------------------------------------


def test_an_older_copy_changes_nothing_and_a_newer_one_wins():
    ledger = _ledger((_phase(), 10))
    older = Ledger.from_json(ledger.to_json())
    ledger.set_steps(20)
    newer = Ledger.from_json(ledger.to_json())
    ledger.combine(older)
    assert ledger.total_steps == 20
    older.combine(newer)
    assert older.total_steps == 20
    assert len(older.phases) == 1


def test_a_run_goes_on_after_loading_its_own_older_copy():
    ledger = _ledger((_phase(), 10))
    older = Ledger.from_json(ledger.to_json())
    ledger.set_steps(20)
    ledger.combine(older)
    ledger.begin(_phase())
    ledger.set_steps(25)
    assert ledger.total_steps == 25


def test_independent_runs_add_up_even_if_they_look_the_same():
    ledger, other = _ledger((_phase(), 10)), _ledger((_phase(), 10))
    for _ in range(2):  # the second time changes nothing
        ledger.combine(other)
        assert ledger.total_steps == 20
    assert other.total_steps == 10


def test_two_continuations_of_one_file_add_up():
    text = _ledger((_phase(), 10)).to_json()
    forks = [Ledger.from_json(text) for _ in range(2)]
    for fork, steps in zip(forks, (15, 7), strict=True):
        fork.begin(_phase())
        assert fork.phases[-1].steps == 0
        fork.set_steps(steps)
    forks[0].combine(forks[1])
    assert forks[0].total_steps == 10 + 15 + 7


def test_an_interrupted_run_resumes_its_phase():
    saved = _ledger((_phase(), 10))
    ledger = Ledger()
    ledger.begin(_phase())
    ledger.combine(Ledger.from_json(saved.to_json()))
    ledger.begin(_phase(), resume=True)
    assert ledger.phases[-1].steps == 10
    ledger.set_steps(14)
    assert ledger.total_steps == 14
    saved.set_steps(12)  # steps after the backup, made again by the replay
    ledger.combine(saved)
    assert ledger.total_steps == 14


def test_a_resumed_epoch_is_counted_once():
    phase = _caller(once_per_epoch=True)
    saved = _ledger((phase, 10))
    ledger = Ledger.from_json(saved.to_json())
    ledger.begin(phase, resume=True)
    ledger.set_steps(15)
    assert ledger.phases[-1].epochs_begun == 1
    ledger.begin_epoch()
    ledger.set_steps(16)
    assert ledger.phases[-1].epochs_begun == 2


def test_combining_keeps_the_open_phase_open():
    ledger = _ledger((_phase(), 10))
    ledger.combine(_ledger((_phase(optimizer="FiBeR"), 99)))
    assert ledger.phases[-1].optimizer == "DPSGD"
    ledger.set_steps(11)
    assert ledger.total_steps == 110


def test_combining_takes_notes():
    ledger, other = Ledger(notes=["a"]), Ledger(notes=["b", "a"])
    ledger.combine(other)
    assert ledger.notes == ("a", "b")


# --- saving ----------------------------------------------------------------------


def _rich_ledger():
    ledger = _ledger(
        (_phase(notes=("n",), noise_multipliers=(1 / 3, 0.1)), 10),
        (_caller(train_size=None, l2_norm_clip=None, seeded=True), 3),
        (_phase(l2_norm_clip=math.inf, noise_multipliers=(0.0,)), 1),
        (_caller(once_per_epoch=True), 5),
        (_caller(assume="poisson"), 5),
    )
    ledger.note('with "quotes" and \u03b5')
    ledger.set_budget(3.0, _DELTA, "pld")
    ledger.set_budget(4.0, 1e-6)
    return ledger


def test_json_comes_back_exactly():
    ledger = _rich_ledger()
    copy = Ledger.from_json(ledger.to_json())
    assert copy.phases == ledger.phases
    assert copy.notes == ledger.notes
    assert copy.budgets == ledger.budgets
    assert len(copy.budgets) == 2
    assert copy.to_json() == ledger.to_json()


def test_json_is_strict():
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    content = json.loads(_rich_ledger().to_json(), parse_constant=refuse)
    assert content["phases"][2]["l2_norm_clip"] == "inf"


def _changed(**changes):
    content = json.loads(_rich_ledger().to_json())
    for name, value in changes.items():
        if value is None:
            del content[name]
        else:
            content[name] = value
    return json.dumps(content)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "no privacy ledger"),
        ("[]", "no privacy ledger"),
        ("{}", "no privacy ledger"),
        ("3", "no privacy ledger"),
        (_changed(version=3), "version 3.* reads versions 1 to 2"),
        (_changed(version=True), "version True"),
        (_changed(version="1"), "version '1'"),
        (_changed(phases=None), "damaged"),
        (_changed(notes=None), "damaged"),
        (_changed(extra=1), "damaged"),
        (_changed(phases=[{}]), "damaged"),
        (_changed(phases=[3]), "damaged"),
        (_changed(phases={}), "damaged.*list"),
        (_changed(notes="abc"), "damaged.*list"),
        (_changed(notes=[1]), "damaged.*strings"),
        (_changed(budgets={}), "damaged.*list"),
        (_changed(budgets=None), "damaged.*budgets"),
        (_changed(budget={"target_epsilon": 1.0, "delta": 0.1}), "damaged"),
        (_changed(budgets=[{"target_epsilon": 1.0}]), "damaged"),
        (_changed(budgets=[{"target_epsilon": True, "delta": 0.1}]), "damaged"),
        (_changed(budgets=[{"target_epsilon": 10**400, "delta": 0.1}]), "damaged"),
        (_changed(budgets=[{"target_epsilon": -1, "delta": 0.1}]), "target_epsilon"),
        (_changed(extra=math.nan), "no privacy ledger"),
        (_changed(extra=math.inf), "no privacy ledger"),
    ],
    # The texts hold random identities, and test processes must agree on the names.
    ids=range(24),
)
def test_what_is_no_ledger_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Ledger.from_json(text)


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": math.nan},
        {"steps": math.inf},
        {"steps": 1.5},
        {"steps": 10.0},
        {"steps": True},
        {"steps": "10"},
        {"steps": None},
        {"steps": -1},
        {"epochs_begun": 0},
        {"epochs_begun": 0.5},
        {"epochs_begun": True},
        {"epochs_begun": math.nan},
        {"noise_multipliers": ["1.1"]},
        {"noise_multipliers": "11"},
        {"noise_multipliers": [True]},
        {"noise_multipliers": [math.nan]},
        {"noise_multipliers": [math.inf]},
        {"noise_multipliers": [10**400]},
        {"noise_multipliers": 1.1},
        {"l2_norm_clip": "1.0"},
        {"l2_norm_clip": True},
        {"l2_norm_clip": math.nan},
        {"expected_batch_size": 1.5},
        {"expected_batch_size": True},
        {"train_size": 60000.0},
        {"train_size": "60000"},
        {"once_per_epoch": "false"},
        {"once_per_epoch": 1},
        {"seeded": 0},
        {"seeded": None},
        {"identity": 3},
        {"optimizer": None},
        {"notes": "abc"},
        {"notes": [1]},
        {"sampling": ["caller"]},
        {"assume": ["poisson"]},
        {"steps_per_release": 0},
        {"steps_per_release": 1.0},
        {"steps_per_release": True},
        {"steps_per_release": None},
        {"noise_plan": None},
        {"noise_plan": "12"},
        {"noise_plan": [1.1]},
        {"noise_plan": [[1.1]]},
        {"noise_plan": [[1.1, 5, 6]]},
        {"noise_plan": [[1.1, 0]]},
        {"noise_plan": [[1.1, 5.0]]},
        {"noise_plan": [[1.1, True]]},
        {"noise_plan": [["1.1", 5]]},
        {"noise_plan": [[math.inf, 5], [1.1, 5]]},
        {"noise_plan": [[-1.0, 5]], "noise_multipliers": [-1.0]},
    ],
    ids=str,
)
def test_a_phase_with_values_of_a_wrong_kind_is_refused(changes):
    content = json.loads(_ledger((_caller(), 10)).to_json())
    content["phases"][0].update(changes)
    text = json.dumps(content)
    with pytest.raises(
        ValueError, match="damaged|must|no privacy|cannot|Unknown|pairs"
    ):
        Ledger.from_json(text)
    if {"steps", "epochs_begun"} & set(changes):
        with pytest.raises((TypeError, ValueError), match="must|cannot have 10 steps"):
            _phase(**{"steps": 10, "epochs_begun": 1, **changes})


def test_counts_of_numpy_become_ints():
    one = np.int64(1)
    phase = _caller(
        steps=one, epochs_begun=one, expected_batch_size=one, train_size=one
    )
    ledger = Ledger([phase])
    assert Ledger.from_json(ledger.to_json()).phases == ledger.phases
    assert type(ledger.phases[0].steps) is int


@pytest.mark.parametrize("steps", [1.5, math.nan, True, "3"])
def test_steps_are_set_to_whole_numbers_alone(steps):
    ledger = _ledger((_phase(), 0))
    with pytest.raises(TypeError, match="`steps` must be a whole number"):
        ledger.set_steps(steps)


def test_an_unknown_field_of_a_phase_is_refused():
    content = json.loads(_rich_ledger().to_json())
    content["phases"][0]["amplification"] = 10.0
    with pytest.raises(ValueError, match="damaged.*amplification"):
        Ledger.from_json(json.dumps(content))


# --- phases ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"sampling": "shuffle"}, "Unknown sampling 'shuffle'"),
        ({"noise_multipliers": ()}, "without any noise multiplier"),
        ({"noise_multipliers": (-1.0,)}, "must be non-negative"),
        ({"noise_multipliers": (math.nan,)}, "must be non-negative"),
        ({"l2_norm_clip": 0.0}, "`l2_norm_clip` must be positive"),
        ({"l2_norm_clip": math.nan}, "`l2_norm_clip` must be positive"),
        ({"expected_batch_size": 60001}, "larger than the training set"),
        ({"expected_batch_size": 0}, "must be at least 1"),
        ({"train_size": None}, "Pass `train_size`"),
        ({"once_per_epoch": True}, "cannot apply"),
        ({"assume": "poisson"}, "cannot apply"),
        ({"sampling": "caller", "assume": "shuffled"}, "Unknown assumption"),
        ({"sampling": "caller", "assume": "poisson", "train_size": None}, "Pass `t"),
        (
            {"sampling": "caller", "assume": "poisson", "once_per_epoch": True},
            "the one that is true",
        ),
        ({"steps": -1}, "at least 0"),
        ({"epochs_begun": -1}, "at least 0"),
    ],
)
def test_phases_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        _phase(**changes)

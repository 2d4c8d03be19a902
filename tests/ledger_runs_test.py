"""Tests of ledger.py and phase.py: phases that are one run, and budgets of them.

One run is a phase in which several steps are one release, or whose noise follows a
plan. The oracle is dp_accounting's own accountant, told of each release.
"""

import dataclasses
import json
import math

import dp_accounting
import hypothesis
import pytest
from dp_accounting import pld, rdp
from hypothesis import strategies as st

from keras_dpopt import accounting
from keras_dpopt.ledger import Ledger
from keras_dpopt.phase import Phase

_DELTA = 1e-5

gaussian = dp_accounting.GaussianDpEvent


def _phase(**changes):
    fields = {
        "optimizer": "DPSGD",
        "sampling": "poisson",
        "noise_multipliers": (4.0,),
        "l2_norm_clip": 1.0,
        "expected_batch_size": 50,
        "train_size": 1003,
    }
    return Phase(**{**fields, **changes})


def _cyclic(steps_per_release=100, **changes):
    return _phase(sampling="cyclic", steps_per_release=steps_per_release, **changes)


def _banded(**changes):
    return _phase(sampling="banded", steps_per_release=10, **changes)


_PLAN = ((5.0, 3), (4.0, 2), (8.0, 10))


def _planned(**changes):
    return _phase(**{"noise_plan": _PLAN, **changes})


_FIXED = _phase(sampling="fixed_size", noise_multipliers=(9.0,))
_ONCE = _phase(sampling="caller", once_per_epoch=True)
_KINDS = {
    "poisson": _phase(),
    "cyclic": _cyclic(7),
    "cyclic, each step": _cyclic(1),
    "banded": _banded(),
    "planned": _planned(),
    "planned, caller": _planned(sampling="caller", noise_multipliers=(4.0,)),
    "planned, cyclic": _planned(sampling="cyclic"),
    "once": _ONCE,
    "planned, once": _planned(sampling="caller", once_per_epoch=True),
    "fixed size": _FIXED,
}
_kinds = st.sampled_from(sorted(_KINDS))


def _ledger(*phases_and_steps):
    ledger = Ledger()
    for phase, steps in phases_and_steps:
        ledger.begin(phase)
        ledger.set_steps(ledger.phases[-1].steps + steps)
    return ledger


def _poisson(sigma=4.0, q=50 / 1003):
    return dp_accounting.PoissonSampledDpEvent(q, gaussian(sigma))


def _rdp(*events, relation=accounting.ZERO_OUT):
    accountant = rdp.RdpAccountant(neighboring_relation=relation)
    for event, count in events:
        accountant.compose(event, count)
    return pytest.approx(accountant.get_epsilon(_DELTA), rel=1e-10)


def _copy(ledger):
    return Ledger.from_json(ledger.to_json())


# --- several steps are one release -----------------------------------------------


def test_a_run_of_correlated_noise_is_one_release():
    for steps, count in [(1, 1), (99, 1), (100, 1), (101, 2), (200, 2), (201, 3)]:
        ledger = _ledger((_cyclic(), steps))
        assert ledger.epsilon(_DELTA) == _rdp((gaussian(4.0), count))
        accountant = pld.PLDAccountant().compose(gaussian(4.0), count)
        expected = accountant.get_epsilon(_DELTA)
        assert ledger.epsilon(_DELTA, "pld") == pytest.approx(expected, rel=1e-3)
        assert ledger.total_steps == steps


def test_cyclic_batches_are_not_amplified():
    each = _ledger((_cyclic(1), 30))
    assert each.epsilon(_DELTA) == _rdp((gaussian(4.0), 30))
    assert each.epsilon(_DELTA, assumption="poisson") == each.epsilon(_DELTA)


def test_banded_batches_are_at_risk_once_a_turn():
    for steps, count in [(1, 1), (10, 1), (11, 2), (100, 10)]:
        ledger = _ledger((_banded(), steps))
        assert ledger.epsilon(_DELTA) == _rdp((_poisson(4.0, 0.5), count))
    accountant = pld.PLDAccountant().compose(_poisson(4.0, 0.5), 10)
    expected = accountant.get_epsilon(_DELTA)
    assert ledger.epsilon(_DELTA, "pld") == pytest.approx(expected, rel=1e-6)


def test_under_replace_one_runs_are_unsampled_at_half_the_noise():
    ledger = _ledger((_cyclic(), 150), (_banded(), 25), (_planned(), 4), (_FIXED, 1))
    fixed = dp_accounting.SampledWithoutReplacementDpEvent(1003, 50, gaussian(4.5))
    assert ledger.epsilon(_DELTA) == _rdp(
        (gaussian(2.0), 2 + 3),
        (gaussian(2.5), 3),
        (gaussian(2.0), 1),
        (fixed, 1),
        relation=accounting.REPLACE_ONE,
    )


@pytest.mark.parametrize("kind", [_cyclic(), _banded()])
def test_a_run_without_clipping_or_noise_is_infinite(kind):
    for change in ({"l2_norm_clip": math.inf}, {"noise_multipliers": (0.0,)}):
        ledger = _ledger((dataclasses.replace(kind, **change), 1))
        assert ledger.epsilon(_DELTA) == ledger.epsilon(_DELTA, "pld") == math.inf


def test_two_gaussians_a_step_as_dp_sam_has_them():
    pair = _ledger((_phase(noise_multipliers=(4.0, 4.0)), 60))
    both = dp_accounting.ComposedDpEvent([gaussian(4.0), gaussian(4.0)])
    event = dp_accounting.PoissonSampledDpEvent(50 / 1003, both)
    assert pair.epsilon(_DELTA) == _rdp((event, 60))
    assert pair.phases[0].noise_multiplier == pytest.approx(4.0 / math.sqrt(2))


# --- noise that follows a plan ---------------------------------------------------


def test_the_first_steps_of_a_plan_were_released():
    for steps, releases in [
        (1, [(5.0, 1)]),
        (3, [(5.0, 3)]),
        (4, [(5.0, 3), (4.0, 1)]),
        (14, [(5.0, 3), (4.0, 2), (8.0, 9)]),
        (15, [(5.0, 3), (4.0, 2), (8.0, 10)]),
        (18, [(5.0, 3), (4.0, 2), (8.0, 10), (4.0, 3)]),  # more than planned
    ]:
        ledger = _ledger((_planned(), steps))
        expected = _rdp(*[(_poisson(sigma), n) for sigma, n in releases])
        assert ledger.epsilon(_DELTA) == expected
        caller = _ledger((_planned(sampling="caller"), steps))
        expected = _rdp(*[(gaussian(sigma), n) for sigma, n in releases])
        assert caller.epsilon(_DELTA) == expected


def test_a_plan_by_pld():
    ledger = _ledger((_planned(), 14))
    accountant = pld.PLDAccountant()
    for sigma, n in [(5.0, 3), (4.0, 2), (8.0, 9)]:
        accountant.compose(_poisson(sigma), n)
    expected = accountant.get_epsilon(_DELTA)
    assert ledger.epsilon(_DELTA, "pld") == pytest.approx(expected, rel=1e-6)
    assert expected < ledger.epsilon(_DELTA)


def test_once_per_epoch_takes_the_least_noise_of_a_plan():
    # A record may be in the step with the least noise, in each epoch.
    ledger = _ledger((_planned(sampling="caller", once_per_epoch=True), 3))
    assert ledger.epsilon(_DELTA) == _rdp((gaussian(4.0), 1))


def test_a_plan_without_clipping_is_infinite():
    ledger = _ledger((_planned(l2_norm_clip=math.inf), 1))
    assert ledger.epsilon(_DELTA) == math.inf


def test_a_plan_may_reach_no_noise_and_costs_it_only_then():
    plan = ((4.0, 2), (0.0, 1))
    ledger = _ledger((_phase(noise_plan=plan, noise_multipliers=(0.0,)), 2))
    assert ledger.epsilon(_DELTA) == _rdp((_poisson(), 2))
    ledger.set_steps(3)
    assert ledger.epsilon(_DELTA) == math.inf


def test_a_rounded_plan_costs_a_little_more():
    sigmas = [2.0 * 10 ** (t / 199) for t in range(200)]

    def epsilon(plan):
        phase = _phase(sampling="caller", noise_plan=plan, noise_multipliers=(2.0,))
        return _ledger((phase, 200)).epsilon(_DELTA)

    exact = epsilon(tuple((sigma, 1) for sigma in sigmas))
    for resolution in (0.02, 0.05):
        plan = accounting.plan_of(sigmas, resolution)
        assert exact < epsilon(plan) < exact * (1 + 2 * resolution)
    assert len(plan) < 50


# --- a run is never gone on with -------------------------------------------------


@pytest.mark.parametrize("kind", [_cyclic(), _banded(), _planned()])
def test_two_fits_are_two_runs(kind):
    ledger = _ledger((kind, 5), (kind, 5))
    assert [phase.steps for phase in ledger.phases] == [5, 5]
    one, two = _ledger((kind, 5)), ledger
    assert two.epsilon(_DELTA) > one.epsilon(_DELTA)
    separate = [*one.phases, *_ledger((kind, 5)).phases]
    assert two.epsilon(_DELTA) == Ledger(separate).epsilon(_DELTA)


def test_without_correlation_cyclic_steps_go_on():
    assert len(_ledger((_cyclic(1), 5), (_cyclic(1), 5)).phases) == 1


@pytest.mark.parametrize("kind", [_cyclic(), _banded(), _planned()])
def test_an_exact_replay_goes_on_with_its_run(kind):
    saved = _ledger((kind, 5))
    ledger = Ledger()
    ledger.begin(kind)
    ledger.combine(_copy(saved))
    ledger.begin(kind, replays=saved.phases[-1].identity)
    ledger.set_steps(9)
    assert ledger.phases == (
        dataclasses.replace(saved.phases[0], steps=9, epochs_begun=1),
    )


@pytest.mark.parametrize("kind", [_cyclic(), _banded()])
def test_a_fork_is_another_run(kind):
    ledger = _copy(_ledger((kind, 5)))
    ledger.begin(kind, resume=True)
    ledger.set_steps(4)
    assert [phase.steps for phase in ledger.phases] == [5, 4]


def test_a_fork_does_not_know_where_it_is_in_a_plan():
    ledger = _copy(_ledger((_planned(), 5)))
    ledger.begin(_planned(), resume=True)
    ledger.set_steps(4)
    assert ledger.phases[-1].noise_plan == ()
    assert ledger.epsilon(_DELTA) == _rdp((_poisson(5.0), 3), (_poisson(4.0), 2 + 4))
    # Whoever has planned what is left says so, and begins as usual.
    ledger = _copy(_ledger((_planned(), 5)))
    ledger.begin(_planned(noise_plan=((8.0, 10),), noise_multipliers=(8.0,)))
    ledger.set_steps(4)
    assert ledger.epsilon(_DELTA) == _rdp(
        (_poisson(5.0), 3), (_poisson(4.0), 2), (_poisson(8.0), 4)
    )


def test_a_replay_from_before_the_first_step_follows_the_plan():
    saved = Ledger()
    saved.begin(_planned())
    ledger = Ledger()
    ledger.combine(_copy(saved))
    ledger.begin(_planned(), replays=saved.phases[-1].identity)
    assert ledger.phases[-1].noise_plan == _PLAN


def test_a_replay_of_another_kind_is_another_run():
    saved = _ledger((_planned(), 5))
    ledger = _copy(saved)
    other = _planned(noise_plan=(*_PLAN, (9.0, 1)))
    ledger.begin(other, replays=saved.phases[-1].identity)
    assert ledger.phases[-1].steps == 0
    assert ledger.phases[-1].noise_plan == ()  # where in it is not known


def test_a_replay_goes_on_with_its_own_run_and_no_other_of_the_kind():
    """Else X would be counted up within what it has paid, while Y has run beyond."""
    known = _ledger((_cyclic(), 2))  # X, in a file of weights
    saved = _copy(known)
    saved.begin(_cyclic())
    saved.set_steps(100)  # Y, in a backup
    ledger = _copy(known)
    ledger.begin(_cyclic())
    ledger.combine(_copy(saved))
    ledger.begin(_cyclic(), replays=saved.phases[-1].identity)
    ledger.set_steps(150)
    assert sorted(phase.steps for phase in ledger.phases) == [2, 150]
    assert ledger.epsilon(_DELTA) == _rdp((gaussian(4.0), 1 + 2))


def test_a_replay_of_independent_steps_goes_on_with_the_phase_it_names():
    ledger = _copy(_ledger((_phase(), 3)))
    named = ledger.phases[0].identity
    ledger.combine(_ledger((_phase(), 4)))
    ledger.begin(_phase(), replays=named)
    assert ledger.phases[-1].identity == named
    ledger.set_steps(8)
    assert ledger.total_steps == 12


def test_an_older_and_a_newer_copy_of_a_run_are_one():
    for kind in (_cyclic(), _banded(), _planned()):
        ledger = _ledger((kind, 5))
        older = _copy(ledger)
        ledger.set_steps(12)
        newer = _copy(ledger)
        for other in (older, newer, older):
            ledger.combine(other)
        assert [phase.steps for phase in ledger.phases] == [12]
        older.combine(newer)
        assert older.epsilon(_DELTA) == ledger.epsilon(_DELTA)


# --- properties ------------------------------------------------------------------


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(st.lists(st.tuples(_kinds, st.integers(1, 25)), max_size=3), _kinds)
def test_epsilon_never_falls_with_steps(before, kind):
    ledger = _ledger(*[(_KINDS[name], steps) for name, steps in before])
    ledger.begin(_KINDS[kind])
    made = ledger.phases[-1].steps
    # A fixed-size phase changes the relation, and so the meaning, at its first step.
    last = -1.0 if kind == "fixed size" else ledger.epsilon(_DELTA)
    for steps in range(made, made + 25):
        ledger.set_steps(steps)
        value = ledger.epsilon(_DELTA)
        assert value >= last * (1 - 1e-12)
        last = value if steps or kind != "fixed size" else -1.0


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(st.lists(st.tuples(_kinds, st.integers(1, 12)), min_size=1))
def test_what_is_joined_costs_no_less_than_what_is_not(fits):
    joined = Ledger()
    separate = []
    for name, steps in fits:
        joined.begin(_KINDS[name])
        joined.set_steps(joined.phases[-1].steps + steps)
        separate += _ledger((_KINDS[name], steps)).phases
    value = Ledger(separate).epsilon(_DELTA)
    assert joined.epsilon(_DELTA) == pytest.approx(value, rel=1e-12)
    assert joined.total_steps == sum(steps for _, steps in fits)
    assert _copy(joined).epsilon(_DELTA) == joined.epsilon(_DELTA)


# --- budgets ---------------------------------------------------------------------


def _left_by_force(ledger, budget, limit):
    """Tries each number of steps, on copies, and stops before the first too many."""
    target, delta, accountant = dataclasses.astuple(budget)
    for more in range(1, limit + 1):
        copy = _copy(ledger)
        phase = copy.phases[-1]
        copy._epoch_is_new = ledger._epoch_is_new
        copy.set_steps(phase.steps + more)
        if copy.epsilon(delta, accountant) > target:
            return more - 1
    return limit


@hypothesis.settings(max_examples=80, deadline=None)
@hypothesis.given(
    st.lists(st.tuples(_kinds, st.integers(1, 9)), max_size=2),
    _kinds,
    st.integers(0, 25),
    st.integers(0, 40),
    st.sampled_from([1 - 1e-9, 1.0, 1 + 1e-9]),
    st.booleans(),
)
def test_steps_left_is_what_trying_finds(before, kind, made, target, slack, new_epoch):
    limit = 24
    ledger = _ledger(*[(_KINDS[name], steps) for name, steps in before])
    ledger.begin(_KINDS[kind])
    made += ledger.phases[-1].steps
    ledger.set_steps(made)
    if new_epoch:
        ledger.begin_epoch()
    # A target right at, below or above the cost of some number of steps.
    reached = _copy(ledger)
    reached.set_steps(made + target)
    ledger.set_budget(max(slack * reached.epsilon(_DELTA), 1e-9), _DELTA)
    expected = _left_by_force(ledger, ledger.budgets[0], limit)
    assert ledger.steps_left(limit) == expected
    assert (ledger.spent_budget() is None) == (expected > 0)


@pytest.mark.parametrize("accountant", accounting.ACCOUNTANTS)
@pytest.mark.parametrize("count", [1, 2])
def test_a_run_pays_with_its_first_step(accountant, count):
    ledger = _ledger((_phase(), 20))
    cost = _ledger((_phase(), 20), (_cyclic(), 100 * count))
    budget = cost.epsilon(_DELTA, accountant)
    ledger.set_budget(budget, _DELTA, accountant)
    ledger.begin(_cyclic())
    for steps in (0, 1, 99, 100, 101, 200):
        if steps > 100 * count:
            break
        ledger.set_steps(steps)
        assert ledger.steps_left() == 100 * count - steps
    assert ledger.spent_budget() == ledger.budgets[0]
    ledger.set_budget(budget * (1 - 1e-9), _DELTA, accountant)
    for steps in (ledger.phases[-1].steps, 100 * count + 1):
        ledger.set_steps(steps)
        assert ledger.steps_left() == 0


def test_a_run_that_does_not_fit_does_not_begin():
    ledger = _ledger((_phase(), 20))
    ledger.set_budget(
        0.999 * _ledger((_phase(), 20), (_cyclic(), 1)).epsilon(1e-5), 1e-5
    )
    ledger.begin(_cyclic())
    assert ledger.steps_left() == 0
    ledger.begin(_phase())
    assert ledger.steps_left() > 0


def test_another_run_pays_anew():
    ledger = _ledger((_cyclic(), 40))
    ledger.set_budget(ledger.epsilon(_DELTA), _DELTA)
    assert ledger.steps_left() == 60
    assert ledger.max_steps_within(99.0, _DELTA, "rdp", _cyclic(), limit=5) == 5
    budget = ledger.budgets[0].target_epsilon
    assert ledger.max_steps_within(budget, _DELTA, "rdp", ledger.phases[0]) == 0
    ledger.begin(_cyclic())
    assert ledger.steps_left() == 0


def test_a_budget_follows_a_plan():
    for most in range(1, 19):
        ledger = Ledger()
        ledger.begin(_planned())
        ledger.set_budget(_ledger((_planned(), most)).epsilon(_DELTA), _DELTA)
        assert ledger.steps_left() == most
        ledger.set_steps(most - 1)
        assert ledger.steps_left() == 1


# --- saving ----------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(_KINDS))
def test_json_comes_back_exactly_in_the_first_version_that_has_it(name):
    kind = _KINDS[name]
    ledger = _ledger((_phase(optimizer="other"), 1), (kind, 12))
    copy = _copy(ledger)
    assert copy.phases == ledger.phases
    assert copy.epsilon(_DELTA) == ledger.epsilon(_DELTA)
    content = json.loads(ledger.to_json())
    is_new = kind.is_one_run or kind.sampling == "cyclic"
    assert content["version"] == 1 + is_new
    fields = {"steps_per_release", "noise_plan"}
    assert not fields & content["phases"][0].keys()
    assert bool(fields & content["phases"][1].keys()) == kind.is_one_run


def test_a_ledger_of_the_first_version_still_loads():
    text = (
        '{"version": 1, "phases": [{"optimizer": "DPSGD", "sampling": "poisson", '
        '"noise_multipliers": [4.0], "l2_norm_clip": 1.0, "expected_batch_size": 50, '
        '"train_size": 1003, "once_per_epoch": false, "assume": null, "seeded": false, '
        '"notes": [], "steps": 30, "epochs_begun": 2, "identity": "abc"}], '
        '"notes": [], "budgets": []}'
    )
    ledger = Ledger.from_json(text)
    assert ledger.epsilon(_DELTA) == _rdp((_poisson(), 30))
    assert json.loads(ledger.to_json()) == json.loads(text)


# --- phases ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"steps_per_release": 2}, "each step is a release of its own"),
        ({"steps_per_release": 2, "sampling": "caller"}, "release of its own"),
        ({"steps_per_release": 2, "sampling": "fixed_size"}, "release of its own"),
        ({"steps_per_release": 0}, "must be at least 1"),
        ({"sampling": "cyclic", "train_size": None}, "Pass `train_size`"),
        ({"sampling": "cyclic", "once_per_epoch": True}, "cannot apply"),
        ({"sampling": "banded", "assume": "poisson"}, "cannot apply"),
        ({"sampling": "banded", "steps_per_release": 21}, "in 21 groups are 47 each"),
        ({"sampling": "banded", "steps_per_release": 2000}, "2000 groups are 0 each"),
        ({"noise_plan": ((4.0, 1, 1),)}, "pairs"),
        ({"noise_plan": ((4.0, 0),)}, "must be at least 1"),
        ({"noise_plan": ((-4.0, 1),)}, "must be non-negative"),
        ({"noise_plan": ((5.0, 1),)}, "least noise multiplier of the plan is 5.0"),
        (
            {"noise_plan": ((4.0, 1),), "noise_multipliers": (4.0, 4.0)},
            r"Pass \(4.0,\)",
        ),
        (
            {"noise_plan": _PLAN, "sampling": "cyclic", "steps_per_release": 2},
            "one noise multiplier a step",
        ),
    ],
)
def test_phases_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        _phase(**changes)

"""Tests of statement.py."""

import dataclasses
import json
import math
import re
import warnings

import pytest

from keras_dpopt.ledger import Ledger
from keras_dpopt.phase import Phase
from keras_dpopt.statement import privacy_statement

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


def _ledger(*phases_and_steps):
    ledger = Ledger()
    for phase, steps in phases_and_steps:
        ledger.begin(phase)
        ledger.set_steps(steps)
    return ledger


def _words(statement):
    """The printed text on one line, so that wrapping hides nothing."""
    return re.sub(r"\s+", " ", str(statement))


# --- an ordinary run -------------------------------------------------------------


def test_attributes_of_an_ordinary_run():
    ledger = _ledger((_phase(), 2350))
    statement = privacy_statement(ledger, _DELTA)
    assert statement.epsilon == ledger.epsilon(_DELTA)
    assert statement.epsilon == pytest.approx(1.0997, abs=1e-4)
    assert statement.delta == _DELTA
    assert statement.accountant == "rdp"
    assert statement.neighboring_relation == "zero-out"
    assert statement.privacy_unit == "per example"
    assert statement.noise_multiplier == 1.1
    assert statement.l2_norm_clip == 1.0
    assert statement.train_size == 60000
    assert statement.steps == 2350
    assert statement.sampling.startswith("Poisson: each of 60000 examples")
    assert statement.warnings == statement.notes == ()
    assert statement.alternatives == {}
    with pytest.raises(dataclasses.FrozenInstanceError):
        statement.epsilon = 0.0  # type: ignore[misc]


def test_text_of_an_ordinary_run():
    statement = privacy_statement(_ledger((_phase(), 2350)), _DELTA)
    lines = str(statement).splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 79
    words = _words(statement)
    for part in (
        "epsilon 1.1 at delta 1e-05",
        "RDP (Renyi differential privacy)",
        "zero-out",
        "steps 2350",
        "noise multiplier 1.1, clipping norm 1",
        "probability 0.004267, drawn by the library",
        "per example",
        "exp(epsilon) = 3.004 times as likely",
        "number of training examples is public",
        "pseudo-random noise (Philox, float32)",
        "The weights before the first private step, and state such as an adapted "
        "Normalization layer, do not come from the protected data.",
        "Logged training loss and metrics",
        "Decisions that callbacks of your own take from logged training values.",
        "validation_split",
        "architecture",
    ):
        assert part in words
    assert "!!" not in words
    assert "Noted" not in words


def test_a_printed_epsilon_is_rounded_up():
    statement = privacy_statement(_ledger((_phase(), 2350)), _DELTA)
    for value, printed in (
        (2.00001, "epsilon 2.001 at"),
        (1.0, "epsilon 1 at"),
        (0.000123401, "epsilon 0.0001235 at"),
        (123456.0, "epsilon 1.235e+05 at"),
    ):
        changed = dataclasses.replace(statement, epsilon=value)
        assert printed in _words(changed)


def test_pld_is_named():
    statement = privacy_statement(_ledger((_phase(), 235)), _DELTA, "pld")
    assert statement.accountant == "pld"
    assert "PLD (privacy loss distributions)" in _words(statement)
    by_rdp = privacy_statement(_ledger((_phase(), 235)), _DELTA)
    assert statement.epsilon < by_rdp.epsilon


# --- several phases --------------------------------------------------------------


def test_phases_that_differ_are_all_listed():
    other = _phase(optimizer="FiBeR", noise_multipliers=(2.0,), l2_norm_clip=0.5)
    statement = privacy_statement(_ledger((_phase(), 100), (other, 20)), _DELTA)
    assert statement.noise_multiplier is None
    assert statement.l2_norm_clip is None
    assert statement.train_size == 60000
    assert statement.steps == 120
    assert [phase["steps"] for phase in statement.phases] == [100, 20]
    words = _words(statement)
    assert "DPSGD, 100 steps: noise multiplier 1.1, clipping norm 1 " in words
    assert "FiBeR, 20 steps: noise multiplier 2, clipping norm 0.5 " in words


def test_a_reload_in_between_is_no_second_phase_to_the_reader():
    ledger = Ledger.from_json(_ledger((_phase(), 100)).to_json())
    ledger.begin(_phase())
    ledger.set_steps(50)
    assert len(ledger.phases) == 2
    statement = privacy_statement(ledger, _DELTA)
    assert [phase["steps"] for phase in statement.phases] == [150]
    assert (
        statement.epsilon == privacy_statement(_ledger((_phase(), 150)), 1e-5).epsilon
    )


def test_fixed_size_batches_are_stated_under_replace_one():
    fixed = _phase(sampling="fixed_size")
    statement = privacy_statement(_ledger((fixed, 100)), _DELTA)
    assert statement.neighboring_relation == "replace-one"
    words = _words(statement)
    assert "one example is replaced with any other" in words
    assert "256 of 60000 examples in each step" in words
    assert "without replacement" in words
    mixed = privacy_statement(_ledger((fixed, 100), (_phase(), 1)), _DELTA)
    assert "an upper bound under replace-one" in _words(mixed)


def test_a_clipping_norm_that_only_the_query_knows():
    phase = _phase(l2_norm_clip=None, noise_multipliers=(1.2, 20.0))
    statement = privacy_statement(_ledger((phase, 5)), _DELTA)
    assert statement.l2_norm_clip is None
    assert "clipping norm set by the query" in _words(statement)
    assert statement.noise_multiplier == pytest.approx((1.2**-2 + 20.0**-2) ** -0.5)


def test_two_gaussians_a_step_are_stated_as_one():
    statement = privacy_statement(
        _ledger((_phase(noise_multipliers=(1.2, 1.2)), 50)), _DELTA
    )
    assert statement.noise_multiplier == pytest.approx(1.2 / math.sqrt(2))
    assert statement.phases[0]["noise_multipliers"] == (1.2, 1.2)
    assert "50 steps: noise multiplier 0.848528," in _words(statement)
    single = privacy_statement(_ledger((_phase(noise_multipliers=(1.2,)), 50)), _DELTA)
    assert single.epsilon < statement.epsilon


# --- steps that are one run ------------------------------------------------------


def _cyclic(**changes):
    fields = {"sampling": "cyclic", "steps_per_release": 500, "optimizer": "DPFTRL"}
    return _phase(**{**fields, "noise_multipliers": (4.0,), **changes})


def test_a_run_on_fixed_blocks_in_turn():
    statement = privacy_statement(_ledger((_cyclic(), 480)), _DELTA)
    words = _words(statement)
    assert (
        "DPFTRL, one run of 480 steps: noise multiplier 4 for each 500 steps together, "
        "clipping norm 1 "
    ) in words
    assert (
        "in turn: 60000 examples in 235 fixed blocks of at most 256, by the library, "
        "in the same order in every epoch"
    ) in words
    assert "The order of the examples is fixed, the same in every epoch, and" in words
    assert "Amplification by sampling is not used" in words
    assert "which examples were in which batch" not in words
    assert statement.noise_multiplier == 4.0
    assert statement.alternatives == {}


def test_the_steps_of_two_runs_are_not_added_to_one():
    ledger = _ledger((_cyclic(), 480), (_cyclic(), 100), (_cyclic(), 500))
    ledger = Ledger.from_json(ledger.to_json())
    statement = privacy_statement(ledger, _DELTA)
    assert statement.epsilon == ledger.epsilon(_DELTA)
    (phase,) = statement.phases
    assert (phase["steps"], phase["steps_of_runs"]) == (1080, (480, 100, 500))
    assert "DPFTRL, 3 runs of at most 500 steps: noise" in _words(statement)
    twice = privacy_statement(_ledger((_cyclic(), 480), (_cyclic(), 480)), _DELTA)
    assert "DPFTRL, 2 runs of 480 steps: noise" in _words(twice)


def test_cyclic_steps_without_correlation_are_no_run():
    statement = privacy_statement(_ledger((_cyclic(steps_per_release=1), 480)), _DELTA)
    assert "DPFTRL, 480 steps: noise multiplier 4, clipping" in _words(statement)
    assert statement.phases[0]["steps_of_runs"] == ()


def test_banded_batches_name_the_groups():
    banded = _cyclic(sampling="banded", steps_per_release=9)
    words = _words(privacy_statement(_ledger((banded, 90)), _DELTA))
    assert "one run of 90 steps: noise multiplier 4, clipping norm 1 " in words
    assert (
        "Poisson in turn: 60000 examples in 9 fixed groups, one group in each step, "
        "each of its examples with probability 0.0384, drawn by the library"
    ) in words
    assert "Nobody learns which examples were in which batch." in words
    assert "The group of an example does not depend on what is in it." in words


def _planned(**changes):
    plan = ((3.2, 100), (4.0, 100), (6.4, 100))
    fields = {"noise_multipliers": (3.2,), "noise_plan": plan, "optimizer": "DPSGLD"}
    return _phase(**{**fields, **changes})


def test_noise_that_follows_the_learning_rate():
    for steps, words in [
        (300, "3.2 to 6.4 following the learning rate"),
        (150, "3.2 to 4 following the learning rate"),
        (100, "3.2"),
    ]:
        statement = privacy_statement(_ledger((_planned(), steps)), _DELTA)
        text = f"DPSGLD, one run of {steps} steps: noise multiplier {words}, clipping"
        assert text in _words(statement)
        assert statement.noise_multiplier is None
    infinite = _planned(l2_norm_clip=math.inf)
    words = _words(privacy_statement(_ledger((infinite, 9)), _DELTA))
    assert "noise multiplier 0, clipping norm inf" in words
    assert "NOT PRIVATE" in words


@pytest.mark.parametrize("phase", [_cyclic(), _planned()], ids=["cyclic", "planned"])
def test_json_of_runs_is_strict(phase):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    statement = privacy_statement(_ledger((phase, 9), (phase, 9)), _DELTA)
    content = json.loads(statement.to_json(), parse_constant=refuse)
    assert content == statement.to_dict()
    assert content["phases"][0]["steps_of_runs"] == [9, 9]
    assert content["phases"][0]["noise_plan"] == [
        list(pair) for pair in phase.noise_plan
    ]


def test_runs_beside_fixed_size_batches():
    ledger = _ledger((_phase(sampling="fixed_size"), 1), (_cyclic(), 1))
    statement = privacy_statement(ledger, _DELTA)
    assert statement.neighboring_relation == "replace-one"
    assert "an upper bound under replace-one" in _words(statement)


# --- batches that the caller made ------------------------------------------------


def test_callers_batches_show_all_three_lines():
    caller = _phase(sampling="caller", noise_multipliers=(20.0,))
    ledger = _ledger((caller, 40))
    statement = privacy_statement(ledger, _DELTA)
    assert list(statement.alternatives) == ["nothing", "once_per_epoch", "poisson"]
    for assumption, value in statement.alternatives.items():
        assert value == ledger.epsilon(_DELTA, assumption=assumption)
    assert statement.epsilon == statement.alternatives["nothing"]
    words = _words(statement)
    assert "made by the caller; nothing assumed: every example may be in" in words
    assert "each example in one step an epoch at most" in words
    assert "Poisson sampling" in words


def test_the_poisson_line_needs_train_size():
    caller = _phase(sampling="caller", train_size=None)
    statement = privacy_statement(_ledger((caller, 40)), _DELTA)
    assert statement.alternatives["poisson"] is None
    assert statement.train_size is None
    assert "needs N Poisson sampling" in _words(statement)


@pytest.mark.parametrize(
    "declared, name, words",
    [
        ({"once_per_epoch": True}, "once_per_epoch", "no example comes twice"),
        ({"assume": "poisson"}, "poisson", "a shuffle is not"),
        ({}, "nothing", "batches do not depend on what is in the examples"),
    ],
)
def test_the_headline_is_what_was_declared_and_says_so(declared, name, words):
    caller = _phase(sampling="caller", noise_multipliers=(20.0,), **declared)
    statement = privacy_statement(_ledger((caller, 40)), _DELTA)
    assert statement.epsilon == statement.alternatives[name]
    assert words in " ".join(statement.assumptions)


def test_declared_poisson_batches_say_how_often_and_by_whose_word():
    caller = _phase(
        sampling="caller", assume="poisson", expected_batch_size=10, train_size=200
    )
    statement = privacy_statement(_ledger((caller, 40)), _DELTA)
    words = "each of 200 examples with probability 0.05, by your word"
    assert words in statement.sampling
    assert f"made by the caller; Poisson sampling: {words}" in _words(statement)
    assert words in statement.phases[0]["batches"]


def test_public_pretraining_does_not_lift_the_assumption_on_what_was_before():
    ledger = _ledger((_phase(), 1))
    ledger.note("The weights were pretrained on data declared public.")
    words = _words(privacy_statement(ledger, _DELTA))
    assert "do not come from the protected data" in words


# --- what makes it void or weak --------------------------------------------------


@pytest.mark.parametrize(
    "change", [{"noise_multipliers": (0.0,)}, {"l2_norm_clip": math.inf}]
)
def test_without_noise_it_says_not_private(change):
    statement = privacy_statement(_ledger((_phase(**change), 1)), _DELTA)
    assert statement.epsilon == math.inf
    words = _words(statement)
    assert "NOT PRIVATE" in words.splitlines()[0]
    assert "without noise, or without clipping" in words
    assert "epsilon infinity at delta" in words
    assert "There is no guarantee for any example." in words
    assert "times as likely" not in words


def test_noise_too_small_is_not_private_either():
    phase = _phase(noise_multipliers=(1e-200,))
    statement = privacy_statement(_ledger((phase, 1)), _DELTA)
    assert statement.epsilon == math.inf
    assert "NOT PRIVATE" in str(statement)
    assert "the noise is too small" in _words(statement)


def test_a_seeded_run_says_against_whom():
    ledger = _ledger((_phase(), 10), (_phase(seeded=True), 1))
    statement = privacy_statement(ledger, _DELTA)
    assert (
        "not private against whoever knows the seed, nor against whoever sees two runs "
        "with the same seed"
    ) in _words(statement)
    assert math.isfinite(statement.epsilon)


def test_before_the_first_step_nothing_was_released():
    ledger = Ledger()
    ledger.begin(_phase(noise_multipliers=(0.0,), seeded=True))
    statement = privacy_statement(ledger, _DELTA)
    assert (statement.epsilon, statement.steps) == (0.0, 0)
    assert statement.phases == statement.warnings == ()
    (assumption,) = statement.assumptions
    assert "The weights before the first private step" in assumption
    assert "nothing about any data was released" in _words(statement)
    assert "NOT PRIVATE" not in str(statement)


def test_a_large_delta_warns_and_is_stated():
    small = _phase(train_size=1000)
    ledger = _ledger((_phase(), 10), (small, 1))
    with pytest.warns(UserWarning, match="not below 1/N = 0.001"):
        statement = privacy_statement(ledger, 1e-3)
    assert "delta is not below 1/N = 0.001" in _words(statement)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert privacy_statement(ledger, 9e-4).warnings == ()


@pytest.mark.parametrize("delta", [0.0, 1.0, 1.5, -1.0, math.nan])
def test_delta_must_be_a_probability(delta):
    for ledger in (Ledger(), _ledger((_phase(), 1))):
        with pytest.raises(ValueError, match="`delta` must lie strictly between"):
            privacy_statement(ledger, delta)


def test_unknown_accountants_are_refused():
    for ledger in (Ledger(), _ledger((_phase(), 1))):
        with pytest.raises(ValueError, match="Unknown accountant 'prv'"):
            privacy_statement(ledger, _DELTA, "prv")


def test_notes_are_listed():
    ledger = _ledger((_phase(notes=("Of the phase.",)), 1))
    ledger.note("Public pretraining was declared.")
    statement = privacy_statement(ledger, _DELTA)
    assert statement.notes == ("Public pretraining was declared.", "Of the phase.")
    assert "Noted: - Public pretraining was declared. - Of the phase." in _words(
        statement
    )


# --- JSON ------------------------------------------------------------------------


def test_json_is_strict_and_says_infinity_in_words():
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    phase = _phase(sampling="caller", l2_norm_clip=math.inf, noise_multipliers=(0.0,))
    statement = privacy_statement(_ledger((phase, 1)), _DELTA)
    content = json.loads(statement.to_json(), parse_constant=refuse)
    assert content == statement.to_dict()
    assert content["epsilon"] == "inf"
    assert float(content["epsilon"]) == statement.epsilon
    assert content["phases"][0]["l2_norm_clip"] == "inf"
    assert content["alternatives"]["nothing"] == "inf"


def test_json_holds_every_attribute():
    statement = privacy_statement(_ledger((_phase(), 2350)), _DELTA)
    content = json.loads(statement.to_json())
    assert set(content) == {f.name for f in dataclasses.fields(statement)}
    assert content["epsilon"] == statement.epsilon
    assert content["noise_multiplier"] == 1.1
    assert content["assumptions"] == list(statement.assumptions)


def test_json_holds_no_identity_of_a_phase():
    ledger = _ledger((_phase(), 5))
    identity = ledger.phases[0].identity
    assert identity
    assert identity not in privacy_statement(ledger, _DELTA).to_json()

"""The privacy statement: what a model guarantees, and what it does not, in words."""

import dataclasses
import decimal
import json
import math
import textwrap
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from keras_dpopt import accounting, validation
from keras_dpopt.ledger import Ledger
from keras_dpopt.phase import ASSUMPTIONS, Phase

_WIDTH = 79

_ACCOUNTANT_NAMES = {
    "rdp": "Renyi differential privacy",
    "pld": "privacy loss distributions",
}

_RELATIONS = {
    "zero-out": "one example contributes or not; their number is public",
    "replace-one": "one example is replaced with any other",
}

_ASSUMPTION_WORDS = {
    "nothing": "nothing assumed: every example may be in every step",
    "once_per_epoch": "each example in one step an epoch at most",
    "poisson": "Poisson sampling",
}

_NOT_COVERED = (
    "Logged training loss and metrics: computed from the raw data without noise, so "
    "do not publish them.",
    "Decisions that callbacks of your own take from logged training values.",
    "Validation and test data, those that validation_split sets aside included.",
    "Choices made by looking at the data: preprocessing, architecture, settings, "
    "which of several runs to keep.",
)


@dataclasses.dataclass(frozen=True)
class PrivacyStatement:
    """What was released about the training data, with what guarantee.

    Print it, read the attributes, or take `to_json()`.

    Attributes:
        epsilon: The guarantee's epsilon, at least 0; infinity means not private.
        delta: Its delta, in (0, 1).
        accountant: "rdp" or "pld".
        neighboring_relation: "zero-out" or "replace-one".
        privacy_unit: What one record is: "per example".
        sampling: How the batches came about, in words.
        noise_multiplier: sigma of one step; None where phases differ.
        l2_norm_clip: Clipping norm; None where phases differ or it is unknown.
        train_size: N; None where phases differ or it is unknown.
        steps: Number of private steps.
        phases: For each kind of step a dict of its settings and number of steps.
        alternatives: Where the caller made the batches: epsilon under each of the
            possible assumptions ("nothing", "once_per_epoch", "poisson"); None where
            the number of training examples is needed and unknown. Else empty.
        warnings: What makes the guarantee void or weak.
        assumptions: What the guarantee relies on.
        not_covered: What it does not say anything about.
        notes: What else happened to the model.
    """

    epsilon: float
    delta: float
    accountant: str
    neighboring_relation: str
    privacy_unit: str
    sampling: str
    noise_multiplier: float | None
    l2_norm_clip: float | None
    train_size: int | None
    steps: int
    phases: tuple[dict[str, Any], ...]
    alternatives: dict[str, float | None]
    warnings: tuple[str, ...]
    assumptions: tuple[str, ...]
    not_covered: tuple[str, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns all attributes as a dict that strict JSON can hold.

        An infinite number is the string "inf", which `float()` reads.
        """
        return _portable(dataclasses.asdict(self))

    def to_json(self, indent: int | None = 2) -> str:
        """Returns `to_dict()` as JSON text (RFC 8259: no Infinity, no NaN)."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def __str__(self) -> str:
        lines = ["PRIVACY STATEMENT (differential privacy, per example)"]
        lines += _wrapped(self.warnings, "!! ")
        relation, accountant = self.neighboring_relation, self.accountant
        table = [
            ("epsilon", f"{_upwards(self.epsilon)} at delta {self.delta:g}"),
            ("accountant", f"{accountant.upper()} ({_ACCOUNTANT_NAMES[accountant]})"),
            ("neighbors", f"{relation}: {_RELATIONS[relation]}"),
            ("steps", str(self.steps)),
        ]
        for phase in self.phases:
            table.append(("mechanism", _mechanism_words(phase)))
            table.append(("batches", phase["batches"]))
        for name, words in table:
            lines += _wrapped([words], f"  {name:<12}")
        if self.alternatives:
            lines.append("Epsilon by what is assumed of the batches that you made:")
            lines += [
                f"  {'needs N' if value is None else _upwards(value):<10}  "
                f"{_ASSUMPTION_WORDS[name]}"
                for name, value in self.alternatives.items()
            ]
        lines += _wrapped([_meaning(self)], "")
        for title, items in (
            ("Assumed:", self.assumptions),
            ("Not covered:", self.not_covered),
            ("Noted:", self.notes),
        ):
            if items:
                lines += [title, *_wrapped(items, "  - ")]
        return "\n".join(lines)


def privacy_statement(
    ledger: Ledger, delta: float, accountant: str = "rdp"
) -> PrivacyStatement:
    """Returns the statement of all that a ledger records.

    Args:
        ledger: The ledger of a model.
        delta: The delta of the guarantee, in (0, 1); well below 1 / N.
        accountant: "rdp" or "pld".

    Returns:
        The statement.

    Raises:
        ValueError: `delta` is outside (0, 1), the accountant is unknown, or it cannot
            account for the ledger's sampling.

    Example:
        >>> ledger = Ledger()
        >>> ledger.begin(Phase("DPSGD", "poisson", (1.1,), 1.0, 256, train_size=60000))
        >>> ledger.set_steps(2350)
        >>> statement = privacy_statement(ledger, delta=1e-5)
        >>> statement.steps, round(statement.epsilon, 4)
        (2350, 1.0997)
    """
    delta = validation.check_delta(delta)
    epsilon = ledger.epsilon(delta, accountant)
    # Phases of one kind, made before and after a reload, are one to the reader.
    kinds: dict[Phase, int] = {}
    for phase in ledger.phases:
        if phase.steps:
            kinds[phase.blank()] = kinds.get(phase.blank(), 0) + phase.steps
    sizes = [kind.train_size for kind in kinds if kind.train_size is not None]
    if sizes:
        validation.warn_if_delta_is_large(delta, min(sizes))
    replaced = ledger.relation is accounting.REPLACE_ONE
    return PrivacyStatement(
        epsilon=epsilon,
        delta=delta,
        accountant=accountant,
        neighboring_relation="replace-one" if replaced else "zero-out",
        privacy_unit="per example",
        sampling="; also ".join(dict.fromkeys(map(_sampling_words, kinds))),
        noise_multiplier=_the_one(kind.noise_multiplier for kind in kinds),
        l2_norm_clip=_the_one(kind.l2_norm_clip for kind in kinds),
        train_size=_the_one(kind.train_size for kind in kinds),
        steps=ledger.total_steps,
        phases=tuple(_phase_dict(kind, steps) for kind, steps in kinds.items()),
        alternatives=_alternatives(ledger, kinds, delta, accountant),
        warnings=tuple(_warnings(kinds, epsilon, delta, sizes)),
        assumptions=tuple(_assumptions(kinds, replaced)),
        not_covered=_NOT_COVERED if kinds else (),
        notes=tuple(
            dict.fromkeys([*ledger.notes, *(n for kind in kinds for n in kind.notes)])
        ),
    )


def _alternatives(
    ledger: Ledger, kinds: Iterable[Phase], delta: float, accountant: str
) -> dict[str, float | None]:
    """Epsilon under each assumption on the caller's batches, if there are any."""
    callers = [kind for kind in kinds if kind.sampling == "caller"]
    if not callers:
        return {}
    values: dict[str, float | None] = {}
    unknown = any(kind.train_size is None for kind in callers)
    for assumption in ASSUMPTIONS:
        values[assumption] = (
            None
            if assumption == "poisson" and unknown
            else ledger.epsilon(delta, accountant, assumption)
        )
    return values


def _warnings(
    kinds: Collection[Phase], epsilon: float, delta: float, sizes: list[int]
) -> Iterator[str]:
    """What makes the guarantee void or weak, worst first."""
    if math.isinf(epsilon):
        if any(kind.noise_multiplier == 0 for kind in kinds):
            reason = "steps were made without noise, or without clipping"
        else:
            reason = "the noise is too small for any finite epsilon"
        yield f"NOT PRIVATE: epsilon is infinite, because {reason}."
    if any(kind.seeded for kind in kinds):
        yield (
            "The run was seeded: not private against whoever knows the seed, nor "
            "against whoever sees two runs with the same seed, whose noise cancels."
        )
    if sizes and delta * min(sizes) >= 1:
        yield (
            f"delta is not below 1/N = {1 / min(sizes):.3g}: such a guarantee would "
            "allow publishing a whole example. State a delta well below 1/N."
        )


def _assumptions(kinds: Collection[Phase], replaced: bool) -> Iterator[str]:
    """What the guarantee relies on."""
    yield (
        "The weights before the first private step, and state such as an adapted "
        "Normalization layer, do not come from the protected data."
    )
    if not kinds:
        return
    yield (
        "An example is one row of the training data. A person with several rows is "
        "protected less."
    )
    yield "The number of training examples is public."
    yield (
        "The pseudo-random noise (Philox, float32) is as good as ideal Gaussian noise, "
        "and its key stays secret."
    )
    if any(kind.sampling != "caller" for kind in kinds):
        yield "Nobody learns which examples were in which batch."
    declared = {kind.assumption for kind in kinds if kind.sampling == "caller"}
    if "nothing" in declared:
        yield "The batches do not depend on what is in the examples."
    if "once_per_epoch" in declared:
        yield "The caller's word that no example comes twice in an epoch."
    if "poisson" in declared:
        yield (
            "The caller's word that the batches are Poisson samples. If they are not "
            "(a shuffle is not), the epsilon is too small."
        )
    if replaced:
        yield (
            "Steps not of fixed-size batches count as if every example were in them: "
            "an upper bound under replace-one."
        )


def _sampling_words(kind: Phase) -> str:
    size, total = kind.expected_batch_size, kind.train_size
    if kind.sampling == "poisson" and total:
        return (
            f"Poisson: each of {total} examples is in a step with probability "
            f"{size / total:.4g}, drawn by the library"
        )
    if kind.sampling == "fixed_size":
        return (
            f"fixed size: {size} of {total} examples in each step, drawn by the "
            "library without replacement"
        )
    words = _ASSUMPTION_WORDS[kind.assumption]
    if kind.assumption == "poisson" and total:
        chance = f"{size / total:.4g}"
        words += f": each of {total} examples with probability {chance}, by your word"
    return f"made by the caller; {words}"


def _mechanism_words(phase: dict[str, Any]) -> str:
    clip = phase["l2_norm_clip"]
    clip = "set by the query" if clip is None else f"{clip:g}"
    return (
        f"{phase['optimizer']}, {phase['steps']} steps: noise multiplier "
        f"{phase['noise_multiplier']:.6g}, clipping norm {clip}"
    )


def _phase_dict(kind: Phase, steps: int) -> dict[str, Any]:
    fields = dataclasses.asdict(kind)
    del fields["epochs_begun"], fields["identity"], fields["notes"]
    return {
        **fields,
        "steps": steps,
        "noise_multiplier": kind.noise_multiplier,
        "batches": _sampling_words(kind),
    }


def _meaning(statement: PrivacyStatement) -> str:
    """One sentence that says what the two numbers are."""
    if not statement.steps:
        return "No private step has been made: nothing about any data was released."
    if math.isinf(statement.epsilon):
        return "There is no guarantee for any example."
    factor = "exp(epsilon)"
    if statement.epsilon < 100:
        factor += f" = {_upwards(math.exp(statement.epsilon))}"
    change = {"zero-out": "contributes or not", "replace-one": "is another one or not"}
    return (
        "In words: whether any one example "
        f"{change[statement.neighboring_relation]}, every outcome of the training (the "
        f"weights after all of its steps) is at most {factor} times as likely, plus "
        "delta."
    )


def _the_one(values: Iterable[Any]) -> Any:
    """The value that all have; None where they differ or there is none."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None


def _upwards(value: float) -> str:
    """Four digits, rounded up: a printed epsilon must not promise too much."""
    if math.isinf(value):
        return "infinity"
    context = decimal.Context(prec=4, rounding=decimal.ROUND_CEILING)
    return f"{float(context.create_decimal(repr(float(value)))):.4g}"


def _portable(value: Any) -> Any:
    """The same with tuples as lists and infinity as a string."""
    if isinstance(value, dict):
        return {key: _portable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_portable(item) for item in value]
    return "inf" if value == math.inf else value


def _wrapped(texts: Iterable[str], prefix: str) -> list[str]:
    indent = " " * len(prefix)
    wrapper = textwrap.TextWrapper(_WIDTH, prefix, indent)
    return [line for text in texts for line in wrapper.wrap(text)]

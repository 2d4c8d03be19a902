"""The privacy statement: what a model guarantees, and what it does not, in words."""

import dataclasses
import decimal
import json
import math
import textwrap
from collections.abc import Iterable
from typing import Any

from keras_dpopt import accounting, statement_words, validation
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
        noise_multiplier: sigma of one release; None where steps or phases differ.
        l2_norm_clip: Clipping norm; None where phases differ or it is unknown.
        train_size: N; None where phases differ or it is unknown.
        steps: Number of private steps.
        phases: For each kind of step a dict of its settings and number of steps;
            "steps_of_runs" has the number of each run where a run counts as a whole.
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
            table.append(("mechanism", statement_words.mechanism_words(phase)))
            table.append(("batches", phase["batches"]))
        for name, words in table:
            lines += _wrapped([words], f"  {name:<12}")
        if self.alternatives:
            lines.append("Epsilon by what is assumed of the batches that you made:")
            lines += [
                f"  {'needs N' if value is None else _upwards(value):<10}  "
                f"{statement_words.ASSUMPTION_WORDS[name]}"
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
    kinds: dict[Phase, list[int]] = {}
    for phase in ledger.phases:
        if phase.steps:
            kinds.setdefault(phase.blank(), []).append(phase.steps)
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
        sampling="; also ".join(
            dict.fromkeys(map(statement_words.sampling_words, kinds))
        ),
        noise_multiplier=_the_one(sigma for kind in kinds for sigma in _noise(kind)),
        l2_norm_clip=_the_one(kind.l2_norm_clip for kind in kinds),
        train_size=_the_one(kind.train_size for kind in kinds),
        steps=ledger.total_steps,
        phases=tuple(statement_words.phase_dict(*item) for item in kinds.items()),
        alternatives=_alternatives(ledger, kinds, delta, accountant),
        warnings=tuple(statement_words.warnings(kinds, epsilon, delta, sizes)),
        assumptions=tuple(statement_words.assumptions(kinds, replaced)),
        not_covered=statement_words.NOT_COVERED if kinds else (),
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


def _noise(kind: Phase) -> list[float]:
    """The noise multipliers of steps of a kind: one, unless they follow a plan."""
    return [kind.noise_multiplier, *(sigma for sigma, _ in kind.noise_plan)]


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

"""A ledger as text: strict JSON, with the version that a reader must know.

A ledger that an earlier version of the library understands is written in the form of
that version. Any other has a version, a sampling and fields that it does not know, and
each of these three makes it refuse the text: it can never count less than there is.
"""

import dataclasses
import json
from collections.abc import Iterable
from typing import Any, NoReturn

from keras_dpopt.budget import Budget
from keras_dpopt.phase import Phase, check_texts

# Version 2 has phases that are one run: `steps_per_release`, `noise_plan`, and the
# samplings "cyclic" and "banded".
_VERSIONS = (1, 2)


def write(
    phases: Iterable[Phase], notes: Iterable[str], budgets: Iterable[Budget]
) -> str:
    """Returns the parts of a ledger as strict JSON, which `read` reads."""
    phases = list(phases)
    content = {
        "version": max((phase.since_version for phase in phases), default=1),
        "phases": [phase.to_fields() for phase in phases],
        "notes": list(notes),
        "budgets": [dataclasses.asdict(budget) for budget in budgets],
    }
    return json.dumps(content, allow_nan=False)


def read(text: str) -> tuple[list[Phase], tuple[str, ...], list[Budget]]:
    """Returns the phases, notes and budgets that `write` wrote.

    Raises:
        ValueError: The text is no ledger, or one of a version that is not known.
    """
    try:
        content: dict[str, Any] = json.loads(text, parse_constant=_refuse)
        version = content.pop("version")
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ValueError(
            "This is no privacy ledger. Load a file that keras_dpopt has saved."
        ) from None
    if version not in _VERSIONS or isinstance(version, bool):
        raise ValueError(
            f"The privacy ledger has version {version!r}, and this keras_dpopt reads "
            f"versions {_VERSIONS[0]} to {_VERSIONS[-1]}. Use the keras_dpopt that "
            "saved it."
        )
    try:
        phases, notes, budgets = map(content.pop, ("phases", "notes", "budgets"))
        if content:
            raise KeyError(f"unknown: {sorted(content)}")
        if not all(isinstance(part, list) for part in (phases, notes, budgets)):
            raise TypeError("a list is missing")
        return (
            [Phase.from_fields(fields) for fields in phases],
            check_texts("notes", notes),
            [Budget(**fields) for fields in budgets],
        )
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(
            f"The privacy ledger is damaged ({error}). Load an intact copy."
        ) from error


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")  # though Python writes and reads it

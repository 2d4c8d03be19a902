"""What the privacy statement says of the steps, in words."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from keras_dpopt import accounting
from keras_dpopt.noise_plan import first_steps
from keras_dpopt.phase import Phase

Kinds = Mapping[Phase, list[int]]
"""For each kind of step, blank, the numbers of steps of the phases of that kind."""

ASSUMPTION_WORDS = {
    "nothing": "nothing assumed: every example may be in every step",
    "once_per_epoch": "each example in one step an epoch at most",
    "poisson": "Poisson sampling",
}

NOT_COVERED = (
    "Logged training loss and metrics: computed from the raw data without noise, so "
    "do not publish them.",
    "Decisions that callbacks of your own take from logged training values.",
    "Validation and test data, those that validation_split sets aside included.",
    "Choices made by looking at the data: preprocessing, architecture, settings, "
    "which of several runs to keep.",
)


def warnings(
    kinds: Kinds, epsilon: float, delta: float, sizes: list[int]
) -> Iterator[str]:
    """Yields what makes the guarantee void or weak, worst first.

    Args:
        kinds: The steps that were made.
        epsilon: Their epsilon.
        delta: Its delta.
        sizes: The known numbers of training examples.
    """
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


def assumptions(kinds: Kinds, replaced: bool) -> Iterator[str]:
    """Yields what the guarantee relies on.

    Args:
        kinds: The steps that were made.
        replaced: Whether it is stated under replace-one.
    """
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
    samplings = {kind.sampling for kind in kinds}
    if samplings & {"poisson", "fixed_size", "banded"}:
        yield "Nobody learns which examples were in which batch."
    if "cyclic" in samplings:
        yield (
            "The order of the examples is fixed, the same in every epoch, and does not "
            "depend on what is in them. Amplification by sampling is not used, so the "
            "order may be known."
        )
    if "banded" in samplings:
        yield "The group of an example does not depend on what is in it."
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
            "Steps not of fixed-size batches count without amplification by sampling: "
            "an upper bound under replace-one."
        )


def sampling_words(kind: Phase) -> str:
    """Returns how the batches of such steps came about."""
    size, total = kind.expected_batch_size, kind.train_size
    if kind.sampling == "caller" or total is None:
        words = ASSUMPTION_WORDS[kind.assumption]
        if kind.assumption == "poisson" and total:
            chance = f"{size / total:.4g}"
            words += (
                f": each of {total} examples with probability {chance}, by your word"
            )
        return f"made by the caller; {words}"
    if kind.sampling == "fixed_size":
        return (
            f"fixed size: {size} of {total} examples in each step, drawn by the "
            "library without replacement"
        )
    if kind.sampling == "cyclic":
        blocks = accounting.steps_per_epoch(total, size)
        return (
            f"in turn: {total} examples in {blocks} fixed blocks of at most {size}, by "
            "the library, in the same order in every epoch"
        )
    if kind.sampling == "banded":
        groups = kind.steps_per_release
        group = accounting.group_size(total, size, groups)
        return (
            f"Poisson in turn: {total} examples in {groups} fixed groups, one group in "
            f"each step, each of its examples with probability {size / group:.4g}, "
            "drawn by the library"
        )
    return (
        f"Poisson: each of {total} examples is in a step with probability "
        f"{size / total:.4g}, drawn by the library"
    )


def phase_dict(kind: Phase, runs: list[int]) -> dict[str, Any]:
    """Returns the settings of a kind of step as a dict.

    Args:
        kind: The kind.
        runs: The numbers of steps of its phases.
    """
    fields = dataclasses.asdict(kind)
    del fields["epochs_begun"], fields["identity"], fields["notes"]
    return {
        **fields,
        "steps": sum(runs),
        # Of a kind whose phases go on with each other, it is not of interest.
        "steps_of_runs": tuple(runs) if kind.is_one_run else (),
        "noise_multiplier": kind.noise_multiplier,
        "batches": sampling_words(kind),
    }


def mechanism_words(phase: dict[str, Any]) -> str:
    """Returns the settings of `phase_dict` in a sentence."""
    clip = phase["l2_norm_clip"]
    clip = "set by the query" if clip is None else f"{clip:g}"
    return (
        f"{phase['optimizer']}, {_steps_words(phase)}: noise multiplier "
        f"{_noise_words(phase)}, clipping norm {clip}"
    )


def _steps_words(phase: dict[str, Any]) -> str:
    runs = phase["steps_of_runs"]
    if not runs:
        return f"{phase['steps']} steps"
    if len(runs) == 1:
        return f"one run of {runs[0]} steps"
    most = "" if min(runs) == max(runs) else "at most "
    return f"{len(runs)} runs of {most}{max(runs)} steps"


def _noise_words(phase: dict[str, Any]) -> str:
    words = f"{phase['noise_multiplier']:.6g}"
    if phase["noise_plan"] and phase["l2_norm_clip"] != math.inf:
        made = first_steps(phase["noise_plan"], max(phase["steps_of_runs"]))
        least, most = min(made)[0], max(made)[0]
        words = f"{least:.6g}"
        if most > least:
            words += f" to {most:.6g} following the learning rate"
    elif phase["sampling"] == "cyclic" and phase["steps_per_release"] > 1:
        words += f" for each {phase['steps_per_release']} steps together"
    return words

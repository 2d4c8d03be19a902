"""What the engines make of a model: which one trains it, and whether all agree."""

import dataclasses
import time
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dpopt import data, engines, keras_compat
from keras_dpopt.private_step import PrivateStep
from keras_dpopt.types import MixIn

_COMPARED_ROWS = 8


class EngineReport(MixIn):
    """Part of the private models: `explain_engine`."""

    def explain_engine(self, x=None, y=None, sample_weight=None) -> str:
        """Prints and returns which gradient engine trains the model, and how.

        Args:
            x: A few rows, where the model has not been trained since `compile`; nothing
                is released of them.
            y: Their targets.
            sample_weight: Their weights, where `fit` gets some.

        Returns:
            The text. For the book-keeping engine it is a table with a line for each
            weight: the operations that use it, how its part of a record's norm is
            computed ("product" and "gram" form no gradient of a record, "instantiated"
            does), and how many multiplications that takes.

        Raises:
            RuntimeError: if no engine has been chosen and no rows are given.

        Privacy:
            Which engine it is can depend on the rows only as far as the model mixes
            them; it is not accounted.
        """
        text = explanation(_chosen(self, x, y, sample_weight))
        print(text)
        return text


def _chosen(model: Any, x, y, sample_weight) -> Any:
    """The model's `MicrobatchSum`, whose engine is chosen now if it is not yet."""
    if model.private_step is None:
        if x is None:
            raise RuntimeError(
                "The gradient engine is chosen when the model sees data. Call `fit` "
                "first, or pass a few rows: `model.explain_engine(x, y)`."
            )
        rows = rows_of(model, x, y, sample_weight)
        spec = lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype)  # noqa: E731
        specs = tf.nest.map_structure(spec, rows)
        with model.distribute_strategy.scope():
            keras_compat.build_for(model, specs)
            model.private_step = PrivateStep.chosen(model, specs, rows)
    return model.private_step.microbatch


def rows_of(model: Any, x, y, sample_weight) -> dict:
    """Rows as the model's training step gets them."""
    return data.single_batch(x, y, sample_weight, None, model._preprocess())["rows"]


def explanation(microbatch: Any) -> str:
    """Returns the text of `explain_engine`."""
    lines = [f"Gradient engine: {microbatch.engine.name}"]
    lines += [f"  not {name!r}: {why}" for name, why in microbatch.reasons.items()]
    if microbatch.engine.name == "bookkeeping":
        header = ("weight", "operations", "norm form", "multiplications a record")
        table = [
            (
                note.weight,
                ", ".join(_counted(note.operations)),
                note.form,
                "" if note.cost is None else f"{note.cost:,}",
            )
            for note in microbatch.notes.weights
        ]
        widths = [max(map(len, column)) for column in zip(header, *table, strict=True)]
        lines += [
            "  ".join(
                cell.ljust(n) for cell, n in zip(row, widths, strict=True)
            ).rstrip()
            for row in (header, *table)
        ]
    lines.append(f"Records in a microbatch: {microbatch.size()}")
    return "\n".join(lines)


def _counted(names: tuple[str, ...]) -> list[str]:
    kinds = dict.fromkeys(names)
    return [f"{k} x{names.count(k)}" if names.count(k) > 1 else k for k in kinds]


@dataclasses.dataclass(frozen=True)
class EngineCheck:
    """What `check_engine` found of one engine.

    Attributes:
        engine: Its name.
        difference: Largest relative difference of the records' clipped gradients from
            those of the loop, each record by itself; `None` if it cannot serve.
        seconds: For the whole batch as one microbatch, the fastest of three runs.
        reason: Why it cannot serve the model, or "".
    """

    engine: str
    difference: float | None
    seconds: float | None
    reason: str = ""


def check_engine(model: Any, batch: tuple, verbose: bool = True) -> list[EngineCheck]:
    """Compares the gradient engines on your own model and batch.

    Args:
        model: A compiled private model; nothing of it changes.
        batch: `(x,)`, `(x, y)` or `(x, y, sample_weight)`.
        verbose: Whether to print the result as a table.

    Returns:
        An `EngineCheck` for each engine, the loop (the reference) last.

    Raises:
        UnsupportedModelError: if no engine can make the model private.

    Privacy:
        What it prints is computed from the batch without noise. Keep it to yourself, as
        you would the batch.

    Example:
        >>> import numpy as np, keras, keras_dpopt
        >>> model = keras_dpopt.DPSequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(keras_dpopt.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0,
        ...                                 expected_batch_size=8), loss="mse")
        >>> found = keras_dpopt.check_engine(
        ...     model, (np.ones((8, 4)), np.ones((8, 1))), verbose=False)
        >>> [check.engine for check in found]
        ['bookkeeping', 'vectorized', 'loop']
        >>> all(check.difference < 1e-4 for check in found)
        True
    """
    x, y, sample_weight = (*batch, None, None)[:3]
    microbatch = _chosen(model, x, y, sample_weight)
    rows = rows_of(model, x, y, sample_weight)
    few = min(_COMPARED_ROWS, tf.nest.flatten(rows)[0].shape[0])
    wanted = [_sum_of(microbatch, "loop", rows, i, i + 1)[0] for i in range(few)]
    found = []
    for name in engines.ENGINES:
        reason = microbatch.why_not(name, rows)
        if reason:
            found.append(EngineCheck(name, None, None, reason))
            continue
        seen = [_sum_of(microbatch, name, rows, i, i + 1)[0] for i in range(few)]
        gaps = [_difference(a, b) for a, b in zip(seen, wanted, strict=True)]
        seconds = min(_sum_of(microbatch, name, rows, 0, None, 3)[1])
        found.append(EngineCheck(name, max(gaps), seconds))
    if verbose:
        print(_table(found))
    return found


def _sum_of(microbatch, name, rows, start, stop, runs: int = 1) -> tuple:
    """The clipped sum of some rows by an engine, and how long it took each time."""
    part = tf.nest.map_structure(lambda t: t[start:stop], rows)
    run, seconds = microbatch.trial_sum(engines.ENGINES[name], part), []
    total: Any = run() if runs > 1 else None  # the first one is slower
    for _ in range(runs):
        begin = time.perf_counter()
        total = [np.asarray(t) for t in tf.nest.flatten(run())]
        seconds.append(time.perf_counter() - begin)
    return total, seconds


def _difference(first: list, second: list) -> float:
    gap = sum(
        np.sum(np.square(a - b, dtype="f8")) for a, b in zip(first, second, strict=True)
    )
    whole = sum(np.sum(np.square(b, dtype="f8")) for b in second)
    return float(np.sqrt(gap / max(whole, 1e-300)))


def _table(found: list[EngineCheck]) -> str:
    lines = [f"{'engine':<12} {'difference':>10} {'seconds':>8}"]
    for check in found:
        if check.reason:
            lines.append(f"{check.engine:<12} cannot: {check.reason}")
        else:
            lines.append(
                f"{check.engine:<12} {check.difference:>10.1e} {check.seconds:>8.4f}"
            )
    return "\n".join(lines)

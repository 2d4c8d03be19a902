"""Gradient engines, and the choice among them."""

from collections.abc import Callable

import tensorflow as tf
from absl import logging

from keras_dpopt.engines.base import GradientEngine, GradientProblem
from keras_dpopt.engines.bookkeeping import BookkeepingEngine
from keras_dpopt.engines.loop import LoopEngine
from keras_dpopt.engines.notes import EngineNotes
from keras_dpopt.engines.record_axis import NoRule
from keras_dpopt.engines.trial import RECORDS as TRIED
from keras_dpopt.engines.trial import bookkeeping as try_bookkeeping
from keras_dpopt.engines.vectorized import VectorizedEngine
from keras_dpopt.types import UnsupportedModelError

__all__ = [
    "ENGINES",
    "TRIED",
    "EngineNotes",
    "GradientEngine",
    "GradientProblem",
    "reason_against",
    "select",
    "try_bookkeeping",
]

# In the order in which "auto" tries them.
ENGINES = {
    engine.name: engine
    for engine in (BookkeepingEngine(), VectorizedEngine(), LoopEngine())
}

# What TensorFlow raises where it cannot vectorize an operation.
_CANNOT = (
    AttributeError,
    NotImplementedError,
    TypeError,
    tf.errors.InvalidArgumentError,
    tf.errors.UnimplementedError,
    ValueError,
)


def select(
    name: str, attempt: Callable[[GradientEngine], None], model_name: str
) -> tuple[GradientEngine, dict[str, str]]:
    """Chooses the engine.

    Args:
        name: "auto", or the name of an engine, which is then the only candidate.
        attempt: Runs a given engine on a few records; raises where the engine cannot
            serve the model.
        model_name: For the log.

    Returns:
        The first engine of `ENGINES` that serves the model, and why the earlier ones do
        not. The last is taken without a trial, because an error there is the model's
        own and belongs to the user.

    Raises:
        UnsupportedModelError: if no engine, or not the one that was asked for, can make
            the model private.
    """
    if name != "auto":
        engine = ENGINES[name]
        if isinstance(engine, BookkeepingEngine):
            reason = reason_against(engine, attempt)
            if reason:
                raise UnsupportedModelError(
                    f"The {name!r} gradient engine cannot serve model {model_name!r} "
                    f"({reason}). Use gradient_engine='auto'."
                )
        return engine, {}
    *candidates, last = ENGINES.values()
    reasons: dict[str, str] = {}
    for engine in candidates:
        reason = reason_against(engine, attempt)
        if not reason:
            break
        reasons[engine.name] = reason
    else:
        engine = last
    why = "".join(f", because {n!r} cannot ({r})" for n, r in reasons.items())
    log = logging.warning if engine is last else logging.info
    log("keras_dpopt: model %r trains by %r%s.", model_name, engine.name, why)
    return engine, reasons


def reason_against(engine: GradientEngine, attempt: Callable) -> str:
    """Why an engine cannot serve the model; empty where it can."""
    try:
        attempt(engine)
    except UnsupportedModelError:
        raise  # no engine can make such a model private
    except _CANNOT as error:
        first = (str(error).strip().splitlines() or [""])[0][:200]
        return (
            first if isinstance(error, NoRule) else f"{type(error).__name__}: {first}"
        )
    return ""

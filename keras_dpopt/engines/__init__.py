"""Gradient engines, and the choice among them."""

from collections.abc import Callable

import tensorflow as tf
from absl import logging

from keras_dpopt.engines.base import GradientEngine, GradientProblem
from keras_dpopt.engines.loop import LoopEngine
from keras_dpopt.engines.vectorized import VectorizedEngine
from keras_dpopt.types import UnsupportedModelError

__all__ = ["ENGINES", "GradientEngine", "GradientProblem", "select"]

# In the order in which "auto" tries them.
ENGINES = {engine.name: engine for engine in (VectorizedEngine(), LoopEngine())}

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
) -> GradientEngine:
    """Chooses the engine.

    Args:
        name: "auto", or the name of an engine, which is then the only candidate.
        attempt: Runs a given engine on made-up records of the data's shapes; raises
            where the engine cannot serve the model.
        model_name: For the log.

    Returns:
        The first engine of `ENGINES` that serves the model; the last without a trial,
        because an error there is the model's own and belongs to the user.
    """
    if name != "auto":
        return ENGINES[name]
    *candidates, last = ENGINES.values()
    for engine in candidates:
        try:
            attempt(engine)
        except UnsupportedModelError:
            raise  # no engine can make such a model private
        except _CANNOT as error:
            reason = str(error).strip().splitlines() or [""]
            logging.warning(
                "keras_dpopt: model %r trains with the slower %r gradient engine, "
                "because %r cannot serve it (%s: %s).",
                model_name,
                last.name,
                engine.name,
                type(error).__name__,
                reason[0][:200],
            )
        else:
            return engine
    return last

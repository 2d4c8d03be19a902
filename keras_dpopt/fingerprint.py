"""Whether a run can be repeated exactly, and what it hangs on besides its state."""

import dataclasses
import hashlib
import json
import platform
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dpopt import tensorflow_compat

_LIBRARIES = ("keras", "keras_dpopt", "keras_hub")


def of_run(model: Any) -> str | None:
    """Returns a digest of all that a step depends on besides state, key and number.

    That is the data, the configuration of model, loss and optimizer, the sampling, and
    the machine.

    Args:
        model: A private model in `fit`.

    Returns:
        A hexadecimal digest; or `None` where a step cannot be made twice alike, or
        nobody can tell: without op determinism, with batches or noise that are not
        drawn here, or with code that is not a library's and may have changed.
    """
    source, optimizer = model.fit_run.source, model.optimizer
    if (
        source.rows is None
        or model._preprocess() is not None
        or not optimizer.mechanism.supports_jit
        or not tensorflow_compat.is_op_determinism_enabled()
    ):
        return None
    try:
        configuration = keras.saving.serialize_keras_object(model)
    except (NotImplementedError, TypeError, ValueError):
        return None
    if not _is_library_code(configuration):
        return None
    known = {
        "model": configuration,
        "compile": model.get_compile_config(),
        "phase": dataclasses.asdict(source.phase) | {"seeded": None},
        "batch": optimizer.expected_batch_size,
        # What decides which records are computed, and added up, together.
        "engine": model.private_step.microbatch.engine.name,
        "microbatch": model.private_step.microbatch.size(),
        "replicas": [
            type(model.distribute_strategy).__name__,
            model.distribute_strategy.num_replicas_in_sync,
        ],
        "tf32": tf.config.experimental.tensor_float_32_execution_enabled(),
        "versions": [tf.__version__, keras.__version__, platform.machine()],
        "devices": [device.name for device in tf.config.list_logical_devices()],
        "floatx": keras.config.floatx(),
    }
    return _digest(known, source.rows)


def of_schedule(model: Any) -> str:
    """Returns a digest of what all steps of a run of correlated noise have in common.

    Its sensitivity is that of one order of the records and of one strategy. So a run
    does not go on with other data, or after another plan, whether or not a step would
    be made twice.

    Args:
        model: A private model in `fit`.

    Returns:
        A hexadecimal digest; empty where the noise of a step is its own.
    """
    source, mechanism = model.fit_run.source, model.optimizer.mechanism
    if not mechanism.is_correlated:
        return ""
    known = {
        "phase": dataclasses.asdict(source.phase) | {"seeded": None},
        "plan": mechanism.plan_digest(),
    }
    return _digest(known, source.rows)


def of_draws(model: Any) -> str:
    """Returns a digest of what the parts of a logical batch have in common.

    Their clipped sums add up only if no record is in two of them: they are parts of one
    draw from one data set.

    Args:
        model: A private model in `fit`.

    Returns:
        A hexadecimal digest; empty where batches come whole, or are not drawn here.
    """
    source, parts = model.fit_run.source, model.optimizer.logical_batch_steps
    if parts == 1 or source.rows is None:
        return ""
    phase = dataclasses.asdict(source.phase) | {"seeded": None}
    return _digest({"phase": phase, "parts": parts}, source.rows)


def _digest(known: dict[str, Any], rows: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps(known, sort_keys=True, default=str).encode())
    for leaf in tf.nest.flatten(rows.values, expand_composites=True):
        array = np.ascontiguousarray(leaf)
        digest.update(repr((array.shape, array.dtype)).encode())
        is_text = array.dtype.kind in "OSU"
        digest.update(repr(array.tolist()).encode() if is_text else array.data)
    return digest.hexdigest()


def _is_library_code(config: Any) -> bool:
    """Whether a configuration names nothing but what the libraries have."""
    if isinstance(config, dict):
        name = config.get("class_name")
        if isinstance(name, str) and "config" in config:
            module = str(config.get("module")).split(".")[0]
            if name == "__lambda__" or not (
                name.startswith("__") or module in _LIBRARIES
            ):
                return False
        return all(map(_is_library_code, config.values()))
    if isinstance(config, list | tuple):
        return all(map(_is_library_code, config))
    if isinstance(config, str) and ">" in config:
        return config.split(">")[0] in _LIBRARIES
    return not callable(config)

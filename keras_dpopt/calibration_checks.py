"""Checks of probabilities and labels; `calibration.py` says what they may be."""

from typing import Any

import numpy as np

# How far the sum of a row may be from one: bfloat16 rounds each entry by up to 2^-8.
_TOLERANCE = 1e-2


def checked(probabilities: Any, labels: Any) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns probabilities [n, k], labels [n], and ln of the least probability.

    Raises:
        ValueError: if they are not what they should be, or were swapped.
    """
    try:
        return _checked(probabilities, labels)
    except ValueError:
        if _passes(labels, probabilities):
            raise ValueError(
                "The labels came first and the probabilities second. Swap them: "
                "probabilities, then labels."
            ) from None
        raise


def _checked(probabilities: Any, labels: Any) -> tuple[np.ndarray, np.ndarray, float]:
    p, log_of_zero = checked_probabilities(probabilities)
    return p, _checked_labels(labels, *p.shape), log_of_zero


def _passes(probabilities: Any, labels: Any) -> bool:
    try:
        _checked(probabilities, labels)
    except (ValueError, TypeError):
        return False
    return True


def checked_probabilities(probabilities) -> tuple[np.ndarray, float]:
    """Float64 probabilities [n, k >= 2], and ln of the least number of their dtype."""
    p = np.asarray(probabilities)
    if p.ndim not in (1, 2) or not p.size:
        raise ValueError(
            "probabilities must have the shape [n, classes] or, of class 1 of two, "
            f"[n] or [n, 1], with n > 0; got {p.shape}. Give the output of the softmax "
            "or sigmoid, one row an example."
        )
    # NumPy has no bfloat16; its kind is void, its range that of float32.
    dtype = {"f": p.dtype, "V": np.dtype("f4")}.get(p.dtype.kind, np.dtype("f8"))
    p = p.astype(np.float64)
    if not ((p >= 0.0) & (p <= 1.0 + _TOLERANCE)).all():
        raise ValueError(
            "probabilities must lie in [0, 1] and may not be NaN. Give the output of "
            "the softmax or sigmoid, not the logits."
        )
    p = np.minimum(p, 1.0)
    if p.ndim == 1 or p.shape[1] == 1:
        p = np.reshape(p, -1)
        p = np.stack([1.0 - p, p], axis=1)
    sums = p.sum(axis=1)
    if np.abs(sums - 1.0).max() > _TOLERANCE:
        worst = sums[np.abs(sums - 1.0).argmax()]
        raise ValueError(
            f"The rows of probabilities must sum to one, got a sum of {worst:.4g}. "
            "Give the output of the softmax; of several sigmoids, one at a time."
        )
    info = np.finfo(dtype)
    return p, float(np.log(2.0) * (info.minexp - info.nmant))


def _checked_labels(labels, n: int, classes: int) -> np.ndarray:
    """Integer labels [n] below `classes`."""
    y = np.asarray(labels)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.shape == (n, classes):
        if not (np.isin(y, (0, 1)).all() and (y.sum(axis=1) == 1).all()):
            raise ValueError(
                "One-hot labels must have a single 1 in a row of zeros. Give the class "
                "of each example as an integer instead."
            )
        y = y.argmax(axis=1)
    if y.shape != (n,):
        raise ValueError(
            f"labels of shape {np.shape(labels)} do not fit {n} examples of {classes} "
            "classes. Give an integer or a one-hot row for each example."
        )
    integers = y.astype(np.int64) if y.dtype.kind in "biuf" else None
    if integers is None or not (integers == y).all():
        raise ValueError("labels must be integers. Give the number of the class.")
    if integers.min() < 0 or integers.max() >= classes:
        raise ValueError(
            f"labels must lie in [0, {classes}), got {integers.min()} to "
            f"{integers.max()}. Number the classes as the model's outputs."
        )
    return integers

"""Checks of arguments that several modules share.

Every check returns the value in a plain Python type, or raises ValueError or
TypeError with one sentence for the cause and one for the remedy.
"""

import math
import operator
import warnings
from typing import Any


def check_positive_integer(name: str, value: object) -> int:
    """Returns `value` as an int, or raises when it is not a whole number above 0.

    Args:
        name: The name of the argument, for the message.
        value: Any integer type (NumPy's included; not bool, not float).

    Returns:
        The value as a Python int, at least 1.

    Raises:
        TypeError: `value` is not an integer.
        ValueError: `value` is below 1.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"`{name}` must be a whole number, not {value!r}. Pass an int."
        ) from None
    if number < 1:
        raise ValueError(
            f"`{name}` must be at least 1, not {number}. Pass a positive int."
        )
    return number


def check_count(name: str, value: Any) -> int:
    """Returns `value` as an int, or raises when it is not a whole number, 0 or more.

    Raises:
        TypeError: `value` is no integer; bool is none either.
        ValueError: `value` is below 0.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"`{name}` must be a whole number, not {value!r}. Pass an int.")
    if (number := operator.index(value)) < 0:
        raise ValueError(f"`{name}` must be at least 0, not {number}. Pass a count.")
    return number


def check_positive(name: str, value: object, *, allow_infinite: bool = False) -> float:
    """Returns `value` as a float, or raises when it is not finite and above 0.

    Args:
        name: The name of the argument, for the message.
        value: Any real number type.
        allow_infinite: Whether infinity passes too.

    Returns:
        The value as a Python float, above 0.

    Raises:
        TypeError: `value` is not a number.
        ValueError: `value` is zero, negative, infinite or NaN.
    """
    number = _as_float(name, value)
    if not (number > 0 and (allow_infinite or math.isfinite(number))):
        raise ValueError(
            f"`{name}` must be positive and finite, not {number}. "
            "Pass a number above 0."
        )
    return number


def check_non_negative(name: str, value: object) -> float:
    """Returns `value` as a float, or raises when it is not finite and at least 0.

    Args:
        name: The name of the argument, for the message.
        value: Any real number type.

    Returns:
        The value as a Python float, at least 0 and finite.

    Raises:
        TypeError: `value` is not a number.
        ValueError: `value` is negative, infinite or NaN.
    """
    number = _as_float(name, value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(
            f"`{name}` must be non-negative and finite, not {number}. "
            "Pass 0 or a positive number."
        )
    return number


def check_finite(name: str, value: object) -> float:
    """Returns `value` as a float, or raises when it is not a finite number.

    Args:
        name: The name of the argument, for the message.
        value: Any real number type.

    Raises:
        TypeError: `value` is not a number.
        ValueError: `value` is infinite or NaN.
    """
    number = _as_float(name, value)
    if not math.isfinite(number):
        raise ValueError(f"`{name}` must be finite, not {number}. Pass such a number.")
    return number


def check_delta(delta: object) -> float:
    """Returns `delta` as a float, or raises when it is not strictly in (0, 1).

    Args:
        delta: The delta of (epsilon, delta)-differential privacy.

    Returns:
        The value as a Python float, strictly between 0 and 1.

    Raises:
        TypeError: `delta` is not a number.
        ValueError: `delta` is outside (0, 1) or NaN.
    """
    number = _as_float("delta", delta)
    if not 0.0 < number < 1.0:
        raise ValueError(
            f"`delta` must lie strictly between 0 and 1, not {number}. "
            "Pass a value well below 1 / (number of training examples), "
            "for example 1e-5."
        )
    return number


def warn_if_delta_is_large(delta: float, train_size: int, stacklevel: int = 3) -> None:
    """Warns when delta is so large that the guarantee would allow a plain leak.

    A mechanism that publishes one record chosen uniformly at random is
    (0, 1/N)-differentially private, so delta must stay well below 1/N.

    Args:
        delta: The delta of the guarantee, in (0, 1).
        train_size: N, the number of training examples, at least 1.
        stacklevel: As `warnings.warn`; 3 blames the caller of the caller.
    """
    if delta * train_size >= 1:
        warnings.warn(
            f"delta = {delta:g} is not below 1/N = {1 / train_size:.3g} for "
            f"N = {train_size} training examples: such a guarantee would allow "
            "publishing a whole record. Choose a delta well below 1/N.",
            UserWarning,
            stacklevel=stacklevel,
        )


def _as_float(name: str, value: object) -> float:
    """Returns float(value), or raises a TypeError that names the argument."""
    try:
        if isinstance(value, (bool, str)):
            raise TypeError
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TypeError(
            f"`{name}` must be a number, not {value!r}. Pass a float."
        ) from None

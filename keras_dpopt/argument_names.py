"""Names of arguments: those of other libraries, misspelled ones, missing ones."""

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")

PRIVACY_NAMES: Mapping[str, str] = {
    "epsilon": "write `target_epsilon`",
    "eps": "write `target_epsilon`",
    "target_delta": "write `delta`",
    "sigma": "write `noise_multiplier`",
    "n": "write `train_size`",
    "num_examples": "write `train_size`",
    "number_of_examples": "write `train_size`",
    "sample_rate": "write `train_size` and `batch_size`, of which it is the ratio",
    "sampling_probability": "write `train_size` and `batch_size`, of which it is the "
    "ratio",
    "steps": "write `epochs`; an epoch has ceil(train_size / batch_size) steps",
    "num_epochs": "write `epochs`",
    "expected_batch_size": "write `batch_size`",
}
"""Names of privacy arguments elsewhere, and what to write here."""

_VALUES = {
    "delta": "Pass one well below 1 / (number of training examples), for example 1e-5",
    "target_epsilon": "Pass the epsilon that may be spent, for example 3.0",
}


def closest(name: str, known: Iterable[str]) -> str:
    """Returns the known name that `name` is a misspelling of, or "".

    Example:
        >>> closest("noise_multipler", ["l2_norm_clip", "noise_multiplier"])
        'noise_multiplier'
    """
    return next(iter(difflib.get_close_matches(name, known, n=1)), "")


def explained(
    foreign: Mapping[str, str] = PRIVACY_NAMES, name: str = ""
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorates a function: a wrong or missing argument is an error with a remedy.

    Args:
        foreign: Names of other libraries, and what to write instead; those that the
            function has itself stay as they are.
        name: Of the function, for the message; its own where empty.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = inspect.signature(function)
        called = name or function.__name__

        @functools.wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for given in kwargs:
                if given not in signature.parameters:
                    _refuse(called, given, signature.parameters, foreign)
            _refuse_missing(called, signature, args, kwargs)
            return function(*args, **kwargs)

        return checked

    return decorate


def _refuse(
    called: str, given: str, known: Iterable[str], foreign: Mapping[str, str]
) -> None:
    # What a name stands for elsewhere helps only where it is an argument here.
    told = foreign.get(given, "")
    if set(re.findall(r"`(\w+)`", told)) & set(known):
        remedy = told
    elif meant := closest(given, known):
        remedy = f"did you mean `{meant}`?"
    else:
        names = ", ".join(f"`{name}`" for name in known if name != "self")
        remedy = f"it takes {names}"
    end = "" if remedy.endswith("?") else "."
    raise TypeError(f"{called} does not know `{given}`: {remedy}{end}")


def _refuse_missing(
    called: str, signature: inspect.Signature, args: tuple, kwargs: dict[str, Any]
) -> None:
    try:
        bound = signature.bind_partial(*args, **kwargs).arguments
    except TypeError:
        return  # too many of them: the call says so
    for parameter in signature.parameters.values():
        if parameter.default is parameter.empty and parameter.name not in bound:
            remedy = _VALUES.get(parameter.name, "Pass it by name")
            raise TypeError(f"{called} needs `{parameter.name}`. {remedy}.")

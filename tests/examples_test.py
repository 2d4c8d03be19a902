"""The examples say what is missing to run them."""

import pathlib
import runpy
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize(
    "example, package",
    [
        ("quickstart", "matplotlib"),
        ("quickstart", "sklearn"),
        ("mnist", "sklearn"),
        ("filter_tracking", "matplotlib"),
    ],
)
def test_a_missing_package_is_an_error_with_its_extra(example, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(SystemExit, match=rf"need {package}\..*'\.\[examples\]'"):
        runpy.run_path(str(EXAMPLES / f"{example}.py"), run_name="__main__")

"""The README: its code runs, and what it names is there."""

import pathlib
import re

import pytest

import keras_dpopt

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text("utf-8")


def test_the_code_runs_and_learns(capsys):
    pytest.importorskip("sklearn")
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    statement = names["model"].privacy_statement(delta=1e-4)
    assert 2.97 < statement.epsilon <= 3.0
    assert "PRIVACY STATEMENT" in capsys.readouterr().out
    _, accuracy = names["model"].evaluate(names["x"], names["y"], verbose=0)
    assert accuracy > 0.7


@pytest.mark.parametrize("name", sorted(set(re.findall(r"keras_dpopt\.(\w+)", README))))
def test_names_exist(name):
    assert hasattr(keras_dpopt, name)


def test_the_first_screen_names_both_commands():
    first = README[:1500]
    assert "make demo" in first and "make test" in first

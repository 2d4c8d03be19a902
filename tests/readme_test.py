"""The README: its code runs, and what it names is there."""

import pathlib
import re
import tomllib

import pytest

import keras_dpopt

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def test_the_code_runs_and_learns(capsys, tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)  # where it saves
    code, saving, replicas = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    statement = names["model"].privacy_statement(delta=1e-4)
    assert 2.97 < statement.epsilon <= 3.0
    assert "PRIVACY STATEMENT" in capsys.readouterr().out
    _, accuracy = names["model"].evaluate(names["x"], names["y"], verbose=0)
    assert accuracy > 0.7
    exec(compile(saving, "README.md", "exec"), names)
    assert names["model"].privacy_statement(delta=1e-4).epsilon == statement.epsilon
    exec(compile(replicas, "README.md", "exec"), names)
    assert names["strategy"].num_replicas_in_sync > 1
    assert 0 < float(capsys.readouterr().out.split()[-1]) < 3


@pytest.mark.parametrize("name", sorted(set(re.findall(r"keras_dpopt\.(\w+)", README))))
def test_names_exist(name):
    assert hasattr(keras_dpopt, name)


def test_what_fixed_sizes_cost():
    fit = {"train_size": 1797, "batch_size": 512, "epochs": 30}
    target = {"target_epsilon": 3.0, "delta": 1e-4}
    poisson = keras_dpopt.noise_multiplier(**target, **fit)
    sampler = keras_dpopt.FixedSizeSampler()
    fixed = keras_dpopt.noise_multiplier(sampler=sampler, **target, **fit)
    assert f"a noise multiplier of {fixed:.1f} in place of {poisson:.1f}" in README


def test_the_extras_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for extra in project["optional-dependencies"]:
        assert f"`{extra}` (" in README, extra


def test_the_first_screen_names_both_commands():
    first = README[:1500]
    assert "make demo" in first and "make test" in first

"""The examples say what is missing to run them, and clean up what they start."""

import os
import pathlib
import runpy
import subprocess
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
        ("distributed", "sklearn"),
        ("tpu", "sklearn"),
    ],
)
def test_a_missing_package_is_an_error_with_its_extra(example, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(SystemExit, match=rf"need {package}\..*'\.\[examples\]'"):
        runpy.run_path(str(EXAMPLES / f"{example}.py"), run_name="__main__")


def _workers(*flags):
    """Runs examples/distributed.py, which starts two workers."""
    environment = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    return subprocess.run(
        [sys.executable, EXAMPLES / "distributed.py", "--strategy=workers", *flags],
        env={**environment, "PYTHONPATH": str(EXAMPLES.parent)},
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.mark.slow
def test_workers_train_and_the_first_reports():
    done = _workers("--epochs=8", "--seed=0", "--timeout=400")
    assert done.returncode == 0, done.stderr[-3000:]
    name, replicas, accuracy, epsilon, *_ = done.stdout.splitlines()[-1].split()
    assert (name, replicas) == ("workers", "2")
    assert float(accuracy) > 0.7 and 2.97 < float(epsilon) <= 3.0


@pytest.mark.slow
def test_workers_that_fail_are_stopped_and_say_why():
    done = _workers("--epochs=2", "--delta=1", "--timeout=400")
    assert done.returncode == 1
    assert "A worker failed or took too long; all were stopped." in done.stderr
    assert "exit status 1" in done.stderr and "delta" in done.stderr

"""Other libraries for private training, measured on the models of speed.py.

Each has its own environment, because their requirements exclude each other, and a
script that measures it there. What cannot be installed or does not run is a row that
says so.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys

PEERS = ("opacus", "jax_privacy", "tf_privacy")
HERE = pathlib.Path(__file__).resolve().parent
# Seconds of one run of a script; XLA compiles some gradients of records for longer.
LIMIT = 1800


def last_line(text: str) -> str:
    """Last line that says something, without what would break a table."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # pip warns after it has told the error.
    lines = [line for line in lines if line.startswith("ERROR")] or lines
    return lines[-1].replace("|", "/")[:160] if lines else "no output"


def call(*command: str, limit: int | None = None) -> str:
    """Runs a command with none of our own packages in sight; returns its stdout."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    return subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        timeout=limit,
        env=variables | {"TF_CPP_MIN_LOG_LEVEL": "2"},
    ).stdout


def environment(peer: str) -> str:
    """Makes the peer's environment if need be; returns its interpreter."""
    folder = HERE.parent / ".venvs" / peer
    python = folder / "bin" / "python"
    wanted = HERE / "peers" / f"{peer}.txt"
    # A copy of the requirements, written last: a broken installation is made anew.
    installed = folder / wanted.name
    if not installed.exists() or installed.read_text() != wanted.read_text():
        print(f"installing {peer}", file=sys.stderr, flush=True)
        call(sys.executable, "-m", "venv", "--clear", str(folder))
        pip = (str(python), "-m", "pip", "--disable-pip-version-check")
        call(*pip, "install", "-q", "-r", str(wanted))
        shutil.copyfile(wanted, installed)
    return str(python)


def stopped_at(text: str | bytes | None) -> str:
    """The way that a script that was stopped was building, if any."""
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    lines = (text or "").splitlines()
    said = [x for x in lines if x.startswith(("building ", "measuring "))]
    return said[-1].partition("building ")[2] if said else ""


def run(python: str, peer: str, *arguments: str) -> list[dict]:
    """Rows that a peer's script prints, without ways that exceed the limit to build."""
    skip: list[str] = []
    while True:
        skips = [f"--skip={way}" for way in skip]
        script = str(HERE / "peers" / f"{peer}_speed.py")
        try:
            output = call(python, script, *arguments, *skips, limit=LIMIT)
        except subprocess.TimeoutExpired as error:
            # Compilers can not be interrupted from within: the others are run again.
            way = stopped_at(error.stderr)
            if not way or way in skip:
                raise
            skip.append(way)
            continue
        lines = [line for line in output.splitlines() if line.startswith("{")]
        if not lines:
            raise ValueError("no rows were printed")
        return [json.loads(line) for line in lines]


def measure(peer: str, model: str, size: int, repeats: int) -> list[dict]:
    """Rows of a peer on a model: peer and way, then seconds and own_ratio or failed."""
    doing = "installation"
    try:
        python = environment(peer)
        doing = "run"
        arguments = f"--model={model}", f"--size={size}", f"--repeats={repeats}"
        return run(python, peer, *arguments)
    except subprocess.TimeoutExpired:
        problem = f"took more than {LIMIT} s"
    except (subprocess.CalledProcessError, OSError, ValueError) as error:
        problem = last_line(getattr(error, "stderr", None) or str(error))
        if getattr(error, "returncode", 0) < 0:
            problem = f"ended by signal {-error.returncode}"
    return [{"peer": peer, "way": "all", "failed": f"{doing} failed: {problem}"}]


def table(model: str, size: int, repeats: int, ordinary: float) -> None:
    """Prints the rows of all peers on a model.

    Args:
        model: Name of the model.
        size: Records in the batch.
        repeats: Steps that a median is taken of.
        ordinary: Seconds of our ordinary Keras step.
    """
    print("\n| peer and way | seconds | own ratio | examples/s | to our Keras |")
    print("|---|---|---|---|---|")
    for peer in PEERS:
        for row in measure(peer, model, size, repeats):
            name = f"{row['peer']}: {row['way']}"
            if "failed" in row:
                print(f"| {name} | {row['failed']} | | | |", flush=True)
                continue
            seconds, own = row["seconds"], row["own_ratio"]
            print(
                f"| {name} | {seconds:.4f} | {f'{own:.2f}' if own else ''} "
                f"| {size / seconds:.0f} | {seconds / ordinary:.2f} |",
                flush=True,
            )

"""What the scripts of all peers share: the batch, the turns and the rows.

Imported inside a peer's own environment, which has NumPy and absl, but neither
keras_dpopt nor, as a rule, TensorFlow.
"""

import importlib.metadata
import json
import statistics
import sys
import time
import traceback

import numpy as np
from absl import app, flags

_MODEL = flags.DEFINE_string("model", None, "Model to measure.", required=True)
_SIZE = flags.DEFINE_integer("size", None, "Records in the batch.", required=True)
_REPEATS = flags.DEFINE_integer("repeats", 7, "Steps that a median is taken of.")
_SKIP = flags.DEFINE_multi_string("skip", [], "Ways that took too long to build.")

# No turn begins after so many seconds: the slowest ways take most of a minute a step.
ENOUGH = 300
# As in speed.py: clip norm, noise multiplier and learning rate of every private way.
CLIP, NOISE, RATE = 1.0, 1.0, 1e-3
TOKENS, VOCABULARY = 64, 8000


def batch(model: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The batch that speed.py measures this model on."""
    rng = np.random.default_rng(0)
    if model in ("cnn", "mlp"):
        shape = (32, 32, 3) if model == "cnn" else (784,)
        x = rng.normal(size=(size, *shape)).astype("f4")
        return x, rng.integers(0, 10, size).astype("int32")
    x = rng.integers(1, VOCABULARY, (size, TOKENS)).astype("int32")
    return x, rng.integers(0, 2, size).astype("int32")


def reason(error: Exception) -> str:
    """An error in one line that fits into a table."""
    line = " ".join(f"{type(error).__name__}: {error}".split()).replace("|", "/")
    return line if len(line) <= 160 else f"{line[:157]}..."


def warm_seconds(step) -> float:
    """Mean seconds of steps that take a tenth of a second together.

    The first is not counted: it follows another way, whose gradients of records have
    pushed its memory out, and can take twenty times as long as one in a training loop.
    """
    step()
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < 0.1:
        step()
        count += 1
    return (time.perf_counter() - begin) / count


def take_turns(makers: dict, x, y, repeats: int, skip=()) -> list[dict]:
    """Times the ways in turns, the first being the peer's ordinary training.

    Args:
        makers: From the name of a way to a function of the batch that builds it; what
            it returns makes one step, waits for it, and returns the loss.
        x: Inputs.
        y: Labels.
        repeats: Turns that the median is of, unless they take long.
        skip: Ways that are not even built.

    Returns:
        One row for each way, with `failed` in place of the seconds if it does not work.
    """
    steps, failed = {}, {}
    for way, make in makers.items():
        if way in skip:
            failed[way] = "took too long to build"
            continue
        # Last line on stderr: tells where a run that was stopped had got to.
        print(f"building {way}", file=sys.stderr, flush=True)
        try:
            step = make(x, y)
            loss = step()
            if not np.isfinite(loss):
                raise ValueError(f"the loss is {loss}")
            steps[way] = step
        except (
            Exception
        ) as error:  # A way that fails is a row, not the end of the table.
            traceback.print_exc()
            failed[way] = reason(error)
    plain = next(iter(makers))
    times = {way: [] for way in steps}
    start = time.perf_counter()
    for turn in range(repeats):
        if turn and time.perf_counter() - start > ENOUGH:
            break
        for way, step in steps.items():
            print(f"measuring {way}", file=sys.stderr, flush=True)
            times[way].append(warm_seconds(step))
    seconds = {way: statistics.median(found) for way, found in times.items()}
    return [
        {"way": way, "failed": failed[way]}
        if way in failed
        else {
            "way": way,
            "seconds": seconds[way],
            "own_ratio": seconds[way] / seconds[plain] if plain in seconds else None,
        }
        for way in makers
    ]


def run(packages: list[str], ways) -> None:
    """Measures the model of the flags and prints its rows as lines of JSON.

    Args:
        packages: Distributions whose versions the rows name, the peer's own first.
        ways: From a model's name to the makers of `take_turns`, empty if this peer is
            not measured on that model.
    """

    def main(_):
        peer = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in packages)
        makers = ways(_MODEL.value)
        rows = [{"way": "all", "failed": "this model is not written for this peer"}]
        if makers:
            inputs = batch(_MODEL.value, _SIZE.value)
            rows = take_turns(makers, *inputs, _REPEATS.value, _SKIP.value)
        for row in rows:
            print(json.dumps({"peer": peer, **row}), flush=True)

    app.run(main)

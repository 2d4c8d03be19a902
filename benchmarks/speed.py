"""Seconds a step and memory of private training, as ratios to ordinary training.

    python benchmarks/speed.py --models=cnn,mlp --repeats=7

For each model, all ways of training it are built first and then take turns, one step
each, so that what else the machine does falls on all of them alike; a row has the
median. The step is the whole training step on one fixed batch: forward and backward
pass, clip, noise, update, metrics. Peak memory is the largest while a process of its
own makes three steps in this one way, less that of a process that has only built the
model.

With `--peers`, the same models and batches follow in other libraries (`peers.py`), with
the ratio to each one's own ordinary training and to ours.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import threading
import time

import keras
import numpy as np
import peers
import tensorflow as tf
from absl import app, flags

import keras_dpopt
from keras_dpopt import data

_MODELS = flags.DEFINE_list(
    "models", ["cnn", "mlp", "bert", "bert_lora", "lstm"], "Models to measure."
)
_REPEATS = flags.DEFINE_integer("repeats", 7, "Steps that a median is taken of.")
_MEMORY = flags.DEFINE_bool("memory", True, "Whether to measure peak memory, too.")
_ALL = flags.DEFINE_bool("all", False, "Also the slow engines, BAM, DiSK and DPIVON.")
_PEERS = flags.DEFINE_bool(
    "peers", False, "Also other libraries, each installed in an environment of its own."
)
_ONE = flags.DEFINE_string("one", "", "MODEL:WAY, to measure its memory; internal.")

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
TOKENS, VOCABULARY = 64, 8000


@dataclasses.dataclass(frozen=True)
class Way:
    """A way of training: plain Keras if there is no optimizer.

    Attributes:
        optimizer: Name of a private optimizer, or "".
        engine: Its gradient engine.
        jit_compile: Of `compile`.
    """

    optimizer: str = ""
    engine: str = "bookkeeping"
    jit_compile: bool = False

    def __str__(self):
        name = f"{self.optimizer} {self.engine}" if self.optimizer else "Keras"
        return f"{name} (XLA)" if self.jit_compile else name


def ways(name: str) -> list[Way]:
    """The ways to measure for a model, ordinary training first."""
    found = [Way(), Way("DPAdamW"), Way("FiBeR")]
    if name not in NOT_COMPILED:
        found[1:1] = [Way(jit_compile=True)]
        found += [dataclasses.replace(w, jit_compile=True) for w in found[2:]]
    if _ALL.value:
        found += [Way(name) for name in ("DPSGD", "DiSK", "DPIVON")]
        found += [Way("BAM", "vectorized"), Way("DPAdamW", "vectorized")]
        found += [Way("DPAdamW", "loop")]
    return found


# --- models --------------------------------------------------------------------------


def cnn():
    """Six convolutions, 32 to 128 channels, and two dense layers."""
    inputs = x = keras.Input((32, 32, 3))
    for channels in (32, 64, 128):
        for _ in range(2):
            x = keras.layers.Conv2D(channels, 3, padding="same", activation="relu")(x)
        x = keras.layers.MaxPool2D()(x)
    x = keras.layers.Dense(128, "relu")(keras.layers.Flatten()(x))
    return keras.Model(inputs, keras.layers.Dense(10)(x))


def mlp():
    """784-256-256-10."""
    layers = [keras.layers.Dense(256, "relu") for _ in range(2)]
    return keras.Sequential([keras.Input((784,)), *layers, keras.layers.Dense(10)])


def bert(rank: int = 0):
    """An encoder of 4 layers of width 256 on 64 tokens, without dropout."""
    import keras_hub

    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=VOCABULARY,
        num_layers=4,
        num_heads=4,
        hidden_dim=256,
        intermediate_dim=1024,
        max_sequence_length=TOKENS,
        dropout=0.0,
    )
    if rank:
        backbone.enable_lora(rank)
    return keras_hub.models.BertTextClassifier(
        backbone, num_classes=2, preprocessor=None, dropout=0.0
    )


def lstm():
    """Embedding 64, LSTM 64 on 64 tokens, and a dense layer."""
    return keras.Sequential(
        [
            keras.Input((TOKENS,), dtype="int32"),
            keras.layers.Embedding(VOCABULARY, 64),
            keras.layers.LSTM(64),
            keras.layers.Dense(2),
        ]
    )


def rows(name: str, size: int) -> tuple:
    """One batch for a model."""
    rng = np.random.default_rng(0)
    if name in ("cnn", "mlp"):
        shape = (32, 32, 3) if name == "cnn" else (784,)
        return rng.normal(size=(size, *shape)).astype("f4"), rng.integers(0, 10, size)
    tokens = rng.integers(1, VOCABULARY, (size, TOKENS)).astype("int32")
    labels = rng.integers(0, 2, size)
    if name == "lstm":
        return tokens, labels
    return {
        "token_ids": tokens,
        "segment_ids": np.zeros_like(tokens),
        "padding_mask": np.ones_like(tokens),
    }, labels


MODELS = {
    "cnn": (cnn, 256),
    "mlp": (mlp, 1024),
    "bert": (bert, 32),
    "bert_lora": (lambda: bert(8), 32),
    "lstm": (lstm, 128),
}

# XLA takes minutes to compile their gradients of records on a CPU, and makes them slow.
NOT_COMPILED = ("cnn", "lstm")


# --- one step ------------------------------------------------------------------------


def stepper(name: str, way: Way):
    """Returns a function that makes one training step, and the engine's name."""
    make, size = MODELS[name]
    keras.utils.set_random_seed(0)
    x, y = rows(name, size)
    if not way.optimizer:
        model = make()
        model.compile("adam", LOSS, metrics=["accuracy"], jit_compile=way.jit_compile)
        batch = (tf.nest.map_structure(tf.constant, x), tf.constant(y))
        model.make_train_function()
        return lambda: model.train_function(iter([batch]))
    model = keras_dpopt.make_private(make())
    optimizer = getattr(keras_dpopt, way.optimizer)(
        1e-3,
        l2_norm_clip=1.0,
        noise_multiplier=1.0,
        expected_batch_size=size,
        gradient_engine=way.engine,
        microbatch_size=size if way.engine == "bookkeeping" else None,
        **({"ess": 1e5} if way.optimizer == "DPIVON" else {}),
    )
    model.compile(optimizer, LOSS, metrics=["accuracy"], jit_compile=way.jit_compile)
    model.train_on_batch(x, y)
    optimizer.step_limit.assign(2**40)  # measured, not accounted
    batch = data.single_batch(x, y, None, None)
    batch["step"] = tf.constant(optimizer.releases(), tf.int64)
    # As in Keras' row: what a pipeline does ahead of the step is not measured.
    batch = data.in_microbatches(batch, model.private_step.microbatch.size())

    def step():
        model.train_function(iter([batch]))
        batch["step"] += 1
        # A step on a batch that is not due raises, and would be none.
        return batch["step"]

    return step


def _seconds(step, number: int) -> float:
    begin = time.perf_counter()
    for _ in range(number):
        step()
    return (time.perf_counter() - begin) / number


def measure(name: str) -> list[dict]:
    """Times all ways of training one model, in turns."""
    steps, first = {}, {}
    for way in ways(name):
        begin = time.perf_counter()
        steps[way] = stepper(name, way)
        steps[way]()
        first[way] = time.perf_counter() - begin
    times = {way: [] for way in steps}
    # Short steps are repeated, so that a turn takes about a quarter of a second. The
    # first step of a turn finds the caches full of another way's data: it is not timed.
    steps[Way()]()
    inner = max(1, round(0.25 / _seconds(steps[Way()], 1)))
    for _ in range(_REPEATS.value):
        for way, step in steps.items():
            step()
            times[way].append(_seconds(step, inner))
    return [
        {"way": way, "seconds": statistics.median(times[way]), "first": first[way]}
        for way in steps
    ]


# --- memory --------------------------------------------------------------------------


def peak(name: str, way: Way | None) -> float:
    """Peak memory in MiB of a process that trains in this way, or that only builds."""
    text = f"{name}:{json.dumps(dataclasses.asdict(way)) if way else ''}"
    output = subprocess.run(
        [sys.executable, __file__, f"--one={text}"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return float(output.strip().splitlines()[-1])


def resident() -> float:
    """Memory of this process now, in MiB."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


def measure_memory(text: str) -> None:
    """Prints the peak memory of this process in three steps after the first.

    It looks every few milliseconds: the system's own peak has that of the parent in it.
    """
    name, _, way = text.partition(":")
    if not way:
        made = MODELS[name][0](), rows(name, MODELS[name][1])
        print(resident())
        del made
        return
    step, found, done = stepper(name, Way(**json.loads(way))), [], threading.Event()

    def look():
        while not done.wait(0.003):
            found.append(resident())

    watch = threading.Thread(target=look)
    watch.start()
    for _ in range(3):
        step()
    done.set()
    watch.join()
    print(max(found))


def main(_):
    """Prints a table for each model."""
    if _ONE.value:
        measure_memory(_ONE.value)
        return
    gpus = len(tf.config.list_physical_devices("GPU"))
    if _PEERS.value and gpus:
        # Theirs may be builds for CPUs, and each brings its own CUDA otherwise.
        raise app.UsageError("--peers compares on CPUs; hide the GPU for that")
    print(
        f"TensorFlow {tf.__version__}, Keras {keras.__version__}, {os.cpu_count()} CPU "
        f"cores, GPUs: {gpus}"
    )
    for name in _MODELS.value:
        size = MODELS[name][1]
        print(f"\n{name}, batch {size}\n")
        print("| way | seconds | ratio | examples/s | first step | memory |")
        print("|---|---|---|---|---|---|")
        found = measure(name)
        base = peak(name, None) if _MEMORY.value else 0.0
        plain: float = 0.0
        for row in found:
            memory = ""
            if _MEMORY.value and not row["way"].jit_compile:
                used = peak(name, row["way"]) - base
                plain = plain or used
                memory = f"{used:.0f} MiB, {used / plain:.2f}"
            seconds = row["seconds"]
            print(
                f"| {row['way']} | {seconds:.4f} | {seconds / found[0]['seconds']:.2f} "
                f"| {size / seconds:.0f} | {row['first']:.1f} s | {memory} |",
                flush=True,
            )
        if _PEERS.value:
            peers.table(name, size, _REPEATS.value, found[0]["seconds"])


if __name__ == "__main__":
    app.run(main)

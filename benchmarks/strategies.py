"""Overhead of MirroredStrategy on logical CPUs, against one device, a step.

    python benchmarks/strategies.py --repeats=7

The same model, weights and logical batch on one device and on `--devices` logical CPUs,
which share the cores of the machine: the work is the same, so the ideal ratio is 1, and
what is above it is what dividing it up costs. The row "Keras" is the same ratio without
privacy: what TensorFlow and Keras need for it by themselves.

All ways of training a model are built first and then take turns, so that what else the
machine does falls on all of them alike; a row has the medians. As in `speed.py` a step
is the whole training step on a fixed batch, the pipeline ahead of it is not measured,
and the first step of a turn, cold after another way's, is left out.
"""

import itertools
import os
import statistics
import time

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import keras_dpopt
from keras_dpopt import data, distribution

_MODELS = flags.DEFINE_list("models", ["cnn", "mlp"], "Models to measure.")
_REPEATS = flags.DEFINE_integer("repeats", 7, "Turns that a median is taken of.")
_DEVICES = flags.DEFINE_integer("devices", 2, "Logical CPUs.", lower_bound=2)

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
WAYS = ("Keras", "DPAdamW", "FiBeR")


# --- models --------------------------------------------------------------------------


def cnn():
    """Three convolutions, 16 to 64 channels, and a dense layer: 0.03 M weights."""
    layers = [keras.Input((32, 32, 3))]
    for channels in (16, 32, 64):
        layers.append(
            keras.layers.Conv2D(channels, 3, padding="same", activation="relu")
        )
        layers.append(keras.layers.MaxPool2D())
    return [*layers, keras.layers.Flatten(), keras.layers.Dense(10)]


def mlp():
    """784-256-256-10: 0.27 M weights."""
    hidden = [keras.layers.Dense(256, "relu") for _ in range(2)]
    return [keras.Input((784,)), *hidden, keras.layers.Dense(10)]


MODELS = {"cnn": (cnn, (32, 32, 3), 256), "mlp": (mlp, (784,), 1024)}


# --- one step ------------------------------------------------------------------------


def stepper(name, way, strategy):
    """Returns a function that makes one training step under a strategy."""
    layers, shape, size = MODELS[name]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(size, *shape)).astype("float32")
    y = rng.integers(0, 10, size)
    make = plain_stepper if way == "Keras" else private_stepper
    keras.utils.set_random_seed(0)
    return make(layers, way, strategy, x, y)


def plain_stepper(layers, way, strategy, x, y):
    """A step without privacy, of a batch that is divided up as Keras does it."""
    del way
    with strategy.scope():
        model = keras.Sequential(layers())
        model.compile("adam", LOSS, metrics=["accuracy"], jit_compile=False)
    parts = [
        (tf.constant(a), tf.constant(b))
        for a, b in zip(
            np.array_split(x, strategy.num_replicas_in_sync),
            np.array_split(y, strategy.num_replicas_in_sync),
            strict=True,
        )
    ]
    batch = on_replicas(strategy, lambda r: parts[r])
    model.train_on_batch(x, y)  # builds what a step may not make
    return lambda: model.train_function(iter([batch]))


def private_stepper(layers, way, strategy, x, y):
    """A private step, of a batch that is divided up as `fit` does it."""
    size = len(x)
    with strategy.scope():
        model = keras_dpopt.DPSequential(layers())
        optimizer = getattr(keras_dpopt, way)(
            1e-3,
            l2_norm_clip=1.0,
            noise_multiplier=1.0,
            expected_batch_size=size,
            gradient_engine="bookkeeping",
            microbatch_size=-(-size // strategy.num_replicas_in_sync),
        )
        model.compile(optimizer, LOSS, metrics=["accuracy"], jit_compile=False)
    model.train_on_batch(x, y)
    optimizer.step_limit.assign(2**40)  # measured, not accounted
    batch = data.single_batch(x, y, None, None)
    batch["step"] = tf.constant(optimizer.releases(), tf.int64)
    batch = next(
        distribution.replica_iterator(
            model, batch, model.private_step.microbatch.size()
        )
    )
    # A step on a batch that is not due raises, and would be none.
    due = itertools.count(optimizer.releases())

    def step():
        number = tf.constant(next(due), tf.int64)
        batch["step"] = on_replicas(strategy, lambda _: number)
        return model.train_function(iter([batch]))

    return step


def on_replicas(strategy, value_of):
    """Returns the values of a function of the replica's number, as a step gets them."""
    if strategy.num_replicas_in_sync == 1:
        return value_of(0)
    return strategy.experimental_distribute_values_from_function(
        lambda context: value_of(context.replica_id_in_sync_group)
    )


# --- turns ---------------------------------------------------------------------------


def seconds(step, number):
    """Seconds a step, of so many in a row."""
    begin = time.perf_counter()
    for _ in range(number):
        step()
    return (time.perf_counter() - begin) / number


def measure(name, strategies):
    """Returns the median seconds a step, by (way, strategy)."""
    steps = {
        (way, kind): stepper(name, way, strategy)
        for way in WAYS
        for kind, strategy in strategies.items()
    }
    for step in steps.values():
        seconds(step, 2)  # traced and warm
    # Short steps are repeated, so that a turn takes about a quarter of a second.
    inner = max(1, round(0.25 / seconds(steps["Keras", "one"], 2)))
    times = {which: [] for which in steps}
    for _ in range(_REPEATS.value):
        for which, step in steps.items():
            step()
            times[which].append(seconds(step, inner))
    return {which: statistics.median(found) for which, found in times.items()}


def main(argv):
    """Prints a table for each model."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
    tf.get_logger().setLevel("ERROR")  # it logs each reduction that it traces
    tf.config.set_visible_devices([], "GPU")
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * _DEVICES.value,
    )
    strategies = {
        "one": tf.distribute.get_strategy(),
        "mirrored": tf.distribute.MirroredStrategy(
            [f"CPU:{i}" for i in range(_DEVICES.value)]
        ),
    }
    print(
        f"TensorFlow {tf.__version__}, Keras {keras.__version__}, {os.cpu_count()} CPU "
        f"cores, {_DEVICES.value} logical CPUs, medians of {_REPEATS.value} turns"
    )
    for name in _MODELS.value:
        found = measure(name, strategies)
        print(f"\n{name}, batch {MODELS[name][2]}\n")
        print("| training | one device, s | mirrored, s | mirrored / one |")
        print("|---|---|---|---|")
        for way in WAYS:
            one, several = found[way, "one"], found[way, "mirrored"]
            print(f"| {way} | {one:.4f} | {several:.4f} | {several / one:.2f} |")


if __name__ == "__main__":
    app.run(main)

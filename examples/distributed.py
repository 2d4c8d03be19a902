"""Private training on several devices or workers: one seed, the same weights.

    python examples/distributed.py --strategy=mirrored    # the GPUs here, or two CPUs
    python examples/distributed.py --strategy=workers     # starts two workers here
    python examples/distributed.py --compare              # one device, and both

Trains a small network on scikit-learn's digits and prints accuracy, epsilon, seconds a
step and the norm of the weights. Without GPUs the devices are logical CPUs, which share
the cores: this shows that the results agree, not how fast several devices are.

On several hosts, set TF_CONFIG on each, start this program on each with the same flags,
and it is the worker that TF_CONFIG says; the first one prints. See docs/distributed.md.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import keras_dpopt

try:
    from sklearn import datasets, model_selection
except ModuleNotFoundError as error:
    raise SystemExit(
        f"The examples need {error.name}. In the clone, run "
        "`pip install '.[examples]'`."
    ) from None

_STRATEGIES = ("none", "mirrored", "workers")
# Of a weight, in units of the largest one. What differs is the order of float32 sums.
_TOLERANCE = 1e-4

FLAGS = flags.FLAGS
flags.DEFINE_enum("strategy", "mirrored", _STRATEGIES, "How to train.")
flags.DEFINE_bool("compare", False, "Train in all three ways, and compare the weights.")
flags.DEFINE_integer("devices", 2, "Devices, or workers to start.", lower_bound=1)
flags.DEFINE_integer("batch_size", 512, "Expected size of a logical batch.")
flags.DEFINE_integer("epochs", 30, "Epochs.", lower_bound=2)
flags.DEFINE_float("target_epsilon", 3.0, "Epsilon to spend.", lower_bound=0.0)
flags.DEFINE_float("delta", 1e-4, "Delta.", lower_bound=0.0, upper_bound=1.0)
flags.DEFINE_integer("seed", None, "Makes the run repeatable, and less private.")
flags.DEFINE_integer("timeout", 600, "Seconds that started workers may take.")
flags.DEFINE_bool("smoke", False, "Few epochs on one and several devices.")
flags.DEFINE_string("result", "", "Where the first worker leaves its result; internal.")


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run reached, and its weights in one vector."""

    strategy: str
    replicas: int
    accuracy: float
    epsilon: float
    seconds: float
    weights: np.ndarray


class StepTime(keras.callbacks.Callback):
    """Seconds of each step, without what an epoch takes to begin."""

    def __init__(self):
        super().__init__()
        self.seconds = []
        self._begin = 0.0

    def on_train_batch_begin(self, batch, logs=None):
        """Starts the clock."""
        self._begin = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        """Stops it."""
        self.seconds.append(time.perf_counter() - self._begin)


def load_digits():
    """Returns x_train, x_test, y_train, y_test of the handwritten digits."""
    x, y = datasets.load_digits(return_X_y=True)
    return model_selection.train_test_split(
        (x / 16).astype("float32"), y, test_size=0.2, random_state=0, stratify=y
    )


def train(name, strategy, verbose=0):
    """Trains under a strategy; every worker calls this with the same data."""
    x_train, x_test, y_train, y_test = load_digits()
    sigma = keras_dpopt.noise_multiplier(
        target_epsilon=FLAGS.target_epsilon,
        delta=FLAGS.delta,
        train_size=len(x_train),
        batch_size=FLAGS.batch_size,
        epochs=FLAGS.epochs,
    )
    if FLAGS.seed is not None:
        keras.utils.set_random_seed(FLAGS.seed)
        # It would round what is to be compared more coarsely than the sums do.
        tf.config.experimental.enable_tensor_float_32_execution(False)
    with strategy.scope():
        model = keras_dpopt.DPSequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(64, activation="tanh"),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            optimizer=keras_dpopt.DPSGD(
                0.25,
                momentum=0.9,
                l2_norm_clip=1.0,
                noise_multiplier=sigma,
                seed=FLAGS.seed,
            ),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    step_time = StepTime()
    model.fit(
        x_train,
        y_train,
        batch_size=FLAGS.batch_size,
        epochs=FLAGS.epochs,
        callbacks=[
            keras_dpopt.PrivacyBudget(FLAGS.target_epsilon, FLAGS.delta),
            step_time,
        ],
        verbose=verbose,
    )
    predicted = model(x_test, training=False).numpy().argmax(axis=-1)
    return Result(
        name,
        strategy.num_replicas_in_sync,
        float((predicted == y_test).mean()),
        model.privacy_statement(FLAGS.delta).epsilon,
        statistics.median(step_time.seconds[2:]),  # the first ones trace it
        np.concatenate([np.ravel(v) for v in model.trainable_variables]),
    )


# --- devices -------------------------------------------------------------------------


def local_devices():
    """Returns the names of as many devices as asked for, of this process."""
    kind, number = "GPU", FLAGS.devices
    if len(tf.config.list_physical_devices("GPU")) < number:
        kind = "CPU"
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * number,
        )
    return [f"{kind}:{i}" for i in range(number)]


def gpu_of_worker(index):
    """Returns what a worker started here may see: a GPU of its own, or none."""
    gpus = len(tf.config.list_physical_devices("GPU"))
    if gpus < FLAGS.devices:
        return "-1"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[index] if visible else str(index)


# --- workers -------------------------------------------------------------------------


def be_worker():
    """Trains as the worker that TF_CONFIG says; the first one reports."""
    # Before anything else of TensorFlow, which sets up its devices only once.
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    resolver = strategy.cluster_resolver
    jobs = resolver.cluster_spec().jobs
    is_first = resolver.task_type == ("chief" if "chief" in jobs else "worker") and (
        resolver.task_id == 0
    )
    result = train("workers", strategy, verbose=2 if is_first else 0)
    if is_first and FLAGS.result:
        np.savez(FLAGS.result, **dataclasses.asdict(result))
    elif is_first:
        print_table([result])


def start_workers():
    """Starts workers on this machine, and returns the result of the first."""
    ports = free_ports(FLAGS.devices)
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as files:
        path, workers = pathlib.Path(folder), []
        try:
            for i in range(FLAGS.devices):
                log = files.enter_context(open(path / f"log{i}", "w", encoding="utf-8"))
                task = {"cluster": cluster, "task": {"type": "worker", "index": i}}
                flags_of_worker = ["--nocompare", f"--result={path / 'result.npz'}"]
                flags_of_worker += (
                    [] if FLAGS.seed is None else [f"--seed={FLAGS.seed}"]
                )
                workers.append(
                    subprocess.Popen(
                        [sys.executable, __file__, *sys.argv[1:], *flags_of_worker],
                        env={
                            **os.environ,
                            "TF_CONFIG": json.dumps(task),
                            "CUDA_VISIBLE_DEVICES": gpu_of_worker(i),
                        },
                        stdout=log,
                        stderr=log,
                    )
                )
            codes = wait_for(workers)
        finally:
            # Also those whose peer has failed: they would wait for it.
            for worker in workers:
                worker.kill()
                worker.wait()
        if any(code != 0 for code in codes):
            for i, code in enumerate(codes):
                said = (path / f"log{i}").read_text(encoding="utf-8")[-2000:]
                state = "did not end" if code is None else f"exit status {code}"
                print(f"--- worker {i}: {state}\n{said}", file=sys.stderr)
            raise SystemExit("A worker failed or took too long; all were stopped.")
        with np.load(path / "result.npz") as stored:
            found = {name: stored[name] for name in stored.files}
    scalars = {name: v.item() for name, v in found.items() if v.ndim == 0}
    return Result(**{**found, **scalars})


def wait_for(workers):
    """Returns the exit codes once all have ended, one has failed or time is up."""
    deadline = time.monotonic() + FLAGS.timeout
    while True:
        codes = [worker.poll() for worker in workers]
        if None not in codes or any(codes) or time.monotonic() > deadline:
            return codes
        time.sleep(0.1)


def free_ports(number):
    """Returns ports of 127.0.0.1 that nobody has now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


# --- results -------------------------------------------------------------------------


def difference(result, other):
    """Returns the largest difference of a weight, in units of the largest weight."""
    largest = np.abs(other.weights).max()
    return float(np.abs(result.weights - other.weights).max() / largest)


def print_table(results):
    """Prints a row for each result, and how far its weights are from the first's."""
    row = "{:<9} {:>8} {:>8} {:>8} {:>10} {:>16} {:>10}"
    print(
        "\n"
        + row.format(
            "strategy",
            "replicas",
            "accuracy",
            "epsilon",
            "seconds",
            "norm of weights",
            "difference",
        )
    )
    for result in results:
        print(
            row.format(
                result.strategy,
                result.replicas,
                f"{result.accuracy:.4f}",
                f"{result.epsilon:.3f}",
                f"{result.seconds:.4f}",
                f"{np.linalg.norm(result.weights):.6f}",
                f"{difference(result, results[0]):.1e}",
            )
        )


def main(argv):
    """Trains and prints."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
    tf.get_logger().setLevel("ERROR")  # it logs each reduction that it traces
    if FLAGS.smoke:
        FLAGS.epochs = min(FLAGS.epochs, 4)
    if "TF_CONFIG" in os.environ:
        be_worker()
        return
    names = [FLAGS.strategy]
    if FLAGS.compare or FLAGS.smoke:
        # A smoke run leaves out the two processes.
        names = ["none", "mirrored"] + ([] if FLAGS.smoke else ["workers"])
        FLAGS.seed = FLAGS.seed or 0
    results = {}
    if "workers" in names:  # first, while this process has taken no GPU
        results["workers"] = start_workers()
    if "mirrored" in names:
        devices = local_devices()  # before the first operation
    if "none" in names:
        results["none"] = train("none", tf.distribute.get_strategy())
    if "mirrored" in names:
        strategy = tf.distribute.MirroredStrategy(devices)
        results["mirrored"] = train("mirrored", strategy)
    found = [results[name] for name in names]
    print_table(found)
    worst = max(difference(result, found[0]) for result in found)
    if worst > _TOLERANCE:
        raise SystemExit(f"The weights differ by {worst:.1e} of the largest one.")
    if min(result.accuracy for result in found) < (0.15 if FLAGS.smoke else 0.7):
        raise SystemExit("A run did not learn.")


if __name__ == "__main__":
    app.run(main)

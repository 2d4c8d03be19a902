"""A worker of tests/distribution_test.py: trains, and writes down what it released."""

import json
import os
import sys

import distribution_cases
import numpy as np
import tensorflow as tf


def main(path: str, index: int, ports: str, names: str) -> None:
    """Trains as one of several workers.

    Args:
        path: Folder of the results.
        index: Number of this worker.
        ports: Of all workers, with commas between them.
        names: Of the optimizers, likewise.
    """
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports.split(",")]}
    task = {"type": "worker", "index": index}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    # As in conftest.py.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    found = {}
    for name in names.split(","):
        result = distribution_cases.train(name, strategy, gradient_engine="loop")
        found[f"{name}.gradients"], found[f"{name}.weights"], history = result
        found |= {f"{name}.{key}": np.array(value) for key, value in history.items()}

    # Keys from the operating system are those of one worker on all, also when renewed.
    model = distribution_cases.classifier(
        "DPSGD", strategy, gradient_engine="loop", seed=None
    )
    x, y = distribution_cases.rows()
    model.fit(x, y, epochs=2, verbose=0)
    model.optimizer.keys.refresh()
    model.fit(x, y, epochs=1, verbose=0)
    found["unseeded"] = distribution_cases.flat(model.trainable_variables)
    found["evaluated"] = np.array(model.evaluate(x, y, verbose=0))

    # Other data on one worker: nothing is released.
    try:
        model.fit(x + index, y, epochs=1, verbose=0)
    except tf.errors.InvalidArgumentError as error:
        found["refused"] = np.array("different batches" in str(error))
    found["after"] = distribution_cases.flat(model.trainable_variables)
    np.savez(f"{path}/worker{index}.npz", **found)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])

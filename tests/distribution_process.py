"""A worker of tests/distribution_test.py: trains, and writes down what it released."""

import json
import os
import sys

PATH, INDEX, PORTS, NAMES = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
WORKERS = [f"127.0.0.1:{port}" for port in PORTS.split(",")]
os.environ["TF_CONFIG"] = json.dumps(
    {"cluster": {"worker": WORKERS}, "task": {"type": "worker", "index": INDEX}}
)

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

strategy = tf.distribute.MultiWorkerMirroredStrategy()
tf.config.experimental.enable_tensor_float_32_execution(False)  # as in conftest.py

import distribution_cases  # noqa: E402

found = {}
for name in NAMES.split(","):
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
    model.fit(x + INDEX, y, epochs=1, verbose=0)
except tf.errors.InvalidArgumentError as error:
    found["refused"] = np.array("different batches" in str(error))
found["after"] = distribution_cases.flat(model.trainable_variables)
np.savez(f"{PATH}/worker{INDEX}.npz", **found)

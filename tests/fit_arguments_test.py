"""Checks of `fit` that need a process of their own."""

import subprocess
import sys

REPLICAS = """
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
two = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(cpu, two)
import keras, keras_dpopt as kd, numpy as np

def made():
    model = kd.DPSequential([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = kd.DPSGD(
        0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=5
    )
    model.compile(optimizer, "mse")
    return model

x, y = np.ones((20, 3), "float32"), np.zeros((20, 1), "float32")
mirrored = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
central = tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0")
with central.scope():
    other = made()
outside = made()
optimizer = made().optimizer
with mirrored.scope():
    half = kd.DPSequential([keras.Input((3,)), keras.layers.Dense(1)])
    half.compile(optimizer, "mse")
for model, strategy in ((other, central), (outside, mirrored), (half, mirrored)):
    before = model.get_weights()
    for train in (
        lambda: model.fit(x, y, verbose=0),
        lambda: model.train_on_batch(x, y),
    ):
        try:
            with strategy.scope():
                train()
        except ValueError as error:
            print("refused", str(error))
    assert all((a == b).all() for a, b in zip(before, model.get_weights()))
    assert model.privacy_statement(delta=1e-5).steps == 0
"""


def test_replicas_are_refused_where_noise_might_not_be_drawn_once():
    """Each would add noise of its own, of which the ledger knows nothing."""
    run = subprocess.run(
        [sys.executable, "-c", REPLICAS], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-2000:]
    refusals = [s for s in run.stdout.splitlines() if s.startswith("refused")]
    assert [("drawn once" in s or "draw noise once" in s) for s in refusals] == (
        [True] * 2 + [False] * 4
    )
    assert ["outside the scope" in s for s in refusals] == [False] * 2 + [True] * 4

"""Replicas: the same privatized gradients as on one device, noise included."""

import os
import pathlib
import socket
import subprocess
import sys

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf
from distribution_cases import (
    BATCH,
    check_equal,
    classifier,
    flat,
    gpus_of_workers,
    mirrored,
    rows,
    train,
)

import keras_dpopt
from keras_dpopt.adaptive_clipping import AdaptiveClipping

# With random layers, this engine gives a record the same draws on every replica.
LOOP = {"gradient_engine": "loop"}


@pytest.mark.parametrize("name", helpers.OPTIMIZERS)
def test_two_replicas_equal_one(name):
    own = {"bands": 2} if name == "MFDPFTRL" else {}
    check_equal(*(train(name, mirrored(n), **LOOP, **own) for n in (1, 2)))


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: tf.distribute.OneDeviceStrategy("CPU:0"),
        lambda: tf.distribute.MirroredStrategy(["CPU:0"]),
    ],
    ids=["one device", "one replica"],
)
def test_a_strategy_of_one_replica_equals_none(strategy):
    """As of `MirroredStrategy` on a machine with one GPU."""
    check_equal(*(train("FiBeR", s, **LOOP) for s in (mirrored(1), strategy())))


@pytest.mark.parametrize("engine", ["bookkeeping", "vectorized", "eagerly"])
def test_engines_on_replicas(engine):
    arguments = {"gradient_engine": "loop" if engine == "eagerly" else engine}
    arguments |= {"dropout": 0.0, "compiled": {"run_eagerly": engine == "eagerly"}}
    check_equal(*(train("DPSGD", mirrored(n), **arguments) for n in (1, 2)))


def test_auto_takes_the_same_engine_on_replicas():
    model = classifier("FiBeR", mirrored(2))
    model.fit(*rows(), verbose=0)
    microbatch = model.private_step.microbatch
    assert microbatch.engine.name == "bookkeeping" and not microbatch.reasons


def test_a_microbatch_is_of_the_share_of_a_replica():
    """Half of the batch on two, and 4 standard deviations of a Poisson draw."""
    for replicas, size in ((1, 64 + 4 * 8 + 1), (2, 32 + 4 * 5 + 1)):
        model = classifier("DPSGD", mirrored(replicas), expected_batch_size=64)
        model.fit(*rows(80), steps_per_epoch=1, verbose=0)
        assert model.private_step.microbatch.size() == size


@pytest.mark.parametrize("name", ["DPSGD", "FiBeR"])
def test_four_replicas_equal_one_also_where_some_have_no_record(name):
    runs = [
        train(name, mirrored(n), dropout=0.0, expected_batch_size=2) for n in (1, 4)
    ]
    check_equal(*runs)


def test_per_layer_and_adaptive_clipping_and_xla_on_replicas():
    adaptive = {"clipping": AdaptiveClipping(count_noise_stddev=2.0)}
    for arguments in ({"clipping": "per_layer"}, adaptive):
        check_equal(*(train("DPSGD", mirrored(n), **LOOP, **arguments) for n in (1, 2)))
    compiled = {"dropout": 0.0, "compiled": {"jit_compile": True}, "microbatch_size": 2}
    compiled |= {"gradient_engine": "bookkeeping"}
    check_equal(*(train("DPAdamW", mirrored(n), **compiled) for n in (1, 2)))


def _free_ports(number: int) -> list[str]:
    sockets = [socket.socket() for _ in range(number)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [str(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


def test_two_workers_equal_one_replica_and_refuse_different_data(tmp_path):
    path, names = pathlib.Path(__file__).parent, ("DPSGD", "FiBeR")
    ports = ",".join(_free_ports(2))
    workers = []
    for i, gpu in enumerate(gpus_of_workers(2)):
        with open(tmp_path / f"log{i}", "w", encoding="utf-8") as log:
            command = ["distribution_process.py", tmp_path, i, ports, ",".join(names)]
            workers.append(
                subprocess.Popen(
                    [sys.executable, *map(str, command)],
                    cwd=path,
                    env={
                        **os.environ,
                        "PYTHONPATH": f"{path.parent}:{path}",
                        "CUDA_VISIBLE_DEVICES": gpu,
                        # Beside this process, which has taken its share.
                        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
                    },
                    stdout=log,
                    stderr=log,
                )
            )
    try:
        codes = [worker.wait(timeout=400) for worker in workers]
    finally:
        for worker in workers:  # none is left behind, whatever happened
            worker.kill()
            worker.wait()
    said = [(tmp_path / f"log{i}").read_text()[-3000:] for i in range(2)]
    assert codes == [0, 0], said
    found = [dict(np.load(tmp_path / f"worker{i}.npz")) for i in range(2)]
    for name in names:
        one = train(name, mirrored(1), **LOOP)
        for of in found:
            history = {key: of[f"{name}.{key}"] for key in one[2]}
            check_equal(one, (of[f"{name}.gradients"], of[f"{name}.weights"], history))
    for key in ("unseeded", "evaluated"):
        np.testing.assert_array_equal(found[0][key], found[1][key])
    for of in found:
        assert of["refused"]
        np.testing.assert_array_equal(of["after"], of["unseeded"])


def _batches(model):
    """Trains on batches of the caller's."""
    batches = tf.data.Dataset.from_tensor_slices(rows()).batch(5)
    model.fit(batches, epochs=2, once_per_epoch=True, verbose=0)
    model.train_on_batch(*rows(7))
    assert model.optimizer.releases() == 7
    return flat(model.trainable_variables)


def test_batches_of_the_caller():
    made = (classifier("DPSGD", mirrored(n), **LOOP) for n in (1, 2))
    np.testing.assert_allclose(*map(_batches, made), rtol=1e-4, atol=1e-6)


def test_saved_on_two_replicas_and_loaded_on_one(tmp_path):
    model = classifier("DPSGD", mirrored(2), **LOOP)
    model.fit(*rows(), batch_size=BATCH, epochs=2, verbose=0)
    before = model.evaluate(*rows(), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.evaluate(*rows(), verbose=0), before, rtol=1e-5)
    np.testing.assert_allclose(loaded.predict(rows()[0]), model.predict(rows()[0]))
    one, two = (m.privacy_statement(delta=1e-3) for m in (loaded, model))
    assert (one.steps, one.epsilon) == (two.steps, two.epsilon) == (4, two.epsilon)


class _Interrupted(Exception):
    pass


class _Interrupt(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            raise _Interrupted


@pytest.mark.parametrize("first, then", [(2, 1), (1, 2)])
def test_interrupted_on_replicas_and_resumed_on_others(first, then, tmp_path):
    """The noise goes on as it would have: the resumed run is the uninterrupted one."""

    def fit(replicas, *callbacks):
        model = classifier("DPSGD", mirrored(replicas), **LOOP)
        model.fit(*rows(), batch_size=BATCH, epochs=4, verbose=0, callbacks=callbacks)
        return model

    whole = fit(1)
    backup = tmp_path / "backup"
    with pytest.raises(_Interrupted):
        fit(first, keras_dpopt.BackupAndRestore(backup), _Interrupt())
    resumed = fit(then, keras_dpopt.BackupAndRestore(backup))
    np.testing.assert_allclose(
        flat(resumed.trainable_variables), flat(whole.trainable_variables), atol=1e-5
    )
    assert resumed.optimizer.releases() == 8

"""Logical batches that come as several physical ones: clipped sums add up, noise once.

The guarantee hangs on two things: no record is in two parts of one sum, and a sum of
which nothing was released is nowhere to be read.
"""

import dataclasses
import re

import contract
import distribution_cases as cases
import keras
import numpy as np
import pytest
import runs
import tensorflow as tf

import keras_dpopt
from keras_dpopt import data
from keras_dpopt.adaptive_clipping import AdaptiveClipping

# With random layers, this engine gives a record the same draws in every part.
LOOP = {"gradient_engine": "loop"}
ONE = cases.mirrored(1)


# ------------------------------------------------------------ equal to whole batches


# One of each kind of query and of mechanism: what a part's sum is, and its noise.
@pytest.mark.parametrize(
    "name", ["DPAdamWBC", "FiBeR", "BAM", "DPSAT", "DPIVON", "DPSGLD", "MFDPFTRL"]
)
def test_three_parts_equal_the_whole(name):
    own = {"bands": 2} if name == "MFDPFTRL" else {}
    whole, parts = (
        cases.train(name, ONE, logical_batch_steps=k, **LOOP, **own) for k in (1, 3)
    )
    cases.check_equal(whole, parts)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"expected_batch_size": 1}, id="parts without a record"),
        pytest.param({"clipping": "per_layer"}, id="per layer"),
        pytest.param(
            {"clipping": AdaptiveClipping(count_noise_stddev=2.0)}, id="count"
        ),
        pytest.param({"microbatch_size": 2}, id="microbatches"),
        pytest.param({"compiled": {"jit_compile": True}}, id="XLA"),
        pytest.param({"compiled": {"run_eagerly": True}}, id="eagerly"),
        pytest.param({"compiled": {"steps_per_execution": 3}}, id="execution"),
        pytest.param({"gradient_engine": "bookkeeping"}, id="bookkeeping"),
    ],
)
def test_parts_equal_the_whole_in_other_settings(arguments):
    arguments = {"dropout": 0.0, **arguments}
    whole, parts = (
        cases.train("DPSGD", ONE, logical_batch_steps=k, **arguments) for k in (1, 2)
    )
    cases.check_equal(whole, parts)


def test_parts_on_two_replicas_equal_the_whole_on_one():
    cases.check_equal(
        cases.train("FiBeR", ONE, **LOOP),
        cases.train("FiBeR", cases.mirrored(2), logical_batch_steps=2, **LOOP),
    )


def test_steps_and_sampling_probability_are_of_the_logical_batch():
    ledgers = []
    for k in (1, 3):
        model = runs.model(runs.sgd(logical_batch_steps=k))
        history = runs.fit(model, epochs=2)
        assert model.optimizer.releases() == 2 * runs.STEPS
        assert int(model.optimizer.iterations) == 2 * runs.STEPS
        assert history.params["steps"] == k * runs.STEPS
        ledgers.append(model.privacy_ledger.sync())
    whole, parts = (dataclasses.replace(x.phases[0], identity="") for x in ledgers)
    assert whole == parts and len(ledgers[1].phases) == 1
    assert ledgers[0].epsilon(1e-5) == ledgers[1].epsilon(1e-5)


def test_the_callers_parts_equal_his_whole_batches():
    weights = []
    for k in (1, 3):
        optimizer = runs.sgd(expected_batch_size=6, logical_batch_steps=k, seed=3)
        model = runs.model(optimizer)
        batches = tf.data.Dataset.from_tensor_slices(runs.data()).batch(6 // k)
        model.fit(batches, epochs=2, verbose=0)
        assert optimizer.releases() == 2 * (runs.N // 6) == runs.steps(model)
        weights.append(cases.flat(model.get_weights()))
    np.testing.assert_allclose(weights[0], weights[1], rtol=1e-5, atol=1e-6)


def test_train_on_batch_releases_with_the_last_part():
    x, y = runs.data()
    whole = runs.model(runs.sgd(expected_batch_size=6, seed=3))
    whole.train_on_batch(x[:6], y[:6])
    parts = runs.model(runs.sgd(expected_batch_size=6, logical_batch_steps=3, seed=3))
    before = parts.get_weights()
    for i in range(3):
        assert all(map(np.array_equal, parts.get_weights(), before))
        assert runs.steps(parts) == 0
        parts.train_on_batch(x[2 * i : 2 * i + 2], y[2 * i : 2 * i + 2])
    assert runs.steps(parts) == 1
    np.testing.assert_allclose(
        cases.flat(parts.get_weights()), cases.flat(whole.get_weights()), rtol=1e-5
    )


def test_a_budget_ends_the_training_after_whole_logical_batches():
    model = runs.model(runs.sgd(noise_multiplier=4.0, logical_batch_steps=2))
    budget = keras_dpopt.PrivacyBudget(0.5, 1e-5)
    runs.fit(model, epochs=1000, callbacks=[budget])
    ledger = model.privacy_ledger.sync()
    assert 0 < ledger.total_steps == model.optimizer.releases()
    assert ledger.epsilon(1e-5) <= 0.5
    more = ledger.phases[-1].blank()
    assert ledger.max_steps_within(0.5, 1e-5, "rdp", more) == 0


# ------------------------------------------------------ no record in two parts of a sum


def test_parts_are_of_one_draw_whatever_becomes_of_the_key():
    """A key that changes between two parts: the second would be of another draw."""
    draws = tf.random.Generator.from_seed(1)
    rows = data.Rows({"x": np.arange(40.0)}, 40)

    def draw(step):
        del step
        return tf.cast(tf.where(draws.uniform([40]) < 0.5)[:, 0], tf.int64)

    start = tf.Variable(5, dtype=tf.int64)
    batches = list(data.drawn_batches(rows, draw, start, 6, parts=4))
    assert [(int(b["step"]), int(b["part"])) for b in batches] == [
        (5 + t, j) for t in range(6) for j in range(4)
    ]
    for t in range(6):
        taken = np.concatenate([b["rows"]["x"] for b in batches[4 * t : 4 * t + 4]])
        assert len(set(taken)) == len(taken) > 5


class _KeyChange(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.optimizer.keys.refresh()


def test_no_record_is_twice_in_a_sum_while_keys_change():
    """Each record has a coordinate of its own, in which it reaches C at most."""
    made = keras_dpopt.DPSequential(
        [keras.Input((runs.N,)), keras.layers.Dense(1, use_bias=False)]
    )
    optimizer = runs.sgd(noise_multiplier=0.0, logical_batch_steps=4)
    made.compile(optimizer, loss=lambda y, y_pred: 1e3 * y_pred[..., 0] + 0.0 * y)
    steps = 40
    made.build((None, runs.N))
    optimizer.build(made.trainable_variables)
    watch = contract.Watch(made, steps)
    made.fit(
        np.eye(runs.N, dtype="float32"),
        np.zeros(runs.N),
        batch_size=15,
        steps_per_epoch=4 * steps,
        verbose=0,
        callbacks=[_KeyChange()],
    )
    sums = 15 * np.stack([cases.flat(watch.gradient(t)) for t in range(steps)])
    assert sums.max() == pytest.approx(1.0, rel=1e-5)
    assert 0.3 < sums.mean() < 0.7


def test_an_interrupted_logical_batch_is_not_in_the_next_fit():
    model = runs.model(runs.sgd(noise_multiplier=0.0, logical_batch_steps=4, seed=1))
    with pytest.raises(runs.Interrupted):
        runs.fit(model, callbacks=[runs.Interrupt(batches=3)])
    assert model.optimizer.releases() == 0 and _kept(model) == 0.0
    fresh = runs.model(runs.sgd(noise_multiplier=0.0, logical_batch_steps=4, seed=1))
    for made in (model, fresh):
        runs.fit(made)
    assert not runs.different(runs.state(model), runs.state(fresh))


@pytest.mark.parametrize("limit", [True, False])
def test_a_sum_that_was_not_released_is_dropped_at_the_end_of_a_fit(limit):
    model = runs.model(runs.sgd(logical_batch_steps=3))
    stop = [Stop()] if limit else []
    runs.fit(model, callbacks=stop)
    assert _kept(model) == 0.0 and int(model.optimizer.parts_come) == 0


class Stop(keras.callbacks.Callback):
    """Stops in the middle of a logical batch."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = batch == 3


def test_data_sets_whose_passes_may_share_a_logical_batch_are_refused():
    model = runs.model(runs.sgd(expected_batch_size=6, logical_batch_steps=2))
    batches = tf.data.Dataset.from_tensor_slices(runs.data()).batch(3)
    assert int(batches.cardinality()) == 10
    unknown = batches.filter(lambda x, y: True)
    for endless in (batches.repeat(), unknown):
        with pytest.raises(ValueError, match="how many batches one pass has"):
            model.fit(endless, steps_per_epoch=4, verbose=0)
    with pytest.raises(ValueError, match="number of batches of the data set=9"):
        model.fit(batches.take(9), verbose=0)
    with pytest.raises(ValueError, match="steps_per_epoch=3 is no multiple"):
        model.fit(batches, steps_per_epoch=3, verbose=0)
    with pytest.raises(ValueError, match="steps_per_epoch=3 is no multiple"):
        runs.fit(model, batch_size=6, steps_per_epoch=3)
    assert model.optimizer.releases() == runs.steps(model) == 0


def test_a_batch_out_of_turn_is_refused():
    """Such as the second of two parts, where the first one has not come."""
    model = runs.model(runs.sgd(expected_batch_size=6, logical_batch_steps=2))
    x, y = runs.data()
    model.train_on_batch(x[:3], y[:3])
    model.optimizer.drop_parts()
    batch = data.single_batch(x[:3], y[:3], None, None)
    batch |= {"step": tf.constant(0, tf.int64), "part": tf.constant(1, tf.int64)}
    batch = data.in_microbatches(batch, model.private_step.microbatch.size())
    model.optimizer.limit_releases(5)
    with pytest.raises(tf.errors.InvalidArgumentError, match="came at step"):
        model.train_function(iter([batch]))


def test_what_cannot_go_over_its_parts_again_is_refused():
    with pytest.raises(ValueError, match="DPSAM goes over each batch more than once"):
        contract.make(keras_dpopt.DPSAM, logical_batch_steps=2)
    for bad in (0, 1.5, True):
        with pytest.raises((TypeError, ValueError), match="logical_batch_steps"):
            runs.sgd(logical_batch_steps=bad)
    with pytest.raises(ValueError, match=re.escape("`logical_batch_steps`")):
        runs.sgd(gradient_accumulation_steps=2)


# ----------------------------------------------------------- files, backups


def _kept(model) -> float:
    """The largest absolute value in the sum that is kept."""
    return max(
        float(np.abs(v.numpy()).max())
        for name, v in model.optimizer.secret_variables().items()
        if name != "partial.count"
    )


def test_no_file_but_the_backup_has_the_sum(tmp_path):
    model = runs.model(runs.sgd(expected_batch_size=6, logical_batch_steps=2))
    x, y = runs.data()
    model.train_on_batch(x[:3], y[:3])
    assert _kept(model) > 0.0
    optimizer = model.optimizer
    secret = [v.numpy() for v in optimizer.secret_variables().values()]
    assert not set(optimizer.named_variables()) & set(optimizer.secret_variables())
    saved = [*optimizer.variables, *model.variables]
    for kept in secret:
        assert not kept.any() or not any(np.array_equal(kept, v.numpy()) for v in saved)
    path = str(tmp_path / "c")
    tf.train.Checkpoint(model=model, optimizer=optimizer).write(path)
    reader = tf.train.load_checkpoint(path)
    for name in reader.get_variable_to_shape_map():
        stored = reader.get_tensor(name)
        assert not any(k.any() and np.array_equal(k, stored) for k in secret)


def _backup(path, **arguments):
    return keras_dpopt.BackupAndRestore(path / "backup", **arguments)


def _model(seed, k=3, **arguments):
    return runs.model(runs.sgd(momentum=0.9, seed=seed, logical_batch_steps=k))


def _interrupted(path, batches=5):
    model = _model(7)
    callbacks = [_backup(path, save_freq=1), runs.Interrupt(batches=batches)]
    with pytest.raises(runs.Interrupted):
        runs.fit(model, epochs=2, callbacks=callbacks)
    return model


@pytest.mark.parametrize("batches", [5, 6, 10])
def test_a_run_goes_on_within_a_logical_batch(tmp_path, batches):
    twin = _model(7)
    runs.fit(twin, epochs=2)
    first = _interrupted(tmp_path, batches)
    assert first.optimizer.releases() == batches // 3
    resumed = _model(None)
    runs.fit(resumed, epochs=2, callbacks=[_backup(tmp_path, save_freq=1)])
    assert not runs.different(runs.state(resumed), runs.state(twin))
    assert runs.steps(resumed) == runs.steps(twin) == 2 * runs.STEPS


class _First(keras.callbacks.Callback):
    """What is kept when the epoch begins, and what batches were made."""

    def on_epoch_begin(self, epoch, logs=None):
        if not hasattr(self, "come"):
            self.come = int(self.model.optimizer.parts_come)
            self.kept = _kept(self.model)


def test_parts_of_other_data_are_dropped_when_a_run_goes_on(tmp_path):
    """A record could be in the parts that came, and again in those to come."""
    _interrupted(tmp_path)
    resumed, first = _model(None), _First()
    runs.fit(resumed, seed=1, epochs=2, callbacks=[_backup(tmp_path), first])
    assert (first.come, first.kept) == (0, 0.0)
    assert runs.steps(resumed) == 2 * runs.STEPS == resumed.optimizer.releases()


def test_parts_of_the_callers_batches_are_dropped_when_a_run_goes_on(tmp_path):
    def fit(seed, *callbacks):
        optimizer = runs.sgd(expected_batch_size=6, logical_batch_steps=2, seed=seed)
        model = runs.model(optimizer)
        batches = tf.data.Dataset.from_tensor_slices(runs.data()).shuffle(9).batch(3)
        model.fit(batches, epochs=2, verbose=0, callbacks=[*callbacks])
        return model

    with pytest.raises(runs.Interrupted):
        fit(7, _backup(tmp_path, save_freq=1), runs.Interrupt(batches=5))
    first = _First()
    resumed = fit(None, _backup(tmp_path), first)
    assert (first.come, first.kept) == (0, 0.0)
    assert runs.steps(resumed) == 10


def test_lost_parts_are_no_lost_steps(tmp_path):
    """The backup is two parts old; nothing was released in them."""
    model = _model(7)
    callbacks = [_backup(tmp_path, save_freq=3), runs.Interrupt(batches=5)]
    with pytest.raises(runs.Interrupted):
        runs.fit(model, epochs=2, callbacks=callbacks)
    twin = _model(7)
    runs.fit(twin, epochs=2)
    resumed = _model(None)
    runs.fit(resumed, epochs=2, callbacks=[_backup(tmp_path)])
    assert not runs.different(runs.state(resumed), runs.state(twin))
    assert runs.steps(resumed) == 2 * runs.STEPS

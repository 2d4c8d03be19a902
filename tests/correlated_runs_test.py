"""Fits with correlated noise: the noise on the weights, the ledger, backups, files."""

import contextlib
import shutil
import zipfile
from typing import Any

import dp_accounting
import helpers
import keras
import numpy as np
import pytest
import runs
import tensorflow as tf
from dp_accounting import rdp
from toeplitz_test import matrix

import keras_dpopt
from keras_dpopt import accounting, prng, sampling, tensorflow_compat, toeplitz

CLIP, SIGMA, RATE = 0.5, 3.0, 0.25
N, BATCH = 13, 4  # four blocks, the last one of one record
BLOCKS = 4
DELTA = 1e-5


def optimizer(kind="banded", **arguments) -> Any:
    arguments = {
        "l2_norm_clip": CLIP,
        "noise_multiplier": SIGMA,
        "momentum": 0.0,
        "gradient_engine": "loop",  # which is traced in less time
        **arguments,
    }
    rate = arguments.pop("learning_rate", RATE)
    if kind == "tree":
        return keras_dpopt.DPFTRL(rate, **arguments)
    more = {
        "banded": {"bands": 3},
        "blt": {"strategy": "blt", "buffers": 2},
        "amplified": {"bands": 3, "amplified": True},
    }
    return keras_dpopt.MFDPFTRL(rate, **{**more[kind], **arguments})


def rows(size=N, features=6, seed=0):
    return np.random.default_rng(seed).normal(size=(size, features)).astype("f4")


def linear(kind="banded", shapes=((2, 2), (2,)), compiled=None, **arguments):
    """A model whose gradient for a record is the record."""
    made = optimizer(kind, **arguments)
    return helpers.rows_model(made, *shapes, **(compiled or {}))


def fit(model, x=None, **arguments):
    x = rows(features=model.size) if x is None else x
    arguments = {"batch_size": BATCH, "verbose": 0, **arguments}
    return model.fit(x, helpers.targets(x), **arguments)


def phases(model):
    return model.privacy_ledger.sync().phases


def epsilon(model):
    return model.privacy_ledger.sync().epsilon(DELTA)


def by_dp_accounting(*events):
    accountant = rdp.RdpAccountant(neighboring_relation=accounting.ZERO_OUT)
    for event, count in events:
        accountant.compose(event, count)
    return accountant.get_epsilon(DELTA)


def gaussian(multiplier):
    return dp_accounting.GaussianDpEvent(multiplier)


def draws(seed, first, steps, index, shape):
    z = [helpers.expected_noise(seed, first + t, index, shape) for t in range(steps)]
    return np.array(z, np.float64).reshape(steps, -1)


class Spy(keras.callbacks.Callback):
    """Calls a function after a number of steps in all."""

    def __init__(self, after, do):
        super().__init__()
        self.left, self.do = after, do

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            self.do(self.model)


def stop(model):
    model.stop_training = True


class Leave(Exception):
    pass


def leave(model):
    raise Leave


# ---------------------------------------------------------------- noise on the weights


def expected_sums(seed, first, steps, shapes, x, sampler):
    """The sum of the releases of one run, times B, in float64; banded."""
    c = toeplitz.optimize_banded(steps, min(3, steps)).coefficients_up_to(steps)
    scale = toeplitz.sensitivity(c, steps, BLOCKS)
    inverse = matrix(toeplitz.inverse_coefficients(c, steps))
    noise = np.concatenate(
        [inverse @ draws(seed, first, steps, i, s) for i, s in enumerate(shapes)],
        axis=1,
    )
    clipped, key = helpers.clipped_rows(x, CLIP), prng.key_from_seed(seed, "sampler")
    taken = [
        clipped[sampler.indices(key, first + t, N, BATCH).numpy()].sum(axis=0)
        for t in range(steps)
    ]
    return np.sum(taken, axis=0) + SIGMA * CLIP * scale * noise.sum(axis=0)


@pytest.mark.parametrize(
    "compiled", [{"steps_per_execution": 3}, {"run_eagerly": True}], ids=str
)
def test_weights_after_two_fits_are_those_of_two_runs(compiled):
    """Of 8 and of 4 steps: the second has other coefficients and no old noise in it."""
    shapes = ((2, 2), (2,))
    model = linear(seed=5, shapes=shapes, compiled=compiled)
    x, sampler = rows(), sampling.CyclicSampler()
    fit(model, x, epochs=2)
    first = expected_sums(5, 0, 8, shapes, x, sampler)
    np.testing.assert_allclose(model.flat(), -RATE / BATCH * first, atol=2e-5)
    model.reset()
    fit(model, x, epochs=1)
    second = expected_sums(5, 8, 4, shapes, x, sampler)
    np.testing.assert_allclose(model.flat(), -RATE / BATCH * second, atol=2e-5)
    assert np.abs(first - second).max() > 0.5
    assert [phase.steps for phase in phases(model)] == [8, 4]


def test_one_band_is_dp_sgd_with_the_noise_of_all_participations():
    """MFDPFTRL(bands=1): DPSGD with sigma * sqrt(k), on the same batches."""
    x, epochs = rows(), 2
    mine = linear(bands=1, coefficients=(1.0,), seed=9, momentum=0.9)
    fit(mine, x, epochs=epochs)
    theirs = helpers.rows_model(
        keras_dpopt.DPSGD(
            RATE,
            momentum=0.9,
            l2_norm_clip=CLIP,
            noise_multiplier=SIGMA * np.sqrt(epochs),
            expected_batch_size=BATCH,
            seed=9,
        ),
        (2, 2),
        (2,),
    )
    key = prng.key_from_seed(9, "sampler")
    for step in range(epochs * BLOCKS):
        taken = x[sampling.CyclicSampler().indices(key, step, N, BATCH).numpy()]
        theirs.train_on_batch(taken, helpers.targets(taken))
    np.testing.assert_allclose(mine.flat(), theirs.flat(), rtol=2e-5, atol=1e-6)
    assert np.abs(mine.flat()).max() > 0.1
    # One release of sigma costs what k of sigma * sqrt(k) do.
    assert epsilon(mine) == pytest.approx(
        by_dp_accounting((gaussian(SIGMA * np.sqrt(epochs)), epochs)), rel=1e-9
    )


def test_weights_set_within_a_run_weaken_no_noise():
    """Post-processing: old weights come back, and old noise does not."""
    seen = []
    model = linear(seed=5)
    first = model.get_weights()
    fit(model, np.zeros((N, 6), "f4"), epochs=2)
    want = model.flat()
    again = linear(seed=5)
    reset = Spy(3, lambda m: (seen.append(m.flat()), m.set_weights(first)))
    fit(again, np.zeros((N, 6), "f4"), epochs=2, callbacks=[reset])
    np.testing.assert_allclose(seen[0] + again.flat(), want, atol=1e-5)


# ------------------------------------------------------------------------- the ledger


def test_cyclic_fits_cost_one_release_each():
    for kind in ("banded", "blt"):
        model = linear(kind)
        fit(model, epochs=2)
        (phase,) = phases(model)
        assert (phase.sampling, phase.steps, phase.steps_per_release) == (
            "cyclic",
            8,
            8,
        )
        assert not phase.seeded
        once = by_dp_accounting((gaussian(SIGMA), 1))
        assert epsilon(model) == pytest.approx(once, rel=1e-9)
        # The same again is another run; one that stops early costs all the same.
        fit(model, epochs=2, callbacks=[Spy(3, stop)])
        assert [p.steps for p in phases(model)] == [8, 3]
        assert len({p.identity for p in phases(model)}) == 2
        with pytest.raises(Leave):
            fit(model, epochs=2, callbacks=[Spy(1, leave)])
        assert [p.steps for p in phases(model)] == [8, 3, 1]
        thrice = by_dp_accounting((gaussian(SIGMA), 3))
        assert epsilon(model) == pytest.approx(thrice, rel=1e-9)


def test_amplified_fits_cost_a_poisson_release_for_each_turn_begun():
    model = linear("amplified")
    x = rows(26)
    fit(model, x, steps_per_epoch=7, epochs=2)
    poisson = dp_accounting.PoissonSampledDpEvent(BATCH / (26 // 3), gaussian(SIGMA))
    (phase,) = phases(model)
    assert (phase.sampling, phase.steps, phase.steps_per_release) == ("banded", 14, 3)
    five = by_dp_accounting((poisson, 5))
    assert epsilon(model) == pytest.approx(five, rel=1e-9)
    fit(model, x, steps_per_epoch=1)
    assert epsilon(model) == pytest.approx(by_dp_accounting((poisson, 6)), rel=1e-9)
    assert five < by_dp_accounting((gaussian(SIGMA), 1)) * 2


def test_a_tree_costs_its_depth_for_each_begun():
    model = linear("tree")
    fit(model, steps_per_epoch=9)  # two trees of 4, and one step of a third
    event = gaussian(SIGMA / np.sqrt(3))
    assert epsilon(model) == pytest.approx(by_dp_accounting((event, 3)), rel=1e-9)
    # The budget allows one more tree, and all of it.
    target = by_dp_accounting((event, 4)) * 1.001
    fit(model, epochs=5, callbacks=[keras_dpopt.PrivacyBudget(target, DELTA)])
    assert [p.steps for p in phases(model)] == [9, 4] and epsilon(model) <= target


def test_the_planned_number_of_steps_is_that_of_the_fit():
    model = linear()
    fit(model, epochs=0)
    fit(model, epochs=3, initial_epoch=3)
    assert not phases(model) or not phases(model)[-1].steps
    assert epsilon(model) == 0.0 and not model.flat().any()
    fit(model, epochs=3, initial_epoch=1)
    fit(model, epochs=2, steps_per_epoch=3)
    fit(model, epochs=1, steps_per_epoch=1)
    fit(model, rows(20), epochs=1, validation_split=0.5)
    made = [(p.steps, p.steps_per_release, p.train_size) for p in phases(model)]
    assert made == [(8, 8, 13), (6, 6, 13), (1, 1, 13), (3, 3, 10)]


def test_batches_of_another_size_are_another_run():
    model = linear()
    fit(model)
    with pytest.raises(ValueError, match="batch"):
        fit(model, batch_size=2)
    model.compile(optimizer(), loss=helpers.output_loss)
    fit(model, batch_size=2)
    made = [(p.expected_batch_size, p.steps_per_release) for p in phases(model)]
    assert made == [(4, 4), (2, 7)]


def test_a_budget_ends_no_run_that_is_paid_and_begins_none_that_is_not():
    model = linear()
    twice = by_dp_accounting((gaussian(SIGMA), 2))
    budget = keras_dpopt.PrivacyBudget(twice * 1.001, DELTA)
    fit(model, epochs=3, callbacks=[budget])
    fit(model, epochs=50, callbacks=[budget])
    assert [p.steps for p in phases(model)] == [12, 200]
    with pytest.raises(RuntimeError, match="is spent"):
        fit(model)
    assert sum(p.steps for p in phases(model)) == 212


def test_phases_of_several_optimizers_add_up():
    model = linear()
    fit(model, epochs=2)
    model.compile(
        keras_dpopt.DPSGD(RATE, l2_norm_clip=CLIP, noise_multiplier=1.5),
        loss=helpers.output_loss,
    )
    fit(model, epochs=1)
    model.compile(optimizer("tree"), loss=helpers.output_loss)
    fit(model, epochs=1)
    want = by_dp_accounting(
        (gaussian(SIGMA), 1),
        (dp_accounting.PoissonSampledDpEvent(BATCH / N, gaussian(1.5)), 4),
        (gaussian(SIGMA / np.sqrt(3)), 1),
    )
    assert epsilon(model) == pytest.approx(want, rel=1e-9)


# ------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("kind", ["banded", "tree"])
def test_batches_of_the_callers_are_refused(kind):
    model = linear(kind, expected_batch_size=BATCH)
    x, y = rows(), helpers.targets(rows())
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    for call in (
        lambda: model.train_on_batch(x[:4], y[:4]),
        lambda: model.fit(data, verbose=0),
        lambda: model.fit(data, verbose=0, once_per_epoch=True, train_size=N),
        lambda: model.fit(data, verbose=0, assume="poisson", train_size=N),
    ):
        with pytest.raises(ValueError, match="Pass arrays to `fit`"):
            call()
    for sampler in (sampling.PoissonSampler(), sampling.CyclicSampler()):
        with pytest.raises(ValueError, match="Leave `sampler` out"):
            fit(model, x, sampler=sampler)
    assert not model.flat().any() and epsilon(model) == 0.0
    assert model.optimizer.releases() == 0


def test_groups_smaller_than_a_batch_are_refused():
    model = linear("amplified")
    for size in (2, 11):  # fewer records than groups; 3 a group
        with pytest.raises(ValueError, match="smaller|fewer|larger|at most"):
            fit(model, rows(size), batch_size=min(size, BATCH))
        model = linear("amplified")
    assert not model.flat().any()


def test_configurations_survive():
    for kind in ("banded", "blt", "amplified", "tree"):
        made = optimizer(kind, nesterov=True, momentum=0.5, seed=4)
        config = made.get_config()
        again = type(made).from_config(config)
        assert again.get_config() == config
        assert "seed" not in config
    made = optimizer(coefficients=(4.0, 2.0, 1.0))
    again = keras.optimizers.deserialize(keras.optimizers.serialize(made))
    assert again.mechanism.coefficients == (4.0, 2.0, 1.0)
    assert optimizer("tree", restart=None).get_config()["restart"] is None
    for wrong in ({"clipping": "automatic"}, {"rescale_to_unit_norm": True}):
        with pytest.raises(ValueError, match="a way of its own"):
            optimizer(**wrong)


# ------------------------------------------------------- what happens within a run


def test_weights_loaded_within_a_run_end_it(tmp_path):
    """A file brings fresh keys: another order, and buffers that no longer fit."""
    model = linear()
    fit(model)
    path, checkpoint = str(tmp_path / "w.weights.h5"), tf.train.Checkpoint(model=model)
    model.save_weights(path)
    saved = checkpoint.save(str(tmp_path / "checkpoint"))
    before, moved = len(phases(model)), []

    def caught(m):
        with contextlib.suppress(ValueError):
            m.load_weights(path)
        moved.append(m.flat())

    for load in (
        lambda m: m.load_weights(path),
        caught,
        lambda m: checkpoint.restore(saved),
        lambda m: m.optimizer.keys.refresh(),
    ):
        with pytest.raises(Exception, match="Weights were loaded"):
            fit(model, epochs=2, callbacks=[Spy(2, load)])
        if load is caught:  # not a step more, even so
            np.testing.assert_array_equal(model.flat(), moved[0])
        cost = epsilon(model)
        fit(model)  # a run of its own, from empty buffers
        assert epsilon(model) > cost
    assert len(phases(model)) >= before + 8


def test_another_fit_within_a_run_changes_nothing():
    """Its plan has a smaller sensitivity: less noise, had the run followed it."""
    refused = []

    def again(model):
        for call in (
            lambda: fit(model, rows(4), epochs=1),
            lambda: model.train_on_batch(rows(4), helpers.targets(rows(4))),
        ):
            with pytest.raises(RuntimeError, match="training already"):
                call()
            refused.append(call)

    disturbed, calm = linear(seed=5), linear(seed=5)
    fit(disturbed, epochs=3, callbacks=[Spy(2, again)])
    fit(calm, epochs=3)
    assert len(refused) == 2
    np.testing.assert_array_equal(disturbed.flat(), calm.flat())


def test_another_plan_within_a_run_ends_it():
    model = linear()
    for steps, words in ((1, "beyond the run"), (99, "Another run was planned")):
        plan = Spy(2, lambda m, steps=steps: m.optimizer.plan_run(steps, N, True))
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            fit(model, epochs=2, callbacks=[plan])


# ---------------------------------------------------------------------------- backups

EPOCHS = 3


def _backup(path, **arguments):
    return keras_dpopt.BackupAndRestore(path / "backup", **arguments)


def _interrupt(model, path, *, save_freq: str | int = "epoch", **when):
    callbacks = [_backup(path, save_freq=save_freq), runs.Interrupt(**when)]
    with pytest.raises(runs.Interrupted):
        fit(model, epochs=EPOCHS, callbacks=callbacks)


@pytest.mark.parametrize("kind", ["banded", "blt", "tree"])
def test_a_run_resumed_at_a_backup_equals_the_uninterrupted_one(kind, tmp_path):
    """Interrupted within an epoch, a turn and a tree: 6 of 12 steps."""
    twin = linear(kind, seed=7, momentum=0.9)
    fit(twin, epochs=EPOCHS)
    model = linear(kind, seed=7, momentum=0.9)
    _interrupt(model, tmp_path, batches=6, save_freq=2)
    if kind == "banded":  # elsewhere, under other keys but for those of the backup
        model = linear(kind, momentum=0.9)
    fit(model, epochs=EPOCHS, callbacks=[_backup(tmp_path)])
    np.testing.assert_array_equal(model.flat(), twin.flat())
    assert epsilon(model) == epsilon(twin)
    assert [(p.steps, p.seeded) for p in phases(model)] == [(12, True)]
    assert not (tmp_path / "backup").exists()
    # The next fit is a run of its own.
    for each in (model, twin):
        fit(each)
    assert [p.steps for p in phases(model)] == [12, 4]
    np.testing.assert_allclose(model.flat(), twin.flat(), atol=1e-6)


def _mlp(**arguments):
    keras.utils.clear_session()  # names count up within a process
    model = helpers.mlp()
    model.compile(optimizer(**arguments), loss="mse")
    return model


def test_lost_steps_are_repeated_exactly(tmp_path, monkeypatch):
    """On a CPU these small steps are deterministic, as the switch would make them."""
    monkeypatch.setattr(tensorflow_compat, "is_op_determinism_enabled", lambda: True)
    x = rows(features=5)
    fit_arguments = {"x": x, "y": np.ones((N, 3), "f4"), "batch_size": BATCH}
    fit_arguments |= {"epochs": EPOCHS, "verbose": 0}
    twin = _mlp(seed=7)
    twin.fit(**fit_arguments)
    lost = _mlp(seed=7)
    with pytest.raises(runs.Interrupted):
        callbacks = [_backup(tmp_path), runs.Interrupt(batches=6)]
        lost.fit(**fit_arguments, callbacks=callbacks)
    shutil.copytree(tmp_path, tmp_path / "copy")
    resumed = _mlp()
    resumed.fit(**fit_arguments, callbacks=[_backup(tmp_path)])
    assert [p.steps for p in phases(resumed)] == [12]
    for mine, theirs in zip(resumed.get_weights(), twin.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    # The same draws through other coefficients would give them away.
    best = toeplitz.optimize_banded(12, 3).coefficients
    other = toeplitz.BandedToeplitz((*best[:2], 0.999 * best[2]))
    monkeypatch.setattr(toeplitz, "optimize_banded", lambda *_, **__: other)
    forked = _mlp()
    forked.fit(**fit_arguments, callbacks=[_backup(tmp_path / "copy")])
    assert [p.steps for p in phases(forked)] == [6, 8]
    assert not forked.optimizer.keys.seeded


@pytest.fixture(scope="module")
def at_a_backup(tmp_path_factory):
    """A run of 12 steps, interrupted without a lost step after 4."""
    path = tmp_path_factory.mktemp("interrupted")
    _interrupt(linear(seed=7, momentum=0.9), path, epochs=1)
    return path


@pytest.mark.parametrize(
    "changed", ["data", "order", "momentum", "coefficients", "epochs"]
)
def test_another_run_does_not_go_on_with_the_noise_of_a_backup(
    changed, at_a_backup, tmp_path
):
    """At a backup, without a lost step: fresh keys, empty buffers, a second release.

    Going on, a record's steps could be closer than accounted, or the strategy's halves
    would not be of one matrix; and the ledger would count one release.
    """
    shutil.copytree(at_a_backup, tmp_path, dirs_exist_ok=True)
    x, arguments, epochs = rows(), {"momentum": 0.9}, EPOCHS
    if changed == "data":
        x[3, 2] += 1.0
    elif changed == "order":
        x = x[::-1]
    elif changed == "epochs":
        epochs = EPOCHS + 1
    elif changed == "momentum":
        arguments = {"momentum": 0.5}
    else:
        arguments |= {"coefficients": (1.0, 0.9, 0.8)}
    resumed = linear(**arguments)
    secrets = []

    class Look(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            variables = self.model.optimizer.secret_variables().values()
            secrets.extend(np.abs(v.numpy()).max() for v in variables)

    fit(resumed, x, epochs=epochs, callbacks=[_backup(tmp_path), Look()])
    assert secrets and not any(secrets)
    assert [p.steps for p in phases(resumed)] == [4, 4 * (epochs - 1)]
    assert not resumed.optimizer.keys.seeded
    twice = by_dp_accounting((gaussian(SIGMA), 2))
    assert epsilon(resumed) == pytest.approx(twice, rel=1e-9)


def test_lost_steps_that_cannot_be_repeated_begin_another_run(at_a_backup, tmp_path):
    shutil.copytree(at_a_backup, tmp_path, dirs_exist_ok=True)
    model = linear(momentum=0.9)
    _interrupt(model, tmp_path, batches=2)
    assert [p.steps for p in phases(model)] == [6]  # it went on, exactly
    fit(model, epochs=EPOCHS, callbacks=[_backup(tmp_path)])
    assert [p.steps for p in phases(model)] == [6, 8]
    twice = by_dp_accounting((gaussian(SIGMA), 2))
    assert epsilon(model) == pytest.approx(twice, rel=1e-9)


# ------------------------------------------------------------------------------ files


def _content(path):
    """The bytes of all files under a path, and of what is in archives."""
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    content = b"".join(file.read_bytes() for file in files)
    for file in files:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                content += b"".join(archive.read(name) for name in archive.namelist())
    return content


@pytest.mark.parametrize("kind", ["blt"])
def test_no_file_but_a_backup_holds_earlier_noise(kind, tmp_path):
    secret, kept = [], {}

    class Save(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            model: Any = self.model
            model.save(tmp_path / "model.keras")
            model.save_weights(tmp_path / "model.weights.h5")
            tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(
                str(tmp_path / "checkpoint" / "all")
            )
            secret.extend(
                row.tobytes()
                for variable in model.optimizer.secret_variables().values()
                if variable.shape.rank
                for row in variable.numpy()
            )
            kept["weights"] = model.trainable_variables[0].numpy().tobytes()
            kept["key"] = model.optimizer.keys.noise.numpy().tobytes()
            kept["backup"] = _content(tmp_path / "backup")

    model = helpers.mlp()
    model.compile(optimizer(kind), loss=helpers.CROSSENTROPY)
    x, y = helpers.classes(12)
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[_backup(tmp_path), Save()])
    assert len(secret) == 4 * 2 and all(any(row) for row in secret)
    for name in ("model.keras", "model.weights.h5", "checkpoint"):
        content = _content(tmp_path / name)
        assert kept["weights"] in content  # Power: this is how values look there.
        assert not any(row in content for row in secret), name
        assert kept["key"] not in content
    assert all(row in kept["backup"] for row in secret)


def test_a_loaded_model_begins_a_run_of_its_own(tmp_path):
    model = helpers.mlp()
    model.compile(optimizer(seed=3), loss=helpers.CROSSENTROPY)
    x, y = helpers.classes(12)
    model.fit(x, y, batch_size=4, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    secrets = loaded.optimizer.secret_variables().values()
    assert not any(np.abs(v.numpy()).max() for v in secrets)
    loaded.fit(x, y, batch_size=4, verbose=0)
    assert [p.steps for p in phases(loaded)] == [3, 3]

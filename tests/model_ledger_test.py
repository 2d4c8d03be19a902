"""The ledger belongs to the model and its weights, and never shrinks (rule 6)."""

import dataclasses

import keras
import pytest
import runs
import tiny

import keras_dpopt
from keras_dpopt.ledger import Ledger


class Do(keras.callbacks.Callback):
    """Calls a function of the model at the end of the first epoch."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            self.function(self.model)


def _recompiled(model, **arguments):
    model.compile(runs.sgd(**arguments), loss="sparse_categorical_crossentropy")
    return model


# ------------------------------------------------------------- one model, many phases


def test_recompiling_with_another_optimizer_and_freezing_go_on_with_the_ledger():
    model = runs.model()
    runs.fit(model)
    runs.fit(_recompiled(model, noise_multiplier=2.0))
    assert runs.steps(model) == 2 * runs.STEPS
    both = model.privacy_ledger.sync().epsilon(1e-5)
    model.layers[0].trainable = False
    runs.fit(_recompiled(model))
    assert runs.steps(model) == 3 * runs.STEPS
    assert model.privacy_ledger.sync().epsilon(1e-5) > both
    assert not runs.notes(model)


def test_a_seeded_optimizer_made_anew_for_the_model_draws_other_noise():
    model = runs.noise_model(seed=7)
    first = runs.increments(model)
    again = runs.noise_model(seed=7)
    assert runs.repeats(first, runs.increments(again)), "the test sees no repetition"
    model.compile(runs.sgd(learning_rate=1.0, seed=7), loss=runs.no_gradient)
    assert not runs.repeats(first, runs.increments(model))


def test_train_on_batch_counts():
    model = runs.model(runs.sgd(expected_batch_size=10))
    x, y = runs.data()
    for _ in range(2):
        model.train_on_batch(x[:10], y[:10])
    assert runs.steps(model) == 2 and not runs.notes(model)


def test_a_callback_cannot_train_the_model():
    model = runs.model()
    with pytest.raises(RuntimeError, match="training already"):
        runs.fit(model, callbacks=[Do(runs.fit)])
    assert runs.steps(model) == runs.STEPS
    runs.fit(model)
    assert runs.steps(model) == 2 * runs.STEPS


# ---------------------------------------------------------------- weights that travel


def test_what_is_built_from_trained_layers_takes_over_the_ledger(tmp_path):
    model = runs.model()
    runs.fit(model)
    epsilon = model.privacy_ledger.sync().epsilon(1e-5)
    built = {
        "wrapped": keras_dpopt.make_private(model),
        "part": keras_dpopt.DPModel(model.inputs, model.layers[0].output),
        "layer": keras_dpopt.DPSequential([model.layers[0], keras.layers.Dense(2)]),
        "wrapped part": keras_dpopt.make_private(
            keras.Sequential([model.layers[0], keras.layers.Dense(2)])
        ),
    }
    for name, other in built.items():
        assert other.privacy_ledger.sync().epsilon(1e-5) == epsilon, name
    built["part"].save(tmp_path / "part.keras")
    loaded = keras.saving.load_model(tmp_path / "part.keras")
    assert loaded.privacy_ledger.sync().epsilon(1e-5) == epsilon


def test_models_that_share_weights_count_each_others_steps():
    model = runs.model()
    runs.fit(model)
    other = keras_dpopt.make_private(model)
    runs.fit(_recompiled(other))
    assert runs.steps(other) == runs.steps(model) == 2 * runs.STEPS
    runs.fit(model)
    assert runs.steps(other) == runs.steps(model) == 3 * runs.STEPS
    assert not runs.notes(model) + runs.notes(other)


# ------------------------------------------------------------- loading within a fit


@pytest.mark.parametrize("budget", [False, True])
def test_weights_loaded_by_a_callback_neither_stop_the_count_nor_lift_the_limit(
    tmp_path, budget
):
    path = tmp_path / "w.weights.h5"
    model = runs.model()
    runs.fit(model)
    model.save_weights(path)
    callbacks: list = [Do(lambda m: m.load_weights(path))]
    steps, epochs = 3 * runs.STEPS, 2
    if budget:
        phase = model.privacy_ledger.sync().phases[0]
        target = Ledger([dataclasses.replace(phase, steps=8)]).epsilon(1e-5)
        callbacks.append(keras_dpopt.PrivacyBudget(target, 1e-5))
        steps, epochs = 8, 4
    runs.fit(model, epochs=epochs, callbacks=callbacks)
    assert runs.steps(model) == steps == model.optimizer.releases()
    assert not runs.notes(model)


def test_a_spent_budget_says_so_each_time():
    model = runs.model()
    model.privacy_ledger.set_budget(1e-3, 1e-5, "rdp")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="budget"):
            runs.fit(model)
    assert runs.steps(model) == 0


# ------------------------------------------------------------------------- the digest


def test_a_change_from_outside_is_noted_and_stays_noted(tmp_path):
    model = runs.model()
    runs.fit(model)
    model.layers[0].kernel.assign(model.layers[0].kernel.value + 1e-6)
    model.save(tmp_path / "m.keras")
    assert "changed outside" in runs.notes(model)
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    assert "changed outside" in runs.notes(loaded)


def test_set_weights_is_noted_at_the_next_fit():
    model = runs.model()
    before = model.get_weights()
    runs.fit(model)
    model.set_weights(before)
    runs.fit(model)
    assert "changed outside" in runs.notes(model)


def test_what_keras_does_in_training_and_evaluation_is_no_change(tmp_path):
    model = runs.model(runs.sgd(use_ema=True, ema_momentum=0.5))
    best = keras.callbacks.EarlyStopping(
        "val_loss", patience=1, restore_best_weights=True
    )
    runs.fit(model, epochs=2, validation_data=runs.data(1), callbacks=[best])
    model.evaluate(*runs.data(), verbose=0)
    model.predict(runs.data()[0], verbose=0)
    model.save_weights(tmp_path / "w.weights.h5")
    runs.fit(model)
    model.load_weights(tmp_path / "w.weights.h5")
    runs.fit(model)
    assert not runs.notes(model)
    assert runs.steps(model) == 4 * runs.STEPS


def test_a_checkpoint_of_a_running_fit_is_no_change(tmp_path):
    path = tmp_path / "m.keras"
    model = runs.model()
    runs.fit(model, epochs=2, callbacks=[Do(lambda m: m.save(path))])
    loaded = keras.saving.load_model(path)
    assert runs.steps(loaded) == runs.STEPS and not runs.notes(loaded)
    runs.fit(loaded)
    assert runs.steps(loaded) == 2 * runs.STEPS and not runs.notes(loaded)


# ------------------------------------------------------- loading within one planned run


def _scheduled():
    rates = keras.optimizers.schedules.PiecewiseConstantDecay([2, 6], [1e-4, 1e-3, 0.1])
    return keras_dpopt.DPSGLD(
        rates, l2_norm_clip=1.0, noise_multiplier=0.0, gradient_engine="loop"
    )


@pytest.mark.parametrize(
    "make",
    [
        _scheduled,
        lambda: keras_dpopt.MFDPFTRL(
            l2_norm_clip=1.0, noise_multiplier=9.0, bands=2, gradient_engine="loop"
        ),
        lambda: keras_dpopt.DPFTRL(
            l2_norm_clip=1.0, noise_multiplier=9.0, gradient_engine="loop"
        ),
    ],
    ids=["DPSGLD", "MFDPFTRL", "DPFTRL"],
)
def test_a_run_that_is_planned_as_a_whole_ends_where_weights_are_loaded(make, tmp_path):
    """Keras makes a warning of an error while it loads; the ledger joins all the same.

    The loaded optimizer state would move the schedule to a step with less noise than
    the plan has.
    """
    path = tmp_path / "other.weights.h5"
    other = tiny.classifier(make())
    tiny.fit(other, *tiny.rows(), batch_size=4, epochs=3)
    other.save_weights(path)
    model = tiny.classifier(make())
    load = Do(lambda m: m.load_weights(path, skip_mismatch=True))
    with pytest.raises(RuntimeError, match="Weights were loaded within a run"):
        tiny.fit(model, *tiny.rows(), batch_size=4, epochs=3, callbacks=[load])
    assert not tiny.moved(model.get_weights(), other.get_weights())
    steps = sorted(phase.steps for phase in model.privacy_ledger.ledger.phases)
    assert steps == [3, 9]
    epsilons = [m.privacy_statement(delta=1e-5).epsilon for m in (model, other)]
    assert epsilons[0] > epsilons[1]
    # The next fit is a run of its own.
    tiny.fit(model, *tiny.rows(), batch_size=4)
    assert tiny.steps(model) == 15

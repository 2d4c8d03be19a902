"""Tests of fit, train_on_batch, evaluate and predict as Keras users know them."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tiny

import keras_dpopt

LOSS = "sparse_categorical_crossentropy"
X, Y = tiny.rows()


# --- the arguments of fit ------------------------------------------------------------


@pytest.fixture(scope="module")
def shared():
    """A model that several tests train, and is traced once; its batches are of five."""
    return tiny.classifier(metrics=["accuracy"])


def test_epochs_and_initial_epoch(shared):
    count = tiny.steps(shared)
    history = tiny.fit(shared, X, Y, batch_size=5, epochs=5, initial_epoch=2)
    assert history.epoch == [2, 3, 4]
    assert tiny.steps(shared) == count + 3 * 3  # ceil(12 / 5) steps an epoch


def test_steps_per_epoch_with_arrays(shared):
    count = tiny.steps(shared)
    tiny.fit(shared, X, Y, batch_size=5, epochs=2, steps_per_epoch=7)
    assert tiny.steps(shared) == count + 14
    assert int(shared.optimizer.iterations) == count + 14


def test_fit_without_epochs_makes_no_step(shared):
    before, count = shared.get_weights(), tiny.steps(shared)
    tiny.fit(shared, X, Y, batch_size=5, epochs=0)
    assert tiny.steps(shared) == count
    assert not tiny.moved(before, shared.get_weights())


@pytest.mark.parametrize("form", ["arrays", "data_set"])
def test_validation_data(form):
    model = tiny.classifier(metrics=["accuracy"])
    x, y = tiny.rows(7, seed=1)
    given = (x, y)
    if form == "data_set":
        given = tf.data.Dataset.from_tensor_slices(given).batch(3)
    history = tiny.fit(model, X, Y, batch_size=4, validation_data=given)
    expected = model.evaluate(x, y, verbose=0)
    assert history.history["val_loss"][0] == pytest.approx(expected[0], rel=1e-5)
    assert history.history["val_accuracy"][0] == pytest.approx(expected[1])
    assert tiny.steps(model) == 3


def test_validation_split_trains_on_the_first_rows_only():
    spy = tiny.RowSpy()
    model = tiny.classifier(metrics=[spy])
    tiny.fit(model, X, np.arange(12) % 3, batch_size=9, validation_split=0.25)
    # N is 9, so every row is drawn at each step: rows 0 to 8 train.
    assert tiny.steps(model) == 1
    assert model.privacy_statement(delta=1e-5).train_size == 9
    history = tiny.fit(model, X, Y, batch_size=9, validation_split=0.25)
    expected = model.evaluate(X[9:], Y[9:], verbose=0)[0]
    assert history.history["val_loss"][0] == pytest.approx(expected, rel=1e-5)
    assert "validation_split" in tiny.notes(model)


def test_validation_freq_and_steps(shared):
    history = tiny.fit(
        shared,
        X,
        Y,
        batch_size=5,
        epochs=4,
        validation_data=(X, Y),
        validation_freq=2,
        validation_batch_size=2,
        validation_steps=2,
    )
    assert len(history.history["val_loss"]) == 2
    expected, _ = shared.evaluate(X[:4], Y[:4], verbose=0)
    assert history.history["val_loss"][-1] == pytest.approx(expected, rel=1e-5)


def test_callbacks_see_each_batch_and_epoch(shared):
    seen = []
    spy = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: seen.append("begin"),
        on_epoch_begin=lambda epoch, logs: seen.append(f"epoch {epoch}"),
        on_train_batch_end=lambda batch, logs: seen.append(f"batch {batch}"),
        on_epoch_end=lambda epoch, logs: seen.append(sorted(logs)),
        on_train_end=lambda logs: seen.append("end"),
    )
    tiny.fit(shared, X, Y, batch_size=5, epochs=2, callbacks=[spy])
    batches = ["batch 0", "batch 1", "batch 2", ["accuracy", "loss"]]
    assert seen == ["begin", "epoch 0", *batches, "epoch 1", *batches, "end"]


def test_a_callback_list_can_be_used_twice(shared):
    spy, count = tiny.StepSpy(), tiny.steps(shared)
    callbacks = keras.callbacks.CallbackList(
        [spy], add_history=True, model=shared, epochs=1, steps=3
    )
    tiny.fit(shared, X, Y, batch_size=5, callbacks=callbacks)
    tiny.fit(shared, X, Y, batch_size=5, callbacks=callbacks)
    assert spy.steps == [count + i for i in range(1, 7)]
    assert tiny.steps(shared) == count + 6
    assert sum(c is spy for c in callbacks.callbacks) == 1


def test_stop_training_of_a_callback_stops(shared):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 1

    count = tiny.steps(shared)
    tiny.fit(shared, X, Y, batch_size=5, epochs=3, callbacks=[Stop()])
    assert tiny.steps(shared) == count + 2


@pytest.fixture(scope="module")
def ten_steps():
    """Weights after ten steps, by fits of two."""
    reference = tiny.classifier()
    for _ in range(5):
        tiny.fit(reference, X, Y, batch_size=4, steps_per_epoch=2)
    return reference.get_weights()


@pytest.mark.parametrize("steps_per_execution", [1, 3, 64])
def test_steps_per_execution_changes_no_step(steps_per_execution, ten_steps):
    """One at a time, some with a rest, and more than there are."""
    model = tiny.classifier(steps_per_execution=steps_per_execution)
    tiny.fit(model, X, Y, batch_size=4, steps_per_epoch=10)
    assert tiny.steps(model) == 10
    assert int(model.optimizer.iterations) == 10
    for a, b in zip(model.get_weights(), ten_steps, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_ways_of_running_agree():
    results = []
    for kwargs in ({}, {"run_eagerly": True}, {"jit_compile": True}):
        optimizer = tiny.private_sgd(gradient_engine="vectorized")
        model = tiny.classifier(optimizer, metrics=["accuracy"], **kwargs)
        history = tiny.fit(model, X, Y, batch_size=4, epochs=2)
        assert tiny.steps(model) == 6
        results.append([*model.get_weights(), history.history["loss"]])
    for result in results[1:]:
        for a, b in zip(results[0], result, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_train_on_batch():
    model = tiny.classifier(
        tiny.private_sgd(expected_batch_size=4), metrics=["accuracy"]
    )
    loss, accuracy = model.train_on_batch(X, Y)
    assert tiny.steps(model) == 1
    logs = model.train_on_batch(X, Y, return_dict=True)
    assert set(logs) == {"loss", "accuracy"}
    assert tiny.steps(model) == 2
    weighted = model.train_on_batch(X, Y, class_weight={0: 0.0, 1: 0.0, 2: 0.0})
    assert weighted[0] == 0
    assert model.train_on_batch(X, Y, sample_weight=np.zeros(12))[0] == 0
    for size in (1, 7):
        model.train_on_batch(X[:size], Y[:size])
    assert tiny.steps(model) == 6
    assert 0 <= accuracy <= 1 and loss > 0


def test_train_on_batch_between_fits():
    model = tiny.classifier()
    tiny.fit(model, X, Y, batch_size=4)
    model.train_on_batch(X, Y)
    tiny.fit(model, X, Y, batch_size=4)
    statement = model.privacy_statement(delta=1e-5)
    assert statement.steps == 7
    assert {p["steps"] for p in statement.phases} == {6, 1}


def test_test_on_batch_and_predict_on_batch(shared):
    count = tiny.steps(shared)
    expected = shared.evaluate(X, Y, verbose=0)
    assert shared.test_on_batch(X, Y) == pytest.approx(expected, rel=1e-5)
    assert shared.predict_on_batch(X).shape == (12, 3)
    assert tiny.steps(shared) == count


def test_learning_rate_schedule_counts_updates():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.5, 0.0])
    model = tiny.classifier(tiny.private_sgd(schedule))
    tiny.fit(model, X, Y, batch_size=4)
    before = model.get_weights()
    tiny.fit(model, X, Y, batch_size=4)
    assert not tiny.moved(before, model.get_weights())
    assert tiny.steps(model) == 6


def test_learning_rate_callback():
    model = tiny.classifier()
    stop = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.0)
    before = model.get_weights()
    tiny.fit(model, X, Y, batch_size=4, callbacks=[stop])
    assert not tiny.moved(before, model.get_weights())
    assert float(model.optimizer.learning_rate) == 0


def test_use_ema_ends_with_the_average():
    momentum, rate = 0.5, 0.3
    reference = tiny.classifier(tiny.private_sgd(rate))
    average: list = []
    for _ in range(4):
        tiny.fit(reference, X, Y, batch_size=4, steps_per_epoch=1)
        now = reference.get_weights()  # with which the average starts
        average = [
            momentum * a + (1 - momentum) * w
            for a, w in zip(average or now, now, strict=True)
        ]
    model = tiny.classifier(tiny.private_sgd(rate, use_ema=True, ema_momentum=momentum))
    tiny.fit(model, X, Y, batch_size=4, steps_per_epoch=4)
    for a, b in zip(model.get_weights(), average, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    # The overwriting at the end of fit is Keras' own, no change by somebody else.
    tiny.fit(model, X, Y, batch_size=4)
    assert "outside" not in tiny.notes(model)


# --- metrics -------------------------------------------------------------------------


def logs_of_all_rows(model, *data, **kwargs) -> dict:
    """Logs of one step on all rows that changes nothing, like an evaluation."""
    history = tiny.fit(model, *data, batch_size=len(data[1]), **kwargs)
    return {name: values[0] for name, values in history.history.items()}


@pytest.mark.parametrize("microbatch_size", [1, 5, 50])
def test_metrics_equal_those_of_evaluate(microbatch_size):
    optimizer = tiny.exact_sgd(microbatch_size=microbatch_size)
    metrics = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top")]
    model = tiny.classifier(optimizer, metrics=metrics, weighted_metrics=[LOSS])
    weight = np.linspace(0.1, 2, 12).astype("float32")
    logs = logs_of_all_rows(model, X, Y, sample_weight=weight)
    expected = model.evaluate(X, Y, sample_weight=weight, verbose=0, return_dict=True)
    assert logs == pytest.approx(expected, rel=1e-4)


def test_metrics_start_anew_each_epoch():
    model = tiny.classifier(tiny.exact_sgd(1.0), metrics=["accuracy"])
    history = tiny.fit(model, X, Y, batch_size=12, epochs=30)
    assert history.history["accuracy"][-1] > history.history["accuracy"][0]
    last = tiny.classifier(tiny.exact_sgd(), metrics=["accuracy"])
    last.set_weights(model.get_weights())
    logs = logs_of_all_rows(last, X, Y)
    assert logs["loss"] < history.history["loss"][-1]


# --- structures ----------------------------------------------------------------------


def two_inputs(names=True):
    a, b = keras.Input((4,), name="a"), keras.Input((2,), name="b")
    joined = keras.layers.Concatenate()([a, b])
    inputs = {"a": a, "b": b} if names else [a, b]
    model = keras_dpopt.DPModel(inputs, keras.layers.Dense(1)(joined))
    model.compile(tiny.private_sgd(gradient_engine="auto"), "mse")
    return model


@pytest.mark.parametrize("form", [dict, list, tuple])
def test_several_inputs(form):
    model = two_inputs(names=form is dict)
    parts = {"a": X, "b": X[:, :2]}
    x = parts if form is dict else form(parts.values())
    tiny.fit(model, x, X[:, :1], batch_size=4)
    assert tiny.steps(model) == 3
    assert model.predict(x, verbose=0).shape == (12, 1)


def test_nested_inputs():
    class Nested(keras_dpopt.DPModel):
        def __init__(self):
            super().__init__()
            self.out = keras.layers.Dense(1)

        def call(self, inputs):
            left, right = inputs["pair"]
            return self.out(left + right + inputs["other"]["x"])

    model = Nested()
    model.compile(tiny.private_sgd(gradient_engine="auto"), "mse")
    x = {"pair": (X, X), "other": {"x": X}}
    tiny.fit(model, x, X[:, :1], batch_size=4)
    assert tiny.steps(model) == 3
    assert np.isfinite(model.evaluate(x, X[:, :1], verbose=0))


def two_outputs(form, optimizer=None, **kwargs):
    inputs = keras.Input((4,))
    out = {
        "left": keras.layers.Dense(2, name="left")(inputs),
        "right": keras.layers.Dense(3, activation="softmax", name="right")(inputs),
    }
    outputs = out if form is dict else list(out.values())
    model = keras_dpopt.DPModel(inputs, outputs)
    model.compile(tiny.exact_sgd() if optimizer is None else optimizer, **kwargs)
    return model


@pytest.mark.parametrize("form", [dict, list])
def test_several_outputs(form):
    """Loss weights, per-output metrics and sample weights, as Keras evaluates them."""
    arrange = lambda left, right: (  # noqa: E731
        {"left": left, "right": right} if form is dict else [left, right]
    )
    model = two_outputs(
        form,
        loss=arrange("mse", LOSS),
        loss_weights=arrange(0.25, 2.0),
        metrics=arrange(["mae"], ["accuracy"]),
    )
    y = arrange(X[:, :2], Y)
    history = tiny.fit(model, X, y, batch_size=12)
    logs = {name: values[0] for name, values in history.history.items()}
    expected = model.evaluate(X, y, verbose=0, return_dict=True)
    assert set(logs) == set(expected)
    assert "left_loss" in logs and "right_accuracy" in logs
    assert logs == pytest.approx(expected, rel=1e-4)
    weight = np.linspace(0, 1, 12).astype("float32")
    weights = arrange(weight, 1 - weight)
    history = tiny.fit(model, X, y, batch_size=12, sample_weight=weights)
    logs = {name: values[0] for name, values in history.history.items()}
    expected = model.evaluate(X, y, sample_weight=weights, verbose=0, return_dict=True)
    assert logs == pytest.approx(expected, rel=1e-4)


def test_outputs_without_a_loss_do_not_train():
    model = two_outputs(dict, tiny.exact_sgd(0.5), loss={"left": "mse"})
    before = [w.numpy() for w in model.get_layer("right").weights]
    left = [w.numpy() for w in model.get_layer("left").weights]
    tiny.fit(model, X, {"left": X[:, :2]}, batch_size=12)
    assert not tiny.moved(before, model.get_layer("right").get_weights())
    assert tiny.moved(left, model.get_layer("left").get_weights())


# --- weights of rows -----------------------------------------------------------------


def reference_step(x, y, rate, **kwargs):
    """One step of Keras' SGD on all rows, from the same weights."""
    plain = keras.Sequential([keras.Input((4,)), *tiny.softmax_layers()])
    plain.compile(keras.optimizers.SGD(rate), LOSS)
    plain.fit(x, y, batch_size=len(y), shuffle=False, verbose=0, **kwargs)
    return plain.get_weights()


@pytest.mark.parametrize("form", ["sample_weight", "class_weight", "none"])
def test_an_exact_step_is_keras_step(form):
    kwargs = {
        "sample_weight": {"sample_weight": np.linspace(0, 3, 12)},
        "class_weight": {"class_weight": {0: 0.5, 1: 2.0, 2: 0.0}},
        "none": {},
    }[form]
    model = tiny.classifier(tiny.exact_sgd(0.5, microbatch_size=5))
    tiny.fit(model, X, Y, batch_size=12, **kwargs)
    for a, b in zip(
        model.get_weights(), reference_step(X, Y, 0.5, **kwargs), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_class_weight_of_one_hot_targets_and_data_sets():
    weight = {0: 0.5, 1: 2.0, 2: 0.0}
    expected = reference_step(X, Y, 0.5, class_weight=weight)
    for data in (
        (X, keras.utils.to_categorical(Y)),
        (tf.data.Dataset.from_tensor_slices((X, Y)).batch(12),),
    ):
        loss = "categorical_crossentropy" if len(data) == 2 else LOSS
        optimizer = tiny.exact_sgd(0.5, expected_batch_size=12)
        model = tiny.classifier(optimizer, loss=loss)
        tiny.fit(model, *data, class_weight=weight)
        for a, b in zip(model.get_weights(), expected, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_class_weight_and_sample_weight_together_raise():
    with pytest.raises(ValueError, match="class_weight"):
        tiny.fit(
            tiny.classifier(),
            X,
            Y,
            batch_size=4,
            class_weight={0: 1.0},
            sample_weight=np.ones(12),
        )


# --- what trains ---------------------------------------------------------------------


def test_frozen_layers_stay_and_are_not_in_the_norm():
    """The clip is of the trained layer's gradient alone."""
    clip, rate = 1e-3, 1.0
    optimizer = tiny.exact_sgd(rate, l2_norm_clip=clip)
    model = tiny.classifier(optimizer)
    model.layers[0].trainable = False
    model.compile(optimizer, LOSS)
    frozen = model.layers[0].get_weights()
    before = model.layers[1].get_weights()
    tiny.fit(model, X[:1], Y[:1], batch_size=1)
    assert not tiny.moved(frozen, model.layers[0].get_weights())
    change = [b - a for a, b in zip(before, model.layers[1].get_weights(), strict=True)]
    norm = np.sqrt(sum(np.sum(c.astype("float64") ** 2) for c in change))
    assert norm == pytest.approx(clip * rate, rel=2e-3)


def test_freezing_and_compiling_again_goes_on():
    model = tiny.classifier()
    tiny.fit(model, X, Y, batch_size=4)
    model.layers[0].trainable = False
    model.compile(tiny.private_sgd(), LOSS)
    frozen = model.layers[0].get_weights()
    tiny.fit(model, X, Y, batch_size=4)
    assert not tiny.moved(frozen, model.layers[0].get_weights())
    assert tiny.steps(model) == 6
    model.layers[0].trainable = True
    model.compile(tiny.private_sgd(), LOSS)
    tiny.fit(model, X, Y, batch_size=4)
    assert tiny.moved(frozen, model.layers[0].get_weights())
    assert tiny.steps(model) == 9
    assert "outside" not in tiny.notes(model)


def test_freezing_without_compiling_again_raises():
    model = tiny.classifier()
    tiny.fit(model, X, Y, batch_size=4)
    model.layers[0].trainable = False
    with pytest.raises(ValueError, match="[Cc]ompile"):
        tiny.fit(model, X, Y, batch_size=4)
    assert tiny.steps(model) == 3


@pytest.mark.parametrize(
    "layer",
    [
        keras.layers.Dropout(0.5),
        keras.layers.GaussianNoise(0.5),
        keras.layers.SpatialDropout1D(0.5),
    ],
    ids=lambda layer: layer.name,
)
def test_random_layers_train(layer):
    inputs = keras.Input((4, 1))
    hidden = layer(keras.layers.Dense(6)(inputs))
    outputs = keras.layers.Dense(3, activation="softmax")(
        keras.layers.Flatten()(hidden)
    )
    model = keras_dpopt.DPModel(inputs, outputs)
    model.compile(tiny.exact_sgd(), LOSS)
    history = tiny.fit(model, X, Y, batch_size=12, epochs=4)
    # The weights stay, so the losses differ by the masks alone.
    assert len(set(history.history["loss"])) == 4


def test_random_layers_do_not_depend_on_the_microbatch_size():
    """Where records are evaluated one by one; see rule 10 of docs/design.md."""
    results = []
    for size in (5, 20):
        model = keras_dpopt.DPSequential(
            [
                keras.Input((4,)),
                keras.layers.Dropout(0.5),
                *tiny.softmax_layers(),
            ]
        )
        optimizer = tiny.exact_sgd(
            0.5, microbatch_size=size, gradient_engine="vectorized"
        )
        model.compile(optimizer, LOSS)
        tiny.fit(model, X, Y, batch_size=12, epochs=2)
        results.append(model.get_weights())
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_records_get_masks_of_their_own():
    """Twelve equal rows under dropout have different losses."""
    inputs = keras.Input((50,))
    outputs = keras.layers.Dense(1, kernel_initializer="ones")(
        keras.layers.Dropout(0.5)(inputs)
    )
    model = keras_dpopt.DPModel(inputs, outputs)
    seen = []

    def spread(y_true, y_pred):
        del y_true
        tf.py_function(lambda p: seen.append(p.numpy().ravel()), [y_pred], [])
        return keras.ops.mean(y_pred)

    model.compile(tiny.exact_sgd(microbatch_size=12), "mse", metrics=[spread])
    tiny.fit(model, np.ones((12, 50)), np.zeros((12, 1)), batch_size=12)
    assert len(set(seen[-1])) > 6


# --- the ledger ----------------------------------------------------------------------


def test_ten_updates_are_ten_steps_through_recompiles():
    model = tiny.classifier()
    for optimizer in (
        None,
        tiny.private_sgd(),
        tiny.private_sgd(l2_norm_clip=2.0),
        keras_dpopt.DPAdam(0.1, l2_norm_clip=1.0, noise_multiplier=1.0),
        keras_dpopt.FiBeR(0.1, l2_norm_clip=1.0, noise_multiplier=1.0),
    ):
        if optimizer is not None:
            model.compile(optimizer, LOSS)
        tiny.fit(model, X, Y, batch_size=6)
    assert tiny.steps(model) == 10


def test_compiling_again_with_the_same_optimizer_goes_on():
    model = tiny.classifier()
    tiny.fit(model, X, Y, batch_size=6)
    model.compile(model.optimizer, LOSS)
    tiny.fit(model, X, Y, batch_size=6)
    assert tiny.steps(model) == 4
    assert model.optimizer.releases() == 4


def test_a_seeded_optimizer_made_anew_does_not_draw_the_old_noise():
    """The second run's updates would otherwise be the first's."""
    changes = []
    model = tiny.classifier()
    nothing = np.zeros(12)
    for _ in range(2):
        model.compile(tiny.private_sgd(), LOSS)
        before = model.get_weights()
        tiny.fit(model, X, Y, batch_size=12, sample_weight=nothing)
        changes.append(model.get_weights()[0] - before[0])
    assert not np.allclose(changes[0], changes[1])


def test_weights_set_between_fits_are_said():
    model = tiny.classifier()
    tiny.fit(model, X, Y, batch_size=6)
    tiny.fit(model, X, Y, batch_size=6)
    assert "outside" not in tiny.notes(model)
    model.set_weights([w + 1 for w in model.get_weights()])
    tiny.fit(model, X, Y, batch_size=6)
    assert "outside" in tiny.notes(model)
    assert tiny.steps(model) == 6


def test_weights_set_back_are_not_said():
    model = tiny.classifier()
    tiny.fit(model, X, Y, batch_size=6)
    model.set_weights(model.get_weights())
    tiny.fit(model, X, Y, batch_size=6)
    assert "outside" not in tiny.notes(model)


def test_own_training_loop_between_fits_is_said():
    model = tiny.classifier()
    tiny.fit(model, X, Y, batch_size=6)
    with tf.GradientTape() as tape:
        # Of squares: the mean of a softmax is constant, and moves no weight at all.
        loss = keras.ops.mean(keras.ops.square(model(X)))
    plain = keras.optimizers.SGD(0.1)
    plain.apply_gradients(
        zip(
            tape.gradient(loss, model.trainable_variables),
            model.trainable_variables,
            strict=True,
        )
    )
    tiny.fit(model, X, Y, batch_size=6)
    assert "outside" in tiny.notes(model)


def test_the_ledger_is_right_within_a_fit(shared):
    spy, count = tiny.StepSpy(), tiny.steps(shared)
    tiny.fit(shared, X, Y, batch_size=5, epochs=2, callbacks=[spy])
    assert spy.steps == [count + i for i in range(1, 7)]


def test_an_untrained_model_has_spent_nothing():
    statement = tiny.classifier().privacy_statement(delta=1e-5)
    assert (statement.epsilon, statement.steps) == (0, 0)


def test_epsilon_is_that_of_the_calculator():
    model = tiny.classifier()
    tiny.fit(model, X, Y, batch_size=4, epochs=2)
    expected = keras_dpopt.epsilon(
        noise_multiplier=1.0, delta=1e-3, train_size=12, batch_size=4, epochs=2
    )
    assert model.privacy_statement(delta=1e-3).epsilon == pytest.approx(expected)

"""Tests of DPModel, DPSequential and make_private."""

import copy
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
import tiny

import keras_dpopt

LOSS = "sparse_categorical_crossentropy"


class Classifier(keras.Model):
    """An ordinary subclassed model."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden, self.out = tiny.softmax_layers()
        self.dropout = keras.layers.Dropout(0.2)

    def call(self, inputs, training=None):
        return self.out(self.dropout(self.hidden(inputs), training=training))


class PrivateClassifier(keras_dpopt.DPModel):
    """The same as a private class."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden, self.out = tiny.softmax_layers()
        self.was_training = []

    def call(self, x, training):
        self.was_training.append(training)
        return self.out(self.hidden(x))


def functional(model_class):
    inputs = keras.Input((tiny.FEATURES,))
    hidden, out = tiny.softmax_layers()
    return model_class(inputs, out(hidden(inputs)))


def sequential(model_class, built: bool):
    first = [keras.Input((tiny.FEATURES,))] if built else []
    return model_class([*first, *tiny.softmax_layers()])


KINDS = {
    "DPModel": lambda: functional(keras_dpopt.DPModel),
    "DPModel_subclass": PrivateClassifier,
    "DPSequential": lambda: sequential(keras_dpopt.DPSequential, True),
    "DPSequential_unbuilt": lambda: sequential(keras_dpopt.DPSequential, False),
    "functional": lambda: keras_dpopt.make_private(functional(keras.Model)),
    "Sequential": lambda: keras_dpopt.make_private(sequential(keras.Sequential, True)),
    "Sequential_unbuilt": lambda: keras_dpopt.make_private(
        sequential(keras.Sequential, False)
    ),
    "subclassed": lambda: keras_dpopt.make_private(Classifier()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_trains_evaluates_and_predicts(kind):
    model = KINDS[kind]()
    # The engine is chosen where a model may not be built yet.
    chosen = kind not in ("DPModel", "DPSequential", "functional", "Sequential")
    optimizer = tiny.private_sgd(gradient_engine="auto" if chosen else "loop")
    model.compile(optimizer, LOSS, metrics=["accuracy"])
    x, y = tiny.rows()
    history = tiny.fit(model, x, y, batch_size=4, epochs=2)
    assert set(history.history) == {"loss", "accuracy"}
    assert tiny.steps(model) == 6
    before = [w.numpy() for w in model.trainable_weights]
    assert len(before) == 4
    model.train_on_batch(x, y)
    assert all(
        not np.array_equal(b, w.numpy())
        for b, w in zip(before, model.trainable_weights, strict=True)
    )
    assert tiny.steps(model) == 7
    assert len(model.evaluate(x, y, verbose=0)) == 2
    assert model.predict(x, verbose=0).shape == (12, tiny.CLASSES)


def test_kinds_take_the_same_step():
    """One private step does not depend on how the same network was written down."""
    x, y = tiny.rows()
    results = {}
    for kind in set(KINDS) - {"subclassed"}:  # that one has dropout
        model = KINDS[kind]()
        model.compile(tiny.private_sgd(), LOSS)
        tiny.fit(model, x, y, batch_size=4)
        results[kind] = model.get_weights()
    reference = results.pop("DPModel")
    for kind, weights in results.items():
        for expected, weight in zip(reference, weights, strict=True):
            np.testing.assert_allclose(weight, expected, atol=1e-6, err_msg=kind)


def test_subclass_is_called_for_training():
    model = PrivateClassifier()
    model.compile(tiny.private_sgd(), LOSS)
    x, y = tiny.rows()
    tiny.fit(model, x, y, batch_size=4)
    assert True in model.was_training
    model.was_training.clear()
    model.predict(x, verbose=0)
    assert True not in model.was_training


def test_functional_use_does_not_spoil_subclassing():
    bases = keras_dpopt.DPModel.__bases__
    functional(keras_dpopt.DPModel)
    assert keras_dpopt.DPModel.__bases__ == bases

    class Later(keras_dpopt.DPModel):
        def __init__(self):
            super().__init__()
            self.out = keras.layers.Dense(tiny.CLASSES)

        def call(self, x):
            return self.out(x)

    assert Later()(np.ones((2, 4), "float32")).shape == (2, tiny.CLASSES)

    class Functional(keras_dpopt.DPModel):
        def __init__(self, inputs, outputs):
            super().__init__(inputs=inputs, outputs=outputs)

    model = functional(Functional)
    model.compile(tiny.private_sgd(), LOSS)
    tiny.fit(model, *tiny.rows(), batch_size=4)
    assert tiny.steps(model) == 3
    assert isinstance(functional(keras_dpopt.DPModel), keras_dpopt.DPModel)


def test_make_private_shares_the_weights():
    plain = sequential(keras.Sequential, True)
    model = keras_dpopt.make_private(plain)
    model.compile(tiny.private_sgd(), LOSS)
    before = plain.get_weights()
    x, y = tiny.rows()
    tiny.fit(model, x, y, batch_size=4)
    assert model.base_model is plain
    assert tiny.moved(before, plain.get_weights())
    np.testing.assert_array_equal(
        plain.predict(x, verbose=0), model.predict(x, verbose=0)
    )


def test_attributes_of_the_model_inside_are_at_hand():
    model = keras_dpopt.make_private(Classifier())
    assert model.hidden is model.base_model.hidden
    with pytest.raises(AttributeError):
        model.no_such_attribute  # noqa: B018
    assert not hasattr(model, "no_such_attribute")


# --- what make_private refuses -------------------------------------------------------


def trained(model):
    model.compile("sgd", LOSS)
    x, y = tiny.rows()
    model.fit(x, y, verbose=0)
    return model


@pytest.mark.parametrize("build", [functional, lambda c: sequential(c, True)])
def test_refuses_a_trained_model(build):
    model_class = keras.Model if build is functional else keras.Sequential
    with pytest.raises(ValueError, match="public_pretraining=True"):
        keras_dpopt.make_private(trained(build(model_class)))


def test_refuses_a_model_with_a_trained_part():
    part = trained(sequential(keras.Sequential, True))
    inputs = keras.Input((tiny.FEATURES,))
    whole = keras.Model(inputs, keras.layers.Dense(2)(part(inputs)))
    with pytest.raises(ValueError, match="public_pretraining=True"):
        keras_dpopt.make_private(whole)


def test_public_pretraining_is_noted():
    plain = trained(sequential(keras.Sequential, True))
    model = keras_dpopt.make_private(plain, public_pretraining=True)
    assert "public" in tiny.notes(model)
    model.compile(tiny.private_sgd(), LOSS)
    tiny.fit(model, *tiny.rows(), batch_size=4)
    assert "public" in tiny.notes(model)
    assert tiny.steps(model) == 3


@pytest.mark.parametrize("built", [True, False])
def test_says_if_the_model_inside_is_trained_without_privacy_afterwards(built):
    plain = sequential(keras.Sequential, built)
    model = keras_dpopt.make_private(plain)
    model.compile(tiny.private_sgd(), LOSS)
    trained(plain)
    tiny.fit(model, *tiny.rows(), batch_size=4)
    assert "outside" in tiny.notes(model) or "without privacy" in tiny.notes(model)


class OwnStep(keras.Sequential):
    def train_step(self, data):
        return super().train_step(data)


class OwnLoss(keras.Sequential):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


class OwnFit(keras.Sequential):
    def make_train_function(self, force=False):
        return super().make_train_function(force)


@pytest.mark.parametrize(
    ("model_class", "name"), [(OwnStep, "train_step"), (OwnLoss, "compute_loss")]
)
def test_refuses_a_model_with_its_own_training(model_class, name):
    with pytest.raises(keras_dpopt.UnsupportedModelError, match=name) as error:
        keras_dpopt.make_private(model_class([keras.layers.Dense(2)]))
    assert "DPModel" in str(error.value)


@pytest.mark.parametrize(
    "thing", [keras.layers.Dense(2), "model", None, keras.Sequential]
)
def test_refuses_what_is_no_model(thing):
    with pytest.raises(TypeError, match="Keras model"):
        keras_dpopt.make_private(thing)


def test_make_private_makes_a_compiled_model_uncompiled():
    plain = sequential(keras.Sequential, True)
    plain.compile("adam", LOSS)
    model = keras_dpopt.make_private(plain)
    with pytest.raises(ValueError, match="compile"):
        tiny.fit(model, *tiny.rows(), batch_size=4)


# --- the ledger goes with the weights ------------------------------------------------


def privately_trained(steps=3):
    model = functional(keras_dpopt.DPModel)
    model.compile(tiny.private_sgd(), LOSS)
    x, y = tiny.rows()
    tiny.fit(model, x, y, batch_size=4, steps_per_epoch=steps)
    return model


def test_private_of_private_carries_the_ledger_on():
    first = privately_trained()
    second = keras_dpopt.make_private(first)
    assert tiny.steps(second) == 3
    second.compile(tiny.private_sgd(), LOSS)
    tiny.fit(second, *tiny.rows(), batch_size=4)
    assert tiny.steps(second) == 6


@pytest.fixture(scope="module")
def finished():
    """Not trained any more: steps of what shares its weights would count for it."""
    return privately_trained()


def test_part_of_a_private_model_carries_the_ledger_on(finished):
    whole = finished
    part = keras.Model(whole.inputs, whole.layers[1].output)
    model = keras_dpopt.make_private(part)
    assert tiny.steps(model) == 3


@pytest.mark.parametrize("kind", ["DPModel", "DPSequential"])
def test_private_model_of_private_layers_says_what_they_cost(kind, finished):
    """Before its first fit too: the weights are released already."""
    whole = finished
    if kind == "DPModel":
        model = keras_dpopt.DPModel(whole.inputs, whole.layers[1].output)
    else:
        model = keras_dpopt.DPSequential(whole.layers)
    assert tiny.steps(model) == 3
    assert model.privacy_statement(delta=1e-5).epsilon > 0


def test_plain_head_on_a_private_body_carries_the_ledger_on():
    whole = privately_trained()
    inputs = keras.Input((tiny.FEATURES,))
    outputs = keras.layers.Dense(2, activation="softmax")(whole(inputs))
    model = keras_dpopt.make_private(keras.Model(inputs, outputs))
    assert tiny.steps(model) == 3
    model.compile(tiny.private_sgd(), LOSS)
    x, y = tiny.rows()
    tiny.fit(model, x, y % 2, batch_size=4)
    assert tiny.steps(model) == 6


def test_models_that_share_weights_count_each_step_once():
    first = privately_trained()
    second = keras_dpopt.DPModel(first.inputs, first.outputs)
    second.compile(tiny.private_sgd(seed=4), LOSS)
    x, y = tiny.rows()
    tiny.fit(second, x, y, batch_size=4)
    assert tiny.steps(second) == 6
    tiny.fit(first, x, y, batch_size=4)
    assert tiny.steps(first) == 9
    assert tiny.steps(first) == 9
    tiny.fit(second, x, y, batch_size=4)
    assert tiny.steps(second) == 12


def test_a_model_whose_weights_another_one_trained_says_so():
    """Without a fit of its own since."""
    first = privately_trained()
    second = keras_dpopt.make_private(first)
    second.compile(tiny.private_sgd(), LOSS)
    tiny.fit(second, *tiny.rows(), batch_size=4)
    assert tiny.steps(first) == 6


def test_copies_keep_the_ledger(finished):
    assert tiny.steps(copy.deepcopy(finished)) == 3


def test_clone_fails_closed():
    """A clone has new weights; it is private itself, or refuses private optimizers."""
    x, y = tiny.rows()
    for kind in ("DPModel", "DPSequential", "functional"):
        model = KINDS[kind]()
        model.compile(tiny.private_sgd(), LOSS)
        tiny.fit(model, x, y, batch_size=4)
        clone = keras.models.clone_model(model)
        assert tiny.moved(model.get_weights(), clone.get_weights())
        if hasattr(clone, "privacy_statement"):
            clone.compile(tiny.private_sgd(), LOSS)
            tiny.fit(clone, x, y, batch_size=4)
            assert tiny.steps(clone) == 3
            with pytest.raises(ValueError, match="private optimizer"):
                clone.compile("sgd", LOSS)
        else:
            clone.compile(tiny.private_sgd(), LOSS)
            with pytest.raises(TypeError, match="make_private"):
                tiny.fit(clone, x, y, batch_size=4)


# --- keras_hub -----------------------------------------------------------------------

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "dog", "sat"]
TEXTS = np.array(["the cat", "the dog sat", "cat", "dog", "sat the", "the the dog"])
LABELS = np.array([0, 1, 0, 1, 0, 1])


def text_classifier(preprocessed: bool):
    hub = pytest.importorskip("keras_hub")
    backbone = hub.models.BertBackbone(
        vocabulary_size=len(WORDS),
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        max_sequence_length=8,
    )
    preprocessor = None
    if preprocessed:
        preprocessor = hub.models.BertTextClassifierPreprocessor(
            hub.models.BertTokenizer(vocabulary=WORDS), sequence_length=8
        )
    return hub.models.BertTextClassifier(
        backbone, num_classes=2, preprocessor=preprocessor, activation="softmax"
    )


def test_hub_task_with_preprocessor_takes_strings():
    task = text_classifier(preprocessed=True)
    model = keras_dpopt.make_private(task)
    assert model.preprocessor is task.preprocessor
    model.compile(tiny.private_sgd(expected_batch_size=3), LOSS, metrics=["accuracy"])
    data_set = tf.data.Dataset.from_tensor_slices((TEXTS, LABELS)).batch(3)
    expected = task.predict(TEXTS, verbose=0)
    forms = (
        ((TEXTS, LABELS), TEXTS),
        ((TEXTS.tolist(), LABELS.tolist()), TEXTS.tolist()),
        ((data_set,), data_set.map(lambda x, y: x)),
    )
    for _, rows in forms:
        np.testing.assert_allclose(model.predict(rows, verbose=0), expected, rtol=1e-5)
    for i, (given, _) in enumerate(forms):
        tiny.fit(model, *given)
        assert tiny.steps(model) == 2 * (i + 1)
    history = tiny.fit(model, TEXTS, LABELS, validation_data=(TEXTS, LABELS))
    assert set(history.history) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    for given, _ in forms:
        loss, _ = model.evaluate(*given, verbose=0)
        assert loss == pytest.approx(history.history["val_loss"][-1], rel=1e-5)
    assert tiny.moved([expected], [task.predict(TEXTS, verbose=0)])


def test_hub_task_splits_strings_and_survives_empty_batches():
    model = keras_dpopt.make_private(text_classifier(preprocessed=True))
    optimizer = tiny.private_sgd(expected_batch_size=1, gradient_engine="vectorized")
    model.compile(optimizer, LOSS)
    assert any(not rows for rows in tiny.draws(optimizer, 0, 12, 4, 1))
    history = tiny.fit(model, TEXTS, LABELS, validation_split=0.3, epochs=3)
    assert "val_loss" in history.history
    assert model.privacy_statement(delta=1e-5).train_size == 4
    assert tiny.steps(model) == 12
    model.train_on_batch(TEXTS, LABELS)
    assert tiny.steps(model) == 13


def test_hub_task_without_preprocessor():
    task = text_classifier(preprocessed=False)
    model = keras_dpopt.make_private(task)
    model.compile(tiny.private_sgd(), LOSS)
    ids = np.arange(48).reshape(6, 8) % len(WORDS)
    x = {
        "token_ids": ids.astype("int32"),
        "segment_ids": np.zeros((6, 8), "int32"),
        "padding_mask": np.ones((6, 8), "int32"),
    }
    before = task.get_weights()
    tiny.fit(model, x, LABELS, batch_size=3)
    assert tiny.steps(model) == 2
    assert tiny.moved(before, task.get_weights())
    assert model.evaluate(x, LABELS, verbose=0) > 0
    np.testing.assert_allclose(
        model.predict(x, verbose=0), task.predict(x, verbose=0), rtol=1e-5
    )


def test_configuration_makes_the_same_kind_again():
    for kind in ("functional", "Sequential"):
        model = KINDS[kind]()
        config = json.loads(json.dumps(model.get_config()))
        again = type(model).from_config(config)
        assert isinstance(again, keras_dpopt.PrivateModel)
        assert type(again.base_model) is type(model.base_model)

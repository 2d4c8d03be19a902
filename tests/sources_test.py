"""Tests of what `fit` takes as data, and of what it refuses with a reason."""

import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf
import tiny

import keras_dpopt
from keras_dpopt import fit_arguments, losses, queries
from keras_dpopt.engines import base
from keras_dpopt.types import UnsupportedModelError

X, Y = tiny.rows()
LOSS = "sparse_categorical_crossentropy"


# --- preprocessing that mixes records ------------------------------------------------


class Task(keras.Model):
    """A model with a preprocessor, as a keras_hub task has one."""

    def __init__(self, change, **kwargs):
        super().__init__(**kwargs)
        self.change = change
        self.dense = keras.layers.Dense(tiny.CLASSES, activation="softmax")

    def call(self, inputs):
        return self.dense(inputs)

    def preprocess_samples(self, x, y=None, sample_weight=None):
        x, y = self.change(x, y)
        return keras.utils.pack_x_y_sample_weight(x, y, sample_weight)


def of_inputs(change):
    return lambda x, y: (change(x), y)


def pad_to_longest(x):
    """Numbers of tokens become vectors of ones as long as the longest."""
    lengths = tf.cast(tf.abs(x[:, 0]) * 10 + 1, tf.int32)
    mask = tf.sequence_mask(lengths, dtype=tf.float32)
    return mask[:, :, tf.newaxis] * x[:, tf.newaxis, :]


def mix_up(x, y):
    share = tf.random.uniform([])
    other = tf.random.shuffle(tf.range(tf.shape(x)[0]))
    return share * x + (1 - share) * tf.gather(x, other), y


MIXING = {
    "mean": of_inputs(lambda x: x - tf.reduce_mean(x, axis=0)),
    "tiny": of_inputs(lambda x: x + 1e-4 * tf.reduce_max(x)),
    "longest": of_inputs(pad_to_longest),
    "targets": lambda x, y: (x, None if y is None else tf.reverse(y, [0])),
    "mix_up": mix_up,
    "fewer": of_inputs(lambda x: x[:1]),
}
APART = {
    "scale": of_inputs(lambda x: x / 255.0),
    "norm": of_inputs(lambda x: x / tf.norm(x, axis=1, keepdims=True)),
    "nan": of_inputs(lambda x: x / tf.zeros([])),
}


def task(change):
    model = keras_dpopt.make_private(Task(change))
    model.compile(tiny.private_sgd(expected_batch_size=4), LOSS)
    return model


class Batches(keras.utils.PyDataset):
    """X and Y in batches of four; `length` as it is said to be."""

    def __init__(self, length):
        super().__init__()
        self.length = length

    @property
    def num_batches(self):
        return self.length

    def __getitem__(self, index):
        return X[4 * index : 4 * index + 4], Y[4 * index : 4 * index + 4]


def forms():
    data_set = tf.data.Dataset.from_tensor_slices((X, Y))
    empty_first = data_set.take(0).batch(4).concatenate(data_set.batch(4))
    return {
        "arrays": (X, Y),
        "data set": (data_set.batch(4),),
        "empty first": (empty_first,),
        "PyDataset": (Batches(3),),
    }


@pytest.mark.parametrize("form", forms())
@pytest.mark.parametrize("name", MIXING)
def test_mixing_preprocessing_is_refused(name, form):
    model = task(MIXING[name])
    with pytest.raises(UnsupportedModelError, match="fixed sequence length"):
        tiny.fit(model, *forms()[form])
    assert tiny.steps(model) == 0


@pytest.mark.parametrize("name", MIXING)
def test_mixing_preprocessing_of_one_batch_is_refused(name):
    model = task(MIXING[name])
    with pytest.raises(UnsupportedModelError, match="record by record"):
        model.train_on_batch(X, Y)
    assert tiny.steps(model) == 0


@pytest.mark.parametrize(
    ("name", "form"),
    [*(("scale", form) for form in forms()), ("norm", "data set"), ("nan", "arrays")],
)
def test_preprocessing_of_each_row_passes(name, form):
    model = task(APART[name])
    tiny.fit(model, *forms()[form])
    assert tiny.steps(model) == 3
    assert "preprocessing" not in tiny.notes(model)


def test_random_preprocessing_is_noted():
    noise = of_inputs(lambda x: x + tf.random.normal(tf.shape(x)))
    tiny.fit(model := task(noise), X, Y)
    assert "preprocessing is random" in tiny.notes(model)


def test_rarely_random_preprocessing_is_not_taken_for_mixing():
    def change(x):
        hit = tf.random.uniform([tf.shape(x)[0], 1]) < 0.3
        return tf.where(hit, 0.0, x)

    for _ in range(3):
        tiny.fit(task(of_inputs(change)), X, Y)


def test_preprocessing_of_a_generator_is_noted():
    batches = ((X[:4], Y[:4]) for _ in range(3))
    tiny.fit(model := task(APART["scale"]), batches)
    assert "cannot be read again" in tiny.notes(model)
    assert tiny.steps(model) == 3  # none was taken away to look at it


def test_one_row_has_nothing_to_mix_with():
    task(MIXING["mean"]).train_on_batch(X[:1], Y[:1])


# --- once_per_epoch ------------------------------------------------------------------


@pytest.mark.parametrize(
    "endless", [lambda: forms()["data set"][0].repeat(), lambda: Batches(None)]
)
def test_an_endless_data_set_is_not_once_per_epoch(endless):
    model = tiny.classifier(tiny.private_sgd(expected_batch_size=4))
    with pytest.raises(ValueError, match=r"no end .* Leave out `repeat\(\)`"):
        tiny.fit(model, endless(), once_per_epoch=True, train_size=12)
    assert tiny.steps(model) == 0


@pytest.mark.parametrize("form", ["data set", "PyDataset"])
def test_a_finite_data_set_may_be_once_per_epoch(form):
    model = tiny.classifier(tiny.private_sgd(expected_batch_size=4))
    tiny.fit(model, *forms()[form], once_per_epoch=True, train_size=12)
    assert tiny.steps(model) == 3


# --- callbacks that decide on the training data --------------------------------------


def test_terminate_on_nan_reads_the_training_loss():
    model = tiny.classifier(tiny.private_sgd(expected_batch_size=4))
    callbacks = [keras.callbacks.TerminateOnNaN()]
    with pytest.raises(ValueError, match="TerminateOnNaN.*acknowledge_training"):
        tiny.fit(model, X, Y, callbacks=callbacks)
    tiny.fit(model, X, Y, callbacks=callbacks, acknowledge_training_metrics=True)
    assert "TerminateOnNaN" in tiny.notes(model)


STOP = [keras.callbacks.EarlyStopping(monitor="val_loss")]
TENSOR, LIST = tf.constant(X), ["the cat", "the dog"]


@pytest.mark.parametrize(
    ("x", "held"),
    [
        (X, (X, Y)),
        (X, [X, Y]),
        (X, (X[:3], Y[:3])),
        (X[:8], (X[4:], Y[4:])),
        ({"a": X, "b": Y}, ({"a": X[2:], "b": Y[2:]}, Y[2:])),
        (TENSOR, (TENSOR, Y)),
        (LIST, (LIST, [0, 1])),
    ],
)
def test_validation_on_the_training_rows_is_training(x, held):
    check = fit_arguments.check_training_metric_callbacks
    with pytest.raises(ValueError, match="of the training rows.*acknowledge"):
        check(STOP, False, x, held)
    (found,) = check(STOP, True, x, held)
    assert "val_loss" in found and "of the training rows" in found
    assert check(STOP, False) == []


@pytest.mark.parametrize(
    ("x", "held"),
    [
        (X, None),
        (X, (X.copy(), Y)),
        (X[:8], (X[8:], Y[8:])),
        (X[::2], (X[1::2], Y[1::2])),
        (["cat", "dog"], (["cat", "sat"], [0, 1])),
    ],
)
def test_validation_on_other_rows_is_not(x, held):
    assert fit_arguments.check_training_metric_callbacks(STOP, False, x, held) == []


# --- weights without a gradient ------------------------------------------------------


class Cached(keras.layers.Layer):
    """A layer whose call TensorFlow traces once, as the model is built."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(tiny.CLASSES)

    def build(self, shape):
        self.dense.build(shape)

    @tf.function
    def call(self, inputs):
        return self.dense(inputs)


class Unused(keras.layers.Layer):
    """A layer with a weight that its output does not depend on."""

    def build(self, shape):
        self.idle = self.add_weight(shape=(2, 3), name="idle")
        self.scale = self.add_weight(shape=(), name="scale")

    def call(self, inputs):
        return inputs * self.scale


def compiled(*layers, **kwargs):
    model = keras_dpopt.DPSequential([keras.Input((tiny.FEATURES,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tiny.private_sgd(**kwargs), loss)
    return model


@pytest.mark.parametrize("engine", ["auto", "vectorized", "loop"])
def test_a_weight_without_gradient_is_named(engine):
    layers = Unused(), keras.layers.Dense(tiny.CLASSES)
    model = compiled(*layers, gradient_engine=engine, noise_multiplier=0.0)
    before = [w.numpy() for w in model.trainable_variables]
    with pytest.warns(UserWarning, match="Gradients do not exist for var") as caught:
        tiny.fit(model, X, Y, batch_size=4)
    texts = {str(w.message).partition(" when")[0] for w in caught}
    assert any(text.endswith(("[number 0]", "/idle']")) for text in texts)
    idle, *others = [
        np.array_equal(a, b.numpy())
        for a, b in zip(before, model.trainable_variables, strict=True)
    ]
    assert idle and not any(others)


@pytest.mark.parametrize("engine", ["auto", "vectorized", "loop"])
def test_no_gradient_at_all_is_refused(engine):
    model = compiled(Cached(), gradient_engine=engine)
    with pytest.raises(ValueError, match="any trainable variable.*@tf.function"):
        tiny.fit(model, X, Y, batch_size=4)
    assert tiny.steps(model) == 0


def test_only_a_weight_without_gradient_at_any_point_is_named():
    """Weight 0 counts at the first point alone, weight 1 at none, weight 2 at both."""
    first, second = (tuple(tf.fill([1], v) for v in (a, 1.0, 2.0)) for a in (3.0, 4.0))

    def evaluate(weights, seeds, record):
        loss = tf.reduce_sum(weights[2]) * record
        loss += tf.reduce_sum(weights[0]) if weights[0] is first[0] else 0.0
        return losses.RecordOutputs(loss, record[tf.newaxis], {})

    points = queries.Point(2.0, first), queries.Point(-1.0, second)
    problem = base.GradientProblem(evaluate, lambda r: r, points, names=("a", "b", "c"))
    with pytest.warns(UserWarning, match=r"variables \['b'\]"):
        record, _ = base.clipped_record(problem, tf.constant(5.0), None)
    assert [g.numpy().tolist() for g in record] == [[2.0], [0.0], [5.0]]


# --- arguments -----------------------------------------------------------------------


def test_a_clip_that_float32_cannot_hold_is_refused():
    for clip in (1e-21, 1e-40):
        with pytest.raises(ValueError, match="below 1e-20.*larger clipping norm"):
            tiny.private_sgd(l2_norm_clip=clip)
    assert tiny.private_sgd(l2_norm_clip=1e-20)


RAGGED = tf.ragged.constant([[1.0], [1.0, 2.0]])
SPARSE, ROWS = tf.sparse.from_dense(X), scipy.sparse.csr_matrix(X)
only = tf.data.Dataset.from_tensors


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: (RAGGED, Y[:2]), "RaggedTensor.*to_tensor"),
        (lambda: (SPARSE, Y), "SparseTensor.*to_dense"),
        (lambda: ({"a": ROWS}, Y), "csr_matrix.*toarray"),
        (lambda: (iter([X, X]), Y), "list_iterator.* Pass arrays"),
        (lambda: (zip(X, Y, strict=True),), "iterator .zip.* Pass arrays"),
        (lambda: (iter(forms()["data set"][0]),), "tor.* Pass arrays"),
        (lambda: (only((RAGGED, Y[:2])),), "RaggedTensor.*with `map`"),
        (lambda: (only((SPARSE, Y)),), "SparseTensor.*with `map`"),
        (lambda: ((ROWS, Y) for _ in range(2)), "SparseTensor.*with `map`"),
    ],
)
def test_other_kinds_of_data_are_refused(given, message):
    model = tiny.classifier(tiny.private_sgd(expected_batch_size=4))
    given = given()
    with pytest.raises(TypeError, match=message):
        tiny.fit(model, *(given if isinstance(given, tuple) else (given,)))
    assert tiny.steps(model) == 0


def test_other_kinds_of_data_in_one_batch_are_refused():
    model = tiny.classifier(tiny.private_sgd(expected_batch_size=4))
    with pytest.raises(TypeError, match="SparseTensor"):
        model.train_on_batch(SPARSE, Y)
    with pytest.raises(TypeError, match="RaggedTensor"):
        task(of_inputs(lambda x: x)).train_on_batch(RAGGED, Y[:2])


@pytest.mark.parametrize("form", forms())
def test_ragged_outputs_of_a_preprocessing_are_refused(form):
    model = task(of_inputs(tf.RaggedTensor.from_tensor))
    with pytest.raises(TypeError, match="RaggedTensor"):
        tiny.fit(model, *forms()[form])

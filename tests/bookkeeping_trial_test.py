"""The trial of the book-keeping engine: what it refuses, and what trains then."""

import threading

import keras
import pytest
import tensorflow as tf
from bookkeeping_cases import (
    BOOKKEEPING,
    IMAGES,
    LOOP,
    SERIES,
    VECTORS,
    Lambda,
    M,
    case,
    draw,
    flat,
    mlp,
    model,
    relative,
)
from keras import layers, ops

import keras_dpopt
from keras_dpopt.engines import trial
from keras_dpopt.engines.separation import Separation


def tried(made):
    """Puts the engine on trial, on the case's rows."""
    specs = tf.nest.map_structure(
        lambda t: tf.TensorSpec(t.shape[1:], t.dtype), made.rows
    )
    made.microbatch.try_engine(BOOKKEEPING, specs, made.rows)


def trained(make, x, engine="auto", loss="mse"):
    """The change of the weights by one step, and the engine that made it."""
    made = make()
    made.compile(
        keras_dpopt.DPSGD(
            1.0,
            l2_norm_clip=0.3,
            noise_multiplier=0.0,
            expected_batch_size=M,
            gradient_engine=engine,
            seed=3,
        ),
        loss=loss,
    )
    y = draw(*made(x).shape, seed=5)
    for i, weight in enumerate(made.trainable_variables):
        weight.assign(draw(*weight.shape, seed=i, scale=0.5))
    before = flat(made.get_weights())
    made.train_on_batch(x, y)
    return flat(made.get_weights()) - before, made.private_step.microbatch


def _rows(x):
    return ops.cast(ops.arange(ops.shape(x)[0]), "float32")[:, None]


@tf.custom_gradient
def _mixed(x):
    return tf.identity(x), lambda b: b - tf.reduce_mean(b, 0, keepdims=True)


@pytest.fixture
def without_proof(monkeypatch):
    """The trial alone: what it shows, where the proof of `separation.py` had a hole."""
    for name in ("check", "check_use"):
        monkeypatch.setattr(Separation, name, lambda *_: None)


COUPLED = {
    "less the mean": lambda x: x - ops.mean(x, axis=0, keepdims=True),
    "times the size": lambda x: x * ops.cast(ops.shape(x)[0], "float32"),
    "unit norm": lambda x: x / ops.norm(x, axis=0, keepdims=True),
    "softmax": lambda x: ops.softmax(x, axis=0),
    "sorted": lambda x: ops.sort(x, axis=0),
    "transposed": lambda x: ops.reshape(ops.transpose(x), ops.shape(x)),
    "shifted": lambda x: x + ops.roll(x, 1, axis=0),
    "in the gradient": _mixed,
}


@pytest.mark.usefixtures("without_proof")
@pytest.mark.filterwarnings("ignore:You are using a softmax over axis 0")
@pytest.mark.parametrize("dropout", [False, True], ids=["plain", "dropout"])
@pytest.mark.parametrize("name", COUPLED)
def test_coupled_records_are_refused(name, dropout):
    """Dropout draws row by row, which hides some differences between batches."""
    parts = [layers.Dropout(0.5)] if dropout else []
    made = model(
        layers.Dense(4, "tanh"), Lambda(COUPLED[name]), *parts, layers.Dense(2)
    )
    with pytest.raises(trial.CoupledRecordsError):
        tried(case(made, VECTORS, seed=3))


class Shuffled(layers.Layer):
    """Swaps the records of a batch, as layers that mix them do."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(1)

    def call(self, x):
        order = keras.random.shuffle(ops.arange(ops.shape(x)[0]), seed=self.seed)
        return ops.take(x, order, axis=0)


@pytest.mark.usefixtures("without_proof")
@pytest.mark.parametrize("seed", [3, 6])
def test_a_random_coupling_is_refused(seed):
    """Of three records, the draws of seed 6 would leave each where it is."""
    made = model(layers.Dense(4), Shuffled(), layers.Dense(2))
    with pytest.raises(trial.CoupledRecordsError):
        tried(case(made, VECTORS, seed=seed))


@pytest.mark.parametrize("dropout", [False, True], ids=["plain", "dropout"])
def test_the_number_of_the_row_is_refused(dropout):
    """It is how many records come before, so a record moves all that follow."""
    parts = [layers.Dropout(0.5)] if dropout else []
    numbered = Lambda(lambda x: x + _rows(x))
    made = model(layers.Dense(4), numbered, *parts, layers.Dense(2))
    with pytest.raises(trial.CoupledRecordsError):
        tried(case(made, VECTORS, seed=3))


def test_other_dimensions_are_no_coupling():
    """The same functions along another axis."""
    made = model(
        layers.Dense(4, "tanh"),
        Lambda(lambda x: x - ops.mean(x, axis=-1, keepdims=True)),
        Lambda(
            lambda x: (
                ops.sort(x, axis=1) + ops.softmax(x) / ops.norm(x, axis=1)[:, None]
            )
        ),
        layers.Dropout(0.5),
        layers.GaussianNoise(0.1),
        layers.Dense(2),
    )
    tried(case(made, VECTORS, seed=3))


@pytest.mark.parametrize("name", ["less the mean", "times the size"])
def test_auto_trains_a_coupled_model_as_the_loop_does(name):
    """There each record is a batch of its own."""

    def make():
        return model(layers.Dense(4), Lambda(COUPLED[name]), layers.Dense(2))

    got, microbatch = trained(make, VECTORS)
    assert microbatch.engine is not BOOKKEEPING
    assert "record" in microbatch.reasons["bookkeeping"]
    assert relative(got, trained(make, VECTORS, "loop")[0]) <= 1e-5


def test_a_loss_that_mixes_rows_gets_one_at_a_time():
    """So it is no reason against the engine, with Dropout or without."""

    def loss(y_true, y_pred):
        return ops.mean((y_pred - 0.5 * ops.mean(y_pred, axis=0) - y_true) ** 2)

    got, microbatch = trained(mlp, VECTORS, loss=loss)
    assert microbatch.engine is BOOKKEEPING
    assert relative(got, trained(mlp, VECTORS, "loop", loss)[0]) <= 2e-5
    made = model(layers.Dense(4), layers.Dropout(0.5), layers.Dense(2))
    tried(case(made, VECTORS, loss=loss, seed=3))


# --- what the engine cannot follow ---------------------------------------------------


def _selected():
    return model(Lambda(lambda x, w: ops.where(x > 0, w, x), (6,)), layers.Dense(2))


def test_an_operation_without_a_rule_is_named():
    with pytest.raises(keras_dpopt.UnsupportedModelError, match="SelectV2.*'auto'"):
        trained(_selected, VECTORS, "bookkeeping")


class AddsLoss(layers.Layer):
    def call(self, x):
        self.add_loss(ops.mean(x**2))
        return x


OTHERS = {
    "no rule": _selected,
    "activity regularizer": lambda: model(
        layers.Dense(4, activity_regularizer="l2"), layers.Dense(2)
    ),
    "add_loss": lambda: model(layers.Dense(4), AddsLoss(), layers.Dense(2)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_auto_takes_another_engine(name):
    got, microbatch = trained(OTHERS[name], VECTORS)
    assert microbatch.engine is not BOOKKEEPING
    assert microbatch.reasons["bookkeeping"]
    assert relative(got, trained(OTHERS[name], VECTORS, "loop")[0]) <= 1e-5


def test_time_before_records_is_refused():
    """Rows of `[T*m, ...]` in the order of the steps would be taken for another's."""

    def function(x, w):
        steps = ops.reshape(ops.transpose(x, (1, 0, 2)), (-1, 6))
        return ops.transpose(ops.reshape(steps @ w, (9, -1, 5)), (1, 0, 2))

    made = case(model(Lambda(function, (6, 5))), SERIES)
    with pytest.raises(NotImplementedError):
        tried(made)


# --- nothing is touched --------------------------------------------------------------


def _state(layer):
    """What `vars` says of a layer, down to the identity of each value."""
    return {name: id(value) for name, value in vars(layer).items()}


def test_nothing_of_the_layers_is_patched():
    made = case(model(layers.Conv2D(3, 3), layers.Flatten(), layers.Dense(2)), IMAGES)
    every = [made.microbatch._model, *made.microbatch._model.layers]
    before = [_state(layer) for layer in every]
    classes = [dict(vars(type(layer))) for layer in every]
    made.bookkeeping(1.0)
    tried(made)
    assert [_state(layer) for layer in every] == before
    assert [dict(vars(type(layer))) for layer in every] == classes


def test_models_that_share_a_layer():
    """A layer of both, used once and twice: each has the sums of its loop."""
    shared = layers.Dense(6, "tanh")
    first = case(model(shared, layers.Dense(3)), SERIES)
    second = case(
        keras_dpopt.DPModel(i := keras.Input((9, 6)), shared(shared(i))), SERIES
    )
    for made in (first, second, first):
        assert relative(made.sum(BOOKKEEPING), made.sum(LOOP)) <= 1e-5


def test_threads_that_trace_at_once():
    """Two models with a common layer, each in a thread of its own."""
    shared = layers.Dense(6, "tanh")
    cases = [case(model(shared, layers.Dense(n)), SERIES) for n in (2, 3)]
    want = [made.sum(LOOP) for made in cases]
    start, got = threading.Barrier(2), [[], []]

    def run(i):
        start.wait()
        for _ in range(3):
            got[i].append(cases[i].sum(BOOKKEEPING))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(2):
        assert [relative(sums, want[i]) <= 1e-5 for sums in got[i]] == [True] * 3


def test_a_model_trains_after_an_exception_while_tracing():
    class Fails(layers.Layer):
        on = False

        def call(self, x):
            if self.on:
                raise RuntimeError("while tracing")
            return x

    layer = Fails()
    made = case(model(layers.Dense(4), layer, layers.Dense(2)), VECTORS)
    want = made.sum(LOOP)
    layer.on = True
    with pytest.raises(RuntimeError, match="while tracing"):
        made.sum(BOOKKEEPING)
    layer.on = False
    assert relative(made.sum(BOOKKEEPING), want) <= 1e-5
    tried(made)

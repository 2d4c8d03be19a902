"""Tests of the way from the user's data to the logical batches of the steps."""

import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
import tiny

import keras_dpopt
from keras_dpopt import private_step

LOSS = "sparse_categorical_crossentropy"
X, Y = tiny.rows()


class Spied(keras_dpopt.DPModel):
    """A model whose loss metric tells which rows came: column 0 is the row number."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.out = keras.layers.Dense(1)

    def call(self, inputs):
        return self.out(inputs)


def numbered(size):
    """Rows that carry their number as the target."""
    return np.ones((size, 2), "float32"), np.arange(size, dtype="float32")[:, None]


def spied(optimizer, **kwargs):
    """A model and the list of targets that its training metric gets, by microbatch."""
    model, spy = Spied(), tiny.RowSpy()
    model.compile(optimizer, "mse", metrics=[spy], **kwargs)
    return model, spy.seen


# --- drawn batches -------------------------------------------------------------------


@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_rows_are_the_samplers_draws(steps_per_execution):
    """Two fits, several epochs: step t gets draw t, whatever was prefetched."""
    optimizer = tiny.private_sgd(microbatch_size=100)
    model, seen = spied(optimizer, steps_per_execution=steps_per_execution)
    tiny.fit(model, *numbered(40), batch_size=12, epochs=2)
    tiny.fit(model, *numbered(40), batch_size=12, steps_per_epoch=3)
    expected = tiny.draws(optimizer, 0, 11, 40, 12)
    assert [rows.astype(int).tolist() for rows in seen] == expected


def test_a_stopped_fit_does_not_shift_the_draws():
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 2

    optimizer = tiny.private_sgd(microbatch_size=100)
    model, seen = spied(optimizer)
    for _ in range(3):
        tiny.fit(
            model, *numbered(40), batch_size=12, steps_per_epoch=9, callbacks=[Stop()]
        )
    expected = tiny.draws(optimizer, 0, 9, 40, 12)
    assert [rows.astype(int).tolist() for rows in seen] == expected


def test_runs_draw_different_batches_without_a_seed():
    first, second = (
        tiny.draws(tiny.private_sgd(seed=None), 0, 3, 100, 10) for _ in range(2)
    )
    assert first != second


def test_fixed_size_sampler():
    optimizer = tiny.private_sgd(microbatch_size=100)
    model, seen = spied(optimizer)
    sampler = keras_dpopt.FixedSizeSampler()
    tiny.fit(model, *numbered(40), batch_size=12, sampler=sampler)
    expected = [
        sampler.indices(optimizer.keys.sampler, t, 40, 12).numpy().tolist()
        for t in range(4)
    ]
    assert [rows.astype(int).tolist() for rows in seen] == expected
    statement = model.privacy_statement(delta=1e-3)
    assert statement.neighboring_relation == "replace-one"


def test_all_rows_are_in_every_batch_at_full_size():
    model, seen = spied(tiny.private_sgd(microbatch_size=100))
    tiny.fit(model, *numbered(6), batch_size=6, epochs=3)
    assert [rows.tolist() for rows in seen] == [[0, 1, 2, 3, 4, 5]] * 3


def test_empty_batches_are_steps_of_noise_alone():
    """b=1 of N=50: a third of the batches is empty."""
    optimizer = tiny.private_sgd(1.0, microbatch_size=1)
    model, seen = spied(optimizer)
    drawn = tiny.draws(optimizer, 0, 60, 50, 1)
    assert sum(not rows for rows in drawn) > 10
    x, y = numbered(50)
    history = tiny.fit(model, x, y, batch_size=1, steps_per_epoch=60)
    assert tiny.steps(model) == 60
    assert np.isfinite(history.history["loss"][0])
    flat = [int(n) for rows in seen for n in rows]
    assert flat == [n for rows in drawn for n in rows]


def test_an_empty_batch_moves_the_weights_by_noise():
    optimizer = tiny.private_sgd(1.0)
    first = next(
        t for t, rows in enumerate(tiny.draws(optimizer, 0, 60, 50, 1)) if not rows
    )
    optimizer = tiny.private_sgd(1.0)
    optimizer.skip_releases(first)
    model, seen = spied(optimizer)
    model(np.ones((1, 2), "float32"))
    before = model.get_weights()
    tiny.fit(model, *numbered(50), batch_size=1, steps_per_epoch=1)
    assert seen == []
    assert tiny.steps(model) == 1
    for a, b in zip(before, model.get_weights(), strict=True):
        assert np.all(a != b)


@pytest.mark.parametrize("engine", ["vectorized", "loop"])
def test_padding_never_contributes(engine):
    results = []
    for size in (1, 3, 7, 100):
        optimizer = tiny.private_sgd(
            microbatch_size=size, gradient_engine=engine, l2_norm_clip=0.1
        )
        model = tiny.classifier(optimizer, metrics=["accuracy"])
        history = tiny.fit(model, X, Y, batch_size=5, epochs=2)
        results.append(
            [*model.get_weights(), history.history["loss"], history.history["accuracy"]]
        )
    for result in results[1:]:
        for a, b in zip(results[0], result, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-6)


# --- the caller's batches ------------------------------------------------------------


def ragged(sizes):
    """A data set of batches of these sizes, and the number of its rows."""
    x, y = tiny.rows(sum(sizes))
    parts = np.split(np.arange(len(y)), np.cumsum(sizes)[:-1])

    def generate():
        for part in parts:
            yield x[part], y[part]

    spec = (tf.TensorSpec([None, 4], tf.float32), tf.TensorSpec([None], tf.int64))
    return tf.data.Dataset.from_generator(generate, output_signature=spec)


class Traces:
    """Counts how often the private step is traced."""

    def __init__(self, monkeypatch):
        self.count = 0
        step = private_step.PrivateStep.__call__

        def counting(*args):
            self.count += 1
            return step(*args)

        monkeypatch.setattr(private_step.PrivateStep, "__call__", counting)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_fifty_batch_sizes_trace_the_step_at_most_three_times(jit_compile, monkeypatch):
    optimizer = tiny.private_sgd(
        expected_batch_size=25, microbatch_size=8, gradient_engine="auto"
    )
    model = tiny.classifier(optimizer, jit_compile=jit_compile)
    traces = Traces(monkeypatch)
    data = ragged(range(1, 51))
    tiny.fit(model, data)
    assert tiny.steps(model) == 50
    assert 1 <= traces.count <= 3


def test_poisson_batches_trace_the_step_at_most_three_times(monkeypatch):
    model = tiny.classifier(tiny.private_sgd(microbatch_size=8))
    traces = Traces(monkeypatch)
    x, y = tiny.rows(300)
    tiny.fit(model, x, y, batch_size=25, steps_per_epoch=50)
    tiny.fit(model, x, y, batch_size=25, steps_per_epoch=2)
    assert 1 <= traces.count <= 3


XLA_PROGRAM = """
import sys
import pathlib
import tiny, data_test
optimizer = tiny.private_sgd(
    expected_batch_size=9, microbatch_size=4, gradient_engine="auto"
)
model = tiny.classifier(optimizer, jit_compile=True)
for sizes in ([1], range(1, 30)):
    tiny.fit(model, data_test.ragged(sizes))
    modules = pathlib.Path(sys.argv[1]).glob("module_*before_optimizations.txt")
    print("modules", len(list(modules)))
"""


def test_xla_compiles_once_for_all_numbers_of_microbatches(tmp_path):
    """Counts the modules that XLA dumps after one batch, and after those of 29 sizes.

    In a process of its own: XLA reads its flags once.
    """
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text",
        "PYTHONPATH": os.pathsep.join([str(pathlib.Path(__file__).parent), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, "-c", XLA_PROGRAM, tmp_path],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    one, many = [int(line[1]) for line in lines if line[:1] == ["modules"]]
    assert 1 <= one <= 3
    assert many == one


class Items(keras.utils.PyDataset):
    """Four batches that carry their number; counts the hooks."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.begun = self.ended = 0

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return np.ones((3, 2), "float32"), np.full((3, 1), index, "float32")

    def on_epoch_begin(self):
        self.begun += 1

    def on_epoch_end(self):
        self.ended += 1


@pytest.mark.parametrize("workers", [1, 2])
def test_py_dataset(workers):
    model, seen = spied(tiny.private_sgd(expected_batch_size=3, microbatch_size=10))
    items = Items(workers=workers)
    tiny.fit(model, items, epochs=3)
    assert tiny.steps(model) == 12
    numbers = [int(rows[0]) for rows in seen]
    assert [sorted(numbers[i : i + 4]) for i in (0, 4, 8)] == [[0, 1, 2, 3]] * 3
    assert items.ended == 3


def test_generator():
    def batches():
        for n in range(10):
            yield np.ones((3, 2), "float32"), np.full((3, 1), n, "float32")

    model, seen = spied(tiny.private_sgd(expected_batch_size=3, microbatch_size=10))
    tiny.fit(model, batches(), steps_per_epoch=5, epochs=2)
    assert tiny.steps(model) == 10
    assert [int(rows[0]) for rows in seen] == list(range(10))


def test_data_set_that_ends_within_an_epoch():
    """The statement counts the steps that were made, not those that were asked for."""
    model = tiny.classifier(tiny.private_sgd(expected_batch_size=4))
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    tiny.fit(model, data, steps_per_epoch=5, epochs=2)
    assert tiny.steps(model) == int(model.optimizer.iterations) >= 3


def test_data_set_with_weights_and_repetition():
    weight = np.zeros(12, "float32")
    data = tf.data.Dataset.from_tensor_slices((X, Y, weight)).batch(5).repeat()
    optimizer = tiny.private_sgd(0.5, noise_multiplier=0.0, expected_batch_size=5)
    model = tiny.classifier(optimizer)
    before = model.get_weights()
    tiny.fit(model, data, steps_per_epoch=2, epochs=2)
    assert tiny.steps(model) == 4
    assert not tiny.moved(before, model.get_weights())


def test_data_set_of_dictionaries():
    inputs = {"a": keras.Input((4,), name="a"), "b": keras.Input((4,), name="b")}
    outputs = keras.layers.Dense(3, activation="softmax")(inputs["a"] + inputs["b"])
    model = keras_dpopt.DPModel(inputs, outputs)
    model.compile(tiny.private_sgd(expected_batch_size=5), LOSS)
    data = tf.data.Dataset.from_tensor_slices(({"a": X, "b": X}, Y)).batch(5)
    tiny.fit(model, data, epochs=2)
    assert tiny.steps(model) == 6


def test_batches_larger_than_expected_are_divided_by_the_expected_size():
    """An update of 12 equal rows is 12/4 of the clipped gradient of one."""
    changes = []
    for size in (1, 12):
        optimizer = tiny.private_sgd(
            1.0, noise_multiplier=0.0, l2_norm_clip=1e-3, expected_batch_size=4
        )
        model = tiny.classifier(optimizer)
        before = model.get_weights()
        x, y = np.repeat(X[:1], size, 0), np.repeat(Y[:1], size, 0)
        tiny.fit(model, tf.data.Dataset.from_tensors((x, y)))
        changes.append(model.get_weights()[0] - before[0])
    np.testing.assert_allclose(changes[1], 12 * changes[0], rtol=1e-2, atol=1e-8)


# --- what is assumed of them ---------------------------------------------------------


def declared(**kwargs):
    model = tiny.classifier(tiny.private_sgd(expected_batch_size=4))
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    tiny.fit(model, data, epochs=2, **kwargs)
    return model.privacy_statement(delta=1e-3)


def test_assumptions_about_batches():
    nothing = declared()
    once = declared(once_per_epoch=True)
    poisson = declared(assume="poisson", train_size=12)
    full = {"noise_multiplier": 1.0, "delta": 1e-3, "train_size": 12, "batch_size": 12}
    assert nothing.epsilon == pytest.approx(keras_dpopt.epsilon(**full, epochs=6))
    assert once.epsilon == pytest.approx(keras_dpopt.epsilon(**full, epochs=2))
    full["batch_size"] = 4
    assert poisson.epsilon == pytest.approx(keras_dpopt.epsilon(**full, epochs=2))
    assert poisson.epsilon < once.epsilon < nothing.epsilon
    assert nothing.steps == once.steps == poisson.steps == 6


def test_once_per_epoch_counts_each_fit_as_an_epoch():
    model = tiny.classifier(tiny.private_sgd(expected_batch_size=4))
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    for _ in range(3):
        tiny.fit(model, data, once_per_epoch=True)
    full = {"noise_multiplier": 1.0, "delta": 1e-3, "train_size": 12, "batch_size": 12}
    expected = keras_dpopt.epsilon(**full, epochs=3)
    assert model.privacy_statement(delta=1e-3).epsilon == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"batch_size": 4}, "expected_batch_size"),
        ({"assume": "shuffled"}, "poisson"),
        ({"assume": "poisson"}, "train_size"),
        ({"assume": "poisson", "train_size": 12, "once_per_epoch": True}, "either"),
        ({"once_per_epoch": True, "steps_per_epoch": 2}, "steps_per_epoch"),
        ({"y": Y}, "`y`"),
        ({"sample_weight": np.ones(12)}, "sample_weight"),
        ({"validation_split": 0.5}, "validation_split"),
        ({"sampler": keras_dpopt.PoissonSampler()}, "arrays"),
        ({"assume": "poisson", "train_size": 0}, "train_size"),
        ({"assume": "poisson", "train_size": 2}, "training set of 2"),
    ],
)
def test_refused_with_a_data_set(kwargs, message):
    model = tiny.classifier(tiny.private_sgd(expected_batch_size=4))
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    with pytest.raises(ValueError, match=message):
        tiny.fit(model, data, **kwargs)
    assert tiny.steps(model) == 0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"shuffle": False, "batch_size": 4}, "shuffle=False"),
        ({"once_per_epoch": True, "batch_size": 4}, "once_per_epoch"),
        ({"assume": "poisson", "batch_size": 4}, "assume"),
        ({"train_size": 12, "batch_size": 4}, "train_size"),
        ({"batch_size": 13}, "batch size of at most 12"),
        ({}, "batch_size"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": -4}, "batch_size"),
    ],
)
def test_refused_with_arrays(kwargs, message):
    model = tiny.classifier()
    with pytest.raises(ValueError, match=message):
        tiny.fit(model, X, Y, **kwargs)
    assert tiny.steps(model) == 0


def test_a_data_set_needs_an_expected_batch_size():
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    with pytest.raises(ValueError, match="expected_batch_size"):
        tiny.fit(tiny.classifier(), data)
    with pytest.raises(ValueError, match="expected_batch_size"):
        tiny.classifier().train_on_batch(X, Y)


def test_one_batch_size_for_constructor_and_fit():
    model = tiny.classifier(tiny.private_sgd(expected_batch_size=4))
    with pytest.raises(ValueError, match="expected_batch_size"):
        tiny.fit(model, X, Y, batch_size=6)
    tiny.fit(model, X, Y)
    tiny.fit(model, X, Y, batch_size=4)
    assert tiny.steps(model) == 6
    model = tiny.classifier()
    tiny.fit(model, X, Y, batch_size=4)
    with pytest.raises(ValueError, match="new optimizer"):
        tiny.fit(model, X, Y, batch_size=6)


def test_a_batch_size_that_is_too_large_is_refused_before_it_is_kept():
    model = tiny.classifier()
    with pytest.raises(ValueError, match="batch size of at most 12"):
        tiny.fit(model, X, Y, batch_size=13)
    tiny.fit(model, X, Y, batch_size=4)
    assert tiny.steps(model) == 3


def test_different_numbers_of_rows_are_refused():
    for data, kwargs in (
        ((X, Y[:-1]), {}),
        ((X, Y), {"sample_weight": np.ones(11)}),
        (([X, X[:-1]], Y), {}),
    ):
        with pytest.raises(ValueError, match="11"):
            tiny.fit(tiny.classifier(), *data, batch_size=4, **kwargs)


# --- kinds of arrays -----------------------------------------------------------------


def rounded():
    """X in numbers that float16 has."""
    return np.round(X, 1).astype("float16").astype("float32")


@pytest.fixture(scope="module")
def weights_by_float32():
    reference = tiny.classifier()
    tiny.fit(reference, rounded(), Y, batch_size=4)
    return reference.get_weights()


@pytest.mark.parametrize(
    "convert",
    [
        lambda a: a.astype("float64") if a.dtype.kind == "f" else a.astype("int64"),
        lambda a: a.astype("float16") if a.dtype.kind == "f" else a.astype("uint8"),
        lambda a: pd.DataFrame(a) if a.ndim == 2 else pd.Series(a),
        tf.constant,
        lambda a: tf.constant(a, tf.float64) if a.dtype.kind == "f" else a,
    ],
    ids=["float64", "float16", "pandas", "tensor", "tensor64"],
)
def test_kinds_of_arrays_take_the_same_step(convert, weights_by_float32):
    model = tiny.classifier()
    tiny.fit(model, convert(rounded()), convert(Y), batch_size=4)
    assert tiny.steps(model) == 3
    for a, b in zip(weights_by_float32, model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_no_data_is_refused_clearly():
    with pytest.raises((ValueError, TypeError)):
        tiny.fit(tiny.classifier(), batch_size=4)
    with pytest.raises((ValueError, TypeError)):
        tiny.fit(tiny.classifier(), X[:0], Y[:0], batch_size=4)


def test_an_iterator_of_batches_is_not_taken_for_rows():
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    model = tiny.classifier(tiny.private_sgd(expected_batch_size=4))
    with pytest.raises((ValueError, TypeError)):
        tiny.fit(model, iter(data))
    with pytest.raises((ValueError, TypeError)):
        tiny.fit(model, iter([(X, Y)]))
    assert tiny.steps(model) == 0

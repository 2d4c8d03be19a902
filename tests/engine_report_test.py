"""explain_engine, check_engine, the size of a microbatch, the rows that are tried."""

import keras
import numpy as np
import pytest
import tiny

import keras_dpopt
from keras_dpopt import keras_compat, microbatch, tried_rows

X = np.random.default_rng(0).normal(size=(12, 6)).astype("float32")
Y = np.arange(12) % tiny.CLASSES


def _model(*layers, **arguments):
    model = keras_dpopt.DPSequential(
        [keras.Input((6,)), *layers, *tiny.softmax_layers()]
    )
    optimizer = tiny.private_sgd(
        **{"expected_batch_size": 12, "gradient_engine": "auto", **arguments}
    )
    model.compile(optimizer, "sparse_categorical_crossentropy")
    return model


def test_the_table_names_weights_rules_and_forms(capsys):
    model = _model()
    text = model.explain_engine(X, Y)
    assert capsys.readouterr().out == text + "\n"
    assert text.startswith("Gradient engine: bookkeeping")
    lines = {line.split()[0]: line.split() for line in text.splitlines()}
    kernel, bias = model.layers[0].variables
    assert lines[kernel.path][1:] == ["MatMul", "product", "60"]
    assert lines[bias.path][1:] == ["BiasAdd", "product", "10"]
    # Looking is no step.
    assert tiny.steps(model) == 0
    assert model.privacy_ledger.ledger.epsilon(1e-5) == 0.0


def test_the_reason_of_a_fallback_is_told():
    model = _model(keras.layers.Dense(3, activity_regularizer="l2"))
    text = model.explain_engine(X, Y)
    assert text.startswith("Gradient engine: vectorized\n  not 'bookkeeping': ")
    assert "loss of its own" in text


def test_there_is_nothing_to_explain_without_data():
    with pytest.raises(RuntimeError, match=r"explain_engine\(x, y\)"):
        _model().explain_engine()


def test_engines_are_compared_on_the_users_batch(capsys):
    model = _model()
    before = [w.copy() for w in model.get_weights()]
    found = keras_dpopt.check_engine(model, (X, Y))
    assert [check.engine for check in found] == ["bookkeeping", "vectorized", "loop"]
    assert all(check.difference < 1e-5 and check.seconds > 0 for check in found)
    assert "difference" in capsys.readouterr().out
    assert tiny.steps(model) == 0
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_engine_that_cannot_serve_says_why():
    model = _model(keras.layers.Dense(3, activity_regularizer="l2"))
    checks = {
        c.engine: c for c in keras_dpopt.check_engine(model, (X, Y), verbose=False)
    }
    assert "loss of its own" in checks["bookkeeping"].reason
    assert checks["bookkeeping"].difference is None
    assert checks["vectorized"].difference < 1e-5


# ------------------------------------------------------------------------------ memory


def test_a_microbatch_is_a_batch_if_the_memory_allows(monkeypatch):
    model = _model()
    model.train_on_batch(X, Y)
    step = model.private_step.microbatch
    assert step.size() == 12 + 4 * 3 + 1
    monkeypatch.setattr(microbatch, "_MEMORY", 5 * step.notes.record_bytes)
    assert step.size() == 5
    assert _model(microbatch_size=7, gradient_engine="loop").optimizer.microbatch_size


def test_wide_records_make_small_microbatches():
    narrow, wide = _model(), _model(keras.layers.Dense(500))
    for model in (narrow, wide):
        model.explain_engine(X, Y)
    least = 500 * 4  # the activations of the wide layer
    notes = [m.private_step.microbatch.notes.record_bytes for m in (narrow, wide)]
    assert notes[1] - notes[0] > least


# ------------------------------------------------------------------------- tried rows


def test_a_model_that_mixes_only_some_records_is_found_on_any_rows():
    """On made-up rows, none of which is above 100, it computes what any other does."""

    class MixesLarge(keras.layers.Layer):
        def call(self, x):
            large = keras.ops.cast(keras.ops.max(x) > 100.0, "float32")
            mixed = x + large * keras.ops.mean(x, axis=0, keepdims=True)
            return mixed / 300.0  # within reach of the tanh behind it

    for rows in (X, X + 200.0):
        model = _model(MixesLarge(), gradient_engine="bookkeeping")
        with pytest.raises(keras_dpopt.UnsupportedModelError, match="records apart"):
            model.fit(rows, Y, verbose=0)
    model = _model(MixesLarge())
    model.fit(X, Y, verbose=0)
    assert model.private_step.microbatch.engine.name == "vectorized"


def test_rows_of_data_sets_are_looked_at_and_not_taken():
    import tensorflow as tf

    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    rows = tried_rows.of_data_set(batches, keras_compat.data_adapter(batches), None)
    assert rows["x"].shape == (3, 6)
    generator = ((x[None], y[None]) for x, y in zip(X, Y, strict=True))
    model = _model()
    model.fit(generator, steps_per_epoch=12, verbose=0)
    assert tiny.steps(model) == 12

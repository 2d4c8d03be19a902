"""Rule 15: low precision in the model, float32 from the record's gradient on."""

import contract
import distribution_cases as cases
import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dpopt

RECORDS, FEATURES = 6, 3
X = np.random.default_rng(0).normal(size=(RECORDS, FEATURES)).astype("float32")
Y = np.ones((RECORDS, 1), "float32")


def model(policy, engine, strategy=None, name="DPSGD", **arguments):
    arguments = {"noise_multiplier": 0.0, "gradient_engine": engine, **arguments}
    with (strategy or cases.mirrored(1)).scope():
        keras.utils.set_random_seed(1)
        layers = [
            keras.Input((FEATURES,)),
            keras.layers.Dense(4, "tanh", dtype=policy),
            keras.layers.Dense(1, dtype=policy),
        ]
        made = keras_dpopt.DPSequential(layers)
        optimizer = contract.make(
            helpers.OPTIMIZERS[name], 0.1, expected_batch_size=RECORDS, **arguments
        )
        made.compile(optimizer, loss=_loss)
    return made


def _loss(y, y_pred):
    """In float16 a target of 1e4 makes a gradient that overflows there."""
    scale = keras.ops.cast(y, y_pred.dtype)
    return keras.ops.sum(y_pred * scale, axis=-1)


def gradient(made, y):
    with made.distribute_strategy.scope():
        made.optimizer.build(made.trainable_variables)
    watch = contract.Watch(made, 1)
    made.train_on_batch(X, y)
    assert made.optimizer.releases() == 1  # counted, whatever overflows
    assert made.privacy_ledger.sync().total_steps == 1
    return cases.flat(watch.gradient(0)) * RECORDS


def _overflowing():
    y = Y.copy()
    y[2] = 1e4  # times the loss scale of 2^10: beyond 65,504
    return y


ENGINES = pytest.mark.parametrize("engine", ["bookkeeping", "vectorized", "loop"])


@pytest.mark.parametrize(
    ("engine", "replicas"),
    [("bookkeeping", 1), ("vectorized", 1), ("loop", 1), ("bookkeeping", 2)],
)
def test_a_record_that_overflows_adds_zero_and_the_step_counts(engine, replicas):
    strategy = cases.mirrored(replicas)
    with_it = gradient(model("mixed_float16", engine, strategy), _overflowing())
    weight = np.ones(RECORDS, "float32")
    weight[2] = 0.0
    others = model("mixed_float16", engine, strategy)
    with strategy.scope():
        others.optimizer.build(others.trainable_variables)
    watch = contract.Watch(others, 1)
    others.train_on_batch(X, Y, sample_weight=weight)
    without = cases.flat(watch.gradient(0)) * RECORDS
    assert np.isfinite(with_it).all() and np.abs(without).max() > 0.1
    np.testing.assert_allclose(with_it, without, rtol=2e-3, atol=2e-3)
    # In float32 the same record is one like all others, of norm C.
    full = gradient(model("float32", engine, strategy), _overflowing())
    assert np.linalg.norm(full - without) > 0.5


@ENGINES
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_norms_are_of_the_gradient_without_the_loss_scale(engine, policy):
    """A clip that no record reaches changes nothing; one below all of them binds."""
    loose = gradient(model(policy, engine, l2_norm_clip=1e3), Y)
    exact = gradient(model("float32", engine, l2_norm_clip=1e3), Y)
    np.testing.assert_allclose(loose, exact, rtol=3e-2, atol=3e-2)
    tight = gradient(model(policy, engine, l2_norm_clip=1e-3), Y)
    assert np.linalg.norm(tight) <= RECORDS * 1e-3 * (1 + 1e-6)
    assert np.linalg.norm(tight) > RECORDS * 0.5e-3


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("name", ["FiBeR", "DPAdamWBC", "DPIVON"])
def test_sums_noise_and_state_are_float32(policy, name):
    made = model(policy, "bookkeeping", name=name, noise_multiplier=1.0)
    values = gradient(made, Y)
    assert values.dtype == np.float32
    assert not np.array_equal(values, values.astype("float16"))
    floats = [v for v in made.optimizer.variables if "float" in str(v.dtype)]
    assert floats and all(v.dtype == "float32" for v in floats)
    assert all(v.dtype == tf.float32 for v in _secrets(made) if v.dtype.is_floating)


def _secrets(made):
    return [tf.convert_to_tensor(v) for v in made.optimizer.secret_variables().values()]

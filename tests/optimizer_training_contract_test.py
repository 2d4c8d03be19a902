"""How every private optimizer trains: noise, clip, engines, XLA, data, schedules."""

import re

import contract
import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf
from contract import every_optimizer

import keras_dpopt
from keras_dpopt import microbatch
from keras_dpopt.queries import GradientQuery

# ------------------------------------------------------- noise, schedule, average


SHAPES = ((30, 50), (500,))
CLIP, SIGMA, BATCH, RECORDS = 0.5, 2.0, 4, 16
RATES = (0.1, 0.3)
EMA = {"use_ema": True, "ema_momentum": 0.5, "ema_warmup": True}


def _white_noise(cls):
    """Two steps without a gradient; every other batch size would be a wrong divisor."""
    arguments = {
        "l2_norm_clip": CLIP,
        "noise_multiplier": SIGMA,
        "expected_batch_size": BATCH,
        "seed": 8,
        "gradient_engine": "loop",
        **contract.kind(cls).linear,
        **EMA,
    }
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0], RATES)
    optimizer = contract.make(cls, schedule, whole=False, **arguments)
    model = helpers.rows_model(optimizer, *SHAPES)
    optimizer.build(model.trainable_variables)
    watch, record = contract.Watch(model, 2), contract.Record()
    x = np.zeros((RECORDS, model.size), "f4")
    model.fit(x, helpers.targets(x), steps_per_epoch=2, verbose=0, callbacks=[record])
    return model, watch, record, arguments


def _replayed(cls, watch, record, arguments, step):
    """A step anew: a constant rate, run eagerly from the state before it."""
    constant = contract.make(cls, RATES[step], whole=False, **arguments)
    variables = [keras.Variable(w, dtype="float32") for w in record.weights[step]]
    constant.build(variables)
    if step:
        named = constant.named_variables()
        for name, value in record.states[step - 1].items():
            named[name].assign(value)
    gradient = helpers.privatized(watch.gradient(step), watch.stddev(step))
    constant.resolve_batch_size(None)
    constant.resolve_train_size(RECORDS)
    constant.apply(gradient, variables)
    return [v.numpy() for v in variables]


@every_optimizer
def test_noise_schedule_and_average(cls):
    """DESIGN rule 2, and the scale of the noise on the weights.

    The noise is a function of key, step and variable: one noise for all classes. The
    first update is linear in it (see `contract.KINDS`).
    """
    model, watch, record, arguments = _white_noise(cls)
    kind, shapes = contract.kind(cls), SHAPES * contract.kind(cls).views
    first = len(shapes) * (kind.stages - 1)  # The noise of the last release.
    white = [
        [
            helpers.expected_noise(8, step, first + i, shape)
            for i, shape in enumerate(shapes)
        ]
        for step in range(2)
    ]
    unit = SIGMA * CLIP / BATCH
    for i in range(len(shapes)):
        noise = kind.draws([white[0][i], white[1][i]])
        for step in range(2):
            np.testing.assert_allclose(
                watch.gradient(step)[i], unit * noise[step], rtol=1e-5, atol=1e-6
            )
    # What the parts are told of it is what it is.
    flat = [np.concatenate([g.ravel() for g in watch.gradient(t)]) for t in range(2)]
    for step in range(2):
        contract.check_normal(flat[step], watch.stddev(step))
    scale = np.linalg.norm(kind.draws(list(np.eye(2)))[0])
    np.testing.assert_allclose(watch.stddev(0), unit * scale, rtol=1e-5)
    # On the weights, at the first rate of the schedule.
    change = np.concatenate([w.ravel() for w in record.weights[1]])
    own = np.concatenate([g.ravel() for g in watch.gradient(0)[: len(SHAPES)]])
    expected = -RATES[0] * kind.factor * own
    np.testing.assert_allclose(change, expected, rtol=1e-3, atol=1e-9)
    contract.check_normal(change, RATES[0] * kind.factor * unit * scale)
    # Each step has the rate of the schedule.
    for step in range(2):
        again = _replayed(cls, watch, record, arguments, step)
        for a, b, c in zip(
            again, record.weights[step + 1], record.weights[step], strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-9)
            assert np.abs(b - c).max() > 1e-7
    # The average of the weights after each update, put in at the end of the fit.
    # The first update is taken whole; the warm-up has (1 + t) / (10 + t) at update t.
    average = [
        2 / 11 * a + 9 / 11 * w
        for a, w in zip(record.weights[1], record.weights[2], strict=True)
    ]
    for a, b in zip(model.get_weights(), average, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-9)
    assert np.abs(average[0] - record.weights[2][0]).max() > 1e-7


# --------------------------------------------- one gradient: engines, microbatches, XLA


class _Spy:
    """TensorFlow, but for the functions that XLA may compile: it remembers them."""

    def __init__(self):
        self.compiled: list = []

    def __getattr__(self, name):
        return getattr(tf, name)

    def function(self, *args, **kwargs):
        made = tf.function(*args, **kwargs)
        if "jit_compile" in kwargs:
            self.compiled.append(made)
        return made


def _operations(spy) -> dict[str, int]:
    """How often each operation is in the XLA module of one microbatch.

    Raises:
        ValueError: if XLA does not compile the function.
    """
    function = spy.compiled[-1]
    (concrete,) = function._list_all_concrete_functions()
    assert not concrete.captured_inputs  # All that it works on goes in.
    args, _ = concrete.structured_input_signature
    zeros = tf.nest.map_structure(
        lambda s: tf.zeros(s.shape, s.dtype) if isinstance(s, tf.TensorSpec) else s,
        args,
    )
    text = function.experimental_get_compiler_ir(*zeros)(stage="hlo")
    found = re.findall(r"= \S+ ([a-z-]+)\(", text)
    return {name: found.count(name) for name in found}


def _small_network():
    """One tanh an evaluation, and two products: forward, and back to the kernel."""
    layer = keras.layers.Dense(
        3, "tanh", kernel_initializer=keras.initializers.GlorotUniform(seed=1)
    )
    return keras_dpopt.DPSequential([keras.Input((5,)), layer])


def _three_steps(cls, monkeypatch=None, jit_compile=False, **arguments):
    rows = 7
    model = _small_network()
    floor = {"variance_floor": 0.01}
    own = contract.own_arguments(cls)
    optimizer = contract.make(
        cls,
        0.05,
        l2_norm_clip=0.5,
        expected_batch_size=rows,
        seed=2,
        **{k: v for k, v in floor.items() if k in own},
        **arguments,
    )
    model.compile(optimizer, helpers.CROSSENTROPY, jit_compile=jit_compile)
    optimizer.build(model.trainable_variables)
    watch, spy = contract.Watch(model, 3), _Spy()
    if monkeypatch:
        monkeypatch.setattr(microbatch, "tf", spy)
    contract.train(model, *helpers.classes(rows), steps=3)
    if monkeypatch:
        monkeypatch.undo()
    return model, watch, spy


def _clipped_alone(model, weight: float) -> float:
    """Norm of what a record of this weight adds to the clipped sum, at this state."""
    step, optimizer = model.private_step.microbatch, model.optimizer
    weights = [tf.convert_to_tensor(v) for v in model.trainable_variables]
    zero = tf.constant(0, tf.int64)
    specs = optimizer.query.record_specs(weights)
    released = [
        tuple(tf.ones(s.shape) for s in specs)
        for _ in range(optimizer.query.stages - 1)
    ]
    points = step.points(optimizer.step_state(weights, zero, released))
    x, y = helpers.classes(1)
    rows = {"x": x, "y": y, "sample_weight": np.array([weight], "f4")}
    rows = tf.nest.map_structure(tf.constant, rows)
    seeds, one = step.seeds(zero, tf.range(1)), tf.constant(1)
    total, _ = step(points, rows, seeds, one)
    return float(np.sqrt(sum(np.square(t, dtype="f8").sum() for t in total)))


@every_optimizer
def test_engines_microbatches_and_xla_agree(cls, monkeypatch):
    """Three steps with noise and clipping, to float32 rounding.

    With Adam a gradient's error of 1e-7 of the noise moves a weight by 1e-6 of lr, or,
    at a variance floor, by more: the floor here is where the noise is. Vectorized and
    without XLA is how `held_out_test.py` trains; here, what is not in there.
    """
    model, watch, _ = _three_steps(cls, gradient_engine="loop", microbatch_size=7)
    start = _small_network().get_weights()
    for w, s in zip(model.get_weights(), start, strict=True):
        assert np.abs(w - s).max() > 1e-3
    ways = [("vectorized", True)]
    if not contract.kind(cls).takes_batches:
        ways.insert(0, ("vectorized", False))
    query = model.optimizer.query
    # What the engine sees of an optimizer is its query; most have the plain one.
    if query.linear and (cls is keras_dpopt.DPAdamW or query != GradientQuery()):
        ways.insert(0, ("bookkeeping", True))
    trained = [model]
    for engine, xla in ways:
        patch = monkeypatch if xla else None
        arguments = {"gradient_engine": engine, "microbatch_size": 3}
        other, seen, spy = _three_steps(cls, patch, xla, **arguments)
        trained.append(other)
        for step in range(3):
            for a, b in zip(seen.gradient(step), watch.gradient(step), strict=True):
                np.testing.assert_allclose(a, b, atol=3e-6)
        for a, b in zip(other.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, atol=5e-6)
    # One XLA module has all evaluations of a record, and the sampling of the weights.
    kind, operations = contract.kind(cls), _operations(spy)
    assert operations["tanh"] == kind.evaluations
    assert operations["dot"] >= 2 * kind.evaluations
    assert ("cosine" in operations) == kind.samples_weights
    # Dropping a record moves the sum by at most C, whatever is in it.
    for clipping in trained[:2]:
        norms = [_clipped_alone(clipping, weight) for weight in (1e3, 1e30, 1e-3)]
        assert max(norms) <= 0.5 * (1 + 1e-6)
        assert norms[0] > 0.49


def test_xla_has_both_passes_of_the_exact_form_of_bam(monkeypatch):
    """The Hessian's product is a second pass through the one evaluation."""
    exact, _, spy = _three_steps(
        keras_dpopt.BAM, monkeypatch, True, gradient_engine="vectorized", exact=True
    )
    operations = _operations(spy)
    assert operations["tanh"] == 1 and operations["dot"] >= 3
    plain, _, spy = _three_steps(
        keras_dpopt.BAM, monkeypatch, True, gradient_engine="vectorized", lambda_=0.0
    )
    assert _operations(spy)["dot"] == 2
    assert np.abs(exact.get_weights()[0] - plain.get_weights()[0]).max() > 1e-4


@pytest.mark.parametrize("jit_compile", ["auto", True])
def test_xla_is_used_where_it_is_asked_for_and_only_there(jit_compile):
    """The power of the test above: an operation that XLA does not know."""

    def loss(y, y_pred):
        digits = tf.strings.length(tf.strings.as_string(y[0, 0]))
        return tf.cast(digits > 0, tf.float32) * helpers.output_loss(y, y_pred)

    optimizer = contract.make(
        keras_dpopt.DPSGD, expected_batch_size=2, gradient_engine="loop"
    )
    model = helpers.RowsModel((3,))
    model.compile(optimizer, loss=loss, jit_compile=jit_compile)
    x = np.ones((2, 3), "f4")
    if jit_compile is True:
        with pytest.raises(Exception, match="compil|XLA"):
            model.train_on_batch(x, helpers.targets(x))
        np.testing.assert_array_equal(model.flat(), 0.0)
    else:
        model.train_on_batch(x, helpers.targets(x))
        assert np.abs(model.flat()).min() > 0


# -------------------------------------------------------- inputs, precision, augmenting


def _mixed_data(rows=4):
    draw = np.random.default_rng(0)
    x = {
        "numbers": draw.normal(size=(rows, 3)),  # float64
        "tokens": draw.integers(0, 6, size=(rows, 5)),
    }
    return x, draw.integers(0, 3, size=rows)


def _mixed_model(policy):
    kept = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        numbers = keras.Input((3,), name="numbers", dtype="float64")
        tokens = keras.Input((5,), name="tokens", dtype="int64")
        words = keras.layers.Embedding(6, 2)(tokens)
        words = keras.layers.GlobalAveragePooling1D()(words)
        both = keras.layers.Concatenate()([keras.layers.Dense(2)(numbers), words])
        both = keras.layers.Dropout(0.3)(both)
        outputs = keras.layers.Dense(3, dtype="float32")(both)
    finally:
        keras.config.set_dtype_policy(kept)
    return keras_dpopt.DPModel({"numbers": numbers, "tokens": tokens}, outputs)


def _trains_in_mixed_precision(cls, policy, engine):
    optimizer = contract.make(
        cls,
        expected_batch_size=4,
        augmentation_multiplicity=2,
        gradient_engine=engine,
        seed=3,
    )
    model = _mixed_model(policy)
    model.compile(optimizer, helpers.CROSSENTROPY)
    start = model.get_weights()
    contract.train(model, *_mixed_data(), steps=2)
    assert model.layers[-2].compute_dtype == policy.removeprefix("mixed_")
    for before, after in zip(start, model.get_weights(), strict=True):
        assert np.isfinite(after).all() and np.abs(after - before).max() > 1e-5
    variables = {**optimizer.named_variables(), **optimizer.secret_variables()}
    assert {str(np.dtype(v.numpy().dtype)) for v in variables.values()} <= {
        "float32",
        "int64",
    }
    assert all(np.isfinite(v.numpy()).all() for v in variables.values())


@every_optimizer
def test_mixed_float16_with_mixed_inputs_and_augmentation(cls):
    _trains_in_mixed_precision(cls, "mixed_float16", "loop")


@pytest.mark.parametrize("name", ["BAM", "DPBayesByBackprop", "FiBeR"])
def test_mixed_bfloat16(name):
    """Several evaluations of a record at once: of one gradient, and of one of two."""
    cls = helpers.OPTIMIZERS[name]
    _trains_in_mixed_precision(cls, "mixed_bfloat16", "vectorized")

"""What holds for every private optimizer: all names in `optimizers.__all__`."""

import copy
import inspect
import json
import pickle

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dpopt
from keras_dpopt import types

REQUIRED = {"l2_norm_clip": 1.0, "noise_multiplier": 1.1}
REFUSED = ("clipnorm", "clipvalue", "global_clipnorm", "loss_scale_factor")
FOREIGN = {
    "max_grad_norm": "l2_norm_clip",
    "clip_norm": "l2_norm_clip",
    "sigma": "noise_multiplier",
    "target_epsilon": "noise_multiplier",
    "num_microbatches": "microbatch_size",
    "batch_size": "expected_batch_size",
    "lr": "learning_rate",
    "eps": "epsilon",
}
REMEDY = "DPModel|make_private|DPSequential"

every_optimizer = pytest.mark.parametrize(
    "cls", helpers.OPTIMIZERS.values(), ids=helpers.OPTIMIZERS
)


def _own_arguments(cls):
    """The arguments of the class itself, with their defaults."""
    parameters = inspect.signature(cls.__init__).parameters.values()
    return {
        p.name: p.default
        for p in parameters
        if p.default is not p.empty and p.name != "learning_rate"
    }


def _changed(name, default):
    """A legal value that is not the default."""
    if isinstance(default, bool):
        return not default
    if name == "noise_correction":
        return "unfiltered" if default != "unfiltered" else "filtered"
    if default is None or default == 0:
        return 0.25
    return default / 2 if isinstance(default, float) else default + 1


def test_all_optimizers_are_public():
    for name, cls in helpers.OPTIMIZERS.items():
        assert getattr(keras_dpopt, name) is cls
        assert name in keras_dpopt.__all__
        assert issubclass(cls, keras.optimizers.Optimizer)


# ------------------------------------------------------------------------ construction


@every_optimizer
def test_constructs_with_the_required_arguments(cls):
    optimizer = cls(**REQUIRED)
    assert float(optimizer.learning_rate) > 0
    assert optimizer.expected_batch_size is None
    assert optimizer.releases() == 0
    positional = inspect.signature(cls.__init__).parameters.values()
    assert [p.name for p in positional if p.kind is p.POSITIONAL_OR_KEYWORD] == [
        "self",
        "learning_rate",
    ]


@every_optimizer
@pytest.mark.parametrize("missing", REQUIRED)
def test_clip_and_noise_are_required(cls, missing):
    given = {k: v for k, v in REQUIRED.items() if k != missing}
    with pytest.raises((TypeError, ValueError), match=missing):
        cls(**given)


@every_optimizer
def test_config_round_trip(cls):
    own = {name: _changed(name, d) for name, d in _own_arguments(cls).items()}
    common = {
        "l2_norm_clip": 0.7,
        "noise_multiplier": 1.3,
        "expected_batch_size": 7,
        "microbatch_size": 3,
        "gradient_engine": "loop",
        "use_ema": True,
        "ema_momentum": 0.5,
        "ema_overwrite_frequency": 3,
        "name": "mine",
    }
    given = {"weight_decay": 0.03, **own, **common}
    schedule = keras.optimizers.schedules.ExponentialDecay(0.2, 3, 0.5)
    for rate in (0.125, schedule):
        optimizer = cls(rate, seed=5, **given)
        config = optimizer.get_config()
        assert "seed" not in json.dumps(config, default=repr)
        for name, value in given.items():
            assert config[name] == value, name
        again = cls.from_config(copy.deepcopy(config))
        assert again.get_config() == config
        assert not again.keys.seeded
        serialized = keras.saving.serialize_keras_object(optimizer)
        text = json.dumps(serialized)
        revived = keras.saving.deserialize_keras_object(json.loads(text))
        assert type(revived) is cls
        assert revived.get_config() == config
        assert not revived.keys.seeded
        assert "Decay" not in text or callable(revived._learning_rate)


@every_optimizer
def test_defaults_round_trip(cls):
    config = cls(**REQUIRED).get_config()
    assert cls.from_config(config).get_config() == config


@every_optimizer
def test_keras_arguments_that_act_after_the_noise_are_refused(cls):
    for name in REFUSED:
        with pytest.raises(ValueError, match=name):
            cls(**REQUIRED, **{name: 1.0})
    with pytest.raises(ValueError, match="gradient_accumulation_steps"):
        cls(**REQUIRED, gradient_accumulation_steps=2)


@every_optimizer
def test_foreign_names_are_refused_with_ours(cls):
    for name, ours in FOREIGN.items():
        if name in _own_arguments(cls):
            continue
        with pytest.raises(TypeError, match=f"{name}.*{ours}"):
            cls(**REQUIRED, **{name: 1.0})


@every_optimizer
def test_unknown_names_are_refused(cls):
    with pytest.raises(TypeError, match=f"{cls.__name__}.*momentun"):
        cls(**REQUIRED, momentun=0.9)


@every_optimizer
@pytest.mark.parametrize("name", ["query", "filter", "rule", "noise_correction"])
def test_the_slots_are_not_arguments(cls, name):
    """A noise_correction that nothing uses would be silently ignored, and lost."""
    if name in _own_arguments(cls):
        return
    with pytest.raises((TypeError, ValueError), match=name):
        cls(**REQUIRED, **{name: "filtered"})


BAD_VALUES = {
    "l2_norm_clip": (0.0, -1.0, np.nan, np.inf, True, "1.0", [1.0]),
    "noise_multiplier": (-1.0, np.nan, np.inf, True, "1.0", [1.0]),
    "learning_rate": (-0.1, np.nan, np.inf, True, "0.1", None),
    "expected_batch_size": (0, -1, 1.5, True, "8"),
    "microbatch_size": (0, -1, 1.5, True, "8"),
    "gradient_engine": ("book", None, 1),
    "weight_decay": (-0.1, np.nan, np.inf, "0.1"),
    "seed": (1.5, "1", True),
    # Of some classes:
    "momentum": (1.0, -0.1, np.nan, "0.9", True),
    "beta_1": (1.0, -0.1, np.nan, "0.9", True),
    "beta_2": (1.0, -0.1, np.nan, "0.9", True),
    "epsilon": (-1e-8, np.nan, np.inf, "1e-8", True),
    "kappa": (0.0, -0.1, 1.1, np.nan, "0.5", True),
    "gamma": (0.0, -0.1, np.inf, np.nan, "0.5", True),
    "omega": (0.0, -0.1, 1.1, np.nan, "0.5", True),
    "variance_floor": (-1e-8, np.nan, np.inf, "1e-8", True),
    "noise_correction": ("full", True, 1.0),
}
COMMON = tuple(BAD_VALUES)[:8]


@every_optimizer
def test_values_are_checked(cls):
    own = _own_arguments(cls)
    for name, values in BAD_VALUES.items():
        if name not in COMMON and name not in own:
            continue
        for value in values:
            with pytest.raises((TypeError, ValueError)) as caught:
                cls(**{**REQUIRED, name: value})
            assert name in str(caught.value), (name, value, caught.value)


@every_optimizer
def test_every_own_number_is_checked(cls):
    """So that an argument of a new class is covered before anyone lists it above."""
    for name, default in _own_arguments(cls).items():
        if isinstance(default, float):
            for value in (np.nan, "x"):
                with pytest.raises((TypeError, ValueError), match=name):
                    cls(**REQUIRED, **{name: value})


@every_optimizer
def test_infinite_clip_without_noise_is_legal(cls):
    assert cls(l2_norm_clip=np.inf, noise_multiplier=0).l2_norm_clip == np.inf


# ------------------------------------------------------------------------ fail closed


def _plain_model(cls):
    model = helpers.mlp(keras.Sequential)
    model.compile(cls(0.1, **REQUIRED, expected_batch_size=4), helpers.CROSSENTROPY)
    return model


def _unchanged(model, weights):
    for a, b in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(a, b)


@every_optimizer
@pytest.mark.parametrize("way", ["fit", "train_on_batch", "tape", "eager"])
def test_a_plain_model_is_refused(cls, way):
    weights = helpers.mlp(keras.Sequential).get_weights()
    model = helpers.mlp(keras.Sequential)
    x, y = helpers.classes(4)
    optimizer = cls(0.1, **REQUIRED, expected_batch_size=4)
    with pytest.raises((TypeError, ValueError, RuntimeError), match=REMEDY):
        model.compile(optimizer, helpers.CROSSENTROPY, run_eagerly=way == "eager")
        if way == "train_on_batch":
            model.train_on_batch(x, y)
        elif way == "tape":
            with tf.GradientTape() as tape:
                loss = helpers.CROSSENTROPY(y, model(x))
            gradients = tape.gradient(loss, model.trainable_variables)
            pairs = zip(gradients, model.trainable_variables, strict=True)
            optimizer.apply_gradients(pairs)
        else:
            model.fit(x, y, verbose=0)
    _unchanged(model, weights)


def _built(cls):
    variable = keras.Variable(np.zeros(3), dtype="float32")
    optimizer = cls(0.1, **REQUIRED, expected_batch_size=4)
    optimizer.build([variable])
    return optimizer, variable


@every_optimizer
def test_plain_gradients_are_refused(cls):
    optimizer, variable = _built(cls)
    gradient = tf.ones(3)
    for call in (
        lambda: optimizer.apply([gradient]),
        lambda: optimizer.apply([gradient], [variable]),
        lambda: optimizer.apply(gradient),
        lambda: optimizer.apply(None),
        lambda: optimizer.apply([]),
        lambda: optimizer.apply_gradients([(gradient, variable)]),
        lambda: optimizer.update_step(gradient, variable, 0.1),
    ):
        with pytest.raises(TypeError, match=REMEDY):
            call()
    with pytest.raises((TypeError, RuntimeError, ValueError, NotImplementedError)):
        optimizer.stateless_apply(
            [v.value for v in optimizer.variables], [gradient], [variable.value]
        )
    np.testing.assert_array_equal(variable.numpy(), 0.0)


@every_optimizer
def test_plain_gradients_are_refused_after_an_error_while_tracing(cls):
    class Failing(helpers.RowsModel):
        def call(self, x):
            if not isinstance(x, keras.KerasTensor) and self.fail:
                raise RuntimeError("while tracing")
            return super().call(x)

    model = Failing((3,))
    model.fail = False
    model.compile(
        cls(0.1, **REQUIRED, expected_batch_size=2, gradient_engine="loop"),
        loss=helpers.output_loss,
    )
    x = np.ones((2, 3), "f4")
    model(x)
    model.fail = True
    for _ in range(2):
        with pytest.raises(Exception, match="while tracing"):
            model.train_on_batch(x, helpers.targets(x))
    if model.optimizer.built:
        gradients = [tf.ones(3)]
        with pytest.raises(TypeError, match=REMEDY):
            model.optimizer.apply(gradients, model.trainable_variables)
    np.testing.assert_array_equal(model.flat(), 0.0)
    model.fail = False
    model.train_on_batch(x, helpers.targets(x))
    assert np.abs(model.flat()).min() > 0


def test_a_privatized_gradient_cannot_be_made_by_hand():
    for arguments in ({}, {"token": None}, {"token": object()}, {"token": True}):
        with pytest.raises(TypeError, match="mechanism"):
            types.PrivatizedGradient([tf.ones(3)], 0.1, **arguments)


# ----------------------------------------------------------------- sizes and variables


@every_optimizer
def test_a_missing_batch_size_is_refused(cls):
    model = helpers.rows_model(cls(0.1, **REQUIRED), (3,))
    x = np.ones((4, 3), "f4")
    for call in (
        lambda: model.train_on_batch(x, helpers.targets(x)),
        lambda: model.fit(x, helpers.targets(x), verbose=0),
        lambda: model.fit(
            tf.data.Dataset.from_tensors((x, helpers.targets(x))), verbose=0
        ),
    ):
        with pytest.raises(ValueError, match="expected_batch_size"):
            call()
    assert model.optimizer.releases() == 0


@every_optimizer
def test_another_batch_size_is_refused(cls):
    model = helpers.rows_model(cls(0.1, **REQUIRED, expected_batch_size=2), (3,))
    x = np.ones((4, 3), "f4")
    with pytest.raises(ValueError, match="batch_size=3.*2"):
        model.fit(x, helpers.targets(x), batch_size=3, verbose=0)
    assert model.optimizer.releases() == 0


def test_the_batch_size_of_the_first_fit_stays():
    model = helpers.rows_model(keras_dpopt.DPSGD(0.1, **REQUIRED), (3,))
    x = np.ones((4, 3), "f4")
    model.fit(x, helpers.targets(x), batch_size=2, verbose=0)
    assert model.optimizer.expected_batch_size == 2
    with pytest.raises(ValueError, match="batch_size"):
        model.fit(x, helpers.targets(x), batch_size=4, verbose=0)


@every_optimizer
@pytest.mark.parametrize("trained_before", [False, True])
def test_another_trainable_set_is_refused(cls, trained_before):
    model = helpers.mlp()
    optimizer = cls(0.1, **REQUIRED, expected_batch_size=4, gradient_engine="loop")
    model.compile(optimizer, helpers.CROSSENTROPY)
    x, y = helpers.classes(4)
    if trained_before:
        model.train_on_batch(x, y)
    else:
        optimizer.build(model.trainable_variables)
    weights = model.get_weights()
    model.layers[0].trainable = False
    with pytest.raises(ValueError, match="[Cc]ompile"):
        model.train_on_batch(x, y)
    with pytest.raises(ValueError, match="[Cc]ompile"):
        model.fit(x, y, verbose=0)
    _unchanged(model, weights)


@every_optimizer
def test_another_order_of_variables_is_refused(cls):
    variables = [keras.Variable(np.zeros(3), dtype="float32") for _ in range(2)]
    optimizer = cls(0.1, **REQUIRED, expected_batch_size=4)
    optimizer.build(variables)
    gradient = helpers.privatized([np.ones(3), np.ones(3)], 0.1)
    with pytest.raises(ValueError, match="[Cc]ompile"):
        optimizer.apply(gradient, variables[::-1])
    optimizer.apply(gradient, variables)


# ----------------------------------------------------------------------------- secrets


@every_optimizer
def test_copies_do_not_share_keys(cls):
    optimizer = cls(0.1, **REQUIRED, seed=3)
    copies = [
        copy.deepcopy(optimizer),
        pickle.loads(pickle.dumps(optimizer)),
        cls.from_config(optimizer.get_config()),
        keras.saving.deserialize_keras_object(
            keras.saving.serialize_keras_object(optimizer)
        ),
    ]
    keys = {tuple(o.keys.export()["keys"]) for o in (optimizer, *copies)}
    assert len(keys) == 5
    # The keys themselves, as a deepcopy of whatever holds them would copy them.
    for other in (
        copy.deepcopy(optimizer.keys),
        copy.copy(optimizer.keys),
        pickle.loads(pickle.dumps(optimizer.keys)),
    ):
        assert other.export()["keys"] != optimizer.keys.export()["keys"]
        assert not other.seeded
    built, _ = _built(cls)
    assert copy.deepcopy(built).keys.export() != built.keys.export()


@every_optimizer
def test_optimizers_do_not_share_keys(cls):
    exported = [cls(0.1, **REQUIRED).keys.export() for _ in range(2)]
    assert exported[0] != exported[1]
    seeded = [cls(0.1, **REQUIRED, seed=3).keys.export() for _ in range(2)]
    assert seeded[0] == seeded[1]


@every_optimizer
def test_keys_are_no_variables_of_the_optimizer(cls):
    optimizer, _ = _built(cls)
    keys = set(optimizer.keys.export()["keys"])
    for variable in optimizer.variables:
        values = np.ravel(variable.numpy()).tolist()
        assert not keys & set(values)
    assert not any("key" in v.path for v in optimizer.variables)


# --------------------------------------------------------- one noise, and one gradient


def _noise(cls, **arguments):
    jit_compile = arguments.pop("jit_compile", "auto")
    optimizer = cls(
        0.1,
        l2_norm_clip=0.5,
        noise_multiplier=2.0,
        expected_batch_size=4,
        seed=8,
        **arguments,
    )
    model = helpers.rows_model(optimizer, (4, 2), (8,), jit_compile=jit_compile)
    gradient = helpers.watch_gradients(model)
    draws = []
    for _ in range(2):
        x = np.zeros((5, 16), "f4")
        model.train_on_batch(x, helpers.targets(x))
        draws.append([g.numpy() for g in gradient])
    return draws


@every_optimizer
@pytest.mark.parametrize(
    "arguments",
    [
        {"gradient_engine": "vectorized"},
        {"gradient_engine": "loop"},
        {"gradient_engine": "vectorized", "microbatch_size": 2, "jit_compile": True},
    ],
    ids=["vectorized", "loop", "microbatches under jit"],
)
def test_noise_is_a_function_of_key_step_and_variable(cls, arguments):
    """DESIGN rule 2: of nothing else; so it is one noise for all classes."""
    draws = _noise(cls, **arguments)
    for step in range(2):
        for i, shape in enumerate([(4, 2), (8,)]):
            want = helpers.expected_noise(8, step, i, shape) * 2.0 * 0.5 / 4
            np.testing.assert_allclose(draws[step][i], want, atol=1e-6)


@every_optimizer
def test_weights_do_not_depend_on_engine_or_microbatch(cls):
    """Three steps with noise and clipping, to float32 rounding.

    With Adam a gradient's error of 1e-7 of the noise moves a weight by 1e-6 of lr, or,
    at a variance floor, by more: the floor here is where the noise is.
    """
    x, y = helpers.classes(7)
    reference = None
    floor = {"variance_floor": 0.01} if "variance_floor" in _own_arguments(cls) else {}
    for engine in helpers.ENGINES:
        for microbatch_size in (1, 3, 16):
            model = helpers.mlp()
            optimizer = cls(
                0.05,
                l2_norm_clip=0.5,
                noise_multiplier=1.0,
                expected_batch_size=5,
                seed=2,
                gradient_engine=engine,
                microbatch_size=microbatch_size,
                **floor,
            )
            model.compile(optimizer, helpers.CROSSENTROPY)
            start = model.get_weights()
            for _ in range(3):
                model.train_on_batch(x, y)
            weights = model.get_weights()
            reference = reference or weights
            for a, b, c in zip(weights, reference, start, strict=True):
                np.testing.assert_allclose(a, b, atol=5e-6)
                assert np.abs(a - c).max() > 1e-3

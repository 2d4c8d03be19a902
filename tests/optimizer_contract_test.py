"""What holds for every private optimizer: all names in `optimizers.__all__`.

Construction, configuration and refusals; `optimizer_training_contract_test.py` and
`optimizer_saving_contract_test.py` have the rest, and `contract.py` the exceptions.
"""

import copy
import inspect
import json
import math
import pickle

import contract
import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf
from contract import REQUIRED, every_optimizer

import keras_dpopt
from keras_dpopt import types

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


def _changed(name, default):
    """A legal value that is not the default; of a word contract.KINDS knows one."""
    if isinstance(default, str):
        return default
    if isinstance(default, bool):
        return not default
    if isinstance(default, tuple):
        return tuple(value / 2 for value in default)
    if name == "train_size":
        return 9
    if isinstance(default, int):
        return default + 1
    if default is None or default == 0:
        return 0.25
    if default == math.inf:
        return 3.0
    return default / 2


def _own_sets(cls):
    """Sets of the class' own arguments, which together change them all."""
    for values in contract.kind(cls).changed:
        yield {
            name: values[name] if name in values else _changed(name, default)
            for name, default in contract.own_arguments(cls).items()
        }


def _plain(value):
    return list(value) if isinstance(value, tuple) else value


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
def test_every_own_argument_is_changed_in_some_set(cls):
    """Of the sets of the next test: one may keep what another one changes."""
    for name, default in contract.own_arguments(cls).items():
        assert any(own[name] != default for own in _own_sets(cls)), name


@every_optimizer
def test_config_round_trip(cls):
    common = {
        "l2_norm_clip": 0.7,
        "noise_multiplier": 1.3,
        "expected_batch_size": 7,
        "microbatch_size": 3,
        "gradient_engine": "loop",
        "augmentation_multiplicity": 2,
        "use_ema": True,
        "ema_momentum": 0.5,
        "ema_warmup": True,
        "ema_overwrite_frequency": 3,
        "name": "mine",
    }
    schedule = keras.optimizers.schedules.ExponentialDecay(0.2, 3, 0.5)
    for own in _own_sets(cls):
        given = {"weight_decay": 0.03, **own, **common}
        for rate in (0.125, schedule):
            optimizer = cls(rate, seed=5, **given)
            config = optimizer.get_config()
            assert "seed" not in json.dumps(config, default=repr)
            for name, value in given.items():
                assert config[name] == _plain(value), name
            again = cls.from_config(copy.deepcopy(config))
            assert again.get_config() == config
            assert not again.keys.seeded
            serialized = keras.saving.serialize_keras_object(optimizer)
            text = json.dumps(serialized)
            revived = keras.saving.deserialize_keras_object(json.loads(text))
            assert type(revived) is cls
            assert revived.get_config() == config
            assert not revived.keys.seeded
            assert float(revived.learning_rate) == pytest.approx(
                0.125 if rate is not schedule else 0.2
            )


CLIPPING = {
    "automatic": "automatic",
    "per layer": "per_layer",
    "adaptive": keras_dpopt.AdaptiveClipping(0.7, count_noise_stddev=3.0),
    "tuned": keras_dpopt.AutomaticClipping(0.5),
}


@every_optimizer
def test_clipping_styles_round_trip_or_are_refused(cls):
    for clipping in CLIPPING.values():
        given = {"clipping": clipping, "rescale_to_unit_norm": True}
        if contract.kind(cls).own_mechanism:
            for name, value in given.items():
                with pytest.raises(ValueError, match=name):
                    cls(**REQUIRED, **{name: value})
            continue
        optimizer = cls(**REQUIRED, **given)
        config = json.loads(json.dumps(optimizer.get_config()))
        again = cls.from_config(config)
        assert again.get_config() == optimizer.get_config()
        assert again.mechanism.style == optimizer.mechanism.style
        assert type(again.mechanism) is type(optimizer.mechanism)
        assert again.mechanism.rescale_to_unit_norm


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
        if name in contract.own_arguments(cls):
            continue
        with pytest.raises(TypeError, match=f"{name}.*{ours}"):
            cls(**REQUIRED, **{name: 1.0})


@every_optimizer
def test_unknown_names_are_refused(cls):
    with pytest.raises(TypeError, match=f"{cls.__name__}.*momentun"):
        cls(**REQUIRED, momentun=0.9)


@every_optimizer
@pytest.mark.parametrize(
    "name", ["query", "mechanism", "filter", "rule", "noise_correction"]
)
def test_the_slots_are_not_arguments(cls, name):
    """A noise_correction that nothing uses would be silently ignored, and lost."""
    if name in contract.own_arguments(cls):
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
    "filter_init": ("first", None, 0.0),
    "base": ("rmsprop", None, 1),
    "second_moment": ("both", None, 1),
    "a": (0.5, "0.5", (np.nan,), ("x",), (-1.0,), (2.0,)),
    "b": (0.5, "0.5", (np.nan,), ("x",), (), (1.0, -1.0)),
    "lambda_": (-0.1, np.nan, np.inf, "0.1", True),
    "radius": (0.0, -0.1, np.nan, np.inf, "0.1", True),
    "exact": (1, None, "yes"),
    "rho": (-0.1, np.nan, "0.5", True),
    "direction": ("last", None, 1),
    "correction_start": (-1, 1.5, True, "1"),
    "temperature": (0.0, -1.0, np.nan, np.inf, "1", True),
    "prior_precision": (-1.0, np.nan, np.inf, "1", True),
    "train_size": (0, -1, 1.5, True, "8"),
    "prior_stddev": (0.0, -1.0, np.nan, np.inf, "1", True),
    "rho_init": (np.nan, np.inf, "1", True),
    "ess": (0.0, -1.0, np.nan, np.inf, "1", True),
    "hess_init": (0.0, -1.0, np.nan, np.inf, "1", True),
    "hessian": ("exact", None, 1),
    "curvature_scale": (0.0, -1.0, np.nan, np.inf, "1", True),
    "mc_samples": (0, -1, 1.5, True, "2"),
    "clip_radius": (0.0, -1.0, np.nan, "1", True),
    "rescale_lr": (1, None, "yes"),
    "strategy": ("tree", None, 1),
    "bands": (0, -1, 1.5, True, "2"),
    "buffers": (0, -1, 1.5, True, "2"),
    "amplified": (1, None, "yes"),
    "coefficients": ((1.0,), (1.0, 0.5, np.nan, 0.1), (1.0, 2.0, 0.5, 0.1), "1234"),
    "restart": ("never", 1, True),
    "epsilon_inside_root": (1, None, "yes"),
    "nesterov": (1, None, "yes"),
}
COMMON = tuple(BAD_VALUES)[:8]


@every_optimizer
def test_values_are_checked(cls):
    own = contract.own_arguments(cls)
    for name, values in BAD_VALUES.items():
        if name not in COMMON and name not in own:
            continue
        for value in values:
            legal = contract.kind(cls).legal
            if name in legal and repr(value) == repr(legal[name]):
                cls(**{**REQUIRED, name: value})
                continue
            with pytest.raises((TypeError, ValueError)) as caught:
                cls(**{**REQUIRED, name: value})
                pytest.fail(f"{name}={value!r} was taken")
            assert name in str(caught.value), (name, value, caught.value)


@every_optimizer
def test_every_own_number_is_checked(cls):
    """So that an argument of a new class is covered before anyone lists it above."""
    for name, default in contract.own_arguments(cls).items():
        if isinstance(default, float):
            for value in (np.nan, "x"):
                with pytest.raises((TypeError, ValueError), match=name):
                    cls(**REQUIRED, **{name: value})


@every_optimizer
def test_every_own_argument_has_bad_values(cls):
    assert set(contract.own_arguments(cls)) <= set(BAD_VALUES)


@every_optimizer
def test_infinite_clip_without_noise_is_legal(cls):
    if contract.kind(cls).infinite_clip:
        assert cls(l2_norm_clip=np.inf, noise_multiplier=0).l2_norm_clip == np.inf
    else:
        with pytest.raises(ValueError, match="l2_norm_clip"):
            cls(l2_norm_clip=np.inf, noise_multiplier=0)


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
    optimizer = contract.make(cls, expected_batch_size=4)
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
        contract.make(cls, expected_batch_size=2, gradient_engine="loop"),
        loss=helpers.output_loss,
    )
    x = np.ones((2, 3), "f4")
    model(x)
    model.fail = True
    for _ in range(2):
        with pytest.raises(Exception, match="while tracing"):
            contract.train(model, x, helpers.targets(x))
    if model.optimizer.built:
        gradients = [tf.ones(3)]
        with pytest.raises(TypeError, match=REMEDY):
            model.optimizer.apply(gradients, model.trainable_variables)
    np.testing.assert_array_equal(model.flat(), 0.0)
    model.fail = False
    contract.train(model, x, helpers.targets(x))
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


# Trained before: one of each kind of step, with one point, two, two releases, a sample
# of the weights, and correlated noise.
_TRAINED = ["DPSGD", "FiBeR", "DPSAM", "DPIVON", "MFDPFTRL"]


@pytest.mark.parametrize(
    ("name", "trained_before"),
    [
        *((name, False) for name in helpers.OPTIMIZERS),
        *((name, True) for name in _TRAINED),
    ],
)
def test_another_trainable_set_is_refused(name, trained_before):
    cls = helpers.OPTIMIZERS[name]
    optimizer = contract.make(cls, expected_batch_size=4, gradient_engine="loop")
    model = helpers.rows_model(optimizer, (2, 2), (2,))
    x = np.ones((4, model.size), "f4")
    model(x)
    if trained_before:
        contract.train(model, x, helpers.targets(x))
    else:
        optimizer.build(model.trainable_variables)
    weights = model.get_weights()
    model.parts[0].trainable = False
    assert len(model.trainable_variables) == 1
    with pytest.raises(ValueError, match="[Cc]ompile"):
        contract.train(model, x, helpers.targets(x))
    with pytest.raises(ValueError, match="[Cc]ompile"):
        model.fit(x, helpers.targets(x), verbose=0)
    model.parts[0].trainable = True
    _unchanged(model, weights)


@every_optimizer
def test_another_order_of_variables_is_refused(cls):
    variables = [keras.Variable(np.zeros(3), dtype="float32") for _ in range(2)]
    optimizer = contract.make(cls, expected_batch_size=4)
    optimizer.build(variables)
    gradient = helpers.privatized([np.ones(3)] * 2 * contract.kind(cls).views, 0.1)
    with pytest.raises(ValueError, match="[Cc]ompile"):
        optimizer.apply(gradient, variables[::-1])
    optimizer.apply(gradient, variables)


# ----------------------------------------------------------------------------- secrets


@every_optimizer
@pytest.mark.filterwarnings("ignore:The saved optimizer state does not fit")
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

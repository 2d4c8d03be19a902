"""Wrong, misspelled and missing names of arguments: the error says what to write."""

import inspect

import helpers
import pytest
import tiny

import keras_dpopt
from keras_dpopt.argument_names import explained

FIT = {"train_size": 30, "batch_size": 7, "epochs": 3}
PRIVATE = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0}


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: keras_dpopt.PrivacyBudget(epsilon=3.0, delta=1e-5), "target_epsilon"),
        (lambda: keras_dpopt.PrivacyBudget(3.0), "needs `delta`. Pass one well below"),
        (lambda: keras_dpopt.PrivacyBudget(delta=1e-5), "needs `target_epsilon`"),
        (
            lambda: keras_dpopt.noise_multiplier(epsilon=3.0, delta=1e-5, **FIT),
            "noise_multiplier does not know `epsilon`: write `target_epsilon`.",
        ),
        (
            lambda: keras_dpopt.noise_multiplier(
                target_epsilon=3.0, target_delta=1e-5, **FIT
            ),
            "write `delta`",
        ),
        (
            lambda: keras_dpopt.noise_multiplier(
                target_epsilon=3.0, delta=1e-5, train_size=30, batch_size=7, steps=9
            ),
            "write `epochs`; an epoch has",
        ),
        (
            lambda: keras_dpopt.epsilon(target_epsilon=3.0, delta=1e-5, **FIT),
            "noise_multiplier` takes it",
        ),
        (
            lambda: keras_dpopt.epsilon(sigma=3.0, delta=1e-5, **FIT),
            "write `noise_multiplier`",
        ),
        (
            lambda: keras_dpopt.epsilon(
                noise_multiplier=1.0, delta=1e-5, trainsize=30, batch_size=7, epochs=3
            ),
            "did you mean `train_size`?",
        ),
        (
            lambda: keras_dpopt.epsilon(noise_multiplier=1.0, delta=1e-5, xyz=1, **FIT),
            "it takes `noise_multiplier`, `delta`",
        ),
        (lambda: tiny.classifier().privacy_statement(), "needs `delta`. Pass one"),
        (
            lambda: tiny.classifier().privacy_statement(target_delta=1e-5),
            "write `delta`",
        ),
        (
            # It has no target: what the name is elsewhere would not help.
            lambda: tiny.classifier().privacy_statement(epsilon=1.0),
            "it takes `delta`, `accountant`.",
        ),
    ],
)
def test_functions_say_what_to_write(call, message):
    with pytest.raises(TypeError) as raised:
        call()
    assert message in str(raised.value)


@pytest.mark.parametrize("name", helpers.OPTIMIZERS)
def test_optimizers_say_what_a_misspelled_name_means(name):
    cls = helpers.OPTIMIZERS[name]
    with pytest.raises(TypeError, match="Did you mean `noise_multiplier`?"):
        cls(l2_norm_clip=1.0, noise_multipler=1.0)
    with pytest.raises(TypeError, match="Did you mean `learning_rate`?"):
        cls(learning_rat=0.1, **PRIVATE)
    with pytest.raises(TypeError, match="argument `xyz`. See help"):
        cls(xyz=1, **PRIVATE)


def test_the_epsilon_of_the_privacy_is_no_argument_of_an_optimizer():
    for name in ("DPSGD", "DPFTRL", "FiBeR"):
        cls = helpers.OPTIMIZERS[name]
        own = "epsilon" in inspect.signature(cls.__init__).parameters
        for argument in ["target_epsilon"] + ["epsilon"] * (not own):
            with pytest.raises(TypeError, match="PrivacyBudget") as raised:
                cls(l2_norm_clip=1.0, **{argument: 2.0})
            assert "keras_dpopt.noise_multiplier(target_epsilon=" in str(raised.value)
    with pytest.raises(TypeError, match="pass `delta` to `PrivacyBudget`"):
        keras_dpopt.DPSGD(delta=1e-5, **PRIVATE)


def test_the_decorated_function_is_itself():
    @explained()
    def function(a, b=2, *, c):
        """Says so."""
        return a, b, c

    assert function(1, c=3) == (1, 2, 3)
    assert function.__doc__ == "Says so."
    assert list(inspect.signature(function).parameters) == ["a", "b", "c"]
    with pytest.raises(TypeError, match="function needs `c`. Pass it by name."):
        function(1, 2)
    with pytest.raises(TypeError, match="positional"):
        function(1, 2, 3, c=4)


def test_the_warning_blames_the_caller():
    with pytest.warns(UserWarning, match="not below 1/N") as record:
        keras_dpopt.epsilon(noise_multiplier=1.0, delta=0.5, **FIT)
    assert record[0].filename == __file__

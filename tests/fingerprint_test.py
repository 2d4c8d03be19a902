"""Which runs can be repeated exactly."""

import keras
import pytest
import runs

from keras_dpopt import fingerprint


def _no_library(y, y_pred):
    return keras.ops.mean(y_pred, axis=-1)


@pytest.mark.parametrize(
    ("loss", "replayable"),
    [
        ("mse", True),
        (keras.losses.MeanSquaredError(), True),
        (_no_library, False),
    ],
)
def test_only_the_libraries_own_code_can_be_repeated(loss, replayable):
    model = runs.model(loss=loss, metrics=[])
    config = keras.saving.serialize_keras_object(model)
    assert fingerprint._is_library_code(config) == replayable


def test_a_lambda_or_registered_class_cannot_be_repeated():
    @keras.saving.register_keras_serializable("mine")
    class Mine(keras.layers.Dense):
        pass

    for layer in (Mine(3), keras.layers.Lambda(lambda x: x)):
        model = keras.Sequential([keras.Input((4,)), layer])
        config = keras.saving.serialize_keras_object(model)
        assert not fingerprint._is_library_code(config)

"""Errors on what a newcomer passes: no optimizer, lists, no targets, no batch size."""

import numpy as np
import pytest
import tensorflow as tf
import tiny

import keras_dpopt

X, Y = tiny.rows(12)
DATA = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)


def model(**arguments):
    return tiny.classifier(tiny.private_sgd(**arguments))


def test_no_optimizer():
    made = keras_dpopt.DPSequential([tiny.keras.layers.Dense(3)])
    with pytest.raises(ValueError, match="No optimizer was given.*DPSGD"):
        made.compile(loss="mse")


@pytest.mark.parametrize(
    "x, y, name", [(X.tolist(), Y, "x"), (X, Y.tolist(), "y"), ([1.0, 2.0], Y, "x")]
)
@pytest.mark.parametrize("how", ["fit", "split", "train_on_batch"])
def test_lists(how, x, y, name):
    made = model(expected_batch_size=4)
    with pytest.raises(
        TypeError, match=rf"`{name}` must be arrays.*np.asarray\({name}"
    ):
        if how == "train_on_batch":
            made.train_on_batch(x, y)
        else:
            tiny.fit(made, x, y, validation_split=0.5 if how == "split" else 0.0)
    assert tiny.steps(made) == 0


@pytest.mark.parametrize("how", ["fit", "data set", "train_on_batch"])
def test_no_targets(how):
    made = model(expected_batch_size=4)
    with pytest.raises(ValueError, match="needs targets, and there are none. Pass `y`"):
        if how == "train_on_batch":
            made.train_on_batch(X)
        elif how == "fit":
            tiny.fit(made, X)
        else:
            tiny.fit(made, DATA.map(lambda x, y: x))
    assert tiny.steps(made) == 0


def test_a_loss_of_the_model_needs_no_targets():
    class Own(keras_dpopt.DPModel):
        def __init__(self):
            super().__init__()
            self.dense = tiny.keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

        def compute_loss(self, x, y, y_pred, sample_weight=None, **kwargs):
            return tf.reduce_mean(y_pred**2)

    made = Own()
    made.compile(tiny.private_sgd())
    tiny.fit(made, X, batch_size=4)
    assert tiny.steps(made) == 3


@pytest.mark.parametrize("how", ["fit", "data set", "train_on_batch"])
def test_no_batch_size(how):
    made = model()
    with pytest.raises(ValueError, match="No batch size is known") as raised:
        if how == "train_on_batch":
            made.train_on_batch(X, Y)
        elif how == "fit":
            tiny.fit(made, X, Y)
        else:
            tiny.fit(made, DATA)
    message = str(raised.value)
    assert "`expected_batch_size` to the optimizer." in message
    assert ("`batch_size` to `fit`" in message) == (how == "fit")


def test_the_other_kind_of_data_is_named():
    made = model(expected_batch_size=4)
    with pytest.raises(ValueError, match="`validation_split`: .* or pass arrays"):
        tiny.fit(made, DATA, validation_split=0.1)
    with pytest.raises(ValueError, match="`once_per_epoch`: .* or pass a data set"):
        tiny.fit(made, X, Y, once_per_epoch=True)
    assert np.isfinite(tiny.steps(made))

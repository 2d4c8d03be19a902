"""Models that tests/save_test.py saves, and loads in a process of their own."""

import json
import pathlib
import sys

import keras
import numpy as np
import runs

import keras_dpopt
from keras_dpopt.dp_optimizer import DPOptimizer


@keras.saving.register_keras_serializable("save_process")
class PrivateSubclass(keras_dpopt.DPModel):
    """A subclass of DPModel."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden, self.out = runs.layers()

    def call(self, x):
        return self.out(self.hidden(x))


@keras.saving.register_keras_serializable("save_process")
class PlainSubclass(keras.Model):
    """A subclass of keras.Model."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden, self.out = runs.layers()

    def call(self, x):
        return self.out(self.hidden(x))


def inputs():
    return runs.data()[0]


def _compiled(model, optimizer=None, **arguments):
    arguments = {
        "loss": "sparse_categorical_crossentropy",
        "metrics": ["accuracy"],
        **arguments,
    }
    model.compile(optimizer or runs.sgd(momentum=0.9), **arguments)
    return model


def _functional(kind):
    hidden, out = runs.layers()
    x = keras.Input((runs.FEATURES,), name="x")
    shared = hidden(x)
    twice = keras.layers.Dense(1, name="other")(shared)
    return kind(x, {"a": out(shared), "b": twice})


def functional():
    """Two outputs, loss weights, a schedule, weight decay."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 10, 0.9)
    return _compiled(
        _functional(keras_dpopt.DPModel),
        keras_dpopt.DPAdamW(
            schedule,
            l2_norm_clip=0.7,
            noise_multiplier=1.3,
            weight_decay=0.01,
            microbatch_size=4,
        ),
        loss={"a": "sparse_categorical_crossentropy", "b": "mse"},
        loss_weights={"a": 1.0, "b": 0.5},
        metrics={"a": ["accuracy"], "b": ["mae"]},
    )


def sequential():
    """Look-ahead, EMA, several steps an execution, XLA."""
    made = keras_dpopt.DPSequential([keras.Input((runs.FEATURES,)), *runs.layers()])
    optimizer = runs.fiber(
        use_ema=True, ema_momentum=0.5, seed=7, gradient_engine="vectorized"
    )
    return _compiled(made, optimizer, steps_per_execution=2, jit_compile=True)


def _plain_sequential():
    return keras.Sequential([keras.Input((runs.FEATURES,)), *runs.layers()])


def _plain_subclass():
    model = PlainSubclass()
    model(inputs()[:1])
    return model


def hub_task():
    """A keras_hub task with its preprocessor."""
    import keras_hub

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film"]
    tokenizer = keras_hub.models.BertTokenizer(vocabulary=words)
    task = keras_hub.models.BertTextClassifier(
        backbone=keras_hub.models.BertBackbone(
            vocabulary_size=len(words),
            num_layers=1,
            num_heads=1,
            hidden_dim=4,
            intermediate_dim=4,
            max_sequence_length=4,
            dropout=0.1,
        ),
        preprocessor=keras_hub.models.BertTextClassifierPreprocessor(
            tokenizer, sequence_length=4
        ),
        num_classes=3,
        activation="softmax",
    )
    # The engine is not the point here, and tokens crash oneDNN in the vectorized one.
    return _compiled(keras_dpopt.make_private(task), runs.sgd())


MODELS = {
    "functional": functional,
    "sequential": sequential,
    "subclass": lambda: _compiled(PrivateSubclass()),
    "private functional": lambda: _compiled(
        keras_dpopt.make_private(_functional(keras.Model)),
        loss={"a": "sparse_categorical_crossentropy", "b": "mse"},
        metrics=None,
    ),
    "private sequential": lambda: _compiled(
        keras_dpopt.make_private(_plain_sequential())
    ),
    "private subclass": lambda: _compiled(keras_dpopt.make_private(_plain_subclass())),
    "hub task": hub_task,
}


def _data(name):
    x, y = runs.data()
    if name == "hub task":
        x = np.array([["good film", "bad film", "film"][c] for c in y])
    if name.endswith("functional"):
        return x, {"a": y, "b": y[:, None].astype("float32")}
    return x, y


def train(name, model, **arguments):
    model.fit(*_data(name), batch_size=runs.BATCH, verbose=0, **arguments)


def described(name, model):
    """What must come back, as JSON; the learning rate is a state or a schedule."""
    config = model.get_compile_config()
    optimizer = model.optimizer
    return json.loads(
        json.dumps(
            {
                "compile": config,
                "optimizer": type(optimizer).__name__,
                "learning_rate": float(optimizer.learning_rate),
                "steps_per_execution": model.steps_per_execution,
                "jit_compile": model.jit_microbatch,
                "iterations": int(optimizer.iterations),
                "releases": optimizer.releases(),
                "steps": model.privacy_ledger.sync().total_steps,
                "epsilon": model.privacy_ledger.sync().epsilon(1e-5),
                "notes": list(model.privacy_ledger.sync().notes),
            }
        )
    )


def arrays(name, model):
    """Predictions, weights and optimizer state."""
    predicted = keras.tree.flatten(model.predict(_data(name)[0], verbose=0))
    return {
        **{f"predicted.{i}": p for i, p in enumerate(predicted)},
        **runs.state(model),
    }


def check(folder):
    for name in MODELS:
        model = keras.saving.load_model(folder / f"{name}.keras")
        expected = json.loads((folder / f"{name}.json").read_text())
        found = described(name, model)
        assert found == expected, f"{name}: {found} is not {expected}"
        assert isinstance(model.optimizer, DPOptimizer)
        with np.load(folder / f"{name}.npz") as saved:
            for key, value in arrays(name, model).items():
                exact = not key.startswith("predicted")
                tolerance = 0.0 if exact else 1e-6
                np.testing.assert_allclose(
                    value, saved[key], atol=tolerance, rtol=0, err_msg=f"{name} {key}"
                )
        train(name, model)
        ledger = model.privacy_ledger.sync()
        assert ledger.total_steps == 2 * runs.STEPS == model.optimizer.releases(), name
        assert int(model.optimizer.iterations) == 2 * runs.STEPS, name
        assert ledger.epsilon(1e-5) > expected["epsilon"], name
        assert not ledger.notes, (name, ledger.notes)


if __name__ == "__main__":
    check(pathlib.Path(sys.argv[1]))

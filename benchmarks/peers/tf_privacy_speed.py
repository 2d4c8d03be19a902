"""TensorFlow Privacy: seconds a step of its optimizers and models, and of Keras 2.

With `(XLA)` are the ways with TensorFlow's compiler: `jit_compile` of `compile`, or
`use_xla` of the private models, which is their default.
"""

import tensorflow as tf
import tensorflow_privacy
import turns
from tensorflow_privacy.privacy.fast_gradient_clipping import layer_registry

layers = tf.keras.layers


def cnn() -> list:
    """As in speed.py."""
    found = [tf.keras.Input((32, 32, 3))]
    for channels in (32, 64, 128):
        for _ in range(2):
            found.append(layers.Conv2D(channels, 3, padding="same", activation="relu"))
        found.append(layers.MaxPool2D())
    return [*found, layers.Flatten(), layers.Dense(128, "relu"), layers.Dense(10)]


def mlp() -> list:
    """As in speed.py."""
    hidden = [layers.Dense(256, "relu") for _ in range(2)]
    return [tf.keras.Input((784,)), *hidden, layers.Dense(10)]


def lstm() -> list:
    """As in speed.py."""
    return [
        tf.keras.Input((turns.TOKENS,), dtype="int32"),
        layers.Embedding(turns.VOCABULARY, 64),
        layers.LSTM(64),
        layers.Dense(2),
    ]


MODELS = {"cnn": cnn, "mlp": mlp, "lstm": lstm}


def maker(name: str, model=None, optimizer=None, jit_compile=False, reduction="auto"):
    """Returns a maker of steps.

    Args:
        name: Of the model.
        model: From layers to a model; by default an ordinary one.
        optimizer: Makes the optimizer; by default ordinary Adam.
        jit_compile: Of `compile`.
        reduction: Of the loss.
    """

    def make(x, y):
        tf.keras.utils.set_random_seed(0)
        made = (model or tf.keras.Sequential)(MODELS[name]())
        loss = tf.keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction=reduction
        )
        made.compile(
            optimizer() if optimizer else "adam",
            loss,
            metrics=["accuracy"],
            jit_compile=jit_compile,
        )
        function = made.make_train_function()
        # Keras 2 traces anew for each Python iterator, but not for those of a dataset.
        batches = iter(tf.data.Dataset.from_tensors((x, y)).repeat())
        return lambda: float(function(batches)["loss"])

    return make


def private_optimizer(name: str, cls, jit_compile: bool):
    """A private optimizer on an ordinary model."""
    return maker(
        name,
        optimizer=lambda: cls(turns.CLIP, turns.NOISE, learning_rate=turns.RATE),
        jit_compile=jit_compile,
        reduction="none",
    )


def private_model(name: str, use_xla: bool, registry=None):
    """A private model with an ordinary optimizer."""

    def model(found):
        return tensorflow_privacy.DPSequential(
            turns.CLIP,
            turns.NOISE,
            use_xla=use_xla,
            layer_registry=registry,
            layers=found,
        )

    return maker(name, model=model)


def ways(name: str) -> dict:
    """Makers for a model, ordinary training first."""
    if name not in MODELS:
        return {}
    found = {"Keras 2": maker(name)}
    for xla in (False, True):
        suffix = " (XLA)" if xla else ""
        if xla:
            found[f"Keras 2{suffix}"] = maker(name, jit_compile=True)
        for cls in ("DPKerasAdamOptimizer", "VectorizedDPKerasAdamOptimizer"):
            optimizer = getattr(tensorflow_privacy, cls)
            found[f"{cls}{suffix}"] = private_optimizer(name, optimizer, xla)
        found[f"DPSequential{suffix}"] = private_model(name, xla)
        if name == "mlp":  # Its registry has dense layers and embeddings only.
            registry = layer_registry.make_default_layer_registry()
            found[f"DPSequential, fast clipping{suffix}"] = private_model(
                name, xla, registry
            )
    return found


if __name__ == "__main__":
    turns.run(["tensorflow-privacy", "tensorflow"], ways)

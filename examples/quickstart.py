"""Private training in under three minutes: scikit-learn's digits, 1,797 images.

    python examples/quickstart.py

Trains one small convolutional network without privacy, with DP-SGD and with FiBeR, at
the same epsilon; prints what each cost and reached, and the privacy statement; draws
accuracy against the epsilon spent.
"""

import dataclasses
import pathlib
import time

import keras
from absl import app, flags

import keras_dpopt

try:
    import matplotlib
    from sklearn import datasets, model_selection
except ModuleNotFoundError as error:
    raise SystemExit(
        f"The examples need {error.name}. In the clone, run "
        "`pip install '.[examples]'`."
    ) from None

matplotlib.use("Agg")  # a file, not a window
import matplotlib.pyplot as plt  # noqa: E402

_BATCH_SIZE = 512
_METHODS = {
    "DPSGD": lambda **private: keras_dpopt.DPSGD(0.25, momentum=0.9, **private),
    # With the noise of so small a data set, the paper's variance_floor of 1e-8 lets
    # coordinates that are all noise take steps of 1e4 * learning_rate * |f|.
    "FiBeR": lambda **private: keras_dpopt.FiBeR(0.03, variance_floor=1e-4, **private),
}

FLAGS = flags.FLAGS
flags.DEFINE_float("target_epsilon", 3.0, "Epsilon to spend.", lower_bound=0.0)
flags.DEFINE_float("delta", 1e-4, "Delta.", lower_bound=0.0, upper_bound=1.0)
flags.DEFINE_integer("epochs", 30, "Epochs.", lower_bound=1)
flags.DEFINE_string("plot", "outputs/quickstart.png", "Where to draw the plot.")
flags.DEFINE_bool("smoke", False, "Few epochs, to see that it runs.")


@dataclasses.dataclass(frozen=True)
class Result:
    """A row of the table, and the curve of the plot."""

    method: str
    accuracy: float
    epsilon: float
    sigma: float
    seconds: float
    history: dict


def load_digits():
    """Returns x_train, x_test, y_train, y_test of the handwritten digits."""
    x, y = datasets.load_digits(return_X_y=True)
    x = (x / 16).astype("float32").reshape(-1, 8, 8, 1)
    return model_selection.train_test_split(
        x, y, test_size=0.2, random_state=0, stratify=y
    )


def layers():
    """Returns the layers of the network."""
    return [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(16, 3, activation="tanh"),
        keras.layers.MaxPooling2D(2),
        keras.layers.Conv2D(32, 3, padding="same", activation="tanh"),
        keras.layers.Flatten(),
        keras.layers.Dense(10),
    ]


def train(method, model, optimizer, data, epochs, sigma=0.0, callbacks=()):
    """Trains a model and returns it with its `Result`."""
    x_train, x_test, y_train, y_test = data
    print(f"\n{method}")
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    start = time.time()
    history = model.fit(
        x_train,
        y_train,
        batch_size=_BATCH_SIZE,
        epochs=epochs,
        validation_data=(x_test, y_test),
        callbacks=list(callbacks),
    ).history
    seconds = time.time() - start
    epsilon = history.get("epsilon", [float("inf")])[-1]
    accuracy = history["val_accuracy"][-1]
    return model, Result(method, accuracy, epsilon, sigma, seconds, history)


def draw(results, path):
    """Draws test accuracy against the epsilon spent."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for result in results:
        accuracy = result.history["val_accuracy"]
        if "epsilon" in result.history:
            axes.plot(result.history["epsilon"], accuracy, label=result.method)
        else:
            axes.axhline(accuracy[-1], color="grey", ls="--", label=result.method)
    axes.set(xlabel="epsilon spent", ylabel="test accuracy", ylim=(0, 1))
    axes.set_title(f"scikit-learn digits, delta = {FLAGS.delta:g}")
    axes.legend()
    figure.savefig(path, dpi=150)
    print(f"Plot: {path}")


def main(argv):
    """Trains, prints and draws."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
    data = load_digits()
    epochs = 3 if FLAGS.smoke else FLAGS.epochs
    sigma = keras_dpopt.noise_multiplier(
        target_epsilon=FLAGS.target_epsilon,
        delta=FLAGS.delta,
        train_size=len(data[0]),
        batch_size=_BATCH_SIZE,
        epochs=epochs,
    )

    _, plain = train(
        "without privacy",
        keras.Sequential(layers()),
        keras.optimizers.SGD(0.25, momentum=0.9),
        data,
        epochs,
    )
    results = [plain]
    for method, make_optimizer in _METHODS.items():
        model, result = train(
            method,
            keras_dpopt.DPSequential(layers()),
            make_optimizer(l2_norm_clip=1.0, noise_multiplier=sigma),
            data,
            epochs,
            sigma,
            [keras_dpopt.PrivacyBudget(FLAGS.target_epsilon, FLAGS.delta)],
        )
        results.append(result)

    row = "{:<16} {:>8} {:>8} {:>8} {:>8} {:>8}"
    print(
        "\n" + row.format("method", "accuracy", "epsilon", "delta", "sigma", "seconds")
    )
    for result in results:
        private = result.sigma > 0
        print(
            row.format(
                result.method,
                f"{result.accuracy:.3f}",
                f"{result.epsilon:.3f}",
                f"{FLAGS.delta:g}" if private else "-",
                f"{result.sigma:.3f}" if private else "-",
                f"{result.seconds:.1f}",
            )
        )
    print(f"\n{model.privacy_statement(FLAGS.delta)}\n")
    draw(results, FLAGS.plot)
    worst = min(result.accuracy for result in results)
    if worst < (0.2 if FLAGS.smoke else 0.7):
        raise SystemExit(f"A method reached an accuracy of {worst:.3f} only.")


if __name__ == "__main__":
    app.run(main)

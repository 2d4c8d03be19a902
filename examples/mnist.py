"""Trains a small tanh CNN on MNIST or Fashion-MNIST with differential privacy.

    python examples/mnist.py --method=DPSGD --target_epsilon=3

The network is that of Papernot et al., "Tempered Sigmoid Activations for Deep Learning
with Differential Privacy" (AAAI 2021), Table 1. Data comes through TensorFlow Datasets:
from --data_dir, or else from the network. Without both, the program says so and trains
on scikit-learn's digits.
"""

import socket
import time
import urllib.parse

import keras
import numpy as np
import tensorflow_datasets as tfds
from absl import app, flags

import keras_dpopt

try:
    from sklearn import datasets, model_selection
except ModuleNotFoundError as error:
    raise SystemExit(
        f"The examples need {error.name}. In the clone, run "
        "`pip install '.[examples]'`."
    ) from None

# The learning rate that suits each method with the other flags at their defaults.
_LEARNING_RATES = {"DPSGD": 0.5, "DPAdam": 2e-3, "DPAdamW": 2e-3, "FiBeR": 2e-3}

FLAGS = flags.FLAGS
flags.DEFINE_enum("dataset", "mnist", ["mnist", "fashion_mnist"], "TFDS data set.")
flags.DEFINE_string(
    "data_dir",
    None,
    "Folder in which TFDS keeps its data sets, with mnist/3.0.1 in it, say; it is "
    "filled from the network where it has none. By default TFDS' own, in your home.",
)
flags.DEFINE_enum("method", "DPSGD", list(_LEARNING_RATES), "Private optimizer.")
flags.DEFINE_float("target_epsilon", 3.0, "Epsilon to spend.", lower_bound=0.0)
flags.DEFINE_float("delta", 1e-5, "Delta.", lower_bound=0.0, upper_bound=1.0)
flags.DEFINE_integer("batch_size", 2048, "Expected batch size.", lower_bound=1)
flags.DEFINE_integer("epochs", 10, "Epochs.", lower_bound=1)
flags.DEFINE_float("learning_rate", None, "Defaults to one that suits the method.")
flags.DEFINE_float("l2_norm_clip", 1.0, "Clipping norm of a record's gradient.")
flags.DEFINE_integer("seed", None, "Makes the run repeatable, and less private.")
flags.DEFINE_bool("smoke", False, "Two epochs on little data, to see that it runs.")


def load_data():
    """Returns (x_train, y_train), (x_test, y_test), images in [0, 1]."""
    try:
        builder = tfds.builder(FLAGS.dataset, data_dir=FLAGS.data_dir)
        if not builder.data_path.exists():
            if FLAGS.smoke:
                raise FileNotFoundError("no download in a smoke run")
            # TFDS would try again for minutes.
            host = urllib.parse.urlparse(builder.URL).hostname
            socket.create_connection((host, 443), timeout=10).close()
            builder.download_and_prepare()
        train, test = (
            tfds.as_numpy(builder.as_dataset(split, batch_size=-1, as_supervised=True))
            for split in ("train", "test")
        )
    except Exception as error:  # TFDS has many ways to say that it found nothing
        print(
            f"TFDS has no {FLAGS.dataset} here ({type(error).__name__}: "
            f"{str(error).splitlines()[0][:80]}); training on scikit-learn's digits."
        )
        x, y = datasets.load_digits(return_X_y=True)
        x = (x / 16).astype("float32").reshape(-1, 8, 8, 1)
        x = np.kron(x, np.ones((1, 3, 3, 1), "float32"))  # as large as the CNN needs
        x = np.pad(x, [(0, 0), (2, 2), (2, 2), (0, 0)])
        x_train, x_test, y_train, y_test = model_selection.train_test_split(
            x, y, test_size=0.2, random_state=0, stratify=y
        )
        return (x_train, y_train), (x_test, y_test)
    return tuple((x.astype("float32") / 255, y) for x, y in (train, test))


def make_model():
    """Returns the tanh CNN for 28x28 images: 26,010 weights."""
    return keras_dpopt.DPSequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(16, 8, strides=2, padding="same", activation="tanh"),
            keras.layers.MaxPooling2D(2, strides=1),
            keras.layers.Conv2D(32, 4, strides=2, activation="tanh"),
            keras.layers.MaxPooling2D(2, strides=1),
            keras.layers.Flatten(),
            keras.layers.Dense(32, activation="tanh"),
            keras.layers.Dense(10),
        ]
    )


def main(argv):
    """Trains, evaluates and prints the privacy statement."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
    (x_train, y_train), (x_test, y_test) = load_data()
    batch_size, epochs = FLAGS.batch_size, FLAGS.epochs
    if FLAGS.smoke:
        x_train, y_train, epochs = x_train[:4000], y_train[:4000], 2
    batch_size = min(batch_size, len(x_train) // 4)
    sigma = keras_dpopt.noise_multiplier(
        target_epsilon=FLAGS.target_epsilon,
        delta=FLAGS.delta,
        train_size=len(x_train),
        batch_size=batch_size,
        epochs=epochs,
    )
    options = {"momentum": 0.9} if FLAGS.method == "DPSGD" else {}
    optimizer = getattr(keras_dpopt, FLAGS.method)(
        FLAGS.learning_rate or _LEARNING_RATES[FLAGS.method],
        l2_norm_clip=FLAGS.l2_norm_clip,
        noise_multiplier=sigma,
        seed=FLAGS.seed,
        **options,
    )
    if FLAGS.seed is not None:
        keras.utils.set_random_seed(FLAGS.seed)
    model = make_model()
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    start = time.time()
    model.fit(
        x_train,
        y_train,
        batch_size=batch_size,
        epochs=epochs,
        callbacks=[keras_dpopt.PrivacyBudget(FLAGS.target_epsilon, FLAGS.delta)],
        verbose=2,
    )
    seconds = time.time() - start
    _, accuracy = model.evaluate(x_test, y_test, verbose=0)
    print(model.privacy_statement(FLAGS.delta))
    print(
        f"{FLAGS.method} on {len(x_train)} images: test accuracy {accuracy:.4f} in "
        f"{seconds:.0f} s"
    )
    if FLAGS.smoke and accuracy < 0.15:
        raise SystemExit("The smoke run did not learn anything.")


if __name__ == "__main__":
    app.run(main)

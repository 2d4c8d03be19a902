"""How private training would run on a TPU VM, and what can be checked without one.

    python examples/tpu.py            # on a TPU VM
    python examples/tpu.py --smoke    # anywhere: the same on the default device

keras_dpopt REFUSES TPUStrategy on more than one core until somebody has tested it on a
TPU: nothing here shows that its replicas add the noise once. On a TPU VM this program
therefore ends with the library's refusal, unless TPUStrategy is in `_STRATEGIES` of
keras_dpopt/fit_arguments.py: do that to test it, not to train on private data. See
docs/distributed.md.

Without a TPU, the same function trains on the default device with jit_compile=True, so
XLA compiles the clipped sum of a microbatch, and once without. The program checks that
both runs, of one seed, end with the same weights up to rounding.
"""

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import keras_dpopt

try:
    from sklearn import datasets
except ModuleNotFoundError as error:
    raise SystemExit(
        f"The examples need {error.name}. In the clone, run "
        "`pip install '.[examples]'`."
    ) from None

# Of a weight, in units of the largest one.
_TOLERANCE = 1e-4

FLAGS = flags.FLAGS
flags.DEFINE_string("tpu", "local", 'Name of the TPU; "local" is that of this TPU VM.')
flags.DEFINE_integer("batch_size", 512, "Expected size of a batch.", lower_bound=1)
flags.DEFINE_integer("epochs", 10, "Epochs.", lower_bound=1)
flags.DEFINE_integer("seed", 0, "Makes the run repeatable, and less private.")
flags.DEFINE_bool("smoke", False, "Two epochs, to see that it runs.")


def connect():
    """Returns the strategy of the TPU; of the default device, where there is none."""
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(FLAGS.tpu)
    try:
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except tf.errors.OpError as error:
        # TensorFlow has no kernel for it without a TPU, or the TPU did not answer.
        print(f"No TPU was found ({type(error).__name__}).")
        return tf.distribute.get_strategy()
    return tf.distribute.TPUStrategy(resolver)


def train(strategy, jit_compile):
    """Trains a small private network under a strategy; returns the model."""
    x, y = datasets.load_digits(return_X_y=True)
    x = (x / 16).astype("float32")
    keras.utils.set_random_seed(FLAGS.seed)
    with strategy.scope():
        model = keras_dpopt.DPSequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(64, activation="tanh"),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            optimizer=keras_dpopt.DPSGD(
                0.25,
                momentum=0.9,
                l2_norm_clip=1.0,
                noise_multiplier=2.0,
                seed=FLAGS.seed,
            ),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            jit_compile=jit_compile,
        )
    model.fit(x, y, batch_size=FLAGS.batch_size, epochs=FLAGS.epochs, verbose=2)
    return model


def main(argv):
    """Trains on the TPU, or checks without one what can be checked."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
    if FLAGS.smoke:
        FLAGS.epochs = min(FLAGS.epochs, 2)
    strategy = connect()
    model = train(strategy, jit_compile=True)
    if isinstance(strategy, tf.distribute.TPUStrategy):
        print(model.privacy_statement(delta=1e-4))
        return
    plain = train(strategy, jit_compile=False)
    one, other = (
        np.concatenate([np.ravel(v) for v in m.trainable_variables])
        for m in (model, plain)
    )
    difference = np.abs(one - other).max() / np.abs(other).max()
    device = tf.config.list_logical_devices()[-1].name
    print(
        "\nNothing was run on a TPU, and TPUStrategy was not tried.\n"
        f"What was checked instead, on {device}: {model.optimizer.releases()} steps in "
        "which XLA compiled the clipped sum of a microbatch gave the weights that they "
        f"give without XLA, to {difference:.1e} of the largest one."
    )
    if not difference < _TOLERANCE:
        raise SystemExit("With and without XLA the weights are different.")


if __name__ == "__main__":
    app.run(main)

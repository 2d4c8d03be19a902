"""A record that is not finite is dropped alone."""

import keras
import numpy as np
import tensorflow as tf

import keras_dpopt
from keras_dpopt import engines


class HalfBecomesInfinite(keras.layers.Layer):
    """Rows become infinite at random: a copy at another place is another draw."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(1)

    def call(self, x):
        draw = keras.random.uniform(keras.ops.shape(x[:, :1]), seed=self.seed)
        return x / keras.ops.cast(draw > 0.5, "float32")


def test_a_dropped_record_does_not_silence_the_others():
    for seed in range(4):
        model = keras_dpopt.DPSequential(
            [keras.Input((3,)), HalfBecomesInfinite(), keras.layers.Dense(1)]
        )
        optimizer = keras_dpopt.DPSGD(
            1.0,
            l2_norm_clip=1.0,
            noise_multiplier=0.0,
            expected_batch_size=1,
            seed=seed,
            gradient_engine="vectorized",
        )
        model.compile(optimizer, "mse")
        x, y = np.ones((32, 3), "f4"), 5 * np.ones((32, 1), "f4")
        model.explain_engine(x, y)
        rows = {"x": tf.constant(x), "y": tf.constant(y)}
        step = model.private_step.microbatch
        total = step.trial_sum(engines.ENGINES["bookkeeping"], rows)()
        # About half of 32 equal records of norm C are left: 5 deviations, 6e-7 each.
        assert np.linalg.norm(np.concatenate([np.ravel(t) for t in total])) > 16 - 14

"""Noise that was drawn ahead is that of its step, or there is none."""

import numpy as np
import pytest
import tensorflow as tf

from keras_dpopt import gaussian_noise, mechanisms
from keras_dpopt.adaptive_clipping import AdaptiveClipping
from keras_dpopt.types import ClippedSum

SHAPES = ((3, 2), (), (5,))
KEY = tf.constant(7, tf.int64)
STEP = tf.constant(4, tf.int64)
ZEROS = [tf.zeros(shape) for shape in SHAPES]


def noised(drawn=None, key=KEY, step=STEP, first=2):
    found = gaussian_noise.add_noise(ZEROS, 0.5, key, step, first, drawn)
    return np.concatenate([np.ravel(value) for value in found])


def test_noise_drawn_ahead_is_the_same():
    drawn = gaussian_noise.draw(SHAPES, KEY, STEP, 2)
    np.testing.assert_array_equal(noised(drawn), noised())
    assert np.std(noised()) > 0.1


@pytest.mark.parametrize(
    "other", [{"key": tf.constant(8, tf.int64)}, {"step": tf.constant(5, tf.int64)}]
)
def test_noise_of_another_step_or_key_is_refused(other):
    drawn = gaussian_noise.draw(SHAPES, KEY, STEP, 2)
    with pytest.raises(tf.errors.InvalidArgumentError, match="another step"):
        noised(drawn, **other)
    in_a_graph = tf.function(lambda: noised_in_graph(drawn, **other))
    with pytest.raises(tf.errors.InvalidArgumentError, match="another step"):
        in_a_graph()


def noised_in_graph(drawn, key=KEY, step=STEP):
    values = (drawn.key + 0, drawn.step + 0)  # not known before it runs
    drawn = gaussian_noise.DrawnNoise(*values, drawn.first_stream, drawn.values)
    return gaussian_noise.add_noise(ZEROS, 0.5, key, step, 2, drawn)


def test_noise_of_another_sum_is_refused():
    drawn = gaussian_noise.draw(SHAPES, KEY, STEP, 2)
    with pytest.raises(ValueError, match="another sum"):
        noised(drawn, first=0)
    for shapes in (SHAPES[:2], SHAPES[::-1]):
        drawn = gaussian_noise.draw(shapes, KEY, STEP, 2)
        with pytest.raises(ValueError, match="another sum"):
            noised(drawn)


@pytest.mark.parametrize("clipping", ["flat", AdaptiveClipping(count_noise_stddev=9.0)])
def test_mechanisms_take_it(clipping):
    mechanism = mechanisms.make(1.0, 2.0, clipping=clipping).built_for([0, 1, 2])
    state = mechanism.initial_state()
    specs = [tf.TensorSpec(shape) for shape in SHAPES]
    params = mechanism.sample_params(state)
    total = ClippedSum(mechanism.zero_sum(specs), mechanism.sensitivity(params))
    drawn = mechanism.draw_ahead(specs, KEY, STEP, 3)
    ahead, _ = mechanism.release(total, state, KEY, STEP, 4.0, 3, drawn)
    plain, _ = mechanism.release(total, state, KEY, STEP, 4.0, 3)
    for a, b in zip(ahead.values, plain.values, strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.any(a != 0)

"""Layers: the golden values, float64 NumPy, and what private training needs."""

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dpopt
from keras_dpopt import layers

GOLDEN = helpers.golden()["methods"]["weight_standardisation"]


def standardized(kernel, gain=1.0):
    """W_hat in float64."""
    kernel = np.asarray(kernel, "f8")
    fan_in = kernel[..., 0].size
    mean, variance = kernel.mean(axis=(0, 1, 2)), kernel.var(axis=(0, 1, 2))
    return gain * (kernel - mean) / np.sqrt(np.maximum(variance * fan_in, 1e-4))


def layer_with(kernel, gain=None, x_channels=None, **arguments):
    """A layer with this kernel, and a bias and a gain that are not trivial."""
    kernel = np.asarray(kernel, "f8")
    layer = layers.WeightStandardizedConv2D(
        kernel.shape[-1], kernel.shape[:2], **arguments
    )
    channels = x_channels or kernel.shape[2]
    layer.build((None, 9, 9, channels))
    layer.kernel.assign(kernel)
    if gain is not None:
        layer.gain.assign(gain)
    return layer


def used_kernel(layer, channels):
    """The kernel that the layer convolves with, by its response to unit images."""
    kh, kw = layer.kernel_size
    units = np.eye(kh * kw * channels).reshape(-1, kh, kw, channels)
    response = keras.ops.convert_to_numpy(layer(units)).astype("f8")
    return response.reshape(kh, kw, channels, -1)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        ("float32", 1e-6),
        ("mixed_float16", 1e-3),
        ("float16", 1e-3),
        ("mixed_bfloat16", 8e-3),
    ],
)
def test_golden_kernel(dtype, tolerance):
    """The entries are at most 0.52: 16 bits round them, and the kernel, by 2^-11."""
    layer = layer_with(GOLDEN["W"], dtype=dtype)
    got = used_kernel(layer, 1)
    np.testing.assert_allclose(got, GOLDEN["W_hat"], atol=tolerance)
    np.testing.assert_allclose(
        np.square(got).sum(axis=(0, 1, 2)), GOLDEN["sum_sq_per_channel"], atol=tolerance
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"strides": 2, "padding": "same"},
        {"dilation_rate": 2},
        {"groups": 2},
        {"use_bias": False, "activation": "tanh"},
    ],
    ids=str,
)
def test_is_a_convolution_with_the_standardized_kernel(arguments):
    draw = np.random.default_rng(0)
    groups = arguments.get("groups", 1)
    kernel, gain = draw.normal(size=(3, 2, 4 // groups, 6)), draw.normal(size=6)
    x = draw.normal(size=(2, 9, 9, 4)).astype("f4")
    layer = layer_with(kernel, gain, x_channels=4, **arguments)
    twin = keras.layers.Conv2D(6, (3, 2), **arguments)
    twin.build(x.shape)
    twin.kernel.assign(standardized(kernel, gain))
    if layer.use_bias:
        layer.bias.assign(np.arange(6.0))
        twin.bias.assign(np.arange(6.0))
    np.testing.assert_allclose(layer(x), twin(x), atol=2e-5)
    assert layer.compute_output_shape(x.shape) == layer(x).shape


def test_scale_and_offset_of_the_kernel_do_not_matter():
    kernel = np.random.default_rng(1).normal(size=(3, 3, 2, 4))
    kernels = [used_kernel(layer_with(k), 2) for k in (kernel, 30 * kernel + 4)]
    np.testing.assert_allclose(*kernels, atol=1e-5)


def test_kernels_near_a_constant_are_not_blown_up():
    """Below the floor the kernel is divided by 0.01, and its gradient is finite."""
    kernel = 1e-4 * np.random.default_rng(1).normal(size=(3, 3, 1, 2))
    layer = layer_with(kernel)
    centered = kernel - kernel.mean(axis=(0, 1, 2))
    np.testing.assert_allclose(used_kernel(layer, 1), 100 * centered, rtol=1e-4)
    layer = layer_with(np.full((3, 3, 1, 2), 0.25))
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(layer(np.random.default_rng(0).normal(size=(1, 5, 5, 1))))
    gradients = tape.gradient(y, layer.trainable_weights)
    assert all(np.isfinite(g).all() for g in gradients)
    np.testing.assert_array_equal(used_kernel(layer, 1), 0)


def test_gradient_is_that_of_the_formula():
    """By central differences in float64, for the kernel and the gain."""
    draw = np.random.default_rng(2)
    kernel, gain = draw.normal(size=(3, 3, 2, 3)), draw.normal(size=3)
    layer = layer_with(kernel, gain, use_bias=False)
    weight = draw.normal(size=kernel.shape)
    # One 3x3 image a channel entry makes the output the kernel itself.
    with tf.GradientTape() as tape:
        units = np.eye(18).reshape(-1, 3, 3, 2)
        response = tf.reshape(layer(units), kernel.shape)
        loss = tf.reduce_sum(response * tf.constant(weight, "float32"))
    got = tape.gradient(loss, [layer.kernel.value, layer.gain.value])
    f = lambda k, g: np.sum(standardized(k, g) * weight)  # noqa: E731
    want = [np.zeros_like(kernel), np.zeros_like(gain)]
    for array, out in zip((kernel, gain), want, strict=True):
        for index in np.ndindex(array.shape):
            ends = []
            for step in (1e-5, -1e-5):
                array[index] += step
                ends.append(f(kernel, gain))
                array[index] -= step
            out[index] = (ends[0] - ends[1]) / 2e-5
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_saving_and_configuration(tmp_path):
    model = keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            layers.WeightStandardizedConv2D(4, 3, strides=2, groups=2, name="ws"),
        ]
    )
    model.layers[0].gain.assign([1.0, 2.0, 3.0, 4.0])
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert type(again.layers[0]) is layers.WeightStandardizedConv2D
    assert again.layers[0].get_config() == model.layers[0].get_config()
    x = np.random.default_rng(0).normal(size=(2, 6, 6, 2))
    np.testing.assert_array_equal(model(x), again(x))
    name = keras.saving.get_registered_name(layers.WeightStandardizedConv2D)
    assert name == "keras_dpopt>WeightStandardizedConv2D"


def test_low_rank_adaptation_goes_through_the_standardizing():
    layer = layer_with(np.random.default_rng(3).normal(size=(3, 3, 2, 4)))
    layer.enable_lora(1)
    layer.lora_kernel_b.assign(np.ones((1, 4)))
    want = standardized(keras.ops.convert_to_numpy(layer.kernel))
    np.testing.assert_allclose(used_kernel(layer, 2), want, atol=1e-6)
    names = [w.name for w in layer.trainable_weights]
    assert sorted(names) == ["bias", "gain", "lora_kernel_a", "lora_kernel_b"]


def test_filters_of_one_entry_are_refused():
    for channels, groups in ((1, 1), (4, 4)):
        layer = layers.WeightStandardizedConv2D(4, 1, groups=groups)
        with pytest.raises(ValueError, match="one entry"):
            layer.build((None, 4, 4, channels))


def private_gradients(batches, engine):
    """Sums of the clipped gradients of a network with the layer, one for each batch."""
    model = keras_dpopt.DPSequential(
        [
            keras.Input((5, 5, 1)),
            layers.WeightStandardizedConv2D(4, 3, activation="tanh"),
            keras.layers.GroupNormalization(2),
            layers.WeightStandardizedConv2D(2, 3),
            keras.layers.Flatten(),
            keras.layers.Dense(3),
        ]
    )
    draw = np.random.default_rng(6)
    weights = [draw.normal(size=w.shape) for w in model.get_weights()]
    optimizer = keras_dpopt.DPSGD(
        0.1,
        l2_norm_clip=0.1,
        noise_multiplier=0.0,
        expected_batch_size=1,
        gradient_engine=engine,
        microbatch_size=3,
    )
    model.compile(optimizer, loss=helpers.CROSSENTROPY)
    gradient = helpers.watch_gradients(model)
    results = []
    for x, y in batches:
        model.set_weights(weights)
        model.train_on_batch(x, y)
        results.append(np.concatenate([np.ravel(g.numpy()) for g in gradient]))
    return results


def test_no_record_moves_the_gradient_of_another():
    draw = np.random.default_rng(7)
    x, y = draw.normal(size=(3, 5, 5, 1)).astype("f4"), np.array([0, 1, 2])
    one_by_one = [(x[i : i + 1], y[i : i + 1]) for i in range(3)]
    *alone, loop = private_gradients([*one_by_one, (x, y)], "loop")
    (vectorized,) = private_gradients([(x, y)], "vectorized")
    for record in alone:
        assert np.linalg.norm(record) == pytest.approx(0.1, rel=1e-4)
    for together in (loop, vectorized):
        np.testing.assert_allclose(together, np.sum(alone, axis=0), atol=3e-7)

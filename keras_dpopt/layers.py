"""Layers that private training gains from."""

import math
from typing import Any

import keras
from keras import ops

__all__ = ["WeightStandardizedConv2D"]

# The floor of var * fan_in of a filter, of De et al.: a filter of equal entries, whose
# variance is zero, comes out as zeros.
_FLOOR = 1e-4


@keras.saving.register_keras_serializable(package="keras_dpopt")
class WeightStandardizedConv2D(keras.layers.Conv2D):
    """A `Conv2D` that standardizes each filter before it convolves with it.

        W_hat = gain * (W - mean(W)) / sqrt(max(var(W) * fan_in, 1e-4))

    for each output channel. Mean and variance (divided by fan_in, not by fan_in - 1)
    are over its fan_in = height * width * (input channels / groups) entries, so the
    squares of a filter sum up to gain^2. The scaled weight standardization of Brock et
    al., "Characterizing signal propagation to close the performance gap in unnormalized
    ResNets", 2021, as De et al. use it, "Unlocking high-accuracy differentially private
    image classification through scale", 2022.

    Standardizing reads the weights and no data. Unlike batch statistics it lets no
    record move another's gradient, and it keeps the scale of the activations while the
    noise makes the weights grow. De et al. put it in the place of each convolution, and
    `GroupNormalization` before it.

    The `kernel` of the layer is W: what is trained, decayed, constrained and saved. The
    sums over a filter are float32 in every dtype policy.

    Args:
        filters: As of `keras.layers.Conv2D`.
        kernel_size: As of `keras.layers.Conv2D`.
        **kwargs: All other arguments of `keras.layers.Conv2D`.

    Attributes:
        gain: Trainable variable of shape `[filters]`, 1 at first.

    Raises:
        ValueError: for arguments that `keras.layers.Conv2D` refuses, and for filters of
            a single entry, which standardize to zero.

    Privacy:
        W_hat is a function of the weights alone. `kernel` and `gain` train through the
        private step like any other weight.

    Example:
        >>> layer = WeightStandardizedConv2D(16, 3, padding="same")
        >>> layer(keras.ops.ones((1, 8, 8, 3))).shape
        TensorShape([1, 8, 8, 16])
        >>> [w.name for w in layer.trainable_weights]
        ['kernel', 'bias', 'gain']
    """

    gain: Any

    def build(self, input_shape):
        """Makes the weights of `Conv2D`, and the gain."""
        super().build(input_shape)
        if math.prod(self.kernel.shape[:-1]) == 1:
            raise ValueError(
                f"The filters of {self.name} have one entry, which standardizes to "
                "zero. Use keras.layers.Conv2D, a larger kernel_size or fewer groups."
            )
        self.gain = self.add_weight(
            name="gain", shape=(self.filters,), initializer="ones", dtype=self.dtype
        )

    def save_own_variables(self, store):
        """Saves the gain too: `Conv2D` names the variables that it saves."""
        super().save_own_variables(store)
        if self.built:
            store["gain"] = self.gain

    def load_own_variables(self, store):
        """Loads the gain too."""
        super().load_own_variables(store)
        if self.built:
            self.gain.assign(store["gain"])

    def convolution_op(self, inputs, kernel):
        """Convolves with the standardized kernel; `Conv2D` calls it with `kernel`."""
        return super().convolution_op(inputs, self._standardized(kernel))

    def _standardized(self, kernel):
        values = ops.cast(kernel, "float32")
        axes = list(range(len(values.shape) - 1))
        values = values - ops.mean(values, axis=axes, keepdims=True)
        # The sum of squares is var * fan_in.
        squares = ops.sum(ops.square(values), axis=axes, keepdims=True)
        scale = ops.cast(self.gain, "float32") * ops.rsqrt(ops.maximum(squares, _FLOOR))
        return ops.cast(values * scale, kernel.dtype)

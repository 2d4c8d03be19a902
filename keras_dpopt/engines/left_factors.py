"""Left factors: the l_t of a term sum_t l_t r_t^T, one kind a way of using a weight.

    Rows      l_t is a token of the input                    Dense, EinsumDense, biases
    Units     l_t is a unit vector e_k, kept as k            embeddings
    Patches   l_t is what a kernel sees at pixel t           convolutions

A norm needs only their products l_t . l_u. Patches overlap, so theirs come from those
of the pixels x_p, each computed once:

    l_t . l_u = sum_s x_{t+s} . x_{u+s}         over the places s of the kernel
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_dpopt.engines.rounding import squares


@dataclasses.dataclass(frozen=True)
class Rows:
    """Vectors as they are.

    Attributes:
        values: `[m, T, p]`, float32.
    """

    values: Any

    @property
    def kind(self) -> tuple:
        """Left factors of equal kinds can be multiplied with each other."""
        return ("tokens",)

    def work(self, tokens: int) -> tuple[int, int]:
        """Returns n and c: their products take n^2 scalar products of length c."""
        return tokens, self.values.shape[-1]

    def products(self, other: Any) -> Any:
        """Returns l_t . l'_u, `[m, T, U]`."""
        if isinstance(other, Units):
            return tf.gather(self.values, other.ids, axis=2, batch_dims=1)
        return tf.matmul(self.values, other.values, transpose_b=True)

    def squared_norms(self) -> Any:
        """Returns ||l_t||^2, float64 `[m, T]`."""
        return squares(self.values, 2)

    def kept(self, keep: Any) -> "Rows":
        """Returns them with zeros in the rows of other records than `keep`."""
        return Rows(kept_rows(self.values, keep))

    def each(self, right: Any) -> Any:
        """Returns sum_t l_it r_it^T for every record i, `[m, p, q]`."""
        return tf.matmul(self.values, right, transpose_a=True)

    def total(self, right: Any) -> Any:
        """Returns the sum of them over all records, `[p, q]`."""
        flat = [tf.reshape(t, [-1, t.shape[-1]]) for t in (self.values, right)]
        return tf.matmul(*flat, transpose_a=True)


@dataclasses.dataclass(frozen=True)
class Units:
    """Unit vectors.

    Attributes:
        ids: int32 `[m, T]`, the entry that is 1.
        length: p.
    """

    ids: Any
    length: int

    kind = ("tokens",)

    def work(self, tokens: int) -> tuple[int, int]:
        """See `Rows.work`."""
        return tokens, 0

    def products(self, other: Any) -> Any:
        """See `Rows.products`."""
        if isinstance(other, Units):
            equal = self.ids[:, :, tf.newaxis] == other.ids[:, tf.newaxis, :]
            return tf.cast(equal, tf.float32)
        return tf.transpose(other.products(self), [0, 2, 1])

    def squared_norms(self) -> Any:
        """See `Rows.squared_norms`."""
        return tf.ones(tf.shape(self.ids), tf.float64)

    def kept(self, keep: Any) -> "Units":
        """See `Rows.kept`; their right factors alone are made zero."""
        del keep
        return self

    def each(self, right: Any) -> Any:
        """See `Rows.each`."""
        return Rows(tf.one_hot(self.ids, self.length)).each(right)

    def total(self, right: Any) -> Any:
        """See `Rows.total`."""
        flat = tf.reshape(right, [-1, right.shape[-1]])
        return tf.math.unsorted_segment_sum(
            flat, tf.reshape(self.ids, [-1]), self.length
        )


@dataclasses.dataclass(frozen=True)
class Patches:
    """Patches of images under a convolution's kernel.

    Attributes:
        image: `[m, H, W, c]`, float32.
        size: (height, width) of the kernel.
        strides: Of the kernel.
        padding: Zeros around the image, ((top, bottom), (left, right)).
        places: (height, width) of the result; a place is a token.
        derivative: Function from images and cotangents `[n, *places, q]` to the
            derivative by the kernel, `[*size, c, q]`, all records together.
    """

    image: Any
    size: tuple[int, int]
    strides: tuple[int, int]
    padding: tuple[tuple[int, int], tuple[int, int]]
    places: tuple[int, int]
    derivative: Callable[[Any, Any], Any]

    @property
    def kind(self) -> tuple:
        """See `Rows.kind`."""
        shape = tuple(self.image.shape[1:])
        return ("patches", shape, self.size, self.strides, self.padding)

    def work(self, tokens: int) -> tuple[int, int]:
        """See `Rows.work`; the pixels are multiplied."""
        del tokens
        return math.prod(self._padded()), self.image.shape[-1]

    def products(self, other: Any) -> Any:
        """See `Rows.products`."""
        mine, others = self._pixels(), other._pixels()
        result = tf.matmul(mine, others, transpose_b=True)
        result = tf.reshape(result, [-1, *self._padded(), *self._padded()])
        for axis in (1, 0):
            result = tf.add_n(
                [self._seen(result, axis, s, (1, 3)) for s in range(self.size[axis])]
            )
        return tf.reshape(result, [-1, math.prod(self.places), math.prod(self.places)])

    def kept(self, keep: Any) -> "Patches":
        """See `Rows.kept`."""
        return dataclasses.replace(self, image=kept_rows(self.image, keep))

    def each(self, right: Any) -> Any:
        """See `Rows.each`."""
        return tf.map_fn(
            lambda i: self.one(i, right),
            tf.range(tf.shape(right)[0]),
            fn_output_signature=tf.float32,
        )

    def one(self, i: Any, right: Any) -> Any:
        """Returns sum_t l_it r_it^T for record i, `[p, q]`."""
        chosen = dataclasses.replace(self, image=self.image[i : i + 1])
        return chosen.total(right[i : i + 1])

    def total(self, right: Any) -> Any:
        """See `Rows.total`."""
        width = right.shape[-1]
        cotangent = tf.reshape(right, [-1, *self.places, width])
        return tf.reshape(self.derivative(self.image, cotangent), [-1, width])

    def _pixels(self) -> Any:
        padded = tf.pad(self.image, [(0, 0), *self.padding, (0, 0)])
        size, channels = math.prod(self._padded()), self.image.shape[-1]
        return tf.reshape(padded, [-1, size, channels])

    def _padded(self) -> tuple[int, int]:
        (height, width), (vertical, horizontal) = self.image.shape[1:3], self.padding
        return height + sum(vertical), width + sum(horizontal)

    def _seen(self, tensor: Any, axis: int, shift: int, at: tuple[int, ...]) -> Any:
        """What the kernel's entries of this shift see, on the image axes from `at`."""
        stride = self.strides[axis]
        end = shift + (self.places[axis] - 1) * stride + 1
        index = [slice(None)] * tensor.shape.rank
        for first in at:
            index[first + axis] = slice(shift, end, stride)
        return tensor[tuple(index)]


def kept_rows(tensor: Any, keep: Any) -> Any:
    """Selects the rows of `keep` `[m]`; zeros for others, whatever they hold."""
    shape = [-1] + [1] * (tensor.shape.rank - 1)
    return tf.where(tf.reshape(keep, shape), tensor, tf.zeros([], tensor.dtype))

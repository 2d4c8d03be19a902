"""Terms: what one use of a weight adds to the gradients of all records.

For a record i a term is a tensor G_i of the weight's shape. Two forms are kept:

    Factored   G_i = sum_t l_it r_it^T      over the record's tokens, pixels, calls t
    Dense      G_i itself, one for each record
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Factored:
    """sum_t l_t r_t^T, for a weight seen as a matrix [p, q].

    Attributes:
        left: `[m, T, p]`; or int32 `[m, T]`, the row that is 1 where l_t is a unit
            vector (embeddings).
        right: `[m, T, q]`.
        shape: Of the weight.
        split: How many of its axes make p.
        tokens: T where it is known as the graph is made, else `None`.
    """

    left: Any
    right: Any
    shape: tuple[int, ...]
    split: int
    tokens: int | None

    @property
    def one_hot(self) -> bool:
        """Whether the left factors are unit vectors."""
        return self.left.dtype.is_integer

    @property
    def rows(self) -> int:
        """P."""
        return math.prod(self.shape[: self.split])

    @property
    def columns(self) -> int:
        """Q."""
        return math.prod(self.shape[self.split :])

    def scaled(self, factor: Any) -> "Factored":
        """Returns the term times a number or scalar."""
        if _is_one(factor):
            return self
        return dataclasses.replace(self, right=self.right * factor)

    def kept(self, keep: Any) -> "Factored":
        """Returns the term with zeros in the rows of other records than `keep`."""
        left = self.left if self.one_hot else kept_rows(self.left, keep)
        return dataclasses.replace(self, left=left, right=kept_rows(self.right, keep))

    def dense(self) -> Any:
        """Returns all G_i, `[m, *shape]`."""
        left = self.left
        if self.one_hot:
            left = tf.one_hot(left, self.rows)
        product = tf.matmul(left, self.right, transpose_a=True)
        return tf.reshape(product, [-1, *self.shape])

    def weighted_sum(self, factors: Any) -> Any:
        """Returns sum_i s_i G_i for factors s `[m]`."""
        right = tf.reshape(scaled_rows(self.right, factors), [-1, self.columns])
        if self.one_hot:
            ids = tf.reshape(self.left, [-1])
            total = tf.math.unsorted_segment_sum(right, ids, self.rows)
        else:
            left = tf.reshape(self.left, [-1, self.rows])
            total = tf.matmul(left, right, transpose_a=True)
        return tf.reshape(total, self.shape)


@dataclasses.dataclass(frozen=True)
class Dense:
    """G_i, one for each record.

    Attributes:
        make: Returns `[m, *shape]`, float32.
        shape: Of the weight.
    """

    make: Callable[[], Any]
    shape: tuple[int, ...]

    def scaled(self, factor: Any) -> "Dense":
        """Returns the term times a number or scalar."""
        if _is_one(factor):
            return self
        return Dense(lambda: self.make() * factor, self.shape)

    def dense(self) -> Any:
        """Returns all G_i, `[m, *shape]`."""
        return self.make()


def _is_one(factor: Any) -> bool:
    return isinstance(factor, float) and factor == 1.0


def scaled_rows(tensor: Any, factors: Any) -> Any:
    """Multiplies row i by s_i `[m]`."""
    shape = [-1] + [1] * (tensor.shape.rank - 1)
    return tensor * tf.reshape(factors, shape)


def kept_rows(tensor: Any, keep: Any) -> Any:
    """Selects the rows of `keep` `[m]`; zeros for others, whatever they hold."""
    shape = [-1] + [1] * (tensor.shape.rank - 1)
    return tf.where(tf.reshape(keep, shape), tensor, tf.zeros([], tensor.dtype))

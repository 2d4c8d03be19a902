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

from keras_dpopt.engines.left_factors import Patches, kept_rows


@dataclasses.dataclass(frozen=True)
class Factored:
    """sum_t l_t r_t^T, for a weight seen as a matrix [p, q].

    Attributes:
        left: See `left_factors.py`.
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
    def rows(self) -> int:
        """P."""
        return math.prod(self.shape[: self.split])

    @property
    def columns(self) -> int:
        """Q."""
        return math.prod(self.shape[self.split :])

    @property
    def record(self) -> Callable[[Any], Any] | None:
        """See `Dense.record`."""
        left = self.left
        return (
            (lambda i: left.one(i, self.right)) if isinstance(left, Patches) else None
        )

    def scaled(self, factor: Any) -> "Factored":
        """Returns the term times a number or scalar."""
        if _is_one(factor):
            return self
        return dataclasses.replace(self, right=self.right * factor)

    def kept(self, keep: Any) -> "Factored":
        """Returns the term with zeros in the rows of other records than `keep`."""
        right = kept_rows(self.right, keep)
        return dataclasses.replace(self, left=self.left.kept(keep), right=right)

    def dense(self) -> Any:
        """Returns all G_i, `[m, *shape]`."""
        return tf.reshape(self.left.each(self.right), [-1, *self.shape])

    def weighted_sum(self, factors: Any) -> Any:
        """Returns sum_i s_i G_i for factors s `[m]`."""
        total = self.left.total(scaled_rows(self.right, factors))
        return tf.reshape(total, self.shape)


@dataclasses.dataclass(frozen=True)
class Dense:
    """G_i, one for each record.

    Attributes:
        make: Returns `[m, *shape]`, float32.
        shape: Of the weight.
        record: Returns G_i alone for a scalar tensor i, where all together cost as much
            as one after the other: there is no operation for them.
    """

    make: Callable[[], Any]
    shape: tuple[int, ...]
    record: Callable[[Any], Any] | None = None

    def scaled(self, factor: Any) -> "Dense":
        """Returns the term times a number or scalar."""
        if _is_one(factor):
            return self
        one = self.record
        return Dense(
            lambda: self.make() * factor,
            self.shape,
            one and (lambda i: one(i) * factor),
        )

    def dense(self) -> Any:
        """Returns all G_i, `[m, *shape]`."""
        return self.make()


def _is_one(factor: Any) -> bool:
    return isinstance(factor, float) and factor == 1.0


def scaled_rows(tensor: Any, factors: Any) -> Any:
    """Multiplies row i by s_i `[m]`."""
    shape = [-1] + [1] * (tensor.shape.rank - 1)
    return tensor * tf.reshape(factors, shape)

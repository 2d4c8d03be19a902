"""Norm forms: how the norms of a weight's terms are bounded, and their sum made.

The norm of a sum of factored terms needs no G_i:

    ||G_i||^2 = sum_{t,u} (l_it . l_iu) (r_it . r_iu)                           (Gram)
              = ||l_i||^2 ||r_i||^2                         for one t       (product)

(Goodfellow, "Efficient per-example gradient computations", 2015; Li et al., "Large
language models can be strong differentially private learners", ICLR 2022).

Rounding. What is clipped must be an upper bound of the norm of what is added to the
sum. With u = 2^-24 and the mass M_i = sum_t ||l_it|| ||r_it||, float32 errs by at most
(p + q + 16) u M_i^2 in the Gram form, whose terms may cancel: p and q are the lengths
of the scalar products, and a sum of n terms errs by n u in any order (Higham, "Accuracy
and Stability of Numerical Algorithms", section 4.2). The contraction that adds the
record up errs by at most (T + 8) u M_i. Both are added. An instantiated G_i is added up
as it is. Squares are summed in runs of at most 64 in float32 and these in float64.
"""

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_dpopt.engines.terms import Factored, kept_rows

_U = 2.0**-24
_RUN = 64
_SMALLEST = 2.0**-126  # below it, squares may be flushed to zero

# A sum of squares in runs, its root and a few roundings around it.
_SLACK = 1.0 + (_RUN / 2 + 8) * _U

# Tokens of a record where nothing tells how many there are.
_SOME_TOKENS = 64


class DenseForm:
    """The gradients themselves, one for each record.

    Args:
        part: Terms of one weight.
    """

    name = "instantiated"

    def __init__(self, part: Sequence[Any]):
        values = [term.dense() for term in part]
        self._shape = part[0].shape
        self._values = values[0] if len(values) == 1 else tf.add_n(values)
        self.bound = tf.sqrt(squares(self._values, 1)) * _SLACK

    def weighted_sum(self, factors: Any, kept: Any = None) -> Any:
        """Returns sum_i s_i G_i, of records of a mask `kept` `[m]`, if there is one."""
        values = self._values if kept is None else kept_rows(self._values, kept)
        flat = tf.reshape(values, [tf.shape(factors)[0], -1])
        total = tf.linalg.matvec(flat, factors, transpose_a=True)
        return tf.reshape(total, self._shape)


class FactoredForm:
    """Norms from the factors alone.

    Args:
        part: Factored terms of one weight, of one shape and split.
    """

    def __init__(self, part: Sequence[Factored]):
        self._part = part
        self.name = "product" if len(part) == 1 and part[0].tokens == 1 else "gram"
        self.bound = (
            product_bound(part[0]) if self.name == "product" else gram_bound(part)
        )

    def weighted_sum(self, factors: Any, kept: Any = None) -> Any:
        """Returns sum_i s_i G_i, of records of a mask `kept` `[m]`, if there is one."""
        part = self._part if kept is None else [term.kept(kept) for term in self._part]
        values = [term.weighted_sum(factors) for term in part]
        return values[0] if len(values) == 1 else tf.add_n(values)


def choose(part: Sequence[Any]) -> tuple[Any, int | None]:
    """Returns the cheaper form for the terms of one weight, and what it costs.

    The cost is that of one record's norm, in multiplications; `None` where the number
    of tokens is not known.
    """
    if not _joinable(part):
        return DenseForm(part), None
    known = all(term.tokens for term in part)
    tokens = sum(term.tokens or _SOME_TOKENS for term in part)
    rows, columns = part[0].rows, part[0].columns
    gram = tokens**2 * (rows * (not part[0].one_hot) + columns)
    dense = (tokens + 4) * rows * columns
    if tokens == 1:
        return FactoredForm(part), rows + columns
    cost = min(gram, dense) if known else None
    return (FactoredForm if gram < dense else DenseForm)(part), cost


def _joinable(part: Sequence[Any]) -> bool:
    """Whether all terms are factors of the same two halves of the weight."""
    factored = all(isinstance(term, Factored) for term in part)
    return factored and len({(term.shape, term.split) for term in part}) == 1


def product_bound(term: Factored) -> Any:
    """Bounds ||l r^T|| for one t: float64 `[m]`."""
    left, right = _squared_norms(term)
    return tf.sqrt(left[:, 0] * right[:, 0]) * _SLACK**2


def gram_bound(terms: Sequence[Factored]) -> Any:
    """Bounds the norm of a sum of factored terms of one weight: float64 `[m]`."""
    zero = tf.constant(0.0, tf.float64)
    total, mass, left_mass, right_mass = zero, zero, zero, zero
    tokens = 0
    for i, first in enumerate(terms):
        left, right = _squared_norms(first)
        mass += tf.reduce_sum(tf.sqrt(left * right), 1)
        left_mass += tf.reduce_sum(tf.sqrt(left), 1)
        right_mass += tf.reduce_sum(tf.sqrt(right), 1)
        tokens += tf.shape(first.right)[1]
        for j, second in enumerate(terms[: i + 1]):
            rights = tf.matmul(first.right, second.right, transpose_b=True)
            # In float64: the products of small numbers would vanish, unlike the norm.
            cross = tf.cast(_lefts(first, second), tf.float64)
            value = tf.reduce_sum(cross * tf.cast(rights, tf.float64), [1, 2])
            total += value if i == j else 2.0 * value
    rows, columns = terms[0].rows, terms[0].columns
    mass *= _SLACK
    error = (rows + columns + 16) * _U * tf.square(mass)
    # What the two matrices may have lost below the normal range.
    lost = _SMALLEST * (rows * tf.square(right_mass) + columns * tf.square(left_mass))
    root = tf.sqrt(tf.maximum(total, 0.0) + error + 4.0 * lost)
    return root * (1.0 + 8 * _U) + (tf.cast(tokens, tf.float64) + 8) * _U * mass


def _lefts(first: Factored, second: Factored) -> Any:
    """[m, T, U] of l_t . l_u."""
    if first.one_hot and second.one_hot:
        equal = first.left[:, :, tf.newaxis] == second.left[:, tf.newaxis, :]
        return tf.cast(equal, tf.float32)
    if first.one_hot:
        rows = tf.gather(second.left, first.left, axis=2, batch_dims=1)
        return tf.transpose(rows, [0, 2, 1])
    if second.one_hot:
        return tf.gather(first.left, second.left, axis=2, batch_dims=1)
    return tf.matmul(first.left, second.left, transpose_b=True)


def _squared_norms(term: Factored) -> tuple[Any, Any]:
    """||l_t||^2 and ||r_t||^2, float64 `[m, T]`."""
    right = squares(term.right, 2)
    return (tf.ones_like(right) if term.one_hot else squares(term.left, 2)), right


def squares(tensor: Any, keep: int) -> Any:
    """Sums squares over all axes but the first `keep`: float64.

    Entries below the normal range count as the largest of them.
    """
    size = math.prod(tensor.shape[keep:])
    shape = tf.shape(tensor)
    run = next(n for n in range(min(size, _RUN), 0, -1) if size % n == 0) if size else 1
    runs = tf.concat([shape[:keep], [-1 if size else 0, run]], 0)
    if not size:
        return tf.zeros(shape[:keep], tf.float64)
    if size <= _RUN:
        sums = tf.cast(
            tf.reduce_sum(tf.square(tf.reshape(tensor, runs)), -1), tf.float64
        )
        return tf.squeeze(sums, -1) + size * _SMALLEST
    if run < 8:  # a prime size, say
        tensor, runs = tf.cast(tensor, tf.float64), runs
    sums = tf.reduce_sum(tf.square(tf.reshape(tensor, runs)), -1)
    return tf.reduce_sum(tf.cast(sums, tf.float64), -1) + size * _SMALLEST

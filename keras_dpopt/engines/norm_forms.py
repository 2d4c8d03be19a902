"""Norm forms: how the norms of a weight's terms are bounded, and their sum made.

The norm of a sum of factored terms needs no G_i:

    ||G_i||^2 = sum_{t,u} (l_it . l_iu) (r_it . r_iu)                           (Gram)
              = ||l_i||^2 ||r_i||^2                         for one t       (product)

(Goodfellow, "Efficient per-example gradient computations", 2015; Li et al., "Large
language models can be strong differentially private learners", ICLR 2022).

Rounding. What is clipped must be an upper bound of the norm of what is added to the
sum. With u = 2^-24 and the mass M_i = sum_t ||l_it|| ||r_it||, float32 errs by at most
(p + q + 16) u M_i^2 in the Gram form, whose terms may cancel: p and q are the lengths
of the scalar products (`rounding.py` has the rule for sums). The contraction that adds
the record up errs by at most (T + 8) u M_i. Both are added. An instantiated G_i is
added up as it is. Where a device cuts the factors of products, each product errs by v
more (`rounding.product_error`): 2 v M_i^2 in the Gram form, and v M_i in the sum.
"""

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_dpopt.engines.left_factors import Patches, kept_rows
from keras_dpopt.engines.rounding import (
    SLACK,
    SMALLEST,
    UNIT,
    product_error,
    squares,
)
from keras_dpopt.engines.terms import Factored

# Tokens of a record where nothing tells how many there are.
_SOME_TOKENS = 64


class DenseForm:
    """The gradients themselves, one for each record.

    Args:
        part: Terms of one weight.
        records: int32 scalar, m.
    """

    name = "instantiated"

    def __init__(self, part: Sequence[Any], records: Any):
        del records
        values = [term.dense() for term in part]
        self._shape = part[0].shape
        self._values = values[0] if len(values) == 1 else tf.add_n(values)
        self.bound = tf.sqrt(squares(self._values, 1)) * SLACK * (1.0 + product_error())

    def weighted_sum(self, factors: Any, kept: Any = None) -> Any:
        """Returns sum_i s_i G_i, of records of a mask `kept` `[m]`, if there is one."""
        values = self._values if kept is None else kept_rows(self._values, kept)
        flat = tf.reshape(values, [tf.shape(factors)[0], -1])
        total = tf.linalg.matvec(flat, factors, transpose_a=True)
        return tf.reshape(total, self._shape)


class OneByOneForm:
    """The gradients themselves, formed one after the other.

    For terms that have a `record`. Each gradient is measured while it is in the cache,
    and none is copied to a place beside the others.

    Args:
        part: Terms of one weight.
        records: int32 scalar, m.
    """

    name = "instantiated"

    def __init__(self, part: Sequence[Any], records: Any):
        self._shape, self._records = part[0].shape, records
        size = math.prod(self._shape)
        values = tf.TensorArray(
            tf.float32, records, element_shape=[1, size], clear_after_read=False
        )
        norms = tf.TensorArray(tf.float64, records, element_shape=[])

        def body(i, values, norms):
            found = [tf.reshape(term.record(i), [1, size]) for term in part]
            value = found[0] if len(found) == 1 else tf.add_n(found)
            return i + 1, values.write(i, value), norms.write(i, squares(value, 1)[0])

        _, self._values, norms = self._for_all(body, values, norms)
        self.bound = tf.sqrt(norms.stack()) * SLACK

    def weighted_sum(self, factors: Any, kept: Any = None) -> Any:
        """Returns sum_i s_i G_i, of records of a mask `kept` `[m]`, if there is one."""

        def body(i, total):
            value = self._values.read(i)
            if kept is not None:
                value = tf.where(kept[i], value, tf.zeros_like(value))
            return i + 1, total + factors[i] * value

        _, total = self._for_all(body, tf.zeros([1, math.prod(self._shape)]))
        return tf.reshape(total, self._shape)

    def _for_all(self, body, *state):
        start = tf.constant(0)
        return tf.while_loop(lambda i, *_: i < self._records, body, (start, *state))


class FactoredForm:
    """Norms from the factors alone.

    Args:
        part: Factored terms of one weight, of one shape, split and kind.
        records: int32 scalar, m.
    """

    def __init__(self, part: Sequence[Factored], records: Any):
        del records
        self._part = part
        one = len(part) == 1 and part[0].tokens == 1
        patch = isinstance(part[0].left, Patches)
        self.name = "product" if one and not patch else "gram"
        self.bound = (
            product_bound(part[0]) if self.name == "product" else gram_bound(part)
        )

    def weighted_sum(self, factors: Any, kept: Any = None) -> Any:
        """Returns sum_i s_i G_i, of records of a mask `kept` `[m]`, if there is one."""
        part = self._part if kept is None else [term.kept(kept) for term in self._part]
        values = [term.weighted_sum(factors) for term in part]
        return values[0] if len(values) == 1 else tf.add_n(values)


def choose(part: Sequence[Any], records: Any) -> tuple[Any, int | None]:
    """Returns the cheaper form for the terms of one weight, and what it costs.

    The cost is that of one record, its share of the sum included, in multiplications
    of a large matrix product; `None` where the number of tokens is not known. The
    constants are measured on a CPU: what is formed is written and read again, and what
    is formed record by record is formed by small operations.

    Args:
        part: Terms of one weight.
        records: int32 scalar, m.
    """
    if not _joinable(part):
        return _formed(part, records), None
    known = all(term.tokens for term in part)
    tokens = sum(term.tokens or _SOME_TOKENS for term in part)
    rows, columns = part[0].rows, part[0].columns
    if tokens == 1:
        return FactoredForm(part, records), 2 * rows * columns
    work = [term.left.work(term.tokens or _SOME_TOKENS) for term in part]
    number, length = sum(n for n, _ in work), max(length for _, length in work)
    summed = tokens * rows * columns
    gram = summed + number**2 * length + tokens**2 * (columns + 24)
    dense = int(1.4 * summed) + 60 * rows * columns
    form = FactoredForm(part, records) if gram < dense else _formed(part, records)
    return form, min(gram, dense) if known else None


def _formed(part: Sequence[Any], records: Any) -> Any:
    form = DenseForm if any(term.record is None for term in part) else OneByOneForm
    return form(part, records)


def _joinable(part: Sequence[Any]) -> bool:
    """Whether all terms are factors of the same two halves of the weight."""
    if not all(isinstance(term, Factored) for term in part):
        return False
    return len({(term.shape, term.split, term.left.kind) for term in part}) == 1


def product_bound(term: Factored) -> Any:
    """Bounds ||l r^T|| for one t: float64 `[m]`."""
    left, right = term.left.squared_norms(), squares(term.right, 2)
    return tf.sqrt(left[:, 0] * right[:, 0]) * SLACK**2 * (1.0 + product_error())


def gram_bound(terms: Sequence[Factored]) -> Any:
    """Bounds the norm of a sum of factored terms of one weight: float64 `[m]`."""
    rows, columns = terms[0].rows, terms[0].columns
    zero = tf.constant(0.0, tf.float64)
    total, mass, left_mass, right_mass = zero, zero, zero, zero
    tokens = 0
    for i, first in enumerate(terms):
        tokens += tf.shape(first.right)[1]
        for j, second in enumerate(terms[: i + 1]):
            lefts = tf.cast(first.left.products(second.left), tf.float64)
            rights = tf.matmul(first.right, second.right, transpose_b=True)
            # In float64: the products of small numbers would vanish, unlike the norm.
            rights = tf.cast(rights, tf.float64)
            value = tf.reduce_sum(lefts * rights, [1, 2])
            total += value if i == j else 2.0 * value
            if i == j:
                left = tf.linalg.diag_part(lefts) + rows * SMALLEST
                right = tf.linalg.diag_part(rights) + columns * SMALLEST
                mass += tf.reduce_sum(tf.sqrt(left * right), 1)
                left_mass += tf.reduce_sum(tf.sqrt(left), 1)
                right_mass += tf.reduce_sum(tf.sqrt(right), 1)
    cut, sums = product_error(), (rows + columns + 16) * UNIT
    # The squares on the diagonals are as wrong as any product.
    mass *= 1.0 + cut + sums
    error = (2.0 * cut + sums) * tf.square(mass)
    # What the two matrices may have lost below the normal range.
    lost = SMALLEST * (rows * tf.square(right_mass) + columns * tf.square(left_mass))
    root = tf.sqrt(tf.maximum(total, 0.0) + error + 4.0 * lost)
    added = (tf.cast(tokens, tf.float64) + 8) * UNIT + cut
    return root * (1.0 + 8 * UNIT) + added * mass

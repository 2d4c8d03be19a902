"""Samplers: which records are in the logical batch of a step.

A sampler is a pure function of (key, step): it has no state of its own, so the draw
of a step does not depend on prefetching, on the epoch, or on what was drawn before,
and a resumed run repeats the draws that it replays. The mechanism is accounted for
the sampler that it names by `kind`.

All samplers run eagerly and in graphs (tf.data map functions); the number of rows of
a Poisson sample is only known at run time, which XLA does not allow.
"""

import dataclasses
from typing import ClassVar

import tensorflow as tf

from keras_dpopt import prng, validation

# The sampler's key is its own, so every draw may use the same stream of its step.
_STREAM = 0


@dataclasses.dataclass(frozen=True)
class PoissonSampler:
    """Takes each record independently, with probability batch_size / train_size.

    The batch has a random size with mean `batch_size`; it may be empty.

    Each row i gets a uniform 32-bit word w_i and is taken when
    w_i < floor(2**32 * batch_size / train_size), in exact integers. (A float32
    uniform has a resolution of 2**-23 only, which at small probabilities is a large
    error.)

    Privacy:
        This is the sampling that the Poisson-subsampled Gaussian analysis assumes
        (Abadi et al., CCS 2016; Mironov et al., arXiv:1908.10530). Rounding makes
        the true probability smaller than the accounted q = batch_size / train_size,
        by less than 2**-32, never larger. At batch_size = train_size every row is
        taken at every step.

    Example:
        >>> rows = PoissonSampler().indices(key=1, step=0, train_size=9, batch_size=9)
        >>> rows.numpy().tolist()
        [0, 1, 2, 3, 4, 5, 6, 7, 8]
    """

    kind: ClassVar[str] = "poisson"

    def indices(
        self, key: prng.IntLike, step: prng.IntLike, train_size: int, batch_size: int
    ) -> tf.Tensor:
        """Draws the rows of one step.

        Args:
            key: The sampler key, 64-bit integer or scalar int64 tensor.
            step: Integer or scalar integer tensor, in [0, 2**43).
            train_size: Number N of records, a positive Python integer.
            batch_size: Expected number of rows, a Python integer in [1, N].

        Returns:
            The rows taken, ascending: int64 [n] with n known at run time only.

        Raises:
            TypeError: if a size is not an integer.
            ValueError: if a size is outside its range.
        """
        train_size, batch_size = _checked_sizes(train_size, batch_size)
        if batch_size == train_size:
            return tf.range(train_size, dtype=tf.int64)
        threshold = tf.constant((batch_size << 32) // train_size, tf.uint32)
        bits = prng.random_bits(key, step, _STREAM, [train_size])
        return tf.reshape(tf.where(bits < threshold), [-1])


@dataclasses.dataclass(frozen=True)
class FixedSizeSampler:
    """Takes exactly batch_size records, uniformly without replacement, each step.

    Every step draws a fresh subset: this is not a shuffled epoch, and a record may
    be in several batches of one epoch or in none.

    Each row gets a uniform 64-bit word, and the rows with the batch_size largest
    words are taken. Two equal words, the only source of bias, occur in a step with
    probability below train_size**2 / 2**65; the lower row then wins.

    Privacy:
        Accounted as sampling without replacement under the replace-one relation,
        where exchanging a record moves the clipped sum by up to 2C. That costs much
        more than Poisson sampling at the same noise; take PoissonSampler unless the
        batch has to have a fixed size.

    Example:
        >>> rows = FixedSizeSampler().indices(key=1, step=0, train_size=9, batch_size=4)
        >>> rows.shape
        TensorShape([4])
    """

    kind: ClassVar[str] = "fixed_size"

    def indices(
        self, key: prng.IntLike, step: prng.IntLike, train_size: int, batch_size: int
    ) -> tf.Tensor:
        """Draws the rows of one step.

        Args:
            key: The sampler key, 64-bit integer or scalar int64 tensor.
            step: Integer or scalar integer tensor, in [0, 2**43).
            train_size: Number N of records, a positive Python integer.
            batch_size: Number of rows, a Python integer in [1, N].

        Returns:
            The rows taken, ascending and distinct: int64 [batch_size].

        Raises:
            TypeError: if a size is not an integer.
            ValueError: if a size is outside its range.
        """
        train_size, batch_size = _checked_sizes(train_size, batch_size)
        bits = prng.random_bits(key, step, _STREAM, [train_size, 2])
        words = tf.bitcast(bits, tf.int64)
        rows = tf.math.top_k(words, k=batch_size, sorted=False).indices
        return tf.sort(tf.cast(rows, tf.int64))


@dataclasses.dataclass(frozen=True)
class CyclicSampler:
    """Takes fixed blocks of records in turn, in the same order in every epoch.

    The records are shuffled once, as a function of the key, and cut into
    ceil(train_size / batch_size) blocks; step t takes block t modulo their number. So
    a record comes exactly once in that many steps, and never sooner: what the
    participation schemas of correlated noise assume.

    Privacy:
        No amplification: every record may be in every release.

    Example:
        >>> rows = CyclicSampler().indices(key=1, step=0, train_size=9, batch_size=9)
        >>> sorted(rows.numpy().tolist())
        [0, 1, 2, 3, 4, 5, 6, 7, 8]
    """

    kind: ClassVar[str] = "cyclic"

    def indices(
        self, key: prng.IntLike, step: prng.IntLike, train_size: int, batch_size: int
    ) -> tf.Tensor:
        """Draws the rows of one step; see `PoissonSampler.indices`."""
        train_size, batch_size = _checked_sizes(train_size, batch_size)
        blocks = -(-train_size // batch_size)
        first = tf.cast(step, tf.int64) % blocks * batch_size
        return _shuffled(key, train_size)[first : first + batch_size]


@dataclasses.dataclass(frozen=True)
class BandedPoissonSampler:
    """Poisson samples of one group of records after the other.

    The records are shuffled once, as a function of the key, and dealt out to `bands`
    groups; step t takes each record of group t modulo `bands` independently, with
    probability batch_size / floor(train_size / bands).

    Privacy:
        A record is at risk in one step of `bands`, there as in a Poisson sample of its
        group (Choquette-Choo et al., "(Amplified) Banded Matrix Factorization", NeurIPS
        2023).

    Attributes:
        bands: Number of groups, a positive int.
    """

    bands: int

    kind: ClassVar[str] = "banded"

    def __post_init__(self):
        validation.check_positive_integer("bands", self.bands)

    def indices(
        self, key: prng.IntLike, step: prng.IntLike, train_size: int, batch_size: int
    ) -> tf.Tensor:
        """Draws the rows of one step; see `PoissonSampler.indices`."""
        train_size, batch_size = _checked_sizes(train_size, batch_size)
        size = train_size // self.bands
        if batch_size > size:
            raise ValueError(
                f"A batch of {batch_size} is larger than a group of {size} records, of "
                f"which there are {self.bands}. Pass fewer bands or a smaller batch."
            )
        turn = tf.cast(step, tf.int64) % self.bands
        group = _shuffled(key, train_size)[turn :: self.bands]
        if batch_size == size:
            return tf.sort(group)
        threshold = tf.constant((batch_size << 32) // size, tf.uint32)
        bits = prng.random_bits(key, step, _STREAM, [train_size])
        return tf.sort(tf.boolean_mask(group, tf.gather(bits, group) < threshold))


def _shuffled(key: prng.IntLike, train_size: int) -> tf.Tensor:
    """All rows in an order that the key fixes for every step."""
    # A step of its own, the last one: no draw of a training step has its number.
    bits = prng.random_bits(key, prng.LAST_STEP, _STREAM, [train_size, 2])
    return tf.cast(tf.argsort(tf.bitcast(bits, tf.int64), stable=True), tf.int64)


def _checked_sizes(train_size: int, batch_size: int) -> tuple[int, int]:
    """Returns both sizes as Python integers, or raises."""
    train_size = validation.check_positive_integer("train_size", train_size)
    batch_size = validation.check_positive_integer("batch_size", batch_size)
    if batch_size > train_size:
        raise ValueError(
            f"`batch_size` must be at most the number of training records, not "
            f"{batch_size} of {train_size}. Choose a smaller batch_size or train on "
            "more data."
        )
    return train_size, batch_size


def check_sampler(sampler: object) -> "PoissonSampler | FixedSizeSampler":
    """Returns the sampler, or raises where its batches could not be accounted.

    Only the samplers of this module are taken, not what calls itself one: the ledger
    believes their `kind`.
    """
    if type(sampler) in (PoissonSampler, FixedSizeSampler):
        return sampler  # type: ignore[return-value]
    raise TypeError(
        f"sampler={sampler!r} is not one whose batches can be accounted. Pass "
        "PoissonSampler() or FixedSizeSampler()."
    )

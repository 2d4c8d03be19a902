"""Keys and random numbers that are pure functions of (key, step, stream).

Every random number of private training is drawn here: the privacy noise, the
sampler's draw and the seeds of random layers. Nothing keeps a generator state, so
a draw does not depend on how many draws came before it, on the replica that makes
it, on the microbatch size, or on XLA; and a resumed run repeats exactly the draws
of the run that it replays.

The generator is Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3", SC 2011), by TensorFlow's stateless op. Whoever knows a key can
recompute the draws, and membership can be read off from them: keys are secrets.
"""

import hashlib
import math
import operator
import secrets
from collections.abc import Sequence
from typing import TypeAlias

import tensorflow as tf

IntLike: TypeAlias = int | tf.Tensor | tf.Variable

STREAM_BITS = 20
"""Streams of one step: numbers below 2**20."""

_MAX_STREAMS = 2**STREAM_BITS
_MAX_STEPS = 2 ** (63 - STREAM_BITS)
LAST_STEP = _MAX_STEPS - 1
"""The largest step, for draws that belong to no step of a training run."""

_PHILOX = 1  # The value of tf.random.Algorithm.PHILOX, which raw ops want bare.


def new_key() -> int:
    """Draws a fresh key from the operating system's entropy.

    Returns:
        A 64-bit signed integer, to be kept in an int64 variable.

    Privacy:
        The key must never reach a file that leaves the training machine.

    Example:
        >>> new_key() == new_key()
        False
    """
    return int.from_bytes(secrets.token_bytes(8), "big", signed=True)


def key_from_seed(seed: int, purpose: str) -> int:
    """Derives a key from a user's seed, one per purpose.

    The key is the first 8 bytes of SHA-256("keras_dpopt", purpose, seed), each part
    closed by a zero byte, so the noise, the sampler and the layers of one seed have
    unrelated keys.

    Args:
        seed: Any integer; equal seeds give equal keys on every machine.
        purpose: What the key is for, e.g. "noise". It may not hold a zero byte.

    Returns:
        A 64-bit signed integer.

    Raises:
        TypeError: if `seed` is not an integer.
        ValueError: if `purpose` is empty or holds a zero byte.

    Privacy:
        A seeded run is not private against whoever knows or guesses the seed.

    Example:
        >>> key_from_seed(7, "noise") == key_from_seed(7, "sampler")
        False
    """
    if isinstance(seed, bool):
        raise TypeError(f"seed must be an integer, got {seed!r}.")
    try:
        seed = operator.index(seed)
    except TypeError as error:
        raise TypeError(f"seed must be an integer, got {seed!r}.") from error
    if not purpose or "\0" in purpose:
        raise ValueError(
            f"purpose must be a non-empty string without zero bytes, got {purpose!r}."
        )
    digest = hashlib.sha256(f"keras_dpopt\0{purpose}\0{seed}\0".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def random_bits(
    key: IntLike, step: IntLike, stream: int, shape: Sequence[int]
) -> tf.Tensor:
    """Draws uniform 32-bit words as a function of (key, step, stream).

    Draws of one key that differ in step or stream share no Philox block. Philox maps
    a 128-bit counter to a block of four words. The counter's high half is set here
    to step * 2**20 + stream, which is different for each (step, stream); its low
    half starts at 0 and counts the blocks of the draw, so a draw would have to be
    longer than 2**64 blocks before it ran into another one.

    Works eagerly, in a tf.function with or without XLA, and in a tf.while_loop; the
    words are the same in all of them.

    Args:
        key: 64-bit integer or scalar int64 tensor.
        step: Integer or scalar integer tensor, in [0, 2**43).
        stream: Python integer in [0, 2**20): which draw of this step, e.g. the
            variable's index.
        shape: Static shape of the result.

    Returns:
        A uint32 tensor of shape `shape`.

    Raises:
        ValueError: if `stream` or a Python `step` is outside its range.

    Privacy:
        Philox is a statistical generator and not a cryptographic one. The noise is
        as good as the assumption that nobody recovers the key from released weights.

    Example:
        >>> random_bits(key=1, step=0, stream=0, shape=[2, 3]).shape
        TensorShape([2, 3])
    """
    stream = operator.index(stream)
    if not 0 <= stream < _MAX_STREAMS:
        raise ValueError(
            f"stream must be in [0, 2**{STREAM_BITS}), got {stream}. A larger number "
            "would run into the next step's draws; split the work over several keys "
            "(key_from_seed with another purpose)."
        )
    if isinstance(step, int) and not 0 <= step < _MAX_STEPS:
        raise ValueError(f"step must be in [0, 2**{63 - STREAM_BITS}), got {step}.")
    high = _as_int64(step) * _MAX_STREAMS + stream
    counter = tf.stack([tf.zeros_like(high), high])
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=tf.constant(tuple(shape), tf.int32),
        key=tf.bitcast(tf.reshape(_as_int64(key), [1]), tf.uint64),
        counter=tf.bitcast(counter, tf.uint64),
        alg=_PHILOX,
        dtype=tf.uint32,
    )


def standard_normal(
    key: IntLike, step: IntLike, stream: int, shape: Sequence[int]
) -> tf.Tensor:
    """Draws N(0, 1) as a function of (key, step, stream), by Box and Muller.

    With u uniform on (0, 1) and a uniform on [-pi, pi),
    sqrt(-2 ln u) cos(a) and sqrt(-2 ln u) sin(a) are two independent standard
    normals (Box and Muller, Ann. Math. Statist. 29, 1958); both are used.

    The words are those of `random_bits`, and the rest are a few float32 operations,
    so the numbers agree with and without XLA to about 1e-6. tf.random's own normals
    differ there in every digit.

    Two words make one u, so that the tail is not cut where one word ends: the
    smallest u is 2**-65, the largest |z| is sqrt(130 ln 2) = 9.49, and a normal
    goes beyond that with probability 2e-21. (One word would end at 6.76, which is
    exceeded once in 7e10 draws, i.e. during an ordinary training run.)

    Args:
        key: 64-bit integer or scalar int64 tensor.
        step: Integer or scalar integer tensor, in [0, 2**43).
        stream: Python integer in [0, 2**20), e.g. the variable's index.
        shape: Static shape of the result; () gives a scalar.

    Returns:
        A float32 tensor of shape `shape`. A draw is a function of its size as well:
        two shapes of one (key, step, stream) use the same words in another order, so
        never draw twice at one address.

    Raises:
        ValueError: if `stream` or a Python `step` is outside its range.

    Privacy:
        Float32 samples are a discrete approximation of the Gaussian that the
        accounting assumes (Mironov, CCS 2012); this library, as TF Privacy and
        Opacus, does not account for the difference.

    Example:
        >>> bool(abs(standard_normal(key=1, step=0, stream=0, shape=())) < 9.5)
        True
    """
    shape = tuple(int(dimension) for dimension in shape)
    size = math.prod(shape)
    pairs = (size + 1) // 2
    bits = random_bits(key, step, stream, (3, pairs))
    high = tf.cast(bits[0], tf.float32)
    low = tf.cast(bits[1], tf.float32)
    # low fills in the digits that float32 still has room for when high is small.
    uniform = (high + (low + 0.5) * 2.0**-32) * 2.0**-32
    # Rounding can reach 1.0, where the radius would be exactly 0 (a pair of
    # coordinates without noise) and a compiler's log might come out above 0.
    uniform = tf.minimum(uniform, 1.0 - 2.0**-24)
    radius = tf.sqrt(-2.0 * tf.math.log(uniform))
    # Signed: float32 is finest around 0, so [-pi, pi) is finer than [0, 2 pi).
    angle = tf.cast(tf.bitcast(bits[2], tf.int32), tf.float32) * (math.pi * 2.0**-31)
    both = tf.concat([radius * tf.cos(angle), radius * tf.sin(angle)], axis=0)
    return tf.reshape(both[:size], shape)


def per_record_seeds(
    key: IntLike, step: IntLike, positions: tf.Tensor, stream: int
) -> tf.Tensor:
    """Gives every record of a logical batch its own seed for one seed generator.

    seed(p) = mix(mix(w0 + p * phi) XOR w1), where w0 and w1 are two 64-bit words of
    `random_bits(key, step, stream)`, phi = 2**64 / golden ratio rounded to odd, and
    mix is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", OOPSLA 2014). Each part is a bijection of
    64-bit words, so two positions of one step never get the same seed.

    The seed depends on the record's absolute position alone, so it is the same
    however the logical batch is cut into microbatches.

    Args:
        key: The layer key, 64-bit integer or scalar int64 tensor.
        step: Integer or scalar integer tensor, in [0, 2**43).
        positions: Integers of any shape, possibly known only at run time: the
            positions in the logical batch.
        stream: Python integer in [0, 2**20): the index of the seed generator.

    Returns:
        A uint32 tensor of shape positions.shape + [2], the form of a Keras
        SeedGenerator's state.

    Raises:
        ValueError: if `stream` or a Python `step` is outside its range.

    Privacy:
        None: layer randomness carries no part of the guarantee. Use a key of its own
        all the same, so that no noise can be computed from a layer's mask.

    Example:
        >>> per_record_seeds(key=1, step=0, positions=tf.range(4), stream=0).shape
        TensorShape([4, 2])
    """
    words = tf.bitcast(random_bits(key, step, stream, (2, 2)), tf.uint64)
    positions = tf.bitcast(_as_int64(positions), tf.uint64)
    golden = tf.constant(0x9E3779B97F4A7C15, tf.uint64)
    mixed = _mix64(words[0] + positions * golden)
    return tf.bitcast(_mix64(tf.bitwise.bitwise_xor(mixed, words[1])), tf.uint32)


def _mix64(word: tf.Tensor) -> tf.Tensor:
    """Applies the finaliser of SplitMix64, a bijection of uint64."""

    def fold(value: tf.Tensor, shift: int) -> tf.Tensor:
        shifted = tf.bitwise.right_shift(value, tf.constant(shift, tf.uint64))
        return tf.bitwise.bitwise_xor(value, shifted)

    word = fold(word, 30) * tf.constant(0xBF58476D1CE4E5B9, tf.uint64)
    word = fold(word, 27) * tf.constant(0x94D049BB133111EB, tf.uint64)
    return fold(word, 31)


def _as_int64(value: IntLike) -> tf.Tensor:
    """Returns an int64 tensor, from a Python integer without passing by int32."""
    if isinstance(value, int):
        return tf.constant(value, tf.int64)
    return tf.cast(value, tf.int64)

"""Records that are hard to clip, ways to run a clip, and norms in float64 NumPy."""

import functools

import numpy as np
import tensorflow as tf

LARGEST = np.finfo(np.float32).max
TINY = np.finfo(np.float32).tiny
OVER_CLIP = 2e-5  # What the bound may take away, as `clipping.RecordNorm` says.
SHAPES = ((3, 5), (7,), ())
WAYS = ("eager", "vectorized", "vectorized xla", "loop xla")
# "record xla" compiles one record's function, which takes far less time.
QUICK_WAYS = ("eager", "vectorized", "vectorized xla", "record xla")


def way(kind, function):
    """`(batch, limit) -> function(record, limit)` of each record, stacked."""
    vectorized = functools.partial(_vectorized, function)
    record_xla = tf.function(function, jit_compile=True)
    return {
        "eager": functools.partial(_each, function),
        "vectorized": tf.function(vectorized),
        "vectorized xla": tf.function(vectorized, jit_compile=True),
        "loop xla": tf.function(functools.partial(_each, function), jit_compile=True),
        "record xla": functools.partial(_each, record_xla),
    }[kind]


def _each(function, batch, limit):
    """Function(record, limit) for each record of the batch, one after the other."""
    records = zip(*(tf.unstack(values) for values in batch), strict=True)
    results = [function(record, limit) for record in records]
    return tf.nest.map_structure(lambda *values: tf.stack(values), *results)


def _vectorized(function, batch, limit):
    # The fallback, for operations without a converter, would loop over the records.
    return tf.vectorized_map(
        lambda record: function(record, limit), batch, fallback_to_while_loop=False
    )


def norms(batch):
    """Joint norms in float64, [records]."""
    flat = [np.reshape(values, (len(values), -1)) for values in batch]
    flat = np.concatenate(flat, axis=1).astype(np.float64)
    return np.sqrt(np.sum(flat**2, axis=1))


def records(*rows):
    """A batch of records in SHAPES from rows of 23 numbers."""
    rows = np.stack([np.asarray(row, np.float32) for row in rows])
    parts = np.split(rows, [15, 22], axis=1)
    return [p.reshape(len(rows), *s) for p, s in zip(parts, SHAPES, strict=True)]


def hard_rows():
    random = np.random.default_rng(0)
    normal = random.normal(size=23)
    spread = normal * 10.0 ** random.uniform(-38, 38, size=23)
    rows = [normal * 10.0**power for power in (-30, -15, -6, 0, 6, 15, 30)]
    rows += [np.full(23, LARGEST), np.full(23, -LARGEST), np.full(23, TINY)]
    rows += [np.full(23, 1e-38), np.full(23, 1e-45), np.zeros(23), -np.zeros(23)]
    rows += [spread, np.eye(23)[0] * LARGEST, np.eye(23)[22] * 1e30]
    for bad in (np.nan, np.inf, -np.inf):
        for place in (0, 16, 22):  # In each tensor of the record.
            rows.append(np.where(np.arange(23) == place, bad, normal))
        rows.append(np.full(23, bad))
    rows.append(np.where(np.arange(23) < 2, [np.nan, np.inf] * 11 + [0], LARGEST))
    return rows

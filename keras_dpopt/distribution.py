"""Replicas of `tf.distribute`: what each computes, and what is done once for all.

Each replica sums the clipped gradients of its share of the logical batch. The sums are
added up by one all-reduce; the noise, the filter and the update come after it, once:

    sum_r clipped sum of replica r   ->   + noise   ->   update of all copies

So neither the noise nor the result depends on the number of replicas. Noise that each
replica drew for itself would add up to another variance, or to none that is private if
the replicas drew the same.
"""

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_dpopt import data


def once(function: Callable, values: Any, batch: dict) -> Any:
    """Calls a function with sums over the replicas, once for all of them.

    Args:
        function: Function of a structure like `values`. What it assigns is assigned to
            the copies on all replicas.
        values: Structure of float32 tensors, of this replica.
        batch: What the replica got: its share of a logical batch.

    Returns:
        What the function returns.

    Raises:
        tf.errors.InvalidArgumentError: in a step in which workers have different
            logical batches: a record could be in the shares of two of them, and the
            noise would be too small for that.
    """
    # A strategy of one replica, too, assigns outside of the replica.
    if not tf.distribute.has_strategy():
        return function(values)
    context = tf.distribute.get_replica_context()
    replicas = context.num_replicas_in_sync
    # A distributed data set forgets the first axis of what it is made of.
    own = tf.zeros([0])
    if "fingerprint" in batch:
        own = tf.ensure_shape(batch["fingerprint"], [8])
    flat = [*tf.nest.flatten(values), own]
    # One vector: one all-reduce, whatever the number of weights.
    vector = tf.concat([tf.reshape(value, [-1]) for value in flat], 0)

    def with_sum(total):
        parts = tf.split(total, [math.prod(value.shape) for value in flat])
        *shaped, fingerprints = [
            tf.reshape(part, value.shape)
            for part, value in zip(parts, flat, strict=True)
        ]
        check = tf.debugging.Assert(
            tf.reduce_all(tf.equal(fingerprints, own * replicas)),
            [
                "The workers have different batches. Give every worker the same data, "
                "in the same order."
            ],
        )
        with tf.control_dependencies([check] if check is not None else []):
            shaped = [tf.identity(value) for value in shaped]
        return function(tf.nest.pack_sequence_as(values, shaped))

    if isinstance(context.strategy, tf.distribute.TPUStrategy):
        # Its replicas are one program, in which each assigns its own copy.
        return with_sum(context.all_reduce(tf.distribute.ReduceOp.SUM, vector))

    def merged(strategy, vectors):
        return with_sum(strategy.reduce(tf.distribute.ReduceOp.SUM, vectors, axis=None))

    return context.merge_call(merged, args=(vector,))


def logs(metrics_result: Callable[[], dict]) -> dict:
    """Returns the metrics of all replicas together, as Keras' `fit` can reduce them."""
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return metrics_result()
    if isinstance(context.strategy, tf.distribute.TPUStrategy):
        found = metrics_result()
    else:
        found = context.merge_call(lambda _: metrics_result())
    return reducible(found)


def reducible(found: dict) -> dict:
    """Returns metrics in the shape that Keras can reduce over the replicas."""
    strategy = tf.distribute.get_strategy()
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return found
    # Keras takes the mean over the first axis there, and scalars have none.
    return {name: tf.reshape(value, [1]) for name, value in found.items()}


def first_share(model: Any, iterator: Any) -> Any:
    """Returns what the first replica here gets of the first batch of an iterator.

    Keras builds models from the mean over the replicas: there is none of unequal shares
    or of tuples.
    """
    of_first = model.distribute_strategy.experimental_local_results
    for _, _, batches in iterator:
        return tf.nest.map_structure(lambda t: of_first(t)[0], next(batches))
    return None


def replica_batches(model: Any, batches: tf.data.Dataset, microbatch_size: int) -> Any:
    """Returns the logical batches as the replicas take them.

    Every worker makes the same logical batches, of which replica r of R has the rows
    r, r + R, r + 2R, ...: shares of unequal size, or of none.

    Args:
        model: The model, of some strategy.
        batches: Logical batches of `data.py`, not yet cut into microbatches.
        microbatch_size: Rows that a replica has at a time.
    """
    strategy = model.distribute_strategy
    replicas = strategy.num_replicas_in_sync
    if replicas == 1:
        return batches.map(
            lambda batch: data.in_microbatches(batch, microbatch_size)
        ).prefetch(2)

    def of_worker(context):
        here = replicas // context.num_input_pipelines
        first = context.input_pipeline_id * here

        def shares(batch):
            if context.num_input_pipelines > 1:
                batch = batch | {"fingerprint": _fingerprint(batch)}
            numbers = tf.data.Dataset.range(first, first + here)
            return numbers.map(
                lambda r: data.in_microbatches(
                    _share(batch, r, replicas), microbatch_size
                )
            )

        return batches.flat_map(shares).prefetch(2 * here)

    distributed = strategy.distribute_datasets_from_function(of_worker)
    # That of the shares, and Keras asks how many steps there are.
    distributed._cardinality = int(batches.cardinality())
    return distributed


def replica_iterator(model: Any, batch: dict, microbatch_size: int) -> Any:
    """Returns an iterator over one logical batch, as the replicas take it."""
    if model.distribute_strategy.num_replicas_in_sync == 1:
        return iter([data.in_microbatches(batch, microbatch_size)])
    batches = tf.data.Dataset.from_tensors(batch)
    return iter(replica_batches(model, batches, microbatch_size))


def positions(batch: dict, rows: Any) -> Any:
    """Returns the places that rows of this replica have in the whole logical batch."""
    if "replica" not in batch:
        return rows
    return batch["replica"] + rows * batch["replicas"]


def _share(batch: dict, replica: Any, replicas: int) -> dict:
    """The rows of a logical batch that a replica computes."""
    taken = tf.nest.map_structure(lambda t: t[replica::replicas], batch["rows"])
    return {
        **batch,
        "rows": taken,
        "replica": tf.cast(replica, tf.int32),
        "replicas": tf.constant(replicas, tf.int32),
    }


def _fingerprint(batch: dict) -> Any:
    """64 bits of a hash of the whole logical batch, in bytes: float32 `[8]`.

    Sums of bytes over the replicas are exact, so equal fingerprints add up to R times
    one of them.
    """
    total = tf.cast(batch["step"], tf.int64)
    for leaf in tf.nest.flatten(batch["rows"]):
        hashed = tf.strings.to_hash_bucket_fast(tf.io.serialize_tensor(leaf), 2**62)
        total = total * 31 + hashed
    return tf.cast(tf.bitcast(total, tf.uint8), tf.float32)

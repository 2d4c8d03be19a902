"""Mechanisms: a clipped sum goes in, a privatized gradient comes out.

    g_t = (1/B) * (sum_i clip(u_i, C) + sigma*C*z_t),    z_t ~ N(0, I)        (SPEC 0.1)

The noise is added once per logical batch, to the sum, and the sum is divided by the
constant expected batch size B, never by the number of records that came.
"""

import collections
from typing import Any

import dp_accounting
import tensorflow as tf

from keras_dpopt import (
    arguments,
    clipping,
    dp_events,
    prng,
    sampling,
    tf_privacy,
    validation,
)
from keras_dpopt.types import MECHANISM_TOKEN, ClippedSum, PrivatizedGradient

# A foreign query clips with `tf.clip_by_global_norm`, whose squares overflow at 1e19.
# No record this long keeps its length under any useful clipping norm.
_FOREIGN_NORM_BOUND = 1e15


class GaussianSumQuery(tf_privacy.SumAggregationDPQuery):
    """A TF Privacy query for Gaussian sums whose noise is a function of (key, step).

    TF Privacy's own query draws unseeded noise, which can neither be resumed nor be
    equal on all replicas. Here the noise of tensor i is `prng.standard_normal(key,
    step, i)`: it depends on nothing else.

    Args:
        l2_norm_clip: Clipping norm C, positive; `inf` only with a zero multiplier.
        noise_multiplier: sigma, the noise's standard deviation on the sum over C.
        key: int64 scalar; drawn from the operating system by default.
    """

    GlobalState = collections.namedtuple(
        "GlobalState", ["l2_norm_clip", "stddev", "key", "step"]
    )

    def __init__(self, l2_norm_clip: float, noise_multiplier: float, key=None):
        self._l2_norm_clip = l2_norm_clip
        self._noise_multiplier = noise_multiplier
        self._key = key

    @property
    def stddev(self) -> float:
        """sigma*C, and 0 where sigma is 0 and C infinite."""
        return self._noise_multiplier and self._noise_multiplier * self._l2_norm_clip

    def make_global_state(self, key, step):
        """Returns the global state of the release number `step` under `key`."""
        return self.GlobalState(
            tf.constant(self._l2_norm_clip, tf.float32),
            tf.constant(self.stddev, tf.float32),
            tf.convert_to_tensor(key, tf.int64),
            tf.convert_to_tensor(step, tf.int64),
        )

    def initial_global_state(self):
        """Implements `SumAggregationDPQuery.initial_global_state`."""
        return self.make_global_state(
            prng.new_key() if self._key is None else self._key, 0
        )

    def derive_sample_params(self, global_state):
        """Implements `SumAggregationDPQuery.derive_sample_params`: C."""
        return global_state.l2_norm_clip

    def preprocess_record(self, params, record):
        """Implements `SumAggregationDPQuery.preprocess_record`: clips the record."""
        clipped = clipping.clip_record(tf.nest.flatten(record), params)
        return tf.nest.pack_sequence_as(record, clipped)

    def get_noised_result(self, sample_state, global_state):
        """Implements `SumAggregationDPQuery.get_noised_result`."""
        key, step, stddev = global_state.key, global_state.step, global_state.stddev
        noised = tuple(
            total + stddev * prng.standard_normal(key, step, stream, total.shape)
            for stream, total in enumerate(tf.nest.flatten(sample_state))
        )
        result = tf.nest.pack_sequence_as(sample_state, noised)
        event = _gaussian_event(self._noise_multiplier)
        return result, global_state._replace(step=step + 1), event


def _gaussian_event(noise_multiplier: float) -> dp_accounting.DpEvent:
    if not noise_multiplier:
        return dp_accounting.NonPrivateDpEvent()
    return dp_accounting.GaussianDpEvent(noise_multiplier)


class GaussianMechanism:
    """The mechanism of all our optimizers: clip to C, add sigma*C, divide by B.

    Args:
        l2_norm_clip: Clipping norm C > 0.
        noise_multiplier: sigma >= 0; 0 gives no privacy, and an infinite epsilon.
    """

    supports_jit = True
    sampler = sampling.PoissonSampler()

    def __init__(self, l2_norm_clip: float, noise_multiplier: float):
        self.noise_multiplier = validation.check_non_negative(
            "noise_multiplier", noise_multiplier
        )
        self.l2_norm_clip = arguments.check_clip(l2_norm_clip, self.noise_multiplier)
        self._query = GaussianSumQuery(self.l2_norm_clip, self.noise_multiplier)

    def initial_state(self):
        """Returns the state between releases: none, key and step are the caller's."""
        return ()

    def noise_multipliers(self, state) -> tuple[float, ...]:
        """Returns the noise multipliers of one release, read on the host."""
        del state
        return (self.noise_multiplier,)

    def sample_params(self, state):
        """Returns what `preprocess_record` needs: the clipping norm."""
        del state
        return tf.constant(self.l2_norm_clip, tf.float32)

    def preprocess_record(self, params, record):
        """Clips one record, all its tensors jointly."""
        return self._query.preprocess_record(params, record)

    def zero_sum(self, record_specs):
        """Returns the sum over no records."""
        return self._query.initial_sample_state(tuple(record_specs))

    def release(
        self, clipped: ClippedSum, state, key, step, expected_batch_size
    ) -> tuple[PrivatizedGradient, Any]:
        """Adds the noise of release `step` and divides by the expected batch size.

        Raises:
            ValueError: if the sum was clipped to another norm than the noise is for.
        """
        if clipped.sensitivity != self.l2_norm_clip:
            raise ValueError(
                f"The sum has sensitivity {clipped.sensitivity}, and the noise is for "
                f"{self.l2_norm_clip}. Clip with this mechanism's `preprocess_record`."
            )
        noised, _, _ = self._query.get_noised_result(
            clipped.values, self._query.make_global_state(key, step)
        )
        gradient = PrivatizedGradient(
            [total / expected_batch_size for total in noised],
            tf.constant(self._query.stddev, tf.float32) / expected_batch_size,
            token=MECHANISM_TOKEN,
        )
        return gradient, state


class ForeignMechanism:
    """A TF Privacy sum query given by the user as `dp_sum_query=`.

    Its noise is drawn by itself: such a run cannot be repeated or resumed bit for bit,
    nor run on several replicas or under XLA. What is accounted is the event that the
    query returns, read eagerly before training; each step checks in the graph that its
    own event is not weaker.

    Args:
        query: A TF Privacy `SumAggregationDPQuery` whose event is Gaussian, or composed
            of Gaussians.
    """

    supports_jit = False
    sampler = sampling.PoissonSampler()

    def __init__(self, query):
        if not isinstance(query, tf_privacy.SumAggregationDPQuery):
            raise TypeError(
                "dp_sum_query must be a TensorFlow Privacy SumAggregationDPQuery, got "
                f"{type(query).__name__}. Pass, say, a GaussianSumQuery, or leave it "
                "out and give l2_norm_clip and noise_multiplier."
            )
        if isinstance(query, tf_privacy.NormalizedQuery):
            raise TypeError(
                "dp_sum_query must return the sum, which the optimizer divides by its "
                "expected batch size, and a NormalizedQuery has divided it already. "
                "Pass the query inside."
            )
        self._query = query
        # Read now, on the host; this also refuses an event that cannot be accounted.
        state = query.initial_global_state()
        self._accounted = self.noise_multipliers(state)
        clip = tf_privacy.l2_norm_clip(state)
        # The initial clipping norm, where the query tells it.
        self.l2_norm_clip = None if clip is None else float(clip)

    def initial_state(self):
        """Returns the query's initial global state."""
        return self._query.initial_global_state()

    def noise_multipliers(self, state) -> tuple[float, ...]:
        """Returns the noise multipliers of the event of one release, on the host."""
        # A release of a scalar zero, thrown away: inside a graph the event would be
        # made of symbols.
        params = self._query.derive_sample_params(state)
        record = self._query.preprocess_record(params, (tf.zeros(()),))
        zeros = tf.nest.map_structure(tf.zeros_like, record)
        _, _, event = self._query.get_noised_result(zeros, state)
        _gaussians(event)  # refuses what could not be checked step by step
        return dp_events.noise_multipliers_of_event(event)

    def sample_params(self, state):
        """Returns the query's parameters for the records of one batch."""
        return self._query.derive_sample_params(state)

    def preprocess_record(self, params, record):
        """Lets the query clip one record, after making it finite and of sane length."""
        safe = clipping.clip_record(record, tf.constant(_FOREIGN_NORM_BOUND))
        return self._query.preprocess_record(params, tuple(safe))

    def zero_sum(self, record_specs):
        """Returns the sum over no records."""
        return self._query.initial_sample_state(
            tuple(tf.zeros(spec.shape, tf.float32) for spec in record_specs)
        )

    def release(
        self, clipped: ClippedSum, state, key, step, expected_batch_size
    ) -> tuple[PrivatizedGradient, Any]:
        """Lets the query add its noise, and divides by the expected batch size."""
        del key, step
        noised, new_state, event = self._query.get_noised_result(clipped.values, state)
        with tf.control_dependencies(_check_event(event, self._accounted)):
            noised = [tf.identity(total) for total in tf.nest.flatten(noised)]
        stddev = tf_privacy.noise_stddev(state)
        gradient = PrivatizedGradient(
            [total / expected_batch_size for total in noised],
            None if stddev is None else stddev / expected_batch_size,
            token=MECHANISM_TOKEN,
        )
        return gradient, new_state


def _check_event(event, accounted: tuple[float, ...]):
    """Ops that fail where a step's event has less noise than what is accounted."""
    return [
        tf.debugging.assert_greater_equal(
            tf.cast(part.noise_multiplier, tf.float32),
            tf.constant(least * (1 - 1e-5), tf.float32),
            "dp_sum_query released with less noise than the ledger accounts.",
        )
        for part, least in zip(_gaussians(event), accounted, strict=True)
    ]


def _gaussians(event) -> list:
    """The Gaussian events that `event` is composed of, in order."""
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return [part for inner in event.events for part in _gaussians(inner)]
    if isinstance(event, dp_accounting.GaussianDpEvent):
        return [event]
    raise ValueError(
        f"dp_sum_query returned a {type(event).__name__}, which is not checked step by "
        "step. Use a query whose event is Gaussian, or composed of Gaussians."
    )


def make(l2_norm_clip, noise_multiplier, dp_sum_query):
    """Returns the mechanism that an optimizer's arguments ask for."""
    if dp_sum_query is not None:
        if l2_norm_clip is not None or noise_multiplier is not None:
            raise ValueError(
                "dp_sum_query brings its own clipping and noise. Leave out "
                "l2_norm_clip and noise_multiplier, or leave out dp_sum_query."
            )
        return ForeignMechanism(dp_sum_query)
    if l2_norm_clip is None or noise_multiplier is None:
        raise ValueError(
            "l2_norm_clip and noise_multiplier are both needed: without them the "
            "gradient is not private. `keras_dpopt.noise_multiplier(...)` calibrates "
            "the second to a target epsilon."
        )
    return GaussianMechanism(l2_norm_clip, noise_multiplier)

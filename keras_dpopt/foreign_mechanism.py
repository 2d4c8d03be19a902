"""TF Privacy's own sum queries as mechanisms, as far as they can be served safely."""

from collections.abc import Sequence
from typing import Any

import dp_accounting
import tensorflow as tf

from keras_dpopt import clipping, dp_events, sampling, tf_privacy
from keras_dpopt.run_plan import ComingSteps, RunPlan
from keras_dpopt.types import MECHANISM_TOKEN, ClippedSum, PrivatizedGradient

# A foreign query clips with `tf.clip_by_global_norm`, whose squares overflow at 1e19.
# No record this long keeps its length under any useful clipping norm.
_FOREIGN_NORM_BOUND = 1e15


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
    state_is_secret = False
    is_correlated = False
    follows_schedule = False
    noise_multiplier = None
    clip_factors = None  # the query wants records, not their norms
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

    def built_for(
        self, groups: Sequence[int], shapes: Sequence[Any] = ()
    ) -> "ForeignMechanism":
        """Returns this mechanism: the query does not ask for the layers."""
        del groups, shapes
        return self

    def plan_run(self, coming: ComingSteps) -> RunPlan:
        """Returns how the coming steps are to be made, and accounted."""
        del coming
        return RunPlan(self.sampler)

    def for_step(self, learning_rate, train_size) -> "ForeignMechanism":
        """Returns this mechanism."""
        del learning_rate, train_size
        return self

    def initial_state(self):
        """Returns the query's initial global state."""
        return self._query.initial_global_state()

    def current_clip(self, state):
        """Returns the clipping norm of this state, or `None` where it is not told."""
        return tf_privacy.l2_norm_clip(state)

    def sensitivity(self, params) -> None:
        """Returns `None`: the query keeps it to itself."""
        del params

    def noise_multipliers(self, state, expected_batch_size=None) -> tuple[float, ...]:
        """Returns the noise multipliers of the event of one release, on the host."""
        del expected_batch_size
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

    def draw_ahead(self, specs, key, step, first_stream: int = 0):
        """See `GaussianMechanism.draw_ahead`: the query draws its own noise."""
        return None

    def release(
        self,
        clipped: ClippedSum,
        state,
        key,
        step,
        expected_batch_size,
        first_stream: int = 0,
        drawn: None = None,
    ) -> tuple[PrivatizedGradient, Any]:
        """Lets the query add its noise, and divides by the expected batch size."""
        del key, step, first_stream, drawn
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

    def get_config(self):
        """Refuses.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "An optimizer with a dp_sum_query cannot be saved, because TF Privacy "
            "queries have no configuration. Save the weights alone, with "
            "`model.save_weights`."
        )


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

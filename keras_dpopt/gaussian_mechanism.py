"""The Gaussian mechanism: a clipped sum goes in, a privatized gradient comes out.

    g_t = (1/B) * (sum_i clip(u_i, C) + sigma*C*z_t),    z_t ~ N(0, I)

The noise is added once per logical batch, to the sum, and the sum is divided by the
constant expected batch size B, never by the number of records that came.
"""

import collections
import copy
import math
import operator
from collections.abc import Sequence
from typing import Any

import dp_accounting
import tensorflow as tf

from keras_dpopt import (
    arguments,
    gaussian_noise,
    prng,
    sampling,
    tf_privacy,
    validation,
)
from keras_dpopt.clipping_styles import ClippingStyle, FlatClipping
from keras_dpopt.run_plan import ComingSteps, RunPlan
from keras_dpopt.types import MECHANISM_TOKEN, ClippedSum, PrivatizedGradient


class GaussianSumQuery(tf_privacy.SumAggregationDPQuery):
    """A TF Privacy query for Gaussian sums whose noise is a function of (key, step).

    TF Privacy's own query draws unseeded noise, which can neither be resumed nor be
    equal on all replicas. Here the noise of tensor i is `prng.standard_normal(key,
    step, i)`: it depends on nothing else.

    Args:
        l2_norm_clip: Clipping norm C, positive; `inf` only with a zero multiplier.
        noise_multiplier: sigma, the noise's standard deviation on the sum over C.
        key: int64 scalar; drawn from the operating system by default.
        style: How a record is clipped to C.
        groups: The number of the layer of each tensor of a record, where `style` asks
            for it.
    """

    GlobalState = collections.namedtuple(
        "GlobalState", ["l2_norm_clip", "stddev", "key", "step"]
    )

    def __init__(
        self,
        l2_norm_clip: float,
        noise_multiplier: float,
        key=None,
        style: ClippingStyle | None = None,
        groups: tuple[int, ...] | None = None,
    ):
        self._l2_norm_clip = l2_norm_clip
        self._noise_multiplier = noise_multiplier
        self._key = key
        self._style = FlatClipping() if style is None else style
        self._groups = groups

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
        clipped = self._style.clip(tf.nest.flatten(record), params, self._groups)
        return tf.nest.pack_sequence_as(record, clipped)

    def clip_factors(self, params, bounds):
        """The factors by which `preprocess_record` clips records of these bounds."""
        return self._style.factors(bounds, params, self._groups)

    def get_noised_result(self, sample_state, global_state):
        """Implements `SumAggregationDPQuery.get_noised_result`."""
        key, step, stddev = global_state.key, global_state.step, global_state.stddev
        noised = gaussian_noise.add_noise(
            tf.nest.flatten(sample_state), stddev, key, step
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
        style: How a record is clipped to C; by default in one piece.
        rescale_to_unit_norm: Whether the gradient is divided by C as well (De et al.,
            "Unlocking High-Accuracy Differentially Private Image Classification through
            Scale", 2022), g = (1/(B*C)) * (sum + sigma*C*z), so that a change of C asks
            for no other learning rate. It needs a finite C.

    Raises:
        ValueError: if an argument is missing or out of its range.

    Attributes:
        l2_norm_clip: C; where it changes, the first one.
        noise_multiplier: sigma; of all that one step releases together.
        state_is_secret: Whether the state would give the noise away.
        is_correlated: Whether the noise depends on that of other steps.
        follows_schedule: Whether the noise follows the learning rate, so that the steps
            must come in the order of the plan.

    Privacy:
        One release is a Gaussian release of noise multiplier sigma, because one record
        moves the clipped sum by at most C. Dividing by B and C is post-processing.
    """

    supports_jit = True
    state_is_secret = False
    is_correlated = False
    follows_schedule = False
    sampler = sampling.PoissonSampler()

    def __init__(
        self,
        l2_norm_clip: float | None,
        noise_multiplier: float | None,
        style: ClippingStyle | None = None,
        rescale_to_unit_norm: bool = False,
    ):
        if l2_norm_clip is None or noise_multiplier is None:
            raise ValueError(
                "l2_norm_clip and noise_multiplier are both needed: without them the "
                "gradient is not private. `keras_dpopt.noise_multiplier(...)` "
                "calibrates the second to a target epsilon."
            )
        self.noise_multiplier = validation.check_non_negative(
            "noise_multiplier", noise_multiplier
        )
        self.l2_norm_clip = arguments.check_clip(l2_norm_clip, self.noise_multiplier)
        self.style: Any = FlatClipping() if style is None else style
        self.style.check(self.l2_norm_clip, self.noise_multiplier)
        self.rescale_to_unit_norm = arguments.check_flag(
            "rescale_to_unit_norm", rescale_to_unit_norm
        )
        if self.rescale_to_unit_norm and not math.isfinite(self.l2_norm_clip):
            raise ValueError(
                "rescale_to_unit_norm=True divides by l2_norm_clip, which is infinite. "
                "Pass a finite l2_norm_clip, or leave rescale_to_unit_norm out."
            )
        self._query = GaussianSumQuery(
            self.l2_norm_clip, self.noise_multiplier, style=self.style
        )

    def built_for(self, groups: Sequence[int], shapes: Sequence[Any] = ()) -> Any:
        """Returns the mechanism for records of known layers.

        Args:
            groups: For each tensor of a record, in order, the number of the layer that
                it belongs to. Any integers; what counts is which of them are equal.
            shapes: The tensors' shapes, which this mechanism does not need.
        """
        del shapes
        built = copy.copy(self)
        built._query = GaussianSumQuery(
            self.l2_norm_clip,
            self.noise_multiplier,
            style=self.style,
            groups=tuple(map(operator.index, groups)),
        )
        return built

    def plan_run(self, coming: ComingSteps) -> RunPlan:
        """Returns how the coming steps are to be made, and accounted."""
        del coming
        return RunPlan(self.sampler)

    def for_step(self, learning_rate, train_size) -> "GaussianMechanism":
        """Returns the mechanism of a step with this learning rate: the same."""
        del learning_rate, train_size
        return self

    def initial_state(self) -> Any:
        """Returns the state between releases: none, key and step are the caller's."""
        return ()

    def current_clip(self, state) -> tf.Tensor:
        """Returns the clipping norm of the next release, a float32 scalar."""
        del state
        return tf.constant(self.l2_norm_clip, tf.float32)

    def noise_multipliers(self, state, expected_batch_size=None) -> tuple[float, ...]:
        """Returns the noise multipliers of one release, read on the host.

        Args:
            state: The state before the release.
            expected_batch_size: B, or `None` while it is not known.
        """
        del state, expected_batch_size
        return (self.noise_multiplier,)

    def sample_params(self, state) -> tf.Tensor:
        """Returns what `preprocess_record` needs: the clipping norm."""
        del state
        # float32(0.1) would be above 0.1.
        return tf.constant(self.l2_norm_clip, tf.float64)

    def sensitivity(self, params) -> Any:
        """Returns the L2 sensitivity of a sum that was clipped with these params.

        It is what `release` wants to find in the `ClippedSum`.
        """
        del params
        return self.l2_norm_clip

    def preprocess_record(self, params, record) -> Any:
        """Clips one record, all its tensors jointly."""
        return self._query.preprocess_record(params, record)

    def clip_factors(self, params, bounds) -> tuple[Any, Any]:
        """Returns what clips records of which only norms are known.

        Args:
            params: What `sample_params` returned.
            bounds: Float64 `[m, parts]`, upper bounds of the norms of their parts.

        Returns:
            The factors of all parts, `[m, parts]` or `[m, 1]`, and the function that
            makes the sum of preprocessed records from the sums of the clipped parts and
            a mask `[m]` of the records in it.
        """
        factors = self._query.clip_factors(params, bounds)
        return factors, lambda sums, mask: tuple(sums)

    def zero_sum(self, record_specs) -> Any:
        """Returns the sum over no records, whose shapes are those of the specs."""
        return tuple(tf.zeros(spec.shape, tf.float32) for spec in record_specs)

    def draw_ahead(self, specs, key, step, first_stream: int = 0) -> Any:
        """Draws what `release` will need, before the sum is there.

        Args:
            specs: Of the tensors of a record.
            key: See `release`.
            step: See `release`.
            first_stream: See `release`.

        Returns:
            A `DrawnNoise`; `None` where the noise depends on more than key and step.
        """
        shapes = [spec.shape for spec in specs]
        return gaussian_noise.draw(shapes, key, step, first_stream)

    def release(
        self,
        clipped: ClippedSum,
        state,
        key,
        step,
        expected_batch_size,
        first_stream: int = 0,
        drawn: Any = None,
    ) -> tuple[PrivatizedGradient, Any]:
        """Adds the noise of release `step` and divides by the expected batch size.

        Args:
            clipped: The sum of preprocessed records, with its `sensitivity`.
            state: The state that the sum was clipped with.
            key: int64 scalar, the noise key.
            step: int64 scalar, the number of the step.
            expected_batch_size: Scalar B.
            first_stream: Of the noise: tensor i gets that of stream first_stream + i.
                Releases of one step need streams that do not overlap.
            drawn: What `draw_ahead` returned for this step, if it was called.

        Returns:
            The privatized gradient and the next state.

        Raises:
            ValueError: if the sum was clipped to another norm than the noise is for.
        """
        self._check_sensitivity(clipped)
        stddev = tf.constant(self._query.stddev, tf.float32)
        noised = gaussian_noise.add_noise(
            clipped.values, stddev, key, step, first_stream, drawn
        )
        clip = tf.constant(self.l2_norm_clip, tf.float32)
        return self._gradient(noised, stddev, clip, expected_batch_size), state

    def _check_sensitivity(self, clipped: ClippedSum) -> None:
        if clipped.sensitivity != self.l2_norm_clip:
            raise ValueError(
                f"The sum has sensitivity {clipped.sensitivity}, and the noise is for "
                f"{self.l2_norm_clip}. Clip with this mechanism's `preprocess_record`."
            )

    def _gradient(self, noised, stddev, clip, expected_batch_size):
        divisor = expected_batch_size
        if self.rescale_to_unit_norm:
            divisor = divisor * clip
        return PrivatizedGradient(
            [value / divisor for value in noised],
            stddev / divisor,
            token=MECHANISM_TOKEN,
            is_correlated=self.is_correlated,
        )

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of `mechanisms.make` that make this mechanism."""
        return {
            "l2_norm_clip": self.l2_norm_clip,
            "noise_multiplier": self.noise_multiplier,
            "clipping": self.style.argument(),
            "rescale_to_unit_norm": self.rescale_to_unit_norm,
        }

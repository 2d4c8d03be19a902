"""The Gaussian mechanism whose clipping norm follows a quantile of the norms."""

from typing import Any

import tensorflow as tf

from keras_dpopt import prng
from keras_dpopt.adaptive_clipping import gradient_noise_multiplier
from keras_dpopt.gaussian_mechanism import GaussianMechanism
from keras_dpopt.gaussian_noise import add_noise
from keras_dpopt.types import ClippedSum, PrivatizedGradient

_STREAMS = 2**prng.STREAM_BITS


class AdaptiveMechanism(GaussianMechanism):
    """Clips to the C of its state, releases gradient and count, and moves C.

    The state is C. A preprocessed record is the pair of the clipped record and the
    centred count b_i - 1/2; see `AdaptiveClipping` for the method.

    Args:
        l2_norm_clip: The first clipping norm C_0, from 1e-20 to 1e15.
        noise_multiplier: z >= 0, of gradient and count together.
        style: The `AdaptiveClipping`.
        rescale_to_unit_norm: Whether the gradient is divided by the C of its step.

    Raises:
        ValueError: if an argument is out of its range.

    Privacy:
        A step is one Gaussian release of noise multiplier z: of the clipped sum, of
        sensitivity C, with noise z_D*C, and of the count, of sensitivity 1/2, with
        noise s_b, where z^-2 = z_D^-2 + (2 s_b)^-2. The noise is of the C that the
        records were clipped with; the new C is a function of the released count.
    """

    def initial_state(self):
        """Returns the state before the first release: the first C."""
        return (self.l2_norm_clip,)

    def current_clip(self, state):
        """Returns the C of the next release, a float32 scalar."""
        (clip,) = state
        return tf.cast(clip, tf.float32)

    def noise_multipliers(self, state, expected_batch_size=None):
        """Returns (z_D, 2 s_b), which together cost z; see `AdaptiveClipping`."""
        del state
        return self.style.noise_multipliers(self.noise_multiplier, expected_batch_size)

    def sample_params(self, state):
        """Returns what `preprocess_record` needs: the C of the next release."""
        return self.current_clip(state)

    def sensitivity(self, params):
        """Returns the L2 sensitivity of the gradient's sum: the C it was clipped with.

        That of the count is always 1/2.
        """
        return params

    def preprocess_record(self, params, record):
        """Returns the clipped record and its centred count."""
        return self.style.clip_and_count(tf.nest.flatten(record), params)

    def clip_factors(self, params, bounds):
        """See `GaussianMechanism.clip_factors`."""
        factors, centred = self.style.factors_and_counts(bounds, params)

        def finish(sums, mask):
            counted = tf.where(mask, centred, tf.zeros_like(centred))
            return tuple(sums), tf.reduce_sum(counted)

        return factors, finish

    def zero_sum(self, record_specs):
        """Returns the sums over no records: of clipped records, and of counts."""
        return super().zero_sum(record_specs), tf.zeros(())

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
        """Releases gradient and count, and moves C; see `GaussianMechanism.release`.

        The noise of the count is that of the last stream less first_stream: counted
        from the other end, so that no tensor of this step has it.

        Raises:
            ValueError: if the sum does not carry the C of its own step, or the streams
                do not suffice.
        """
        totals, count = clipped.values
        count_stream = _STREAMS - 1 - first_stream
        if first_stream + len(totals) > count_stream:
            raise ValueError(
                f"A record of {len(totals)} tensors from stream {first_stream} on "
                f"would share noise with its count, of stream {count_stream}. Pass a "
                "smaller first_stream."
            )
        clip = self._checked_clip(clipped, state)
        stddev, count_stddev = self._stddevs(clip, expected_batch_size)
        noised = add_noise(totals, stddev, key, step, first_stream, drawn)
        (noised_count,) = add_noise([count], count_stddev, key, step, count_stream)
        gradient = self._gradient(noised, stddev, clip, expected_batch_size)
        return gradient, (
            self.style.next_clip(clip, noised_count, expected_batch_size),
        )

    def _checked_clip(self, clipped, state):
        """The C of this step, which the sum must have been clipped with."""
        used = clipped.sensitivity
        if not tf.is_tensor(used):
            raise ValueError(
                f"The sum has the fixed sensitivity {used}, and the clipping norm of "
                "this mechanism changes. Pass `sensitivity(params)` with the params "
                "that its records were preprocessed with."
            )
        clip = self.current_clip(state)
        check = tf.debugging.assert_equal(
            used, clip, "The sum was clipped to another norm than its noise is for."
        )
        with tf.control_dependencies([] if check is None else [check]):
            # XLA drops checks; the larger of the two keeps the guarantee there too.
            return tf.maximum(clip, used)

    def _stddevs(self, clip, expected_batch_size):
        """Standard deviations of the noise on the gradient's sum and on the count."""
        # The batch size is a tensor in a training step. In float64, because the
        # difference in z_D loses digits, and z_D must be what the ledger computes.
        batch_size = tf.cast(expected_batch_size, tf.float64)
        count = tf.convert_to_tensor(self.style.count_stddev(batch_size), tf.float64)
        count_stddev = tf.cast(count, tf.float32)
        if self.noise_multiplier == 0:
            return tf.zeros(()), count_stddev
        check = tf.debugging.assert_greater(
            2 * count,
            tf.constant(self.noise_multiplier, tf.float64),
            "The noise multiplier must be below twice the noise on the count.",
        )
        with tf.control_dependencies([] if check is None else [check]):
            # Where XLA drops the check, the noise is NaN or infinite, which is seen.
            multiplier = gradient_noise_multiplier(self.noise_multiplier, 2 * count)
        return tf.cast(multiplier, tf.float32) * clip, count_stddev

"""MF-DP-FTRL."""

from typing import Any

import keras

from keras_dpopt import arguments, matrix_mechanism, update_rules
from keras_dpopt.dp_optimizer import DPOptimizer


@keras.saving.register_keras_serializable(package="keras_dpopt")
class MFDPFTRL(DPOptimizer):
    """SGD with noise that is correlated from step to step by a matrix factorization.

    Choquette-Choo et al., "(Amplified) Banded Matrix Factorization" (NeurIPS 2023),
    sections 3 and 4, and Dvijotham et al., "Efficient and Near-Optimal Noise Generation
    for Streaming Differential Privacy" (FOCS 2024) for "blt". With a lower triangular
    Toeplitz strategy S of first column c and z_t ~ N(0, I):

        w   = S^{-1} z:  w_t = (z_t - sum_{j=1}^{b-1} c_j*w_{t-j}) / c_0      ("banded")
        g_t = (1/B) * (sum_i clip(grad l_i(theta_t), C) + sigma*s*C*w_t)
        v_t = momentum*v_{t-1} - lr*g_t,     theta_{t+1} = theta_t + v_t

    s is the sensitivity of S under the participation schema, in units of C. The noise
    of later steps takes away some of earlier ones', so that the sum over the steps has
    less of it than with independent noise of the same cost.

    The strategy is made when `fit` begins, for the number of its steps, and `fit` draws
    the batches that it is accounted for:
      - cyclic (the default): fixed blocks in turn. A record comes again after ceil(N/B)
        steps, s = || sum_{j<k} S[:, j*ceil(N/B)] || for its k participations.
      - `amplified`: Poisson samples of `bands` groups in turn, s = ||c||.

    Args:
        learning_rate: A float, a schedule or a callable. Defaults to 0.01.
        strategy: "banded" (the default), or "blt": c_0 = 1 and
            c_j = sum_i scale_i*decay_i^(j-1).
        bands: b of "banded", at most the number of steps after which a record comes
            again. 1 is independent noise: `DPSGD`, but for the order of the batches.
            Defaults to 4.
        buffers: Number of terms of "blt". Defaults to 3.
        amplified: See above; for "banded" alone. Defaults to `False`.
        momentum: mu in [0, 1), which the strategy is optimized for as well. Defaults
            to 0.9.
        nesterov: Whether to use Nesterov momentum.
        coefficients: c of "banded", non-negative and not increasing, `bands` of them.
            `None`, the default, minimizes the mean square of the noise in the weights.
        **kwargs: The arguments of every private optimizer, but `clipping`,
            `rescale_to_unit_norm` and `dp_sum_query`.

    Privacy:
        A cyclic fit of T steps is one Gaussian release with noise multiplier sigma,
        from its first step on, however many epochs it has. An amplified one is
        ceil(T/b) releases of Poisson samples of N//b records. Calibrate both with
        `keras_dpopt.noise_multiplier(..., optimizer=make)`. Each fit is a run of its
        own. `train_on_batch` and batches of the caller's are refused, because they need
        not keep to the schema. Earlier noise is a secret: `BackupAndRestore` alone
        keeps it.

    Deviations from the papers:
        Coefficients are kept from increasing, without which the formula for s would not
        hold.

    Example:
        >>> optimizer = MFDPFTRL(l2_norm_clip=1.0, noise_multiplier=4.0, bands=8)
        >>> optimizer.mechanism.bands
        8
    """

    def __init__(
        self,
        learning_rate=0.01,
        *,
        strategy="banded",
        bands=4,
        buffers=3,
        amplified=False,
        momentum=0.9,
        nesterov=False,
        coefficients: tuple[float, ...] | None = None,
        l2_norm_clip: Any = None,
        noise_multiplier: Any = None,
        **kwargs,
    ):
        arguments.refuse_for_own_mechanism("MFDPFTRL", **kwargs)
        self._check_names(kwargs)
        super().__init__(
            learning_rate,
            # All four slots are filled here, so that none comes with `kwargs`.
            query=None,
            mechanism=matrix_mechanism.ToeplitzMechanism(
                l2_norm_clip,
                noise_multiplier,
                strategy,
                bands,
                buffers,
                amplified,
                momentum,
                coefficients,
            ),
            filter=None,
            rule=update_rules.SGD(momentum, nesterov),
            noise_correction=None,
            **kwargs,
        )

    def get_config(self):
        """Returns the configuration."""
        config = super().get_config()
        mechanism = self.mechanism
        coefficients = mechanism.coefficients
        config.update(
            strategy=mechanism.strategy,
            bands=mechanism.bands,
            buffers=mechanism.buffers,
            amplified=mechanism.amplified,
            momentum=self.rule.momentum,
            nesterov=self.rule.nesterov,
            coefficients=None if coefficients is None else list(coefficients),
        )
        return config

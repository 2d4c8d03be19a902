"""The mechanisms of MF-DP-FTRL and DP-FTRL."""

from typing import Any

import numpy as np

from keras_dpopt import arguments, sampling, toeplitz, validation
from keras_dpopt.correlated_mechanism import CorrelatedMechanism, separation
from keras_dpopt.noise_streams import BandedStream, BufferedLinearStream, TreeStream
from keras_dpopt.run_plan import ComingSteps, RunPlan


class ToeplitzMechanism(CorrelatedMechanism):
    """Noise of a Toeplitz strategy: banded, or of buffered linear recursions (BLT).

    Args:
        l2_norm_clip: C > 0.
        noise_multiplier: sigma >= 0.
        strategy: "banded" or "blt".
        bands: Number b of coefficients of "banded"; 1 is independent noise.
        buffers: Number of recursions of "blt".
        amplified: Whether batches are Poisson samples of `bands` groups in turn.
        momentum: mu of the SGD that the strategy is optimized for.
        coefficients: c of "banded", in the place of optimized ones; or `None`.
    """

    def __init__(
        self,
        l2_norm_clip: float,
        noise_multiplier: float,
        strategy: str,
        bands: int,
        buffers: int,
        amplified: bool,
        momentum: float,
        coefficients: Any = None,
    ):
        arguments.check_choice("strategy", strategy, ("banded", "blt"))
        self.bands = validation.check_positive_integer("bands", bands)
        self.buffers = validation.check_positive_integer("buffers", buffers)
        self.amplified = arguments.check_flag("amplified", amplified)
        arguments.check_fraction("momentum", momentum, below_one=True)
        self.strategy, self._momentum = strategy, momentum
        if amplified and strategy != "banded":
            raise ValueError(
                "Amplification by sampling needs a strategy with finitely many bands. "
                "Use strategy='banded', or leave `amplified` out."
            )
        if coefficients is not None:
            coefficients = tuple(
                validation.check_finite("coefficients", c) for c in coefficients
            )
            if strategy != "banded" or len(coefficients) != bands:
                raise ValueError(
                    f"There are {len(coefficients)} coefficients for {bands} bands of "
                    f"strategy={strategy!r}. Pass as many as `bands`, with 'banded'."
                )
            toeplitz.BandedToeplitz(coefficients)  # refuses what has no sensitivity
        self.coefficients = coefficients
        if strategy == "banded":
            stream, shape = BandedStream(self.bands), (self.bands,)
        else:
            stream, shape = BufferedLinearStream(self.buffers), (2, self.buffers)
        super().__init__(
            l2_norm_clip, noise_multiplier, stream, np.ones(shape, np.float32)
        )

    def plan_run(self, coming: ComingSteps) -> RunPlan:
        """Returns the plan: its sampler, and what the ledger records."""
        self._check_drawn(coming)
        steps = max(1, coming.steps or 0)
        size: int = coming.train_size or 0
        apart = self.bands if self.amplified else separation(size, coming.batch_size)
        if self.strategy == "banded" and self.bands > apart:
            raise ValueError(
                f"{self.bands} bands reach further than the {apart} steps after which "
                "a record comes again. Pass fewer bands, or a smaller batch."
            )
        # What the steps compute with is what is accounted, to the last bit.
        strategy = self._stream.rounded(self._optimized(steps, apart))
        column = strategy.coefficients_up_to(steps)
        if self.amplified:
            sampler: Any = sampling.BandedPoissonSampler(self.bands)
            scale = toeplitz.largest_column_norm(column, steps, apart)
            # A record is at risk in one step of so many.
            fields = {"sampling": "banded", "steps_per_release": self.bands}
            if self.bands == 1:
                fields = {"sampling": "poisson"}
                sampler = sampling.PoissonSampler()
        else:
            sampler = sampling.CyclicSampler()
            scale = toeplitz.sensitivity(column, steps, apart)
            fields = {"sampling": "cyclic", "steps_per_release": steps}
        self._begin_plan(
            steps,
            self._stream.parameters(strategy),
            scale,
            toeplitz.noise_row_norms(strategy, steps),
        )
        return RunPlan(sampler, False, fields)

    def _optimized(self, steps: int, apart: int) -> Any:
        if self.coefficients is not None:
            return toeplitz.BandedToeplitz(self.coefficients)
        if self.strategy == "banded":
            bands = min(self.bands, steps)
            return toeplitz.optimize_banded(steps, bands, momentum=self._momentum)
        return toeplitz.optimize_blt(
            steps, self.buffers, min(apart, steps), momentum=self._momentum
        )


class TreeMechanism(CorrelatedMechanism):
    """Noise of tree aggregation, whose prefix sums grow with the depth of a tree.

    The noise of a node has standard deviation sigma*C, as in TF Privacy; the ledger
    gets sigma over the sensitivity of the tree.

    Args:
        l2_norm_clip: C > 0.
        noise_multiplier: sigma >= 0, of one node.
        restart: "epoch" begins a new tree after each pass over the data, `None` never.
    """

    def __init__(
        self, l2_norm_clip: float, noise_multiplier: float, restart: str | None
    ):
        arguments.check_choice("restart", restart, ("epoch", None))
        self.restart = restart
        super().__init__(l2_norm_clip, noise_multiplier, TreeStream(), np.int64(1))

    def plan_run(self, coming: ComingSteps) -> RunPlan:
        """Returns the plan: its sampler, and what the ledger records."""
        self._check_drawn(coming)
        steps = max(1, coming.steps or 0)
        size: int = coming.train_size or 0
        apart = separation(size, coming.batch_size)
        period = min(apart, steps) if self.restart == "epoch" else steps
        # A step takes away as many nodes as there are zero bits at its number's end.
        numbers = np.arange(steps) % period + 1
        row_norms = np.sqrt(1.0 + np.log2(numbers & -numbers))
        self._begin_plan(steps, period, 1.0, row_norms)
        sensitivity = toeplitz.tree_sensitivity(period, apart)
        multipliers = (self.noise_multiplier / sensitivity,)
        return RunPlan(
            sampling.CyclicSampler(),
            False,
            {
                "sampling": "cyclic",
                "steps_per_release": period,
                "noise_multipliers": multipliers,
            },
        )

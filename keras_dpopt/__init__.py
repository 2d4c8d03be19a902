"""Differentially private training for Keras 3."""

from keras_dpopt import calibration, diagnostics, layers
from keras_dpopt.accounting import epsilon, noise_multiplier
from keras_dpopt.adaptive_clipping import AdaptiveClipping
from keras_dpopt.backup import BackupAndRestore
from keras_dpopt.callbacks import PrivacyBudget
from keras_dpopt.clipping_styles import AutomaticClipping, PerLayerClipping
from keras_dpopt.dp_optimizer import DPOptimizer
from keras_dpopt.engine_report import check_engine
from keras_dpopt.models import DPModel, DPSequential, PrivateModel, make_private
from keras_dpopt.optimizers import (
    BAM,
    DOPPLER,
    DPFTRL,
    DPIVON,
    DPSAM,
    DPSAT,
    DPSGD,
    DPSGLD,
    MFDPFTRL,
    DiSK,
    DPAdam,
    DPAdamBC,
    DPAdamW,
    DPAdamWBC,
    DPBayesByBackprop,
    DPRMSprop,
    FiBeR,
)
from keras_dpopt.posterior import PosteriorPrediction, posterior_predict
from keras_dpopt.posterior_samples import PosteriorSamples
from keras_dpopt.sampling import FixedSizeSampler, PoissonSampler
from keras_dpopt.statement import PrivacyStatement
from keras_dpopt.types import UnsupportedModelError

__version__ = "0.1.0"

__all__ = [
    "AdaptiveClipping",
    "AutomaticClipping",
    "BAM",
    "BackupAndRestore",
    "DOPPLER",
    "DPAdam",
    "DPAdamBC",
    "DPAdamW",
    "DPAdamWBC",
    "DPBayesByBackprop",
    "DPFTRL",
    "DPIVON",
    "DPModel",
    "DPOptimizer",
    "DPRMSprop",
    "DPSAM",
    "DPSAT",
    "DPSGD",
    "DPSGLD",
    "DPSequential",
    "DiSK",
    "FiBeR",
    "FixedSizeSampler",
    "MFDPFTRL",
    "PerLayerClipping",
    "PoissonSampler",
    "PosteriorPrediction",
    "PosteriorSamples",
    "PrivacyBudget",
    "PrivacyStatement",
    "PrivateModel",
    "UnsupportedModelError",
    "calibration",
    "check_engine",
    "diagnostics",
    "epsilon",
    "layers",
    "make_private",
    "noise_multiplier",
    "posterior_predict",
]


def __dir__():
    """The public names alone: the modules behind them are not for users."""
    return sorted([*__all__, "__version__", "__doc__", "__file__", "__path__"])

"""Differentially private training for Keras 3."""

from keras_dpopt.accounting import epsilon, noise_multiplier
from keras_dpopt.backup import BackupAndRestore
from keras_dpopt.callbacks import PrivacyBudget
from keras_dpopt.dp_optimizer import DPOptimizer
from keras_dpopt.models import DPModel, DPSequential, PrivateModel, make_private
from keras_dpopt.optimizers import DPSGD, DPAdam, DPAdamW, FiBeR
from keras_dpopt.sampling import FixedSizeSampler, PoissonSampler
from keras_dpopt.statement import PrivacyStatement
from keras_dpopt.types import UnsupportedModelError

__version__ = "0.1.0"

__all__ = [
    "BackupAndRestore",
    "DPAdam",
    "DPAdamW",
    "DPModel",
    "DPOptimizer",
    "DPSGD",
    "DPSequential",
    "FiBeR",
    "FixedSizeSampler",
    "PoissonSampler",
    "PrivacyBudget",
    "PrivacyStatement",
    "PrivateModel",
    "UnsupportedModelError",
    "epsilon",
    "make_private",
    "noise_multiplier",
]

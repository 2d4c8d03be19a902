"""The private optimizers: one public class a file."""

from keras_dpopt.optimizers.dp_adam import DPAdam
from keras_dpopt.optimizers.dp_adamw import DPAdamW
from keras_dpopt.optimizers.dp_sgd import DPSGD
from keras_dpopt.optimizers.fiber import FiBeR

__all__ = ["DPAdam", "DPAdamW", "DPSGD", "FiBeR"]

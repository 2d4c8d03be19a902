"""The private optimizers: one public class a file."""

from keras_dpopt.optimizers.bam import BAM
from keras_dpopt.optimizers.disk import DiSK
from keras_dpopt.optimizers.doppler import DOPPLER
from keras_dpopt.optimizers.dp_adam import DPAdam
from keras_dpopt.optimizers.dp_adambc import DPAdamBC
from keras_dpopt.optimizers.dp_adamw import DPAdamW
from keras_dpopt.optimizers.dp_adamw_bc import DPAdamWBC
from keras_dpopt.optimizers.dp_bayes_by_backprop import DPBayesByBackprop
from keras_dpopt.optimizers.dp_ftrl import DPFTRL
from keras_dpopt.optimizers.dp_ivon import DPIVON
from keras_dpopt.optimizers.dp_rmsprop import DPRMSprop
from keras_dpopt.optimizers.dp_sam import DPSAM
from keras_dpopt.optimizers.dp_sat import DPSAT
from keras_dpopt.optimizers.dp_sgd import DPSGD
from keras_dpopt.optimizers.dp_sgld import DPSGLD
from keras_dpopt.optimizers.fiber import FiBeR
from keras_dpopt.optimizers.mf_dp_ftrl import MFDPFTRL

__all__ = [
    "BAM",
    "DOPPLER",
    "DPAdam",
    "DPAdamBC",
    "DPAdamW",
    "DPAdamWBC",
    "DPBayesByBackprop",
    "DPFTRL",
    "DPIVON",
    "DPRMSprop",
    "DPSAM",
    "DPSAT",
    "DPSGD",
    "DPSGLD",
    "DiSK",
    "FiBeR",
    "MFDPFTRL",
]

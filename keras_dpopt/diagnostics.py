"""Diagnostics of the papers, as callbacks and functions.

Private, made of what was released: `ClampMass`, `SignalToNoise`.

Not private, made of raw gradients: `gradient_bias`, `sharpness`, and the callbacks
`NonPrivateGradientBias` and `NonPrivateSharpness`, which the privacy statement lists.

For synthetic or public data: `attenuation_audit`.
"""

from keras_dpopt.diagnostics_audit import AttenuationReport, attenuation_audit
from keras_dpopt.diagnostics_private import (
    ClampMass,
    SignalToNoise,
    clamp_mass,
    signal_to_noise,
)
from keras_dpopt.diagnostics_raw import (
    GradientBias,
    NonPrivateGradientBias,
    NonPrivateSharpness,
    gradient_bias,
    sharpness,
)

__all__ = [
    "AttenuationReport",
    "ClampMass",
    "GradientBias",
    "NonPrivateGradientBias",
    "NonPrivateSharpness",
    "SignalToNoise",
    "attenuation_audit",
    "clamp_mass",
    "gradient_bias",
    "sharpness",
    "signal_to_noise",
]

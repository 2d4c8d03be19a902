"""Temporal filters: pure functions on the privatized gradient, one variable at a time.

A filter also says what it does to the noise. It propagates the variance of the noise
through its own recursion, so that a correction after it never subtracts the variance of
something else.
"""

import dataclasses

from keras_dpopt import arguments


@dataclasses.dataclass(frozen=True)
class NoFilter:
    """The identity: the gradient and its noise pass unchanged."""

    slots = ()
    noise_slots = ()

    def update(self, slots, gradient):
        """Returns the filtered gradient and the new slots."""
        return gradient, slots

    def propagate(self, noise_slots, variance):
        """Returns (steady, exact) noise variance after the filter, and the slots."""
        return (variance, variance), noise_slots


@dataclasses.dataclass(frozen=True)
class InnovationFilter:
    """The innovation filter of FiBeR.

        nu_t = g_t - f_{t-1}
        r_t  = (1 - omega) * r_{t-1} + omega * nu_t
        f_t  = f_{t-1} + r_t

    with f and r zero before the first step. White noise of variance s^2 in g leaves
    variance A(omega)*s^2 in f in the steady state,

        A(omega) = (2 - omega) / (4 - 3*omega),

    and at a finite time the (1,1) entry of the covariance P of (f, r), which follows
    P_t = F P_{t-1} F' + b b' s_t^2 with F = [[1-omega, 1-omega], [-omega, 1-omega]] and
    b = (omega, omega).

    Attributes:
        omega: Gain in (0, 1]; 1 makes the filter the identity.
    """

    omega: float

    slots = ("filtered", "residual")
    noise_slots = ("noise_variance_f", "noise_covariance_fr", "noise_variance_r")

    def __post_init__(self):
        arguments.check_fraction("omega", self.omega, above_zero=True)

    @property
    def steady_gain(self) -> float:
        """A(omega)."""
        return (2.0 - self.omega) / (4.0 - 3.0 * self.omega)

    def update(self, slots, gradient):
        """Returns the filtered gradient and the new slots."""
        innovation = gradient - slots["filtered"]
        residual = (1.0 - self.omega) * slots["residual"] + self.omega * innovation
        filtered = slots["filtered"] + residual
        return filtered, {"filtered": filtered, "residual": residual}

    def propagate(self, noise_slots, variance):
        """Returns (steady, exact) noise variance after the filter, and the slots."""
        w, keep = self.omega, 1.0 - self.omega
        ff = noise_slots["noise_variance_f"]
        fr = noise_slots["noise_covariance_fr"]
        rr = noise_slots["noise_variance_r"]
        fresh = w * w * variance
        new_ff = keep * keep * (ff + 2.0 * fr + rr) + fresh
        new_fr = keep * (-w * ff + (keep - w) * fr + keep * rr) + fresh
        new_rr = w * w * ff - 2.0 * w * keep * fr + keep * keep * rr + fresh
        new_slots = {
            "noise_variance_f": new_ff,
            "noise_covariance_fr": new_fr,
            "noise_variance_r": new_rr,
        }
        return (self.steady_gain * variance, new_ff), new_slots

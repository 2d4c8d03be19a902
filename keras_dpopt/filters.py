"""Temporal filters: pure functions on the privatized gradient, one variable at a time.

A filter also says what it does to the noise. It propagates the covariance of the noise
through its own recursion, so that a correction after it never subtracts the variance of
something else, also when sigma or C changes from step to step.

`begin` does what is the same for all variables, once a step. It returns the variance
that the noise has after the filter, in one of two accounts: that of a filter which
starts now ("exact"), or that of a filter which has run on the first step's noise for
ever ("steady", the closed forms of the papers). With constant noise the second one is
constant, and both follow a noise that changes.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import keras
import numpy as np
import scipy.linalg
import scipy.signal
from keras import ops

from keras_dpopt import arguments, validation


@dataclasses.dataclass(frozen=True)
class NoFilter:
    """The identity: the gradient and its noise pass unchanged."""

    slots: ClassVar[dict[str, float]] = {}
    scalars: ClassVar[dict[str, Any]] = {}

    def begin(self, scalars, step, variance, steady: bool):
        """Returns what `update` shares, the noise variance after the filter, scalars.

        Args:
            scalars: The scalar slots.
            step: k = t + 1, the number of this update.
            variance: Variance of the noise in this step's gradient, a coordinate.
            steady: Which of the two accounts of the module is wanted.
        """
        del step, steady
        return None, variance, scalars

    def update(self, slots, gradient, shared):
        """Returns the filtered gradient and the new slots."""
        del shared
        return gradient, slots


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

    slots: ClassVar[dict[str, float]] = {"filtered": 0.0, "residual": 0.0}
    scalars: ClassVar[dict[str, Any]] = {"noise_covariance": np.zeros((2, 2))}

    def __post_init__(self):
        arguments.check_fraction("omega", self.omega, above_zero=True)

    @property
    def steady_gain(self) -> float:
        """A(omega)."""
        return (2.0 - self.omega) / (4.0 - 3.0 * self.omega)

    def begin(self, scalars, step, variance, steady: bool):
        """See `NoFilter.begin`."""
        w, keep = self.omega, 1.0 - self.omega
        transition = np.array([[keep, keep], [-w, keep]])
        input_ = np.array([w, w])
        stationary = np.array([[2.0 - w, w], [w, 2.0 * w]]) / (4.0 - 3.0 * w)
        covariance = _propagated(
            scalars, transition, input_, stationary, step, variance, steady
        )
        return None, covariance[0, 0], {"noise_covariance": covariance}

    def update(self, slots, gradient, shared):
        """Returns the filtered gradient and the new slots."""
        del shared
        innovation = gradient - slots["filtered"]
        residual = (1.0 - self.omega) * slots["residual"] + self.omega * innovation
        filtered = slots["filtered"] + residual
        return filtered, {"filtered": filtered, "residual": residual}


@dataclasses.dataclass(frozen=True)
class EMAFilter:
    """The exponential moving average of DiSK's gradient state.

        f_t = (1 - kappa)*f_{t-1} + kappa*g_t

    from f_{-1} = 0 ("zero") or f_0 = g_0 ("first_gradient"). White noise of variance
    s^2 leaves A_state(kappa)*s^2 in the steady state, A_state = kappa / (2 - kappa);
    at a finite time P_t = (1-kappa)^2*P_{t-1} + kappa^2*s_t^2, with P_0 = s_0^2 for
    "first_gradient".

    Attributes:
        kappa: Weight of the new gradient, in (0, 1]; 1 makes the filter the identity.
        init: "zero" or "first_gradient".
    """

    kappa: float
    init: str = "zero"

    slots: ClassVar[dict[str, float]] = {"filtered": 0.0}
    scalars: ClassVar[dict[str, Any]] = {"noise_covariance": np.zeros((1, 1))}

    def __post_init__(self):
        arguments.check_fraction("kappa", self.kappa, above_zero=True)
        arguments.check_choice("filter_init", self.init, ("zero", "first_gradient"))

    @property
    def steady_gain(self) -> float:
        """A_state(kappa)."""
        return self.kappa / (2.0 - self.kappa)

    def begin(self, scalars, step, variance, steady: bool):
        """See `NoFilter.begin`."""
        first = ops.equal(step, 1)
        whole = first if self.init == "first_gradient" else False
        covariance = scalars["noise_covariance"]
        keep = ops.cast(
            ops.where(whole, 0.0, (1.0 - self.kappa) ** 2), covariance.dtype
        )
        fresh = ops.cast(ops.where(whole, 1.0, self.kappa**2), covariance.dtype)
        covariance = keep * covariance + fresh * variance
        if steady:
            stationary = self.steady_gain * variance * ops.ones_like(covariance)
            covariance = ops.where(first, stationary, covariance)
        weight = ops.where(whole, 1.0, self.kappa)
        return weight, covariance[0, 0], {"noise_covariance": covariance}

    def update(self, slots, gradient, shared):
        """Returns the filtered gradient and the new slots."""
        filtered = (1.0 - shared) * slots["filtered"] + shared * gradient
        return filtered, {"filtered": filtered}


@dataclasses.dataclass(frozen=True)
class LowPassFilter:
    """The linear low-pass filter of DOPPLER, with unit-step normalisation.

        m_t = - sum_{j=1..na} a_j m_{t-j} + sum_{j=0..nb} b_j g_{t-j}
        c_t = the same recursion on g = 1 from t = 0 on
        f_t = m_t / c_t

    with everything before t = 0 zero, so that a constant gradient passes unchanged from
    the first step on. The covariance of the noise in (m_t, m_{t-1}, .., g_t, ..)
    follows the recursion in state-space form.

    Attributes:
        a: (a_1, .., a_na), without the leading 1; all poles within the unit circle.
        b: (b_0, .., b_nb), at least one.
    """

    a: tuple[float, ...]
    b: tuple[float, ...]

    def __post_init__(self):
        for name in ("a", "b"):
            values = getattr(self, name)
            if isinstance(values, str | bytes) or not np.iterable(values):
                raise TypeError(f"`{name}` must be a sequence of numbers: {values!r}.")
            values = tuple(validation.check_finite(name, v) for v in values)
            object.__setattr__(self, name, values)
        if not self.b:
            raise ValueError("`b` has no coefficient. Pass at least (1.0,).")
        radius = max(np.abs(np.roots([1.0, *self.a])), default=0.0)
        if not radius < 1.0:
            raise ValueError(
                f"`a` makes an unstable filter (a pole of size {radius:.6g}), whose "
                "output grows without bound. Pass coefficients with all poles within "
                "the unit circle, as scipy.signal's designs have."
            )
        # The slowest mode has decayed to exp(-20) by then, so the sign stays.
        settled = min(100_000, 64 + int(20.0 / (1.0 - radius)))
        response = self.step_response(settled) * np.sign(self.gain)
        if not response.min() > 1e-9 * np.abs(self.b).max():
            raise ValueError(
                "`b` makes a filter whose response to a constant passes through 0, so "
                "it cannot be normalised to let a constant pass. Pass a low-pass "
                "filter."
            )

    @property
    def slots(self) -> dict[str, float]:
        """Past outputs and inputs."""
        names = [f"output_{j + 1}" for j in range(len(self.a))]
        names += [f"input_{j + 1}" for j in range(len(self.b) - 1)]
        return dict.fromkeys(names, 0.0)

    @property
    def scalars(self) -> dict[str, Any]:
        """Past step responses, and the covariance of the noise."""
        order = len(self._state_space[1])
        past = {"step_response": np.zeros(len(self.a))} if self.a else {}
        return {**past, "noise_covariance": np.zeros((order, order))}

    @property
    def gain(self) -> float:
        """The limit of c_t, the gain at frequency zero."""
        return sum(self.b) / (1.0 + sum(self.a))

    @property
    def steady_gain(self) -> float:
        """The limit of the variance of f over that of white noise in g."""
        return float(self._state_space[2][0, 0]) / self.gain**2

    def step_response(self, steps: int) -> np.ndarray:
        """Returns c_0 to c_{steps-1}."""
        return scipy.signal.lfilter(self.b, (1.0, *self.a), np.ones(steps))

    @functools.cached_property
    def _state_space(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """F, b of the state (m_t, .., g_t, ..), and its stationary covariance."""
        a = self.a or (0.0,)
        order = len(a) + len(self.b) - 1
        transition = np.zeros((order, order))
        transition[0] = [*(-np.array(a)), *self.b[1:]]
        for i in range(1, order):
            if i != len(a):  # the newest input comes from outside
                transition[i, i - 1] = 1.0
        input_ = np.zeros(order)
        input_[0] = self.b[0]
        if len(self.b) > 1:
            input_[len(a)] = 1.0
        stationary = scipy.linalg.solve_discrete_lyapunov(
            transition, np.outer(input_, input_)
        )
        return transition, input_, stationary

    def begin(self, scalars, step, variance, steady: bool):
        """See `NoFilter.begin`."""
        dtype = keras.backend.standardize_dtype(scalars["noise_covariance"].dtype)
        constant = lambda values: np.array(values, dtype)  # noqa: E731
        # b_j counts from step j on.
        arrived = ops.cast(np.arange(len(self.b)) < step, dtype)
        response = ops.sum(constant(self.b) * arrived)
        new_scalars = {}
        if self.a:
            past = scalars["step_response"]
            response = response - ops.sum(constant(self.a) * past)
            new_scalars["step_response"] = ops.concatenate(
                [ops.reshape(response, (1,)), past[:-1]]
            )
        covariance = _propagated(scalars, *self._state_space, step, variance, steady)
        new_scalars["noise_covariance"] = covariance
        scale = self.gain if steady else response
        return response, covariance[0, 0] / (scale * scale), new_scalars

    def update(self, slots, gradient, shared):
        """Returns the filtered gradient and the new slots."""
        na, nb = len(self.a), len(self.b) - 1
        outputs = [slots[f"output_{j + 1}"] for j in range(na)]
        inputs = [gradient] + [slots[f"input_{j + 1}"] for j in range(nb)]
        new = sum(b * g for b, g in zip(self.b, inputs, strict=True))
        new = new - sum(a * m for a, m in zip(self.a, outputs, strict=True))
        new_slots = {f"output_{j + 1}": m for j, m in enumerate([new, *outputs][:na])}
        new_slots |= {f"input_{j + 1}": g for j, g in enumerate(inputs[:nb])}
        return new / shared, new_slots


def _propagated(scalars, transition, input_, stationary, step, variance, steady):
    """Returns the covariance of a filter's state after one more step of noise.

    P_t = F P_{t-1} F' + b b' s_t^2,        P_0 = P_stationary * s_0^2 if steady
    """
    covariance = scalars["noise_covariance"]
    dtype = keras.backend.standardize_dtype(covariance.dtype)
    constant = lambda array: ops.convert_to_tensor(array.astype(dtype))  # noqa: E731
    f = constant(transition)
    covariance = ops.matmul(ops.matmul(f, covariance), ops.transpose(f))
    covariance = covariance + constant(np.outer(input_, input_)) * variance
    if steady:
        covariance = ops.where(
            ops.equal(step, 1), constant(stationary) * variance, covariance
        )
    return covariance

"""Update rules: from the filtered gradient to the step, one variable at a time.

A rule is a frozen object with pure functions. `begin` does what is the same for every
variable, once a step; `update` returns what is subtracted from the weights.
"""

import dataclasses
import math
from typing import Any

from keras import ops

from keras_dpopt import arguments, validation
from keras_dpopt.types import FilterOutput


@dataclasses.dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with Keras' momentum.

        v_t = mu*v_{t-1} - lr*g_t
        theta_{t+1} = theta_t + v_t              (Nesterov: + mu*v_t - lr*g_t)

    Attributes:
        momentum: mu in [0, 1).
        nesterov: Whether to use Nesterov's form.
    """

    momentum: float = 0.0
    nesterov: bool = False

    scalar_slots = ()

    def __post_init__(self):
        arguments.check_fraction("momentum", self.momentum, below_one=True)

    @property
    def slots(self):
        """Names of a variable's slots."""
        return ("momentum",) if self.momentum else ()

    def begin(self, scalars, step, noise_variance):
        """Returns what all variables share (nothing), and the scalar slots."""
        del step, noise_variance
        return None, scalars

    def update(self, slots, gradient: FilterOutput, learning_rate, shared):
        """Returns what is subtracted from the weights, and the new slots."""
        del shared
        step = learning_rate * gradient.filtered
        if not self.momentum:
            return step, slots
        velocity = self.momentum * slots["momentum"] - step
        change = self.momentum * velocity - step if self.nesterov else velocity
        return -change, {"momentum": velocity}


@dataclasses.dataclass(frozen=True)
class Adam:
    """Adam in the v_hat form, with the variance of the noise taken out of v_hat.

        m_t = b1*m_{t-1} + (1-b1)*g_t             m_hat = m_t / (1 - b1^k)
        v_t = b2*v_{t-1} + (1-b2)*g_t^2           v_hat = v_t / (1 - b2^k)
        n_t = b2*n_{t-1} + (1-b2)*s_t^2           n_hat = n_t / (1 - b2^k)
        step = lr * m_hat / (sqrt(max(v_hat - n_hat, floor)) + epsilon),   k = t + 1

    s_t^2 is the noise variance in g_t. Averaged with the weights of v, n_hat is the
    noise's part of E[v_hat] also when sigma or C changes; where s_t is constant it is
    that constant.

    Attributes:
        beta_1: b1 in [0, 1).
        beta_2: b2 in [0, 1).
        epsilon: Added to the root, non-negative.
        variance_floor: Inside the root, non-negative; `None` leaves v_hat alone (n_hat
            is then not tracked).
    """

    beta_1: float
    beta_2: float
    epsilon: float
    variance_floor: float | None = None

    slots = ("momentum", "velocity")

    def __post_init__(self):
        arguments.check_fraction("beta_1", self.beta_1, below_one=True)
        arguments.check_fraction("beta_2", self.beta_2, below_one=True)
        validation.check_non_negative("epsilon", self.epsilon)
        if self.variance_floor is not None:
            validation.check_non_negative("variance_floor", self.variance_floor)

    @property
    def scalar_slots(self):
        """Names of the scalar slots."""
        return () if self.variance_floor is None else ("noise_velocity",)

    def begin(self, scalars, step, noise_variance):
        """Returns the bias corrections and n_hat, and the scalar slots.

        Args:
            scalars: The scalar slots.
            step: k = t + 1.
            noise_variance: s_t^2, of the noise in this step's gradient.
        """
        # Powers of Python floats: ops.cast(0.999, "float64") would round to float32.
        k = ops.cast(step, "float32")
        shared: dict[str, Any] = {
            "debias_1": _one_minus_power(self.beta_1, k),
            "debias_2": _one_minus_power(self.beta_2, k),
        }
        if self.variance_floor is None:
            return shared, scalars
        mean = scalars["noise_velocity"]
        mean = mean + (1.0 - self.beta_2) * (noise_variance - mean)
        shared["noise_variance"] = mean / shared["debias_2"]
        return shared, {"noise_velocity": mean}

    def update(self, slots, gradient: FilterOutput, learning_rate, shared):
        """Returns what is subtracted from the weights, and the new slots."""
        g = gradient.filtered
        m = slots["momentum"] + (1.0 - self.beta_1) * (g - slots["momentum"])
        v = slots["velocity"] + (1.0 - self.beta_2) * (g * g - slots["velocity"])
        m_hat, v_hat = m / shared["debias_1"], v / shared["debias_2"]
        if self.variance_floor is not None:
            v_hat = ops.maximum(v_hat - shared["noise_variance"], self.variance_floor)
        step = learning_rate * m_hat / (ops.sqrt(v_hat) + self.epsilon)
        return step, {"momentum": m, "velocity": v}


def _one_minus_power(beta: float, k):
    """1 - beta^k to float32 rounding: expm1 keeps the digits that 1 - x loses."""
    if beta == 0.0:
        return ops.ones_like(k)
    return -ops.expm1(k * math.log(beta))

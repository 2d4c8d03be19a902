"""Update rules: from the filtered gradient to the step, one variable at a time.

A rule is a frozen object with pure functions. `begin` does what is the same for every
variable, once a step; `update` returns what is subtracted from the weights.
"""

import dataclasses
import math
from typing import Any, ClassVar

from keras import ops

from keras_dpopt import arguments, validation
from keras_dpopt.types import RuleInput, StepScalars


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

    scalars: ClassVar[dict[str, Any]] = {}
    uses_train_size: ClassVar[bool] = False

    def __post_init__(self):
        arguments.check_fraction("momentum", self.momentum, below_one=True)
        arguments.check_flag("nesterov", self.nesterov)

    @property
    def slots(self) -> dict[str, float]:
        """A variable's slots, by name, with their first value."""
        return {"momentum": 0.0} if self.momentum else {}

    def begin(self, scalars, given: StepScalars):
        """Returns what all variables share (nothing), and the scalar slots."""
        del given
        return None, scalars

    def update(self, slots, gradient: RuleInput, learning_rate, shared):
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
        variance_floor: Inside the root, non-negative, and positive where epsilon is 0;
            `None` leaves v_hat alone (n_hat is then not tracked).
        correction_start: Number of first steps in which n_hat is not subtracted.
        second_moment: "filtered" or "raw": v is of the gradient after or before the
            temporal filter.
        bias_correction: `False` leaves the powers of b1 and b2 out.
    """

    beta_1: float
    beta_2: float
    epsilon: float
    variance_floor: float | None = None
    correction_start: int = 0
    second_moment: str = "filtered"
    bias_correction: bool = True

    slots: ClassVar[dict[str, float]] = {"momentum": 0.0, "velocity": 0.0}
    uses_train_size: ClassVar[bool] = False

    def __post_init__(self):
        arguments.check_fraction("beta_1", self.beta_1, below_one=True)
        arguments.check_fraction("beta_2", self.beta_2, below_one=True)
        validation.check_non_negative("epsilon", self.epsilon)
        if self.variance_floor is not None:
            validation.check_non_negative("variance_floor", self.variance_floor)
            if self.epsilon == 0:  # the step would be divided by zero at the floor
                validation.check_positive("variance_floor", self.variance_floor)
        validation.check_count("correction_start", self.correction_start)
        arguments.check_choice("second_moment", self.second_moment, ("filtered", "raw"))
        arguments.check_flag("bias_correction", self.bias_correction)

    @property
    def scalars(self) -> dict[str, Any]:
        """The scalar slots, with their first value."""
        return {} if self.variance_floor is None else {"noise_velocity": 0.0}

    def begin(self, scalars, given: StepScalars):
        """Returns the bias corrections and n_hat, and the scalar slots."""
        k = ops.cast(given.step, "float32")
        shared: dict[str, Any] = {"debias_1": 1.0, "debias_2": 1.0}
        if self.bias_correction:
            shared["debias_1"] = one_minus_power(self.beta_1, k)
            shared["debias_2"] = one_minus_power(self.beta_2, k)
        if self.variance_floor is None:
            return shared, scalars
        mean = scalars["noise_velocity"]
        mean = mean + (1.0 - self.beta_2) * (given.noise_variance - mean)
        noise = mean / shared["debias_2"]
        if self.correction_start:
            noise = ops.where(given.step > self.correction_start, noise, 0.0)
        shared["noise_variance"] = noise
        return shared, {"noise_velocity": mean}

    def update(self, slots, gradient: RuleInput, learning_rate, shared):
        """Returns what is subtracted from the weights, and the new slots."""
        g = gradient.filtered
        h = gradient.raw if self.second_moment == "raw" else g
        m = slots["momentum"] + (1.0 - self.beta_1) * (g - slots["momentum"])
        v = slots["velocity"] + (1.0 - self.beta_2) * (h * h - slots["velocity"])
        m_hat, v_hat = m / shared["debias_1"], v / shared["debias_2"]
        if self.variance_floor is not None:
            v_hat = ops.maximum(v_hat - shared["noise_variance"], self.variance_floor)
        step = learning_rate * m_hat / (ops.sqrt(v_hat) + self.epsilon)
        return step, {"momentum": m, "velocity": v}


@dataclasses.dataclass(frozen=True)
class RMSprop:
    """RMSprop.

        v_t  = rho*v_{t-1} + (1-rho)*g_t^2
        step = lr * g_t / sqrt(v_t + epsilon)             (epsilon inside, as Keras)
        step = lr * g_t / (sqrt(v_t) + epsilon)           (outside)

    Attributes:
        rho: In [0, 1).
        epsilon: Non-negative.
        epsilon_inside_root: Which of the two forms.
    """

    rho: float
    epsilon: float
    epsilon_inside_root: bool = True

    slots: ClassVar[dict[str, float]] = {"velocity": 0.0}
    scalars: ClassVar[dict[str, Any]] = {}
    uses_train_size: ClassVar[bool] = False

    def __post_init__(self):
        arguments.check_fraction("rho", self.rho, below_one=True)
        validation.check_non_negative("epsilon", self.epsilon)
        arguments.check_flag("epsilon_inside_root", self.epsilon_inside_root)

    def begin(self, scalars, given: StepScalars):
        """Returns what all variables share (nothing), and the scalar slots."""
        del given
        return None, scalars

    def update(self, slots, gradient: RuleInput, learning_rate, shared):
        """Returns what is subtracted from the weights, and the new slots."""
        del shared
        g = gradient.filtered
        v = slots["velocity"] + (1.0 - self.rho) * (g * g - slots["velocity"])
        if self.epsilon_inside_root:
            root = ops.sqrt(v + self.epsilon)
        else:
            root = ops.sqrt(v) + self.epsilon
        return learning_rate * g / root, {"velocity": v}


def make_base(
    name: str,
    *,
    noise_correction: str | None,
    variance_floor: float,
    momentum: float,
    beta_1: float,
    beta_2: float,
    epsilon: float,
    weight_decay: float | None,
    default_decay: float,
    second_moment: str = "filtered",
) -> tuple[SGD | Adam, float | None]:
    """Returns the base rule of a filtering method, and its weight decay.

    Args:
        name: "sgd", "adam" or "adamw".
        noise_correction: Of the optimizer; `None` leaves v_hat alone.
        variance_floor: See `Adam`.
        momentum: For "sgd".
        beta_1: See `Adam`.
        beta_2: See `Adam`.
        epsilon: See `Adam`.
        weight_decay: As the user gave it.
        default_decay: That of "adamw" where the user gave none.
        second_moment: See `Adam`.

    Raises:
        ValueError: if an argument is out of range, or SGD is to be corrected.
    """
    arguments.check_choice("base", name, ("sgd", "adam", "adamw"))
    # Both, so that every argument is checked whatever the base.
    sgd = SGD(momentum)
    adam = Adam(beta_1, beta_2, epsilon, variance_floor, second_moment=second_moment)
    if name == "sgd":
        if noise_correction is not None:
            raise ValueError(
                f"noise_correction={noise_correction!r} needs a second moment to "
                "correct, which base='sgd' has not. Use base='adam', or leave it out."
            )
        return sgd, weight_decay
    if name == "adamw" and weight_decay is None:
        weight_decay = default_decay
    if noise_correction is None:
        adam = dataclasses.replace(adam, variance_floor=None)
    return adam, weight_decay


def one_minus_power(beta: float, k):
    """1 - beta^k to float32 rounding: expm1 keeps the digits that 1 - x loses.

    beta is a Python float, because `ops.cast(0.999, "float64")` rounds it to float32.
    """
    if beta == 0.0:
        return ops.ones_like(k)
    return -ops.expm1(k * math.log(beta))

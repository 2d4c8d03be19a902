"""Update rules that keep a posterior over the weights, or sample from one."""

import dataclasses
import math
from typing import Any, ClassVar

from keras import ops

from keras_dpopt import arguments, validation
from keras_dpopt.types import RuleInput, StepScalars
from keras_dpopt.update_rules import one_minus_power

# The precision stays within these, so that neither it nor a sample overflows.
_LEAST_PRECISION, _MOST_PRECISION = 1e-30, 1e30


@dataclasses.dataclass(frozen=True)
class IVON:
    """The improved variational online Newton step, on privatized gradients.

        v_hat = max(g^2 - s^2, 0),      h_hat = curvature_scale * v_hat      ("gradsq")
        h_hat = sqrt(ess * (h + delta)) * mean_s(e_s * g_s)                  ("price")
        h'    = b2*h + (1-b2)*h_hat + (1-b2)^2/2 * (h - h_hat)^2 / (h + delta)
        mom'  = b1*mom + (1-b1)*g,      mom_hat = mom' / (1 - b1^k)
        step  = lr * clip((mom_hat + delta*m) / (h' + delta), -xi, xi)

    with s^2 the noise variance of g. What is kept is the precision p = h + delta, in
    which the update reads

        p' = p * (1 + x + x^2/2),       x = (1-b2) * (h_hat - h) / p,

    at least p/2 whatever x is: it stays positive in float32 too.

    Attributes:
        ess: Effective sample size, positive; `None` takes N.
        hess_init: h before the first step, positive.
        weight_decay: delta, positive.
        beta_1: b1 in [0, 1).
        beta_2: b2 in [0, 1].
        hessian: "gradsq" or "price".
        curvature_scale: Positive; `None` takes `ess`.
        clip_radius: xi, positive; may be infinite.
        rescale_lr: Whether the learning rate is multiplied by hess_init + delta.
    """

    ess: float | None
    hess_init: float
    weight_decay: float
    beta_1: float
    beta_2: float
    hessian: str = "gradsq"
    curvature_scale: float | None = None
    clip_radius: float = math.inf
    rescale_lr: bool = True

    scalars: ClassVar[dict[str, Any]] = {}

    def __post_init__(self):
        if self.ess is not None:
            validation.check_positive("ess", self.ess)
        validation.check_positive("hess_init", self.hess_init)
        validation.check_positive("weight_decay", self.weight_decay)
        arguments.check_fraction("beta_1", self.beta_1, below_one=True)
        arguments.check_fraction("beta_2", self.beta_2)
        arguments.check_choice("hessian", self.hessian, ("gradsq", "price"))
        if self.curvature_scale is not None:
            validation.check_positive("curvature_scale", self.curvature_scale)
        validation.check_positive("clip_radius", self.clip_radius, allow_infinite=True)
        arguments.check_flag("rescale_lr", self.rescale_lr)

    @property
    def uses_train_size(self) -> bool:
        """Whether `ess` is to be N."""
        return self.ess is None

    @property
    def slots(self) -> dict[str, float]:
        """A variable's slots, by name, with their first value."""
        return {"momentum": 0.0, "precision": self.hess_init + self.weight_decay}

    def begin(self, scalars, given: StepScalars):
        """Returns the bias correction, the noise variance, ess and its like."""
        ess = given.train_size if self.ess is None else self.ess
        scale = ess if self.curvature_scale is None else self.curvature_scale
        shared = {
            "debias": one_minus_power(self.beta_1, ops.cast(given.step, "float32")),
            "noise_variance": given.noise_variance,
            "ess": ess,
            "curvature_scale": scale,
        }
        return shared, scalars

    def update(self, slots, gradient: RuleInput, learning_rate, shared):
        """Returns what is subtracted from the mean, and the new slots."""
        g, p, delta = gradient.filtered, slots["precision"], self.weight_decay
        x = (1.0 - self.beta_2) * (self._curvature(gradient, p, shared) - p + delta) / p
        precision = ops.clip(
            p * (1.0 + x + 0.5 * x * x), _LEAST_PRECISION, _MOST_PRECISION
        )
        momentum = slots["momentum"] + (1.0 - self.beta_1) * (g - slots["momentum"])
        step = (momentum / shared["debias"] + delta * gradient.weight) / precision
        if self.clip_radius < math.inf:
            step = ops.clip(step, -self.clip_radius, self.clip_radius)
        if self.rescale_lr:
            step = step * (self.hess_init + delta)
        return learning_rate * step, {"momentum": momentum, "precision": precision}

    def _curvature(self, gradient: RuleInput, precision, shared):
        """h_hat."""
        if self.hessian == "gradsq":
            square = ops.square(gradient.raw) - shared["noise_variance"]
            return shared["curvature_scale"] * ops.maximum(square, 0.0)
        if gradient.views:
            (product,) = gradient.views
        else:
            product = gradient.draws(0) * gradient.raw
        return ops.sqrt(shared["ess"] * precision) * product


@dataclasses.dataclass(frozen=True)
class VariationalSGD:
    """Gradient descent on mean and scale of a Gaussian over the weights.

        s      = softplus(rho)
        mu'    = mu  - lr * (g_mu  + mu / s0^2 / N)
        rho'   = rho - lr * (g_rho + (s/s0^2 - 1/s) * sigmoid(rho) / N)

    The second terms are the gradient of KL(N(mu, s^2) || N(0, s0^2)) / N, which knows
    no data.

    Attributes:
        prior_stddev: s0, positive.
        rho_init: rho before the first step.
        train_size: N; `None` takes that of the fit.
    """

    prior_stddev: float
    rho_init: float
    train_size: int | None = None

    scalars: ClassVar[dict[str, Any]] = {}

    def __post_init__(self):
        validation.check_positive("prior_stddev", self.prior_stddev)
        validation.check_finite("rho_init", self.rho_init)
        arguments.check_optional_size("train_size", self.train_size)

    @property
    def uses_train_size(self) -> bool:
        """Whether N is to be that of the fit."""
        return self.train_size is None

    @property
    def slots(self) -> dict[str, float]:
        """A variable's slots, by name, with their first value."""
        return {"rho": self.rho_init}

    def begin(self, scalars, given: StepScalars):
        """Returns N, and the scalar slots."""
        return given.train_size if self.train_size is None else self.train_size, scalars

    def update(self, slots, gradient: RuleInput, learning_rate, shared):
        """Returns what is subtracted from the mean, and the new rho."""
        (of_rho,) = gradient.views
        mu, rho, prior = gradient.weight, slots["rho"], self.prior_stddev**2
        scale = ops.softplus(rho)
        # sigmoid(rho) / softplus(rho) tends to 1 where both vanish.
        kl_mu = mu / prior
        kl_rho = ops.sigmoid(rho) * scale / prior - _ratio(rho, scale)
        step = learning_rate * (gradient.filtered + kl_mu / shared)
        return step, {"rho": rho - learning_rate * (of_rho + kl_rho / shared)}


@dataclasses.dataclass(frozen=True)
class Langevin:
    """The drift of stochastic gradient Langevin dynamics.

        theta' = theta - (lr/2) * (N*g + prior_precision*theta)

    Attributes:
        prior_precision: Of the prior N(0, 1/prior_precision), non-negative.
        train_size: N; `None` takes that of the fit.
    """

    prior_precision: float
    train_size: int | None = None

    slots: ClassVar[dict[str, float]] = {}
    scalars: ClassVar[dict[str, Any]] = {}

    def __post_init__(self):
        validation.check_non_negative("prior_precision", self.prior_precision)
        arguments.check_optional_size("train_size", self.train_size)

    @property
    def uses_train_size(self) -> bool:
        """Whether N is to be that of the fit."""
        return self.train_size is None

    def begin(self, scalars, given: StepScalars):
        """Returns N, and the scalar slots."""
        return given.train_size if self.train_size is None else self.train_size, scalars

    def update(self, slots, gradient: RuleInput, learning_rate, shared):
        """Returns what is subtracted from the weights."""
        drift = shared * gradient.filtered + self.prior_precision * gradient.weight
        return 0.5 * learning_rate * drift, slots


def _ratio(rho, scale):
    """sigmoid(rho) / softplus(rho)."""
    return ops.where(rho < -30.0, 1.0, ops.sigmoid(rho) / ops.maximum(scale, 1e-30))

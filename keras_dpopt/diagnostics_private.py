"""Diagnostics that read what the optimizer keeps: post-processing, and so private."""

import math
from typing import Any

import keras
import numpy as np

from keras_dpopt import keras_compat, validation
from keras_dpopt.dp_optimizer import DPOptimizer
from keras_dpopt.mechanisms import GaussianMechanism
from keras_dpopt.training import PrivateTraining
from keras_dpopt.update_rules import one_minus_power


class OptimizerDiagnostic(keras.callbacks.Callback):
    """Base class of callbacks that measure something after some of the steps.

    Args:
        every: Positive int, after every how many updates it is measured.

    Attributes:
        history: One dict for each measurement: "step", the number of updates so far,
            and what was measured. The newest is in the logs as well.
    """

    def __init__(self, every: int = 1):
        super().__init__()
        self.every = validation.check_positive_integer("every", every)
        self.history: list[dict[str, float]] = []

    def measure(self, model: Any) -> dict[str, float]:
        """Returns what is to be logged, by name."""
        raise NotImplementedError

    def on_train_begin(self, logs=None):
        """Refuses a model that is not private."""
        del logs
        check_private_model(type(self).__name__, self.model)

    def on_train_batch_end(self, batch, logs=None):
        """Measures if it is time, and adds the newest values to the progress bar."""
        del batch
        model: Any = self.model
        step = int(model.optimizer.iterations.numpy())
        last = self.history[-1]["step"] if self.history else 0
        if step // self.every != last // self.every:
            self.history.append({"step": step, **self.measure(model)})
        self._show(logs)

    def on_epoch_end(self, epoch, logs=None):
        """Adds the newest values to `History`."""
        del epoch
        self._show(logs)

    def _show(self, logs: dict[str, Any] | None) -> None:
        if logs is not None and self.history:
            logs.update({k: v for k, v in self.history[-1].items() if k != "step"})


class ClampMass(OptimizerDiagnostic):
    """Logs how much of the step is on coordinates whose second moment is at its floor.

        clamp_mass     = sum_i 1[v_bar_i = floor] * |m_hat_i| / sum_i |m_hat_i|
        clamp_fraction = (1/d) * sum_i 1[v_bar_i = floor],
        v_bar          = max(v_hat - noise, floor)

    (the paper of `FiBeR`, appendix E.6), for optimizers that subtract the
    noise: `FiBeR`, `DPAdamBC`, `DPAdamWBC`, `DiSK` and `DOPPLER` with a
    `noise_correction`. Near 0 the floor does nothing; near 1 the optimizer has become
    momentum with one step size for all coordinates.

    Args:
        every: Positive int, after every how many updates it is measured.

    Attributes:
        history: A dict for each measurement, with "step".

    Raises:
        TypeError: at the beginning of `fit`, if the model is not private.
        ValueError: in `fit`, if the optimizer has no variance floor.

    Privacy:
        A function of the optimizer's state, which is made of released gradients: it
        costs nothing, and may be published.

    Example:
        >>> ClampMass(every=10).every
        10
    """

    def measure(self, model: Any) -> dict[str, float]:
        """Returns the two numbers."""
        mass, fraction = clamp_mass(model.optimizer)
        return {"clamp_mass": mass, "clamp_fraction": fraction}


class SignalToNoise(OptimizerDiagnostic):
    """Logs the length of the filtered gradient over that of its noise.

        signal_to_noise = ||f_t|| / (sqrt(d) * s_t)

    f_t is the gradient after the temporal filter, or the bias-corrected first moment
    where there is no filter, and s_t^2 the variance that the noise has in each of its d
    coordinates once the filter is in its steady state. Of noise alone it is about 1,
    give or take 1/sqrt(2d).

    Args:
        every: Positive int, after every how many updates it is measured.

    Attributes:
        history: A dict for each measurement, with "step".

    Raises:
        TypeError: at the beginning of `fit`, if the model is not private.
        ValueError: in `fit`, if the optimizer keeps no such gradient (`DPSGD`), or has
            no known independent noise.

    Privacy:
        As `ClampMass`.

    Example:
        >>> SignalToNoise(every=10).every
        10
    """

    def measure(self, model: Any) -> dict[str, float]:
        """Returns the ratio."""
        return {"signal_to_noise": signal_to_noise(model.optimizer)}


def clamp_mass(optimizer: DPOptimizer) -> tuple[float, float]:
    """Returns the clamp mass and the clamped fraction; see `ClampMass`.

    Args:
        optimizer: A private optimizer with a variance floor, after its first update.

    Returns:
        Two numbers in [0, 1]: of the first moment's absolute sum, and of coordinates.

    Raises:
        ValueError: if it has no variance floor, or made no update.

    Privacy:
        Post-processing of released gradients.
    """
    rule: Any = optimizer.rule
    floor = getattr(rule, "variance_floor", None)
    if floor is None:
        raise ValueError(
            f"{type(optimizer).__name__} has no variance floor, so nothing is clamped. "
            "Use ClampMass with an optimizer that subtracts the noise, such as FiBeR "
            "or DPAdamBC."
        )
    step = _updates(optimizer)
    debias = np.float32(1.0)
    if rule.bias_correction:
        debias = np.float32(one_minus_power(rule.beta_2, np.float32(step)))
    state = optimizer.named_variables()
    noise = state["noise_velocity"].numpy() / debias
    if step <= rule.correction_start:
        noise = np.float32(0.0)
    mass = clamped_mass = clamped = size = 0.0
    for i in range(_variables(optimizer)):
        m = np.abs(state[f"momentum.{i}"].numpy().astype(np.float64))
        # In float32, as the rule does it: at the floor, rounding decides.
        at_floor = state[f"velocity.{i}"].numpy() / debias - noise <= np.float32(floor)
        mass += m.sum()
        clamped_mass += m[at_floor].sum()
        clamped += at_floor.sum()
        size += m.size
    return float(clamped_mass / mass) if mass else 0.0, float(clamped / size)


def signal_to_noise(optimizer: DPOptimizer) -> float:
    """Returns the ratio of `SignalToNoise`.

    Args:
        optimizer: A private optimizer with a temporal filter or a first moment, after
            its first update.

    Returns:
        A non-negative number.

    Raises:
        ValueError: if it keeps no such gradient, or its noise is not known.

    Privacy:
        Post-processing of released gradients.
    """
    _updates(optimizer)
    filtered = filtered_gradient(optimizer)
    if filtered is None:
        filtered, gain = _first_moment(optimizer)
    else:
        gain = optimizer.filter.steady_gain
    arrays = [np.asarray(f, np.float64) for f in filtered]
    squares = sum(float(np.sum(array**2)) for array in arrays)
    size = sum(array.size for array in arrays)
    return math.sqrt(squares / size / gain) / noise_stddev(optimizer)


def noise_stddev(optimizer: DPOptimizer) -> float:
    """Returns the noise's standard deviation in a coordinate of the next gradient.

    sigma*C/B; sigma/B with `rescale_to_unit_norm`.

    Raises:
        ValueError: if the noise is a foreign query's, correlated, or zero.
    """
    check_known_noise(optimizer)
    mechanism, size = optimizer.mechanism, optimizer.expected_batch_size
    state = optimizer.mechanism_state()
    stddev = mechanism.noise_multipliers(state, size)[0] / (size or math.nan)
    if not mechanism.rescale_to_unit_norm:
        stddev *= float(mechanism.current_clip(state))
    if not stddev > 0.0:
        raise ValueError(
            "The gradient has no noise to compare with. Set a positive "
            "noise_multiplier, and an expected_batch_size or a fit that tells it."
        )
    return stddev


def check_known_noise(optimizer: DPOptimizer) -> None:
    """Raises unless the noise is independent, Gaussian and of known size."""
    mechanism = optimizer.mechanism
    known = isinstance(mechanism, GaussianMechanism)
    if not known or mechanism.is_correlated or mechanism.follows_schedule:
        raise ValueError(
            f"The noise of {type(optimizer).__name__} is correlated, follows a "
            "schedule or is a foreign query's, and its variance is not known here. Use "
            "an optimizer with independent noise, and l2_norm_clip and "
            "noise_multiplier."
        )


def filtered_gradient(optimizer: DPOptimizer) -> list[Any] | None:
    """Returns the last gradient after the temporal filter, or `None` without one.

    Tensors, also within a graph.

    Raises:
        ValueError: if the filter does not keep its output.
    """
    filter_, state = optimizer.filter, optimizer.named_variables()
    if not filter_.slots:
        return None
    name, scale = "filtered", 1.0
    if name not in filter_.slots:
        name = "output_1"  # of the low-pass filter, before it is normalised
        if name not in filter_.slots:
            raise ValueError(
                f"The filter of {type(optimizer).__name__} keeps past inputs only. "
                "Give it at least one coefficient `a`."
            )
        scale = state["step_response"].value[0]
    return [state[f"{name}.{i}"].value / scale for i in range(_variables(optimizer))]


def check_private_model(name: str, model: Any) -> None:
    """Raises unless the model of a callback or function trains privately."""
    if not isinstance(model, PrivateTraining):
        raise TypeError(
            f"{name} needs a private model, got {type(model).__name__}. Use "
            "keras_dpopt.DPModel, DPSequential or make_private(model)."
        )


def _first_moment(optimizer: DPOptimizer) -> tuple[list[Any], float]:
    """m_hat, and the variance of independent noise in it over that of one gradient.

    The weights of m_hat are (1-b)*b^(t-j) / (1-b^k); the sum of their squares is
    (1-b)*(1+b^k) / ((1+b)*(1-b^k)).
    """
    rule: Any = optimizer.rule
    if "momentum" not in rule.slots or not hasattr(rule, "beta_1"):
        raise ValueError(
            f"{type(optimizer).__name__} keeps no filtered gradient and no mean of "
            "gradients. Use SignalToNoise with a filter (FiBeR, DiSK, DOPPLER) or an "
            "Adam rule."
        )
    beta, power = rule.beta_1, rule.beta_1 ** _updates(optimizer)
    state = optimizer.named_variables()
    debias = 1.0 - power if getattr(rule, "bias_correction", True) else 1.0
    gain = (1.0 - beta) / (1.0 + beta) * (1.0 - power * power) / debias**2
    moments = range(_variables(optimizer))
    return [state[f"momentum.{i}"].numpy() / debias for i in moments], gain


def _updates(optimizer: DPOptimizer) -> int:
    """How many updates were made, at least one."""
    updates = int(optimizer.iterations.numpy())
    if not updates or not optimizer.built:
        raise ValueError(
            "The optimizer has made no update yet. Measure after the first step."
        )
    return updates


def _variables(optimizer: DPOptimizer) -> int:
    return len(keras_compat.optimizer_variables_of(optimizer))

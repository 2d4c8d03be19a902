"""Below the privacy line: filter, noise correction, update rule, weights.

What happens here sees privatized gradients only, one variable at a time.
"""

from typing import Any

from keras import ops

from keras_dpopt import digest, keras_compat
from keras_dpopt.optimizer_state import OptimizerState, assign
from keras_dpopt.types import FilterOutput, PrivatizedGradient


def update(
    optimizer: Any,
    state: OptimizerState,
    variables: list,
    gradient: PrivatizedGradient,
    regularization: list | None,
) -> None:
    """Updates the variables and the optimizer's state.

    Args:
        optimizer: The `DPOptimizer`: its filter, rule, learning rate, weight decay and
            count of iterations are read.
        state: Its variables.
        variables: The model's, in the order of the gradient.
        gradient: The privatized gradient.
        regularization: Gradients of the weight regularizers or `None`, in that order.
    """
    filter_, rule = optimizer.filter, optimizer.rule
    scalars = {name: v.value for name, v in state.scalars.items()}
    noise_variance, noise_slots = _noise_variance(optimizer, gradient, scalars)
    shared, rule_scalars = rule.begin(
        _chosen(scalars, rule.scalar_slots),
        optimizer.iterations.value + 1,
        noise_variance,
    )
    learning_rate = ops.cast(optimizer.learning_rate, "float32")
    new_weights = []
    for i, (variable, slots) in enumerate(
        zip(variables, state.per_variable, strict=True)
    ):
        raw = gradient.values[i]
        if regularization is not None and regularization[i] is not None:
            raw = raw + regularization[i]
        values = {name: slot.value for name, slot in slots.items()}
        filtered, filter_slots = filter_.update(_chosen(values, filter_.slots), raw)
        step, rule_slots = rule.update(
            _chosen(values, rule.slots),
            FilterOutput(filtered, raw),
            learning_rate,
            shared,
        )
        old = variable.value
        new = old - step
        if optimizer.weight_decay and keras_compat.uses_weight_decay(
            optimizer, variable
        ):
            # The gradient is fixed already, so the order of the two does not matter.
            new = new - learning_rate * optimizer.weight_decay * old
        if variable.constraint is not None:
            new = variable.constraint(new)
        new_slots = {**filter_slots, **rule_slots}
        if "last_update" in slots:
            new_slots["last_update"] = new - old
        assign(slots, new_slots)
        variable.assign(new)
        new_weights.append(new)
    assign(state.scalars, {**noise_slots, **rule_scalars})
    if optimizer.query.uses_last_update:
        state.weights_digest.assign(digest.weights_digest(new_weights))


def _noise_variance(optimizer, gradient, scalars):
    """The noise variance that the rule subtracts, and the filter's noise slots."""
    slots = _chosen(scalars, optimizer.filter.noise_slots)
    correction = optimizer.noise_correction
    if gradient.noise_stddev is None:
        if correction is not None:
            raise ValueError(
                f"{type(optimizer).__name__} subtracts the variance of the noise, "
                "which this dp_sum_query does not tell. Set noise_correction=None, or "
                "give l2_norm_clip and noise_multiplier."
            )
        return 0.0, slots
    variance = ops.square(gradient.noise_stddev)
    (steady, exact), slots = optimizer.filter.propagate(slots, variance)
    choice = {"filtered": steady, "exact": exact, "unfiltered": variance}
    return choice.get(correction, 0.0 * variance), slots


def _chosen(values: dict, names) -> dict:
    return {name: values[name] for name in names}

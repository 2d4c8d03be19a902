"""Below the privacy line: filter, noise correction, update rule, weights.

What happens here sees privatized gradients only, one variable at a time.
"""

from typing import Any

import tensorflow as tf
from keras import ops

from keras_dpopt import digest, keras_compat
from keras_dpopt.optimizer_state import OptimizerState, assign
from keras_dpopt.queries import StepState
from keras_dpopt.types import PrivatizedGradient, RuleInput, StepScalars


def update(
    optimizer: Any,
    state: OptimizerState,
    variables: list,
    gradient: PrivatizedGradient,
    regularization: list | None,
    step_state: StepState,
) -> None:
    """Updates the variables and the optimizer's state.

    Args:
        optimizer: The `DPOptimizer`: its filter, rule, learning rate, weight decay and
            count of iterations are read.
        state: Its variables.
        variables: The model's, in the order of the gradient.
        gradient: The privatized gradient.
        regularization: Gradients of the weight regularizers or `None`, in that order.
        step_state: What the query was given.
    """
    filter_, rule = optimizer.filter, optimizer.rule
    scalars = _read(state.scalars)
    step = optimizer.iterations.value + 1
    shared_filter, variance, filter_scalars = _filtered_noise(
        optimizer, gradient, scalars, step
    )
    learning_rate = ops.cast(optimizer.learning_rate, "float32")
    shared, rule_scalars = rule.begin(
        _chosen(scalars, rule.scalars),
        StepScalars(step, variance, step_state.train_size),
    )
    new_weights = []
    for i, (variable, slots) in enumerate(
        zip(variables, state.per_variable, strict=True)
    ):
        # The record's views come one after the other, each in the variables' order.
        raw, *views = gradient.values[i :: len(variables)]
        if regularization is not None and regularization[i] is not None:
            raw = raw + regularization[i]
        values = _read(slots)
        filtered, filter_slots = filter_.update(
            _chosen(values, filter_.slots), raw, shared_filter
        )
        old = variable.value
        change, rule_slots = rule.update(
            _chosen(values, rule.slots),
            RuleInput(
                filtered,
                raw,
                tuple(views),
                old,
                draws=lambda j, i=i: step_state.draw(j, i),
            ),
            learning_rate,
            shared,
        )
        new = old - change
        if optimizer.weight_decay and keras_compat.uses_weight_decay(
            optimizer, variable
        ):
            # The gradient is fixed already, so the order of the two does not matter.
            new = new - learning_rate * optimizer.weight_decay * old
        if variable.constraint is not None:
            new = variable.constraint(new)
        of_query = {"last_update": new - old, "last_gradient": raw}
        assign(
            slots,
            {**filter_slots, **rule_slots, **_chosen(of_query, optimizer.query.slots)},
        )
        variable.assign(new)
        new_weights.append(new)
    assign(state.scalars, {**filter_scalars, **rule_scalars})
    if "last_update" in optimizer.query.slots:
        state.weights_digest.assign(digest.weights_digest(new_weights))


def _filtered_noise(optimizer, gradient, scalars, step):
    """What the filter shares, the variance that the rule subtracts, and scalars."""
    filter_, correction = optimizer.filter, optimizer.noise_correction
    if gradient.noise_stddev is None and correction is not None:
        raise ValueError(
            f"{type(optimizer).__name__} subtracts the variance of the noise, "
            "which this dp_sum_query does not tell. Set noise_correction=None, or "
            "give l2_norm_clip and noise_multiplier."
        )
    if gradient.is_correlated and correction in ("filtered", "exact") and filter_.slots:
        raise ValueError(
            f"{type(optimizer).__name__} filters noise that is correlated from step to "
            "step, whose variance after the filter is not known. Set "
            "noise_correction=None."
        )
    known = gradient.noise_stddev is not None
    variance = ops.square(gradient.noise_stddev) if known else 0.0
    shared, filtered, filter_scalars = filter_.begin(
        _chosen(scalars, filter_.scalars), step, variance, correction == "filtered"
    )
    subtracted = variance if correction == "unfiltered" else filtered
    return shared, 0.0 if correction is None else subtracted, filter_scalars


def _read(variables: dict) -> dict:
    # Tensors, not variables: a filter may give one slot the old value of another.
    return {name: tf.convert_to_tensor(v.value) for name, v in variables.items()}


def _chosen(values: dict, names) -> dict:
    return {name: values[name] for name in names}

"""What the ledger will record of a fit, told before it: its phase and its epsilon."""

import copy
import dataclasses
from typing import Any

import tensorflow as tf

from keras_dpopt import accounting, sampling, validation
from keras_dpopt.ledger import Ledger, Phase


def sampler_of(optimizer: Any, plan: Any, sampler: Any) -> Any:
    """Returns the sampler of a fit, if the mechanism may be used with it.

    Args:
        optimizer: The private optimizer.
        plan: The `RunPlan`.
        sampler: The one that the user asks for, or `None`.

    Raises:
        ValueError: if the mechanism is accounted for another.
    """
    if sampler is not None and not plan.allows_other_samplers:
        raise ValueError(
            f"{type(optimizer).__name__} is accounted for batches that come in an "
            f"order of its own, not those of {sampler!r}. Leave `sampler` out."
        )
    return plan.sampler if sampler is None else sampling.check_sampler(sampler)


def phase_of(optimizer: Any, plan: Any, batch_size: int, **fields: Any) -> Phase:
    """Returns the phase of the steps that a plan is for.

    Args:
        optimizer: The private optimizer.
        plan: The `RunPlan`; its fields go before all others.
        batch_size: B.
        **fields: Of the `Phase`, that the source of the batches knows.
    """
    fields = {
        "optimizer": type(optimizer).__name__,
        "noise_multipliers": optimizer.noise_multipliers(batch_size),
        "l2_norm_clip": optimizer.mechanism.l2_norm_clip,
        "expected_batch_size": batch_size,
        "seeded": optimizer.keys.seeded,
        **fields,
        **plan.phase,
    }
    return Phase(**fields)


def epsilon(
    optimizer: Any,
    *,
    delta: float,
    train_size: int,
    batch_size: int,
    epochs: int,
    sampler: Any,
    accountant: str,
) -> float:
    """Returns the epsilon of a fit on arrays; see `DPOptimizer.planned_epsilon`."""
    delta = validation.check_delta(delta)
    steps = accounting.training_steps(train_size, batch_size, epochs)
    coming = optimizer.coming_steps(steps, batch_size, train_size, drawn=True)
    plan = _for_planning(optimizer.mechanism).plan_run(coming)
    phase = phase_of(
        optimizer,
        plan,
        batch_size,
        sampling=sampler_of(optimizer, plan, sampler).kind,
        train_size=train_size,
    )
    phase = dataclasses.replace(phase, steps=steps, epochs_begun=epochs)
    return Ledger([phase]).epsilon(delta, accountant)


def _for_planning(mechanism: Any) -> Any:
    """A copy of the mechanism, whose plans leave alone the run that is on."""
    twin = copy.copy(mechanism)
    for name, value in vars(mechanism).items():
        if isinstance(value, tf.Variable):
            vars(twin)[name] = tf.Variable(value, trainable=False, shape=value.shape)
    return twin

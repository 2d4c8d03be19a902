"""Tests of noise_plan.py."""

import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from keras_dpopt import accounting, noise_plan

_SIGMAS = st.lists(
    st.one_of(st.just(0.0), st.floats(1e-300, 1e300), st.floats(0.5, 2.0)), min_size=1
)


def _flat(plan):
    return [sigma for sigma, count in plan for _ in range(count)]


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(_SIGMAS, st.sampled_from([1e-3, 0.005, 0.5]))
def test_a_plan_raises_no_noise_multiplier_and_lowers_none_by_much(sigmas, resolution):
    lowered = _flat(accounting.plan_of(sigmas, resolution))
    assert len(lowered) == len(sigmas)
    for low, sigma in zip(lowered, sigmas, strict=True):
        assert sigma / (1 + resolution) * (1 - 1e-9) <= low <= sigma
    assert min(lowered) == min(sigmas)


@hypothesis.given(_SIGMAS)
def test_equal_neighbors_are_one_entry(sigmas):
    plan = accounting.plan_of(sigmas)
    assert all(a[0] != b[0] for a, b in zip(plan, plan[1:], strict=False))


def test_values_that_are_equal_or_far_apart_are_kept():
    assert accounting.plan_of([1 / 3] * 1000) == ((1 / 3, 1000),)
    steps = [1.0] * 7 + [0.1] * 3 + [1.0]
    assert accounting.plan_of(steps) == ((1.0, 7), (0.1, 3), (1.0, 1))


def test_thousands_of_multipliers_become_hundreds():
    sigmas = np.geomspace(0.8, 8.0, 5000, dtype=np.float32)
    plan = accounting.plan_of(sigmas)
    assert 400 < len(plan) <= 464
    assert sum(count for _, count in plan) == 5000
    assert all(type(sigma) is float for sigma, _ in plan)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (([],), "plan without any step"),
        (([1.0, -1.0],), "must be non-negative"),
        (([1.0, math.nan],), "must be non-negative"),
        (([math.inf],), "must be non-negative"),
        (([1.0], 0.0), "`resolution` must be positive"),
        (([1.0], math.inf), "`resolution` must be positive"),
    ],
)
def test_what_is_no_multiplier_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        accounting.plan_of(*arguments)


@hypothesis.given(
    st.lists(st.tuples(st.floats(0.5, 9.0), st.integers(1, 5)), min_size=1),
    st.integers(0, 60),
)
def test_the_first_steps_are_those_of_the_plan_and_then_its_least(plan, steps):
    made = _flat(noise_plan.first_steps(plan, steps))
    planned = _flat(plan)
    least = min(planned)
    assert made == (planned + [least] * 60)[:steps]

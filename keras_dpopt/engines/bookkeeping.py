"""The book-keeping engine: clipped sums by one forward and one backward pass.

The records of a microbatch run through the model together. From what the weights meet
on the way (`weight_uses.py`) and the derivative of the losses by what comes out of it,
follow each record's norm and the clipped sum, and no gradient of a record is formed
where that costs more:

    n_i = ||(G_i1, ..., G_iP)||,      sum_i s_i G_ip,      s_i = factor of the clip

(Lee and Kifer, "Scaling up differentially private deep learning with fast per-example
gradient clipping", PoPETs 2021; Bu et al., "Differentially private optimization on
large model at small cost", ICML 2023, whose name for it is book-keeping.)
"""

import dataclasses
import functools
from typing import Any

import tensorflow as tf

from keras_dpopt.engines import (
    base,
    loops,
    norm_forms,
    operation_rules,
    pull_back,
    separation,
    subgraphs,
    weight_uses,
)
from keras_dpopt.engines.notes import WeightNote
from keras_dpopt.engines.operation_rules import Call
from keras_dpopt.engines.record_axis import NoRule, RecordAxis
from keras_dpopt.engines.terms import Dense


class BookkeepingEngine(base.GradientEngine):
    """Evaluates the records of a microbatch as one batch."""

    name = "bookkeeping"

    def clipped_sum(self, problem, rows, seeds, count):
        """See `GradientEngine.clipped_sum`."""
        if problem.clip_factors is None or not problem.query.linear:
            raise NoRule("the optimizer needs every record's gradient")

        # With an axis of records of unknown size: what is of known shape is then the
        # same for all records.
        spec = lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype)  # noqa: E731
        traced = tf.function(
            functools.partial(_masked_sum, problem), autograph=False
        ).get_concrete_function(
            tf.nest.map_structure(spec, rows),
            spec(seeds),
            tf.TensorSpec([None], "bool"),
        )
        mask = tf.range(tf.shape(seeds)[0]) < count
        if not problem.static_shapes:
            rows = tf.nest.map_structure(lambda t: t[:count], rows)
            mask = mask[:count]
        return traced(rows, seeds, mask)


def _masked_sum(problem, rows, seeds, mask):
    """The sum over the records of a mask `[m]`, and the model's outputs."""
    flat = tf.nest.flatten(rows)
    records = tf.shape(flat[0])[0]
    axis = RecordAxis(records)
    apart = separation.Separation(flat)
    parts: list[list] = []
    outputs: Any = None
    operations: list = []
    for point in problem.points:
        weights = [tf.identity(w) for w in point.weights]
        outputs = problem.evaluate_batch(weights, seeds[0], rows)
        for tensor in (outputs.loss, *tf.nest.flatten(outputs.y_pred)):
            apart.check(tensor)
        uses = weight_uses.find(weights, flat)
        operations = [tuple(use.operation.type for use in of) for of in uses]
        found = _terms(outputs.loss, weights, uses, axis, apart, problem.loss_scale)
        found = _views(found, point)
        parts = [a + b for a, b in zip(parts, found, strict=True)] if parts else found
    count = len(problem.points[0].weights)
    missing = [i for i in range(count) if not parts[i]]
    base.report_missing(missing, count, problem.names)
    forms = []
    for i, part in enumerate(parts):
        form, cost = norm_forms.choose(part, records) if part else (None, None)
        forms.append(form)
        if form:
            name = problem.names[i % count] if problem.names else f"number {i}"
            note = WeightNote(name, operations[i % count], form.name, cost)
            problem.notes.weights.append(note)
    none = tf.zeros(records[tf.newaxis], tf.float64)
    bounds = tf.stack([form.bound if form else none for form in forms], 1)
    factors, finish = problem.clip_factors(bounds)
    finite = tf.reduce_all(tf.math.is_finite(bounds), 1)
    keep = (mask & finite)[:, tf.newaxis]
    factors = tf.cast(tf.where(keep, factors, tf.zeros_like(factors)), tf.float32)
    specs = problem.query.record_specs(problem.points[0].weights)
    # One column stands for all; what they have in common is then computed once.
    of = lambda i: factors[:, i if factors.shape[1] > 1 else 0]  # noqa: E731

    def sums(kept):
        return [
            form.weighted_sum(of(i), kept) if form else tf.zeros(spec.shape)
            for i, (form, spec) in enumerate(zip(forms, specs, strict=True))
        ]

    # 0 * NaN is NaN: what a record that is not finite holds is taken out by select.
    total = tf.cond(tf.reduce_all(finite), lambda: sums(None), lambda: sums(finite))
    problem.notes.measure(records.graph, axis.elements)
    return finish(tuple(total), mask), {
        "loss": outputs.loss,
        "y_pred": outputs.y_pred,
        "masks": outputs.masks,
    }


def _terms(losses, weights, uses, axis: RecordAxis, apart, loss_scale) -> list[list]:
    """The terms of all weights at one point."""
    results = {t.ref(): t for of in uses for use in of for t in use.results}
    total = tf.reduce_sum(losses) * loss_scale
    derivatives: Any = tf.gradients(total, list(results.values())) if results else []
    cotangents = dict(zip(results, derivatives, strict=True))
    return [
        [
            term.scaled(1.0 / loss_scale)
            for use in of
            for term in _terms_of(use, weight, cotangents, axis, apart)
        ]
        for weight, of in zip(weights, uses, strict=True)
    ]


def _terms_of(use, weight, cotangents: dict, axis: RecordAxis, apart) -> list:
    """The terms that one use makes of the weight."""
    own = [cotangents[t.ref()] for t in use.results]
    if all(cotangent is None for cotangent in own):
        return []
    if use.operation.type in loops.LOOPS:
        found = []
        for inner in loops.calls(use.operation, use.index, own, axis.records):
            apart.check_use(inner.call.operation)
            term = operation_rules.term(inner.call, inner.cotangent, axis)
            path = use.path if inner.same else None
            found.append(pull_back.to_weight(term, inner.tensor, path, weight))
        return found
    if use.operation.type in subgraphs.FUNCTIONS:
        inner = subgraphs.uses_in_function(use.operation, use.index, own)
        found = []
        for part, cotangent in inner:
            chain = use.path is not None and part.path is not None
            path = (*(use.path or ()), *(part.path or ())) if chain else None
            part = dataclasses.replace(part, path=path)
            own = {t.ref(): cotangent for t in part.results}
            found += _terms_of(part, weight, own, axis, apart)
        return found
    apart.check_use(use.operation)
    if len(own) != 1:
        raise NoRule(f"no rule for {use.operation.type} ({use.operation.name})")
    call = Call(use.operation, use.index, list(use.operation.inputs), use.results[0])
    term = operation_rules.term(call, tf.convert_to_tensor(own[0]), axis)
    return [pull_back.to_weight(term, use.tensor, use.path, weight)]


def _views(found: list[list], point) -> list[list]:
    """The terms of all views of the record; see `queries.Point`."""
    views = [[term.scaled(point.coefficient) for term in part] for part in found]
    for scales in point.scales:
        for part, scale in zip(found, scales, strict=True):
            factor = point.coefficient * scale
            views.append([_multiplied(term, factor) for term in part])
    return views


def _multiplied(term, factor):
    one = term.record
    return Dense(
        lambda: term.dense() * factor,
        term.shape,
        one and (lambda i: tf.reshape(one(i), term.shape) * factor),
    )

"""How far predicted probabilities can be trusted. Plain NumPy.

For n examples with probabilities p_i over k classes and labels y_i.

Probabilities are an array `[n, k]` whose rows sum to one; or, of a model with one
sigmoid, `[n]` or `[n, 1]`, the probability of class 1 of two. Labels are integers `[n]`
or `[n, 1]`, or one-hot rows `[n, k]`.

Privacy: nothing here is private. Of the private training data these numbers are raw
functions of the records, without noise: report those of held-out data, or do not
publish them.
"""

import dataclasses
from typing import Any

import numpy as np

from keras_dpopt import calibration_checks, validation

__all__ = [
    "CalibrationReport",
    "ReliabilityCurve",
    "brier_score",
    "calibration_report",
    "expected_calibration_error",
    "negative_log_likelihood",
    "predictive_entropy",
    "reliability_curve",
]


def __dir__():
    """The public names alone."""
    return [*__all__, "__doc__", "__file__", "__name__"]


@dataclasses.dataclass(frozen=True)
class ReliabilityCurve:
    """Accuracy against confidence, in bins of equal width.

    Attributes:
        edges: `[bins + 1]`, the bins' limits from 0 to 1; a bin has its upper limit.
        confidence: `[bins]`, mean confidence in a bin; NaN where the bin is empty.
        accuracy: `[bins]`, the fraction of correct predictions; NaN as above.
        count: `[bins]`, the number of examples.
    """

    edges: np.ndarray
    confidence: np.ndarray
    accuracy: np.ndarray
    count: np.ndarray


@dataclasses.dataclass(frozen=True)
class CalibrationReport:
    """What `calibration_report` returns; `print` shows it as a table.

    Attributes:
        examples: n.
        accuracy: Fraction of examples whose most probable class is the label.
        confidence: Mean probability of the most probable class.
        negative_log_likelihood: See the function of that name.
        brier_score: See the function of that name.
        expected_calibration_error: See the function of that name.
        predictive_entropy: Mean over the examples, in nats.
        curve: The `ReliabilityCurve`.
    """

    examples: int
    accuracy: float
    confidence: float
    negative_log_likelihood: float
    brier_score: float
    expected_calibration_error: float
    predictive_entropy: float
    curve: ReliabilityCurve

    def __str__(self):
        bins = len(self.curve.count)
        lines = [f"Calibration on {self.examples} examples (not private)"]
        for name, value in (
            ("accuracy", self.accuracy),
            ("mean confidence", self.confidence),
            ("negative log-likelihood", self.negative_log_likelihood),
            ("Brier score", self.brier_score),
            (f"calibration error ({bins} bins)", self.expected_calibration_error),
            ("mean entropy", self.predictive_entropy),
        ):
            lines.append(f"  {name:<28}{value:.4f}")
        return "\n".join(lines)


def negative_log_likelihood(probabilities: Any, labels: Any) -> float:
    """Returns the mean of -ln p_i[y_i], in nats.

    A probability of zero counts as the smallest positive number of its dtype: softmax
    rounds small ones to zero, and one such label would make the mean infinite.

    Args:
        probabilities: See the module.
        labels: See the module.

    Returns:
        A number in [0, 745].

    Raises:
        ValueError: if the arrays are not what the module says, or empty.

    Privacy:
        Not private; see the module.

    Example:
        >>> print(round(negative_log_likelihood([[0.5, 0.5], [0.2, 0.8]], [0, 1]), 4))
        0.4581
    """
    p, y, log_of_zero = calibration_checks.checked(probabilities, labels)
    chosen = p[np.arange(len(p)), y]
    logs = np.where(chosen > 0, np.log(np.where(chosen > 0, chosen, 1.0)), log_of_zero)
    return float(-np.mean(logs))


def brier_score(probabilities: Any, labels: Any) -> float:
    """Returns the mean of sum_c (p_i[c] - 1[y_i = c])^2 (Brier, 1950).

    Over all classes: with two it is twice the mean of (p - y)^2 that is sometimes given
    for them.

    Args:
        probabilities: See the module.
        labels: See the module.

    Returns:
        A number in [0, 2]; 0 is best.

    Raises:
        ValueError: if the arrays are not what the module says, or empty.

    Privacy:
        Not private; see the module.

    Example:
        >>> brier_score([[0.5, 0.5]], [0])
        0.5
    """
    p, y, _ = calibration_checks.checked(probabilities, labels)
    return float(np.mean(np.sum((p - np.eye(p.shape[1])[y]) ** 2, axis=1)))


def reliability_curve(
    probabilities: Any, labels: Any, bins: int = 15
) -> ReliabilityCurve:
    """Returns accuracy and mean confidence in bins of the confidence.

    The confidence is the probability of the most probable class; of equal ones the
    first counts as predicted. Bin m of M is ((m - 1) / M, m / M], the first one with 0
    (Guo et al., "On calibration of modern neural networks", 2017, section 2).

    Args:
        probabilities: See the module.
        labels: See the module.
        bins: M, at least 1.

    Returns:
        The `ReliabilityCurve`.

    Raises:
        ValueError: if the arrays are not what the module says, or empty, or `bins` is
            not positive.

    Privacy:
        Not private; see the module.

    Example:
        >>> curve = reliability_curve([[0.6, 0.4], [0.9, 0.1]], [1, 0], bins=2)
        >>> print(curve.count, curve.accuracy, curve.confidence)
        [0 2] [nan 0.5] [ nan 0.75]
    """
    p, y, _ = calibration_checks.checked(probabilities, labels)
    return _curve(p, y, bins)


def expected_calibration_error(
    probabilities: Any, labels: Any, bins: int = 15
) -> float:
    """Returns sum_m (n_m / n) |accuracy_m - confidence_m| (Guo et al. 2017, eq. 3).

    It depends on the bins, and is biased upwards by about the noise of an accuracy over
    n / M examples: compare it at equal n and M only.

    Args:
        probabilities: See the module.
        labels: See the module.
        bins: M, at least 1; see `reliability_curve`.

    Returns:
        A number in [0, 1].

    Raises:
        ValueError: as `reliability_curve`.

    Privacy:
        Not private; see the module.

    Example:
        >>> expected_calibration_error([[0.75, 0.25], [0.5, 0.5]], [1, 0])
        0.625
    """
    return _calibration_error(reliability_curve(probabilities, labels, bins))


def predictive_entropy(probabilities: Any) -> np.ndarray:
    """Returns -sum_c p_i[c] ln p_i[c] of each example, in nats.

    Args:
        probabilities: See the module.

    Returns:
        `[n]`, each in [0, ln k].

    Raises:
        ValueError: if the probabilities are not what the module says, or empty.

    Privacy:
        Not private; see the module.

    Example:
        >>> print(predictive_entropy([[0.5, 0.5], [1.0, 0.0]]).round(4))
        [0.6931 0.    ]
    """
    return _entropy(calibration_checks.checked_probabilities(probabilities)[0])


def calibration_report(
    probabilities: Any, labels: Any, bins: int = 15
) -> CalibrationReport:
    """Returns all numbers of this module, to be printed.

    Args:
        probabilities: See the module.
        labels: See the module.
        bins: Of the calibration error, at least 1.

    Returns:
        The `CalibrationReport`.

    Raises:
        ValueError: as `reliability_curve`.

    Privacy:
        Not private; see the module.

    Example:
        >>> print(calibration_report([[0.5, 0.5], [0.2, 0.8]], [0, 1]))
        Calibration on 2 examples (not private)
          accuracy                    1.0000
          mean confidence             0.6500
          negative log-likelihood     0.4581
          Brier score                 0.2900
          calibration error (15 bins) 0.3500
          mean entropy                0.5968
    """
    p, y, _ = calibration_checks.checked(probabilities, labels)
    curve = _curve(p, y, bins)
    return CalibrationReport(
        examples=len(p),
        accuracy=float(np.mean(p.argmax(axis=1) == y)),
        confidence=float(np.mean(p.max(axis=1))),
        negative_log_likelihood=negative_log_likelihood(probabilities, labels),
        brier_score=brier_score(probabilities, labels),
        expected_calibration_error=_calibration_error(curve),
        predictive_entropy=float(np.mean(_entropy(p))),
        curve=curve,
    )


def _curve(p: np.ndarray, y: np.ndarray, bins: int) -> ReliabilityCurve:
    bins = validation.check_positive_integer("bins", bins)
    edges = np.linspace(0.0, 1.0, bins + 1)
    confidence, correct = p.max(axis=1), p.argmax(axis=1) == y
    index = np.searchsorted(edges[1:-1], confidence)
    count = np.bincount(index, minlength=bins)
    sums = [np.bincount(index, values, bins) for values in (confidence, correct)]
    with np.errstate(invalid="ignore"):  # 0 / 0 of an empty bin is its NaN.
        means = [values / count for values in sums]
    return ReliabilityCurve(edges, means[0], means[1], count)


def _calibration_error(curve: ReliabilityCurve) -> float:
    gaps = np.abs(curve.accuracy - curve.confidence)
    return float(np.nansum(curve.count * gaps) / curve.count.sum())


def _entropy(p: np.ndarray) -> np.ndarray:
    return -np.sum(p * np.log(np.where(p > 0, p, 1.0)), axis=1) + 0.0  # No -0.

"""Calibration: closed forms, scikit-learn, and properties of any predictions."""

import hypothesis
import numpy as np
import pytest
import sklearn.calibration
import sklearn.metrics
from hypothesis import strategies as st

from keras_dpopt import calibration

PARTS = (
    calibration.negative_log_likelihood,
    calibration.brier_score,
    calibration.expected_calibration_error,
    calibration.reliability_curve,
    calibration.calibration_report,
)


def predictions(n=200, classes=4, seed=0, dtype="f8"):
    """Random probabilities, and labels drawn from them."""
    draw = np.random.default_rng(seed)
    p = draw.dirichlet(np.full(classes, 0.5), size=n)
    labels = np.array([draw.choice(classes, p=row) for row in p])
    return p.astype(dtype), labels


@st.composite
def any_predictions(draw):
    n, classes = draw(st.integers(1, 20)), draw(st.integers(2, 5))
    weights = st.lists(st.integers(0, 6), min_size=classes, max_size=classes)
    rows = draw(st.lists(weights.filter(any), min_size=n, max_size=n))
    labels = draw(st.lists(st.integers(0, classes - 1), min_size=n, max_size=n))
    p = np.array(rows, "f8")
    return p / p.sum(axis=1, keepdims=True), np.array(labels)


# --- closed forms --------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_uniform_predictions(classes):
    n = 7 * classes
    p = np.full((n, classes), 1 / classes)
    labels = np.arange(n) % classes
    report = calibration.calibration_report(p, labels)
    assert report.examples == n
    assert report.negative_log_likelihood == pytest.approx(np.log(classes))
    assert report.predictive_entropy == pytest.approx(np.log(classes))
    assert report.brier_score == pytest.approx(1 - 1 / classes)
    assert report.accuracy == pytest.approx(1 / classes)
    assert report.confidence == pytest.approx(1 / classes)
    assert report.expected_calibration_error == pytest.approx(0, abs=1e-12)


def test_certain_predictions():
    """Three right and one wrong of four, all with probability one."""
    p = np.eye(3)[[0, 1, 2, 0]]
    report = calibration.calibration_report(p, [0, 1, 2, 1])
    assert report.accuracy == 0.75
    assert report.brier_score == 0.5  # 2 / 4
    assert report.expected_calibration_error == 0.25
    assert report.predictive_entropy == 0.0
    # Of the zero: the smallest number of float64.
    assert report.negative_log_likelihood == pytest.approx(1074 * np.log(2) / 4)


def test_a_zero_is_as_small_as_its_dtype_goes():
    for dtype, bits in (("f8", 1074), ("f4", 149), ("f2", 24), (bool, 1074)):
        p = np.array([[0, 1]], dtype)
        value = calibration.negative_log_likelihood(p, [0])
        assert value == pytest.approx(bits * np.log(2)), dtype


def test_bins_have_their_upper_limit():
    p = np.array([[0.75, 0.25], [0.5, 0.5], [0.76, 0.24], [1.0, 0.0]])
    curve = calibration.reliability_curve(p, [0, 1, 1, 0], bins=4)
    np.testing.assert_allclose(curve.edges, [0, 0.25, 0.5, 0.75, 1])
    np.testing.assert_array_equal(curve.count, [0, 1, 1, 2])
    np.testing.assert_array_equal(curve.accuracy, [np.nan, 0, 1, 0.5])
    np.testing.assert_allclose(curve.confidence, [np.nan, 0.5, 0.75, 0.88])
    error = calibration.expected_calibration_error(p, [0, 1, 1, 0], bins=4)
    assert error == pytest.approx((0.5 + 0.25 + 2 * 0.38) / 4)


def test_a_bin_where_errors_cancel_is_calibrated():
    """Half of the examples right at 0.5: over- and underconfident by 0.5 each."""
    p = np.full((2, 3), [0.5, 0.3, 0.2])
    assert calibration.expected_calibration_error(p, [0, 1]) == 0
    assert calibration.expected_calibration_error(p, [0, 0]) == 0.5


# --- scikit-learn --------------------------------------------------------------------


def test_negative_log_likelihood_is_log_loss():
    p, labels = predictions()
    value = calibration.negative_log_likelihood(p, labels)
    assert value == pytest.approx(sklearn.metrics.log_loss(labels, p), rel=1e-9)


@pytest.mark.parametrize("classes", [2, 4])
def test_brier_score(classes):
    p, labels = predictions(classes=classes)
    want = sklearn.metrics.brier_score_loss(
        labels, p if classes > 2 else p[:, 1], scale_by_half=False
    )
    assert calibration.brier_score(p, labels) == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("bins", [1, 5, 15])
def test_reliability_curve(bins):
    p, labels = predictions()
    curve = calibration.reliability_curve(p, labels, bins)
    correct, confidence = p.argmax(axis=1) == labels, p.max(axis=1)
    accuracy, mean = sklearn.calibration.calibration_curve(
        correct, confidence, n_bins=bins
    )
    filled = curve.count > 0
    np.testing.assert_allclose(curve.accuracy[filled], accuracy, rtol=1e-9)
    np.testing.assert_allclose(curve.confidence[filled], mean, rtol=1e-9)
    np.testing.assert_array_equal(np.isnan(curve.accuracy), ~filled)
    error = np.sum(curve.count[filled] * np.abs(accuracy - mean)) / len(p)
    value = calibration.expected_calibration_error(p, labels, bins)
    assert value == pytest.approx(error, rel=1e-9)


# --- properties ----------------------------------------------------------------------


@hypothesis.given(any_predictions(), st.integers(1, 20))
def test_ranges_and_relations(case, bins):
    p, labels = case
    report = calibration.calibration_report(p, labels, bins)
    entropy = calibration.predictive_entropy(p)
    assert 0 <= report.brier_score <= 2
    assert 0 <= report.negative_log_likelihood < 745
    assert (entropy >= 0).all()
    assert (entropy <= np.log(p.shape[1]) + 1e-12).all()
    assert report.curve.count.sum() == len(p)
    # By the triangle inequality; and it is this with one bin.
    gap = abs(report.accuracy - report.confidence)
    error = report.expected_calibration_error
    assert gap - 1e-12 <= error <= 1
    if bins == 1:
        assert error == pytest.approx(gap, abs=1e-12)
    # The score of a label is least for certainty of it: a proper score.
    assert calibration.brier_score(np.eye(p.shape[1])[labels], labels) == 0


@hypothesis.given(any_predictions(), st.randoms(use_true_random=False))
def test_order_and_form_do_not_matter(case, random):
    p, labels = case
    want = calibration.calibration_report(p, labels)
    order = list(range(len(p)))
    random.shuffle(order)
    for other in (
        calibration.calibration_report(p[order], labels[order]),
        calibration.calibration_report(p, np.eye(p.shape[1])[labels]),
        calibration.calibration_report(p.tolist(), labels[:, None].astype("u1")),
        calibration.calibration_report(np.repeat(p, 2, 0), np.repeat(labels, 2)),
    ):
        for name in ("accuracy", "confidence", "brier_score", "predictive_entropy"):
            assert getattr(other, name) == pytest.approx(getattr(want, name)), name
        assert other.negative_log_likelihood == pytest.approx(
            want.negative_log_likelihood
        )
        assert other.expected_calibration_error == pytest.approx(
            want.expected_calibration_error, abs=1e-12
        )


def test_a_permutation_of_the_labels_matters():
    p, labels = predictions()
    good = calibration.calibration_report(p, labels)
    bad = calibration.calibration_report(p, np.roll(labels, 1))
    assert bad.negative_log_likelihood > good.negative_log_likelihood + 0.5
    assert bad.brier_score > good.brier_score + 0.2
    assert bad.expected_calibration_error > good.expected_calibration_error + 0.2


# --- one sigmoid ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_one_sigmoid_is_two_classes(dtype):
    p, labels = predictions(classes=2, dtype=dtype)
    want = calibration.calibration_report(p, labels)
    for column in (p[:, 1], p[:, 1:]):
        for y in (labels, labels[:, None], labels.astype("f4"), labels == 1):
            got = calibration.calibration_report(column, y)
            assert got.accuracy == want.accuracy
            assert got.brier_score == pytest.approx(want.brier_score, rel=1e-6)
            assert got.expected_calibration_error == pytest.approx(
                want.expected_calibration_error, rel=1e-6
            )
            np.testing.assert_array_equal(got.curve.count, want.curve.count)
        assert len(calibration.predictive_entropy(column)) == len(p)


# --- what is refused -----------------------------------------------------------------

GOOD = np.array([[0.5, 0.5], [0.2, 0.8]])


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("probabilities", "labels", "message"),
    [
        ([[0.5, 0.4], [0.2, 0.8]], [0, 1], "sum to one"),
        ([[0.5, 0.5], [np.nan, 0.8]], [0, 1], "NaN"),
        ([[0.5, 0.5], [np.inf, 0.8]], [0, 1], "logits"),
        ([[2.0, -1.0], [0.2, 0.8]], [0, 1], "logits"),
        ([[1.001, -0.001], [0.2, 0.8]], [0, 1], "logits"),
        ([1.5, 0.5], [0, 1], "logits"),
        (np.zeros((0, 2)), [], "shape"),
        (np.full((2, 2, 2), 0.5), [0, 1], "shape"),
        (GOOD, [0], "do not fit"),
        (GOOD, [0, 1, 0], "do not fit"),
        (GOOD, [[1, 0, 0], [0, 1, 0]], "do not fit"),
        (GOOD, [0, 2], r"\[0, 2\)"),
        (GOOD, [0, -1], r"\[0, 2\)"),
        (GOOD, [0, 0.5], "integers"),
        (GOOD, [0, np.nan], "integers"),
        (GOOD, ["a", "b"], "integers"),
        (GOOD, [[0.5, 0.5], [0, 1]], "single 1"),
        (GOOD, [[1, 1], [0, 1]], "single 1"),
        (GOOD, [[0, 0], [0, 1]], "single 1"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
def test_what_is_refused(part, probabilities, labels, message):
    with pytest.raises(ValueError, match=message):
        part(probabilities, labels)


def test_entropy_refuses_too():
    with pytest.raises(ValueError, match="sum to one"):
        calibration.predictive_entropy([[0.5, 0.4]])


@pytest.mark.parametrize("bins", [0, -1])
def test_bins_are_positive(bins):
    with pytest.raises(ValueError, match="bins"):
        calibration.reliability_curve(GOOD, [0, 1], bins)


@pytest.mark.parametrize("dtype", ["f2", "f4"])
def test_rounded_outputs_are_taken(dtype):
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(5, 1000), scale=3)
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    labels = draw.integers(1000, size=5)
    exact = calibration.calibration_report(p, labels)
    rounded = calibration.calibration_report(p.astype(dtype), labels)
    tolerance = 0.02 if dtype == "f2" else 1e-5
    for name in ("negative_log_likelihood", "predictive_entropy", "brier_score"):
        assert getattr(rounded, name) == pytest.approx(
            getattr(exact, name), rel=tolerance
        )


def test_report_is_printed_and_says_what_it_is():
    text = str(calibration.calibration_report(*predictions(), bins=7))
    assert "not private" in text and "7 bins" in text and "200 examples" in text
    assert len(text.splitlines()) == 7


@pytest.mark.parametrize("function", PARTS)
def test_swapped_arguments_are_named(function):
    p, labels = predictions()
    with pytest.raises(ValueError, match="Swap them: probabilities, then labels"):
        function(labels, p)
    with pytest.raises(ValueError, match="Swap them"):
        function([1, 0, 1, 0], [0.2, 0.3, 0.5, 0.5])
    with pytest.raises(ValueError, match="not the logits"):  # wrong in another way
        function(10 * p, labels)


def test_dir_has_the_public_names_alone():
    names = [name for name in dir(calibration) if not name.startswith("_")]
    assert names == sorted(calibration.__all__)

"""Correlated noise: golden values, brute force over participations, optimal errors.

Tolerances: identities of float64 hold to 1e-12, golden values to 1e-12 where both
sides compute the same formula, optimized coefficients to 1e-4 (the optimum is flat:
their error agrees to 1e-9).
"""

import itertools
import time

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp
from helpers import golden

from keras_dpopt import toeplitz
from keras_dpopt.toeplitz import BandedToeplitz, BufferedLinearToeplitz

GOLDEN = golden()["methods"]["mf_dp_ftrl"]
CIFAR = golden()["mf_cifar10_800steps"]
PROBLEM = golden()["problem"]
DRAWS = np.concatenate([PROBLEM["Z"], PROBLEM["E1"]])
GOLDEN_BLT = BufferedLinearToeplitz(
    tuple(GOLDEN["blt"]["buf_decay"]), tuple(GOLDEN["blt"]["output_scale"])
)
BLTS = [
    GOLDEN_BLT,
    BufferedLinearToeplitz((0.0,), (1.0,)),
    BufferedLinearToeplitz((0.999, 0.999, 0.5), (0.2, 0.1, 0.7)),
]


def matrix(column):
    """The lower triangular Toeplitz matrix of that first column."""
    lags = np.subtract.outer(np.arange(len(column)), np.arange(len(column)))
    return np.where(lags >= 0, np.asarray(column)[np.maximum(lags, 0)], 0.0)


def patterns(steps, separation, most=None):
    """All non-empty sets of steps, any two at least `separation` apart."""
    for count in range(1, (most or steps) + 1):
        for chosen in itertools.combinations(range(steps), count):
            if all(np.diff(chosen) >= separation):
                yield list(chosen)


def worst(strategy, steps, separation, most=None):
    """The sensitivity by brute force; contributions all the same, which is worst."""
    chosen = patterns(steps, separation, most)
    return max(np.linalg.norm(strategy[:, steps].sum(axis=1)) for steps in chosen)


def random_column(rng, steps):
    """Coefficients that do not increase, of several shapes: some flat, some zero."""
    falls = rng.exponential(size=steps) * (rng.random(steps) < rng.uniform(0.2, 1.0))
    falls[rng.integers(steps)] += 0.1
    return np.cumsum(falls[::-1])[::-1]


def sqrt_strategy(steps):
    return BandedToeplitz(toeplitz.square_root_coefficients(steps))


# ------------------------------------------------------------------------- strategies


def test_square_root_and_inverse_equal_the_golden_values():
    root = toeplitz.square_root_coefficients(8)
    np.testing.assert_allclose(root, GOLDEN["sqrt_coefs"], rtol=1e-15)
    inverse = toeplitz.inverse_coefficients(root, 8)
    np.testing.assert_allclose(inverse, GOLDEN["inverse_coefs"], rtol=1e-14)
    many = matrix(toeplitz.square_root_coefficients(200))
    np.testing.assert_allclose(many @ many, np.tri(200), atol=1e-13)


@pytest.mark.parametrize("steps", [1, 3, 9, 40])
@pytest.mark.parametrize("strategy", [BandedToeplitz((0.8, 0.4, 0.3, 0.2)), *BLTS])
def test_inverse_is_the_inverse(strategy, steps):
    column = strategy.coefficients_up_to(steps)
    inverse = strategy.inverse_up_to(steps)
    assert column.shape == inverse.shape == (steps,)
    expected = np.linalg.inv(matrix(column))
    np.testing.assert_allclose(matrix(inverse), expected, atol=1e-13)
    norms = toeplitz.noise_row_norms(strategy, steps)
    np.testing.assert_allclose(norms, np.linalg.norm(expected, axis=1), rtol=1e-13)


def test_banded_recursion_gives_the_golden_noise():
    strategy = BandedToeplitz(GOLDEN["banded4_coefs"])
    assert strategy.bands == 4
    first, *rest = strategy.coefficients
    noise = []
    for draw in DRAWS:
        kept = [c * w for c, w in zip(rest, noise[::-1], strict=False)]
        noise.append((draw - sum(kept)) / first)
    expected = GOLDEN["banded4_noise_from_Z_then_E1"]
    np.testing.assert_allclose(noise, expected, atol=1e-14)
    np.testing.assert_allclose(
        matrix(strategy.inverse_up_to(8)) @ DRAWS, expected, atol=1e-14
    )


def test_blt_recursion_gives_the_golden_noise():
    column = GOLDEN_BLT.coefficients_up_to(8)
    np.testing.assert_allclose(column, GOLDEN["blt"]["toeplitz_coefs"], rtol=1e-14)
    buffers, noise = np.zeros((2, 3)), []
    for draw in DRAWS:
        noise.append(draw - GOLDEN_BLT.scales @ buffers)
        buffers = np.array(GOLDEN_BLT.decays)[:, np.newaxis] * buffers + noise[-1]
    np.testing.assert_allclose(noise, GOLDEN["blt"]["noise"], atol=1e-14)
    np.testing.assert_allclose(
        matrix(GOLDEN_BLT.inverse_up_to(8)) @ DRAWS, GOLDEN["blt"]["noise"], atol=1e-14
    )


def test_row_norms_equal_the_golden_values():
    for strategy, name in (
        (BandedToeplitz(GOLDEN["banded4_coefs"]), "banded4_row_std_first8"),
        (sqrt_strategy(8), "sqrt_row_std_first8"),
    ):
        norms = toeplitz.noise_row_norms(strategy, 8)
        np.testing.assert_allclose(norms, GOLDEN[name], rtol=1e-14)


def test_noise_of_allowed_strategies_never_grows_exponentially():
    rng = np.random.default_rng(1)
    for _ in range(50):
        strategy = BandedToeplitz(random_column(rng, 6))
        assert toeplitz.noise_row_norms(strategy, 3000)[-1] < 1e6
    # The check that refuses others is not for nothing: a pole at 1/2.
    assert abs(toeplitz.inverse_coefficients([0.5, 1.0], 300)[-1]) > 1e80


@pytest.mark.parametrize(
    "coefficients",
    [
        (),
        (0.0, 0.0),
        (-1.0,),
        (1.0, -0.1),
        (1.0, 0.5, 0.6),
        (1.0, 1.0 + 1e-9),
        (1.0, np.nan),
        (np.inf, 1.0),
        ((1.0, 0.5), (0.3, 0.2)),
    ],
)
def test_coefficients_without_a_known_sensitivity_are_refused(coefficients):
    with pytest.raises(ValueError, match="known sensitivity. Pass"):
        BandedToeplitz(coefficients)
    with pytest.raises(ValueError, match="known sensitivity. Pass"):
        toeplitz.sensitivity(coefficients, 8, 2)


@pytest.mark.parametrize(
    ("decays", "scales"),
    [
        ((), ()),
        ((0.5,), (0.1, 0.1)),
        ((1.0,), (0.5,)),
        ((-0.1,), (0.5,)),
        ((0.5,), (0.0,)),
        ((0.5, 0.2), (0.8, 0.3)),
        ((0.5, 0.2), (0.8, -0.3)),
        ((np.nan,), (0.5,)),
        ((0.5,), (np.nan,)),
    ],
)
def test_blts_without_a_known_sensitivity_are_refused(decays, scales):
    with pytest.raises(ValueError, match="is unknown. Pass decays"):
        BufferedLinearToeplitz(decays, scales)


def test_a_rise_by_rounding_is_taken_as_the_larger_value():
    c = np.array([1.0, 0.5, 0.5 + 1e-13, 0.25])
    assert BandedToeplitz(c).coefficients == (1.0, c[2], c[2], 0.25)
    assert toeplitz.sensitivity(c, 4, 1) >= worst(matrix(c), 4, 1)


@pytest.mark.parametrize("steps", [0, -1, 2.5])
def test_numbers_of_steps_out_of_range_are_refused(steps):
    for call in (
        lambda: BandedToeplitz((1.0,)).coefficients_up_to(steps),
        lambda: GOLDEN_BLT.coefficients_up_to(steps),
        lambda: GOLDEN_BLT.inverse_up_to(steps),
        lambda: toeplitz.square_root_coefficients(steps),
        lambda: toeplitz.sensitivity([1.0], steps, 1),
        lambda: toeplitz.sensitivity([1.0], 4, steps),
        lambda: toeplitz.sensitivity([1.0], 4, 1, participations=steps),
        lambda: toeplitz.largest_column_norm([1.0], 4, steps),
        lambda: toeplitz.optimize_banded(steps, 1),
        lambda: toeplitz.optimize_blt(steps, 1),
        lambda: toeplitz.optimize_blt(4, 1, separation=steps),
        lambda: toeplitz.tree_sensitivity(steps, 1),
        lambda: toeplitz.tree_prefix_nodes(steps - 1),
    ):
        with pytest.raises((ValueError, TypeError), match="must be .* Pass"):
            call()


# ------------------------------------------------------------------------ sensitivity


def test_sensitivities_equal_the_golden_table():
    for steps, expected in GOLDEN["single_participation_sens"].items():
        c = toeplitz.square_root_coefficients(int(steps))
        assert toeplitz.sensitivity(c, int(steps), int(steps)) == pytest.approx(
            expected, rel=1e-13
        )
        assert toeplitz.largest_column_norm(c, int(steps), int(steps)) == pytest.approx(
            expected, rel=1e-13
        )
    root = toeplitz.square_root_coefficients(800)
    for name, arguments in {
        "n8_b2": (root, 8, 2),
        "n8_b4": (root, 8, 4),
        "n8_b4_k1": (root, 8, 4, 1),
        "n16_b4_bands4": (root[:4], 16, 4),
        "n16_b4_full": (root, 16, 4),
        "n800_b10_bands10": (root[:10], 800, 10),
        "n800_b10_full": (root, 800, 10),
        "n800_b10_identity": ([1.0], 800, 10),
    }.items():
        expected = GOLDEN["minsep_sens_sqrt"][name]
        assert toeplitz.sensitivity(*arguments) == pytest.approx(expected, rel=1e-13)


def test_a_separation_beyond_the_run_is_one_participation():
    once = toeplitz.sensitivity([1.0, 0.5], 8, separation=8)
    assert toeplitz.sensitivity([1.0, 0.5], 8, separation=10**15) == once
    assert toeplitz.tree_sensitivity(8, 10**15) == toeplitz.tree_sensitivity(8, 8)


def disagreements(formula, cases=60, seed=0):
    """Largest relative difference of a formula from brute force, both directions."""
    rng = np.random.default_rng(seed)
    low = high = 0.0
    for _ in range(cases):
        steps = int(rng.integers(1, 9))
        separation = int(rng.integers(1, steps + 2))
        most = int(rng.integers(1, steps + 1)) if rng.random() < 0.5 else None
        c = random_column(rng, int(rng.integers(1, steps + 1)))
        column = np.append(c, np.zeros(steps))[:steps]
        truth = worst(matrix(column), steps, separation, most)
        ratio = formula(c, steps, separation, most) / truth - 1.0
        low, high = min(low, ratio), max(high, ratio)
    return low, high


def test_sensitivity_equals_brute_force_over_all_patterns():
    low, high = disagreements(toeplitz.sensitivity)
    assert -1e-13 < low <= high < 1e-13


def test_brute_force_refutes_wrong_formulas():
    def no_overlap(c, steps, separation, most):
        count = min(most or steps, -(-steps // separation))
        return np.sqrt(count) * np.linalg.norm(c)

    def one_too_few(c, steps, separation, most):
        count = min(most or steps, -(-steps // separation))
        return toeplitz.sensitivity(c, steps, separation, max(1, count - 1))

    assert disagreements(no_overlap)[0] < -0.2
    assert disagreements(one_too_few)[0] < -0.1


def test_no_signs_or_sizes_of_contributions_exceed_the_sensitivity():
    rng = np.random.default_rng(2)
    c = random_column(rng, 7)
    bound = toeplitz.sensitivity(c, 7, 2)
    for chosen in patterns(7, 2):
        gradients = np.zeros((7, 3))
        gradients[chosen] = rng.normal(size=(len(chosen), 3))
        norms = np.linalg.norm(gradients[chosen], axis=1, keepdims=True)
        gradients[chosen] *= rng.random((len(chosen), 1)) / norms
        assert np.linalg.norm(matrix(c) @ gradients) <= bound


def test_the_formula_fails_for_the_coefficients_that_are_refused():
    c = np.array([1.0, -1.0, 0.0, 0.0])  # the columns cancel in the formula's pattern
    assert np.linalg.norm(matrix(c).sum(axis=1)) == 1.0
    assert worst(matrix(c), 4, 1) > 1.4


def test_columns_that_do_not_overlap_need_no_order():
    c = [0.3, -1.0, 0.5]
    norm = toeplitz.largest_column_norm(c, 9, separation=3)
    assert norm == pytest.approx(np.linalg.norm(c), rel=1e-15)
    column = np.append(c, np.zeros(6))
    truth = worst(matrix(column), 9, 3)
    assert truth == pytest.approx(np.sqrt(3) * norm, rel=1e-13)
    with pytest.raises(ValueError, match="than the separation. Use at most 2"):
        toeplitz.largest_column_norm(c, 9, separation=2)
    assert toeplitz.largest_column_norm([1.0, 0.5, 0.0], 9, separation=2) > 1.0
    assert toeplitz.largest_column_norm(c, 2, separation=2) == np.linalg.norm(c[:2])


# ------------------------------------------------------------------- error, optimizers


def explicit_error(inverse, momentum, error):
    """The error from matrices: momentum as SGD computes it, one step at a time."""
    steps = len(inverse)
    sums, velocity, weights = np.zeros((steps, steps)), np.zeros(steps), np.zeros(steps)
    for step in range(steps):
        velocity = momentum * velocity + np.eye(steps)[step]
        weights = weights + velocity
        sums[step] = weights
    squares = np.square(np.linalg.norm(sums @ matrix(inverse), axis=1))
    return np.sqrt(np.mean(squares) if error == "mean" else np.max(squares))


@pytest.mark.parametrize("error", ["mean", "max"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_error_equals_that_of_explicit_matrices(momentum, error):
    for strategy in (BandedToeplitz((0.8, 0.5, 0.1)), sqrt_strategy(30), *BLTS):
        expected = explicit_error(strategy.inverse_up_to(30), momentum, error)
        found = toeplitz.prefix_sum_error(strategy, 30, momentum, error)
        assert found == pytest.approx(expected, rel=1e-13)


def test_errors_of_the_square_root_equal_the_golden_values():
    for name, expected in GOLDEN["rmse_factor_prefix_sum"].items():
        steps = int(name)
        root, independent = sqrt_strategy(steps), BandedToeplitz((1.0,))
        error = toeplitz.prefix_sum_error(root, steps, error="max")
        loss = error * toeplitz.sensitivity(root.coefficients, steps, steps)
        alone = toeplitz.prefix_sum_error(independent, steps, error="max")
        assert error == pytest.approx(expected["max_err"], rel=1e-13)
        assert loss == pytest.approx(expected["max_loss"], rel=1e-13)
        assert alone == pytest.approx(expected["independent_noise_max_err"], rel=1e-13)


@pytest.mark.parametrize("bands", CIFAR)
def test_optimized_bands_equal_the_golden_values(bands):
    strategy = toeplitz.optimize_banded(800, int(bands))
    error = toeplitz.prefix_sum_error(strategy, 800)
    expected = CIFAR[bands]
    np.testing.assert_allclose(strategy.coefficients, expected["coefs"], rtol=1e-4)
    assert error == pytest.approx(expected["rms_unit"], rel=1e-9)
    norm = toeplitz.largest_column_norm(strategy.coefficients, 800, int(bands))
    assert norm == pytest.approx(1.0, rel=1e-14)
    for epsilon, rms in expected["rms_prefix_error"].items():
        assert error * expected["sigma"][epsilon] == pytest.approx(rms, rel=1e-9)


def loss(strategy, steps, separation, momentum, error):
    c = strategy.coefficients_up_to(steps)
    return toeplitz.sensitivity(c, steps, separation) * toeplitz.prefix_sum_error(
        strategy, steps, momentum, error
    )


@pytest.mark.parametrize("error", ["mean", "max"])
@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.99])
def test_no_small_change_improves_optimized_bands(momentum, error):
    best = toeplitz.optimize_banded(120, 6, momentum, error)
    c = np.array(best.coefficients)
    assert np.all(np.diff(c) <= 0) and c[-1] >= 0
    least = loss(best, 120, 120, momentum, error)
    rng = np.random.default_rng(3)
    for size in (1e-1, 1e-2, 1e-3):
        for _ in range(40):
            falls = c - np.append(c[1:], 0.0)
            falls = np.abs(falls + size * rng.normal(size=6) * falls.mean())
            other = BandedToeplitz(np.cumsum(falls[::-1])[::-1])
            assert loss(other, 120, 120, momentum, error) >= least * (1 - 1e-10)


def test_bands_stay_in_order_where_the_best_would_rise():
    c = np.array(toeplitz.optimize_banded(12, 9, 0.8, "max").coefficients)
    assert c[4] > c[5] == c[6] > c[7]
    rising = c.copy()
    rising[6] *= 1.003
    products = []
    for column in (c, rising):
        inverse = toeplitz.inverse_coefficients(column, 12)
        products.append(np.linalg.norm(column) * explicit_error(inverse, 0.8, "max"))
    assert products[1] < products[0] * (1 - 1e-6)


def test_bands_for_momentum_are_better_under_momentum_and_worse_without():
    plain = toeplitz.optimize_banded(200, 8)
    heavy = toeplitz.optimize_banded(200, 8, momentum=0.9)
    for momentum, better, other in ((0.0, plain, heavy), (0.9, heavy, plain)):
        ratio = toeplitz.prefix_sum_error(
            better, 200, momentum
        ) / toeplitz.prefix_sum_error(other, 200, momentum)
        assert ratio < 0.97


def test_optimizing_many_bands_takes_seconds():
    toeplitz.optimize_banded.cache_clear()
    start = time.monotonic()
    best = toeplitz.optimize_banded(20_000, 50)
    assert time.monotonic() - start < 60.0
    root = toeplitz.square_root_coefficients(50)
    root = BandedToeplitz(root / np.linalg.norm(root))
    errors = [toeplitz.prefix_sum_error(s, 20_000) for s in (best, root)]
    assert errors[0] < 0.95 * errors[1]
    assert toeplitz.optimize_banded(20_000, 50) is best


@pytest.mark.parametrize("error", ["mean", "max"])
@pytest.mark.parametrize("buffers", [2, 3, 4])
def test_optimized_blt_is_close_to_the_square_root(buffers, error):
    found = toeplitz.optimize_blt(800, buffers, error=error)
    least = loss(found, 800, 800, 0.0, error)
    two = toeplitz.optimize_banded(800, 2, error=error)
    assert len(found.decays) == buffers
    assert least < 0.3 * loss(BandedToeplitz((1.0,)), 800, 800, 0.0, error)
    assert least < 0.3 * loss(two, 800, 800, 0.0, error)
    # The square root is optimal for "max" among Toeplitz strategies, not for "mean".
    ratio = least / loss(sqrt_strategy(800), 800, 800, 0.0, error)
    assert ratio < {2: 1.02, 3: 1.002, 4: 1.0002}[buffers]
    assert ratio > (1.0 if error == "max" else 0.98)


def test_blt_for_many_epochs_takes_the_separation_into_account():
    once = toeplitz.optimize_blt(400, 2)
    often = toeplitz.optimize_blt(400, 2, separation=40)
    assert loss(often, 400, 40, 0.0, "mean") < 0.9 * loss(once, 400, 40, 0.0, "mean")
    assert loss(often, 400, 400, 0.0, "mean") > loss(once, 400, 400, 0.0, "mean")


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_optimizers_take_runs_of_few_steps(steps):
    for found in (
        toeplitz.optimize_banded(steps, steps),
        toeplitz.optimize_blt(steps, 2),
    ):
        independent = loss(BandedToeplitz((1.0,)), steps, steps, 0.0, "mean")
        assert loss(found, steps, steps, 0.0, "mean") <= independent * (1 + 1e-9)


def test_arguments_of_the_optimizers_are_checked():
    with pytest.raises(ValueError, match="9 bands exceed 8 steps. Pass"):
        toeplitz.optimize_banded(8, 9)
    for optimize in (toeplitz.optimize_banded, toeplitz.optimize_blt):
        with pytest.raises(ValueError, match="`momentum` is 1.0. Pass"):
            optimize(8, 2, momentum=1.0)
        with pytest.raises(ValueError, match="'mean' or 'max'"):
            optimize(8, 2, error="median")
        with pytest.raises(ValueError, match="must be"):
            optimize(8, 0)


# ------------------------------------------------------------------------------- tree


def test_prefix_nodes_cover_the_steps_so_far_once():
    for step in range(70):
        nodes = toeplitz.tree_prefix_nodes(step)
        covered = [s for m, i in nodes for s in range(i * 2**m, (i + 1) * 2**m)]
        assert covered == list(range(step + 1))
        assert all(index % 2 == 0 for _, index in nodes)


@pytest.mark.parametrize("steps", [1, 2, 7, 8, 33])
def test_tree_is_a_square_strategy(steps):
    prefixes, covers = toeplitz.tree_matrices(steps)
    np.testing.assert_array_equal(prefixes @ covers, np.tri(steps))
    assert np.all(np.diag(covers) == 1) and np.all(np.triu(covers, 1) == 0)
    # The recursion with one kept draw for each level.
    draws = np.random.default_rng(4).normal(size=steps)
    kept, noise, norms = {}, [], []
    for step in range(steps):
        level = toeplitz.tree_prefix_nodes(step)[-1][0]
        noise.append(draws[step] - sum(kept[m] for m in range(level)))
        kept[level] = draws[step]
        norms.append(1 + level)
    inverse = np.linalg.inv(covers)
    np.testing.assert_allclose(noise, inverse @ draws, atol=1e-12)
    np.testing.assert_allclose(np.square(inverse).sum(axis=1), norms, atol=1e-12)


def cyclic_worst(covers, separation):
    """The sensitivity by brute force over the offsets of a fixed order."""
    return max(
        np.linalg.norm(covers[:, offset::separation].sum(axis=1))
        for offset in range(min(separation, len(covers)))
    )


def test_tree_sensitivity_equals_brute_force():
    for steps in (1, 2, 3, 5, 8, 11, 16, 21, 31, 32, 33, 64, 77):
        _, covers = toeplitz.tree_matrices(steps)
        for separation in range(1, steps + 2):
            expected = cyclic_worst(covers, separation)
            found = toeplitz.tree_sensitivity(steps, separation)
            assert found == pytest.approx(expected, rel=1e-13)


def test_tree_sensitivity_is_that_of_the_released_sums():
    # From nothing but the prefix sums and the covariance of their noise.
    steps, separation = 12, 3
    prefixes, _ = toeplitz.tree_matrices(steps)
    precision = np.linalg.inv(prefixes @ prefixes.T)
    largest = 0.0
    for offset in range(separation):
        period = np.arange(offset, steps, separation)
        for keep in itertools.product([0.0, 1.0], repeat=len(period)):
            gradients = np.zeros(steps)
            gradients[period] = keep
            sums = np.cumsum(gradients)
            largest = max(largest, np.sqrt(sums @ precision @ sums))
    found = toeplitz.tree_sensitivity(steps, separation)
    assert found == pytest.approx(largest, rel=1e-12)


def test_nodes_that_are_never_released_cost_nothing():
    steps, separation = 64, 4
    sizes = [2**m for m in range(7)]
    every = [
        np.sum(np.arange(start, start + size) % separation == 0) ** 2
        for size in sizes
        for start in range(0, steps, size)
    ]
    assert toeplitz.tree_sensitivity(steps, separation) < 0.9 * np.sqrt(sum(every))


def test_min_separation_is_not_enough_for_the_tree():
    _, covers = toeplitz.tree_matrices(14)
    irregular = np.linalg.norm(covers[:, [0, 12]].sum(axis=1))
    assert irregular > 1.05 * toeplitz.tree_sensitivity(14, 11)


def test_single_epoch_equals_what_dp_accounting_says():
    noise = 1.5
    for steps in [*range(1, 70), 1000, 1023, 1024, 1025, 10**6]:
        event = dp_accounting.SingleEpochTreeAggregationDpEvent(noise, steps)
        relation = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
        accountant = rdp.RdpAccountant([2.0], relation).compose(event)
        theirs = accountant.rdp[0] * noise**2  # alpha d / (2 sigma^2), alpha = 2
        ours = toeplitz.tree_sensitivity(steps, steps) ** 2
        assert ours == pytest.approx(theirs, rel=1e-12)
        assert ours == pytest.approx(steps.bit_length(), rel=1e-12)


def test_tree_sensitivity_of_a_million_steps_takes_seconds():
    start = time.monotonic()
    for separation in (1, 1000, 10**6):
        toeplitz.tree_sensitivity(10**6, separation)
    assert time.monotonic() - start < 30.0

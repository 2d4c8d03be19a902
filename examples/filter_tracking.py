"""How well do temporal filters follow a drifting gradient? FiBeR, appendix E.3.

    python examples/filter_tracking.py

A signal s_t drifts, the filter sees g_t = s_t + w_t, and is scored by its error against
s_t. The signal is a random walk ("RW": s_t = s_{t-1} + q_t), or has a velocity that is
one ("CV", constant velocity up to small changes, equations 21-23 of the paper):

    s_t = s_{t-1} + r_{t-1},    r_t = r_{t-1} + q_t,    s_0 = r_0 = 0

The moving average of DiSK and the innovation filter of FiBeR are those of
`keras_dpopt.filters`. Beside them stand the alpha-beta filter, of which the innovation
filter is the case of tied gains (alpha = beta = omega), and the Kalman filter in its
steady state, which knows the model and both variances and is the optimum here.

The paper states neither the gains, nor the seven drifts, nor the length of its runs.
Those below were chosen to fit its Table 10: noise of standard deviation 1/epsilon,
kappa = 0.1, omega = 0.9, 2000 steps, and q_t of standard deviation 0.1 times one of
`_DRIFTS`. What follows from them and is not in the table is no result of the paper.
"""

import dataclasses
import pathlib
from typing import Any, ClassVar

import numpy as np
import scipy.linalg
import tensorflow as tf
from absl import app, flags

from keras_dpopt import filters

try:
    import matplotlib
except ModuleNotFoundError as error:
    raise SystemExit(
        f"The examples need {error.name}. In the clone, run "
        "`pip install '.[examples]'`."
    ) from None

matplotlib.use("Agg")  # a file, not a window
import matplotlib.pyplot as plt  # noqa: E402

_MODELS = ("CV", "RW")
_EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
_DRIFTS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 1.0)
_KAPPA, _OMEGA = 0.1, 0.9
_GAINS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.9, 1.0)
_STEPS, _BURN_IN = 2000, 500
# The paper's Table 10: wins of seven, best and mean improvement in percent.
_PAPER = {
    ("CV", 0.5): (3, 99.59, -388.59),
    ("CV", 1.0): (4, 99.90, -189.32),
    ("CV", 2.0): (5, 99.97, -26.14),
    ("CV", 4.0): (6, 99.99, 59.91),
    ("CV", 8.0): (7, 100.00, 89.23),
    ("RW", 0.5): (0, -1225.59, -1466.996),
    ("RW", 1.0): (0, -781.19, -1396.070),
    ("RW", 2.0): (0, -277.68, -1297.283),
    ("RW", 4.0): (0, -15.40, -1180.544),
    ("RW", 8.0): (1, 69.15, -1014.144),
}

FLAGS = flags.FLAGS
flags.DEFINE_integer("seeds", 20, "Runs of each setting.", lower_bound=2)
flags.DEFINE_integer("dimension", 4, "Coordinates of the signal.", lower_bound=1)
flags.DEFINE_integer("seed", 0, "Of the random numbers.")
flags.DEFINE_string("plot", "outputs/filter_tracking.png", "Where to draw the plot.")
flags.DEFINE_bool("smoke", False, "Few seeds, to see that it runs.")


@dataclasses.dataclass(frozen=True)
class AlphaBetaFilter:
    """The alpha-beta filter, with gains that may differ from entry to entry.

        e_t = g_t - (f_{t-1} + r_{t-1})
        f_t = f_{t-1} + r_{t-1} + alpha*e_t,      r_t = r_{t-1} + beta*e_t

    alpha = beta = omega is `filters.InnovationFilter`, beta = 0 a moving average. As it
    is for this study alone, it does not say what it does to the noise.
    """

    alpha: Any
    beta: Any

    slots: ClassVar[dict[str, float]] = {"filtered": 0.0, "rate": 0.0}
    scalars: ClassVar[dict[str, Any]] = {}

    def begin(self, scalars, step, variance, steady):
        """See `filters.NoFilter.begin`."""
        del step, variance, steady
        return None, None, scalars

    def update(self, slots, gradient, shared):
        """Returns the filtered gradient and the new slots."""
        del shared
        predicted = slots["filtered"] + slots["rate"]
        residual = gradient - predicted
        filtered = predicted + self.alpha * residual
        rate = slots["rate"] + self.beta * residual
        return filtered, {"filtered": filtered, "rate": rate}


def benedict_bordner(alpha):
    """The alpha-beta filter with one gain: beta = alpha^2 / (2 - alpha)."""
    return AlphaBetaFilter(alpha, alpha**2 / (2.0 - alpha))


def kalman_gains(model, drift_stddev, noise_stddev):
    """Returns (alpha, beta) of the steady-state Kalman filter.

    P solves the Riccati equation P = A (P - P H' (H P H' + R)^-1 H P) A' + Q, and the
    gains are P H' / (H P H' + R).
    """
    if model == "CV":
        transition = np.array([[1.0, 1.0], [0.0, 1.0]])
        process = np.diag([0.0, drift_stddev**2])
    else:
        transition, process = np.eye(1), np.full((1, 1), drift_stddev**2)
    seen = np.eye(len(process))[:, :1]  # H'
    noise = np.full((1, 1), noise_stddev**2)
    covariance = scipy.linalg.solve_discrete_are(transition.T, seen, process, noise)
    gains = covariance[:, 0] / (covariance[0, 0] + noise_stddev**2)
    return gains if model == "CV" else np.array([gains[0], 0.0])


def simulate(generator, seeds, dimension):
    """Returns signals and noises: (steps, model, epsilon, drift, seed, coordinate).

    All settings share the random numbers, so that differences are those of settings.
    """
    shape = (_STEPS, 1, 1, 1, seeds, dimension)
    changes = 0.1 * generator.normal(size=shape)
    walk = np.cumsum(changes, axis=0)
    with_velocity = np.zeros(shape)
    with_velocity[1:] = np.cumsum(walk[:-1], axis=0)
    drifts = np.array(_DRIFTS).reshape(-1, 1, 1)
    signal = drifts * np.concatenate([with_velocity, walk], axis=1)
    stddev = 1.0 / np.array(_EPSILONS).reshape(-1, 1, 1, 1)
    noise = stddev * generator.normal(size=shape)
    return signal, noise


def run(filter_, observed):
    """Runs a filter of the library's kind over the first axis."""

    def step(carry, gradient):
        slots, scalars, number, _ = carry
        shared, _, scalars = filter_.begin(scalars, number, 1.0, False)
        filtered, slots = filter_.update(slots, gradient, shared)
        return slots, scalars, number + 1, filtered

    zeros = tf.zeros(observed.shape[1:])
    slots = {name: zeros + first for name, first in filter_.slots.items()}
    scalars = {k: tf.constant(v, tf.float32) for k, v in filter_.scalars.items()}
    start = slots, scalars, tf.constant(1), zeros
    # A graph: step by step, TensorFlow would spend its time on Python.
    return tf.function(lambda g: tf.scan(step, g, start)[-1])(observed).numpy()


def score(filter_, signal, observed):
    """Returns mean squared errors of each run: of all steps, and after the burn-in."""
    error = np.square(run(filter_, observed) - signal).sum(axis=-1)
    return np.stack([error.mean(axis=0), error[_BURN_IN:].mean(axis=0)])


def best_gain(errors):
    """For each setting the gain of the least error after the burn-in, in hindsight.

    Args:
        errors: By gain, what `score` returned.

    Returns:
        The errors with that gain, after the burn-in, and the gains.
    """
    late = np.stack([errors[gain][1] for gain in errors])
    index = late.mean(axis=-1).argmin(axis=0)
    chosen = np.take_along_axis(late, index[None, ..., None], axis=0)[0]
    return chosen, np.array(list(errors))[index]


def print_table_10(average, innovation):
    """Prints the paper's Table 10 beside the same from here, and compares the two.

    Returns:
        In how many rows the number of wins is the paper's; the largest difference of
        an improvement, CV, in points; and the largest relative difference of a ratio of
        errors, RW.
    """
    row = "{:>8} {:>6} | {:>5} {:>5} | {:>9} {:>9} | {:>9} {:>9}"
    print("Innovation filter (omega 0.9) against moving average (kappa 0.1), all steps")
    print(row.format("", "", "wins", "of 7", "best", "%", "mean", "%"))
    print(row.format("epsilon", "model", *["here", "paper"] * 3))
    before = average[0].mean(axis=-1)
    improvement = 100.0 * (before - innovation[0].mean(axis=-1)) / before
    same, points, ratios = 0, [], []
    for (model, epsilon), (wins, best, mean) in _PAPER.items():
        of_row = improvement[_MODELS.index(model), _EPSILONS.index(epsilon)]
        here = int((of_row > 0).sum()), of_row.max(), of_row.mean()
        same += here[0] == wins
        for ours, theirs in ((here[1], best), (here[2], mean)):
            if model == "CV":
                points.append(abs(ours - theirs))
            else:
                ratios.append(abs((100.0 - ours) / (100.0 - theirs) - 1.0))
        texts = [f"{v:.2f}" for v in (here[1], best, here[2], mean)]
        print(row.format(epsilon, model, here[0], wins, *texts))
    return same, max(points), max(ratios)


def print_errors(columns, gains):
    """Prints RMSE after the burn-in, in units of the noise, at epsilon 2."""
    print("\nRMSE of a coordinate after 500 steps, in units of the noise, epsilon 2;")
    print("'best' is the gain in parentheses, in hindsight the best of 0.01 to 1")
    row = "{:>5} {:>6} | " + " ".join(["{:>14}"] * len(columns))
    print(row.format("model", "drift", *columns))
    epsilon = _EPSILONS.index(2.0)
    for i, model in enumerate(_MODELS):
        for j, drift in enumerate(_DRIFTS):
            texts = []
            for name, errors in columns.items():
                mse = errors[i, epsilon, j].mean() / FLAGS.dimension
                text = f"{2.0 * np.sqrt(mse):.3f}"
                if name in gains:
                    text += f" ({gains[name][i, epsilon, j]:g})"
                texts.append(text)
            print(row.format(model, drift, *texts))


def print_win_rates(columns, pairs):
    """Prints in how many runs the error after the burn-in is the smaller one."""
    print("\nRuns with the smaller error after the burn-in, % of 35 settings x seeds")
    row = "{:<48} {:>6} {:>6}"
    print(row.format("", *_MODELS))
    for one, other in pairs:
        wins = columns[one] < columns[other]
        rates = [f"{100.0 * wins[i].mean():.1f}" for i in range(len(_MODELS))]
        print(row.format(f"{one} against {other}", *rates))


def beaten_by(kalman, other):
    """By how many standard errors another filter is the better one, at the most."""
    difference = kalman - other
    error = difference.std(axis=-1, ddof=1) / np.sqrt(difference.shape[-1])
    return (difference.mean(axis=-1) / np.maximum(error, 1e-12)).max()


def print_comparison(same, points, ratio, columns, curves):
    """Prints what of the paper this study reproduces, and what it does not."""
    growth = {
        name: np.sqrt(np.square(curve[-500:]).mean() / np.square(curve[:500]).mean())
        for name, curve in curves.items()
    }
    mean = {name: errors.mean(axis=-1) for name, errors in columns.items()}
    wins, before = (
        (mean[name] < mean["EMA 0.1"])[0, 0].sum() for name in ("tied best", "tied 0.9")
    )
    fair = (mean["tied best"] < mean["EMA best"]).sum(axis=(1, 2))
    left = [filters.InnovationFilter(w).steady_gain for w in _GAINS]
    of_average = filters.EMAFilter(_KAPPA).steady_gain
    row = "  {:<56} {:>7} {:>9}"
    print("\nReproduced (by settings that were fitted to Table 10):")
    print(row.format("", "paper", "here"))
    for text, paper, here in (
        ("Tables 6 and 10: rows with that number of wins", "10", same),
        ("Table 10, CV: largest difference, percentage points", "-", f"{points:.1f}"),
        ("Table 10, RW: largest difference of innov./EMA error", "-", f"{ratio:.1%}"),
        ("Fig. 11: last / first quarter, EMA", "grows", f"{growth['EMA 0.1']:.2f}"),
        ("Fig. 11: innovation filter", "stable", f"{growth['tied 0.9']:.2f}"),
    ):
        print(row.format(text, paper, here))
    print("Not reproduced: Fig. 10 and the settings, which the paper does not state.")
    print("Beyond the paper, after the burn-in:")
    for text, here in (
        ("CV, epsilon 0.5: wins of omega 0.9 over EMA 0.1", f"{before} of 7"),
        ("CV, epsilon 0.5: wins of the best omega over EMA 0.1", f"{wins} of 7"),
        ("CV: settings where the best omega beats the best EMA", f"{fair[0]} of 35"),
        ("RW: the same", f"{fair[1]} of 35"),
        ("Part of the noise variance left, least of all omegas", f"{min(left):.3f}"),
        ("Part of the noise variance left, EMA 0.1", f"{of_average:.3f}"),
    ):
        print(row.format(text, "-", here))
    print(
        "With tied gains A(omega) > 1/2: no omega removes half of the noise variance,\n"
        "so that a smaller one helps little where noise dominates (the paper suggests\n"
        '"conservative gain settings" there). Untied gains do.'
    )


def draw(columns, curves, path):
    """Draws the error over time of one setting, and the errors of all of them."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for name, curve in curves.items():
        axes[0].plot(curve, label=name)
    axes[0].set(xlabel="step", ylabel="error / noise", yscale="log")
    axes[0].set_title("CV, drift 0.05, epsilon 8")
    axes[0].legend()
    epsilons = np.array(_EPSILONS)[:, None]
    ratio = 0.1 * (epsilons * np.array(_DRIFTS)).ravel()
    order = ratio.argsort()
    for i, model in enumerate(_MODELS):
        for name, errors in columns.items():
            rmse = np.sqrt(errors[i].mean(axis=-1) / FLAGS.dimension) * epsilons
            axes[i + 1].loglog(ratio[order], rmse.ravel()[order], ".-", label=name)
        axes[i + 1].set(xlabel="stddev of q / noise", ylabel="RMSE / noise")
        axes[i + 1].set_title(model)
    axes[2].legend()
    figure.savefig(path, dpi=150)
    print(f"\nPlot: {path}")


def main(argv):
    """Simulates, filters, prints and draws."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
    # It takes each filter for a function that is traced again and again.
    tf.get_logger().setLevel("ERROR")
    seeds = 8 if FLAGS.smoke else FLAGS.seeds
    generator = np.random.default_rng(FLAGS.seed)
    signal, noise = simulate(generator, seeds, FLAGS.dimension)
    observed = tf.constant(signal + noise, tf.float32)

    averages = {k: score(filters.EMAFilter(k), signal, observed) for k in _GAINS}
    tied = {w: score(filters.InnovationFilter(w), signal, observed) for w in _GAINS}
    untied = {a: score(benedict_bordner(a), signal, observed) for a in _GAINS}
    gains = np.array(
        [
            [[kalman_gains(m, 0.1 * d, 1.0 / e) for d in _DRIFTS] for e in _EPSILONS]
            for m in _MODELS
        ]
    ).astype("float32")[..., None, None, :]
    kalman = AlphaBetaFilter(gains[..., 0], gains[..., 1])

    same, points, ratio = print_table_10(averages[_KAPPA], tied[_OMEGA])

    chosen = {
        "EMA best": best_gain(averages),
        "tied best": best_gain(tied),
        "untied best": best_gain(untied),
    }
    columns = {
        "EMA 0.1": averages[_KAPPA][1],
        "EMA best": chosen["EMA best"][0],
        "tied 0.9": tied[_OMEGA][1],
        "tied best": chosen["tied best"][0],
        "untied best": chosen["untied best"][0],
        "Kalman": score(kalman, signal, observed)[1],
    }
    print_errors(columns, {name: gain for name, (_, gain) in chosen.items()})
    print_win_rates(
        columns,
        [
            ("tied 0.9", "EMA 0.1"),
            ("tied best", "EMA best"),
            ("untied best", "EMA best"),
            ("untied best", "tied best"),
            ("Kalman", "EMA best"),
            ("Kalman", "tied best"),
            ("Kalman", "untied best"),
        ],
    )

    place = (0, _EPSILONS.index(8.0), _DRIFTS.index(0.05))
    one = observed[(slice(None), *place)]
    alpha, beta = gains[(*place, 0, 0)]
    curves = {
        name: 8.0 * np.sqrt(np.square(run(f, one) - signal[:, 0, 0, 3]).mean((1, 2)))
        for name, f in {
            "EMA 0.1": filters.EMAFilter(_KAPPA),
            "tied 0.9": filters.InnovationFilter(_OMEGA),
            "Kalman": AlphaBetaFilter(float(alpha), float(beta)),
        }.items()
    }
    worst = max(
        beaten_by(columns["Kalman"], errors)
        for name, errors in columns.items()
        if name != "Kalman"
    )
    print_comparison(same, points, ratio, columns, curves)
    comparisons = (len(columns) - 1) * columns["Kalman"][..., 0].size
    print(
        f"\nKalman filter: in {comparisons} comparisons another filter is better by "
        f"{worst:.1f} standard errors at most"
    )
    draw(columns, curves, FLAGS.plot)

    rmse = {name: errors[0, -1].mean(axis=-1) for name, errors in columns.items()}
    if not (rmse["tied 0.9"] < rmse["EMA 0.1"]).all():
        raise SystemExit("At epsilon 8 the moving average beats the innovation filter.")
    if same < 9:
        raise SystemExit(f"Only {same} of 10 rows have the wins of the paper's Table.")
    if ratio > 0.1:
        raise SystemExit(f"Errors are {ratio:.0%} off the paper's Table 10, RW.")
    if worst > 4.0:
        raise SystemExit(f"The Kalman filter is beaten by {worst:.1f} standard errors.")


if __name__ == "__main__":
    app.run(main)

"""Every private optimizer on scikit-learn's handwritten digits, at one epsilon.

Not a comparison of methods (one small data set, a short grid of learning rates, the
best of it chosen on the test rows): a check that each of them learns under its full
noise, and what a step of each costs beside DPSGD's, measured in the same run.

    python benchmarks/methods_on_digits.py --seeds=3
"""

import time
from collections.abc import Sequence

import keras
import numpy as np
from absl import app, flags
from sklearn.datasets import load_digits

import keras_dpopt
from keras_dpopt import optimizers

_METHODS = flags.DEFINE_list("methods", optimizers.__all__, "Which ones.")
_SEEDS = flags.DEFINE_integer("seeds", 1, "Runs for each learning rate.")
_EPOCHS = flags.DEFINE_integer("epochs", 30, "Epochs.")
_EPSILON = flags.DEFINE_float("epsilon", 3.0, "Target epsilon, at delta 1e-4.")

_BATCH, _DELTA, _TEST = 512, 1e-4, 360

# The learning rates that are tried, and arguments without which a method is at a loss.
_TRIED: dict[str, tuple[tuple[float, ...], dict]] = {
    "BAM": ((0.5, 2.0), {}),
    "DOPPLER": ((0.5, 2.0), {}),
    "DPAdam": ((0.003, 0.01), {}),
    "DPAdamBC": ((0.003, 0.01), {"variance_floor": 1e-4}),
    "DPAdamW": ((0.003, 0.01), {}),
    "DPAdamWBC": ((0.003, 0.01), {"variance_floor": 1e-4}),
    "DPBayesByBackprop": ((0.5, 2.0), {}),
    "DPFTRL": ((0.05, 0.2), {}),
    "DPIVON": ((0.3, 1.0), {"hess_init": 0.1}),
    "DPRMSprop": ((0.001, 0.003), {}),
    "DPSAM": ((0.05, 0.2), {}),
    "DPSAT": ((0.05, 0.2), {}),
    "DPSGD": ((0.5, 2.0), {}),
    "DPSGLD": ((5e-4, 2e-3), {"temperature": 0.01}),
    "DiSK": ((0.003, 0.01), {}),
    "FiBeR": ((0.003, 0.01), {"variance_floor": 1e-4}),
    "MFDPFTRL": ((0.05, 0.2), {"bands": 3}),
}


def _noise_multiplier(name: str, train_size: int) -> float:
    """The noise multiplier with which the run costs the target epsilon."""
    calibrate = lambda **sizes: keras_dpopt.noise_multiplier(  # noqa: E731
        target_epsilon=_EPSILON.value, delta=_DELTA, **sizes
    )
    usual = calibrate(train_size=train_size, batch_size=_BATCH, epochs=_EPOCHS.value)
    if name == "MFDPFTRL":
        return calibrate(train_size=1, batch_size=1, epochs=1)
    if name == "DPFTRL":
        # A tree an epoch, of ceil(N/B) steps.
        depth = (-(-train_size // _BATCH)).bit_length()
        once = calibrate(train_size=1, batch_size=1, epochs=_EPOCHS.value)
        return once * depth**0.5
    return usual * 2**0.5 if name == "DPSAM" else usual


class _Timer(keras.callbacks.Callback):
    """Times the steps of all epochs but the first, in which the step is traced."""

    def __init__(self):
        super().__init__()
        self._begun, self._ended, self._steps = 0.0, 0.0, 0

    def on_epoch_end(self, epoch, logs=None):
        del logs
        self._ended = time.perf_counter()
        if epoch == 0:
            self._begun = self._ended
        else:
            self._steps += self.params["steps"]

    def milliseconds(self) -> float:
        return 1e3 * (self._ended - self._begun) / max(1, self._steps)


def _run(name: str, rate: float, own: dict, seed: int, data) -> dict:
    (x, y), test = data
    keras.utils.set_random_seed(seed)
    model = keras_dpopt.DPSequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="tanh"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    optimizer = getattr(keras_dpopt, name)(
        rate,
        l2_norm_clip=1.0,
        noise_multiplier=_noise_multiplier(name, len(x)),
        **own,
    )
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    timer = _Timer()
    model.fit(
        x, y, batch_size=_BATCH, epochs=_EPOCHS.value, verbose=0, callbacks=[timer]
    )
    return {
        "accuracy": model.evaluate(*test, verbose=0, return_dict=True)["accuracy"],
        "epsilon": model.privacy_statement(_DELTA).epsilon,
        "milliseconds": timer.milliseconds(),
    }


def main(argv: Sequence[str]) -> None:
    """Runs the methods and prints a table."""
    del argv
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = (x[order] / 16.0).astype("float32"), y[order]
    data = (x[_TEST:], y[_TEST:]), (x[:_TEST], y[:_TEST])
    print(f"{'method':<18} {'rate':>8} {'accuracy':>16} {'epsilon':>8} {'ms/step':>8}")
    for name in _METHODS.value:
        rates, own = _TRIED[name]
        for rate in rates:
            runs = [_run(name, rate, own, s, data) for s in range(_SEEDS.value)]
            accuracy = np.array([run["accuracy"] for run in runs])
            cost = min(run["milliseconds"] for run in runs)
            print(
                f"{name:<18} {rate:>8g} {accuracy.mean():>8.3f} +- {accuracy.std():.3f}"
                f" {runs[0]['epsilon']:>8.3f} {cost:>8.1f}",
                flush=True,
            )


if __name__ == "__main__":
    app.run(main)

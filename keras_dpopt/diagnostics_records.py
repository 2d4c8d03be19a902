"""Raw gradients and losses of some records, for diagnostics: not private."""

from typing import Any

import numpy as np
import tensorflow as tf

from keras_dpopt import data, keras_compat, losses, preprocessing, prng
from keras_dpopt.diagnostics_private import check_private_model
from keras_dpopt.engines import base
from keras_dpopt.queries import Point


def note(name: str, model: Any) -> None:
    """Lets the privacy statement list that raw data was looked at.

    Args:
        name: Of what has looked.
        model: The private model.
    """
    model.privacy_ledger.ledger.note(
        f"{name} computed numbers from raw gradients. They are not covered: do not "
        "publish them, nor what was chosen by them."
    )


class RawRecords:
    """Some records and a model, for gradients and losses one record at a time.

    Nothing that it returns is private.

    Args:
        name: Of whoever asks, for messages and the note in the ledger.
        model: A compiled private model.
        x: Arrays, as `fit` takes them.
        y: Targets, or `None`.
        sample_weight: Weights, or `None`.
        seed: int, for random layers.
        held_out: Whether the note is left out.

    Attributes:
        weights: Values of the trainable variables.
    """

    def __init__(self, name, model, x, y, sample_weight, seed, held_out):
        check_private_model(name, model)
        if not model.compiled:
            raise ValueError(
                f"{name} needs the loss and the clip of a compiled model. Call "
                "`compile` first."
            )
        # Of a model with a preprocessor, as in a private model around a keras_hub task.
        preprocess = getattr(model, "preprocess_samples", None)
        self._rows = data.single_batch(x, y, sample_weight, None, preprocess)["rows"]
        self._size = preprocessing.number_of_rows(self._rows)
        keras_compat.build_for(
            model,
            tf.nest.map_structure(
                lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), self._rows
            ),
        )
        if not held_out:
            note(name, model)
        self._optimizer = model.optimizer
        values = lambda vs: tuple(tf.convert_to_tensor(v.value) for v in vs)  # noqa: E731
        states = keras_compat.seed_states(model)
        known = {id(state) for state in states}
        other = [v for v in model.non_trainable_variables if id(v) not in known]
        self.weights = values(model.trainable_variables)
        loss = losses.RecordLoss(
            model, other, states, self._optimizer.augmentation_multiplicity
        )
        others = values(other)
        self._evaluate = lambda w, seeds, record: loss(w, others, seeds, record)
        # As the training step does: float16 gradients would underflow.
        layers = keras_compat.flat_layers(model)
        float16 = any(layer.compute_dtype == "float16" for layer in layers)
        self._loss_scale = 1024.0 if float16 else 1.0
        key = prng.key_from_seed(seed, "diagnostics")
        self._seeds = tf.stack(
            [
                prng.per_record_seeds(key, 0, tf.range(self._size), i)
                for i in range(len(states))
            ],
            axis=1,
        )

    def gradients(self) -> dict[str, Any]:
        """Returns the means "raw" and "clipped", and the norms `[n]` as "stacked"."""
        mechanism = self._optimizer.mechanism
        params = mechanism.sample_params(self._optimizer.mechanism_state())
        zeros = [tf.zeros(w.shape, tf.float32) for w in self.weights]
        # A record of several views is clipped as one: the others are zero here.
        padding = zeros * (self._optimizer.query.views - 1)
        problem = base.GradientProblem(
            self._evaluate,
            preprocess=tuple,
            points=(Point(1.0, self.weights),),
            loss_scale=self._loss_scale,
        )

        def one(record, seeds):
            gradient = base.RecordGradient(problem, record, seeds)(self.weights)
            clipped = mechanism.preprocess_record(params, (*gradient, *padding))
            # What an adaptive clip counts comes after the gradient.
            return {
                "raw": gradient,
                "clipped": tf.nest.flatten(clipped)[: len(gradient)],
                "stacked": tf.linalg.global_norm(gradient),
            }

        found = self._sums(one, {"raw": zeros, "clipped": zeros})
        mean = lambda total: total / self._size  # noqa: E731
        return {
            "raw": [mean(total) for total in found["raw"]],
            "clipped": [mean(total) for total in found["clipped"]],
            "stacked": found["stacked"],
        }

    def mean_losses(self, *points) -> list[float]:
        """Returns the mean loss at each of some weights."""

        def one(record, seeds):
            values = [self._evaluate(w, seeds, record).loss for w in points]
            return {"stacked": tf.stack(values)}

        found = self._sums(one, {})["stacked"].numpy()
        return found.astype(np.float64).mean(axis=0).tolist()

    def _sums(self, one, zeros):
        """Runs `one` on each record: sums what is in `zeros`, stacks "stacked"."""

        @tf.function(autograph=False)
        def run(rows, seeds):
            def step(i, sums, stacked):
                row = tf.nest.map_structure(lambda t: t[i], rows)
                found = one(row, seeds[i])
                stacked = stacked.write(i, found.pop("stacked"))
                return i + 1, tf.nest.map_structure(tf.add, sums, found), stacked

            stacked = tf.TensorArray(tf.float32, self._size)
            _, sums, stacked = tf.while_loop(
                lambda i, *_: i < self._size,
                step,
                (0, zeros, stacked),
                parallel_iterations=1,
            )
            return {**sums, "stacked": stacked.stack()}

        return run(self._rows, self._seeds)

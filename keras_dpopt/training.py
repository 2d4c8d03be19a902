"""The private training of a Keras model: compile, fit, train_on_batch, statement.

`PrivateTraining` comes before a Keras model class among the bases: its `train_step`
replaces Keras', and everything else stays Keras' own.
"""

from typing import Any

import tensorflow as tf

from keras_dpopt import (
    argument_names,
    data,
    distribution,
    fit_arguments,
    keras_compat,
    sources,
    statement,
    step_checks,
)
from keras_dpopt.dp_optimizer import check_private_optimizer
from keras_dpopt.engine_report import EngineReport
from keras_dpopt.fit_run import FitRun
from keras_dpopt.model_ledger import ModelLedger
from keras_dpopt.private_step import PrivateStep
from keras_dpopt.saving import PrivateSaving
from keras_dpopt.training_hooks import TrainingHooks


class PrivateTraining(EngineReport, TrainingHooks, PrivateSaving):
    """Makes a Keras model train with differential privacy, and in no other way."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.privacy_ledger = ModelLedger(self)
        self.private_step = None
        self.fit_run = None
        self._compiled_optimizer = None
        self._own_train_function = None

    # --- compile ---------------------------------------------------------------------

    def compile(
        self,
        optimizer: Any = None,
        loss=None,
        loss_weights=None,
        metrics=None,
        weighted_metrics=None,
        run_eagerly=False,
        steps_per_execution=1,
        jit_compile="auto",
        auto_scale_loss=False,
    ):
        """Configures the model for private training.

        Args:
            optimizer: A private optimizer of `keras_dpopt`; there is no default.
            loss: As in Keras, and so are the others that are not explained here.
            loss_weights: See `loss`.
            metrics: Their values on training data are not private.
            weighted_metrics: See `metrics`.
            run_eagerly: See `loss`.
            steps_per_execution: See `loss`.
            jit_compile: `True` lets XLA compile the gradient of one microbatch. "auto"
                does not: on a CPU, XLA makes per-example convolutions much slower.
            auto_scale_loss: Ignored: the training step scales float16 losses itself,
                and undoes it before the clip.

        Raises:
            ValueError: if `optimizer` is not a private optimizer, or `jit_compile` is
                asked of one that cannot.
        """
        del auto_scale_loss
        check_private_optimizer(optimizer, jit_compile is True)
        self.privacy_ledger.close_phase()
        super().compile(
            optimizer=optimizer,
            loss=loss,
            loss_weights=loss_weights,
            metrics=metrics,
            weighted_metrics=weighted_metrics,
            run_eagerly=run_eagerly,
            steps_per_execution=steps_per_execution,
            jit_compile=jit_compile,
            auto_scale_loss=False,
        )
        self._compiled_optimizer = optimizer
        self._own_train_function = self.train_function
        self.jit_microbatch = jit_compile is True and not run_eagerly
        self.private_step = None

    # --- fit -------------------------------------------------------------------------

    def fit(
        self,
        x=None,
        y=None,
        batch_size=None,
        epochs=1,
        verbose: int | str = "auto",
        callbacks=None,
        validation_split=0.0,
        validation_data=None,
        shuffle=True,
        class_weight=None,
        sample_weight=None,
        initial_epoch=0,
        steps_per_epoch=None,
        validation_steps=None,
        validation_batch_size=None,
        validation_freq=1,
        *,
        sampler=None,
        once_per_epoch=False,
        assume=None,
        train_size=None,
        acknowledge_training_metrics=False,
    ):
        """Trains the model privately; the arguments up to `validation_freq` are Keras'.

        With arrays, each step draws a Poisson batch (every row is in it independently
        with probability batch_size / N), or the batch that the optimizer is accounted
        for. An epoch is ceil(N / batch_size) steps.

        Args:
            x: Arrays; or a data set that the caller batched (`tf.data.Dataset`,
                `PyDataset`, generator).
            y: Targets, with arrays.
            batch_size: Expected size of a batch, with arrays; not needed if the
                optimizer has an `expected_batch_size`.
            epochs: As in Keras.
            verbose: As in Keras.
            callbacks: As in Keras; with `keras_dpopt.PrivacyBudget` among them the
                training ends before the budget is exceeded.
            validation_split: As in Keras. These rows are not protected, nor are those
                of `validation_data`.
            validation_data: As in Keras.
            shuffle: Must be `True` with arrays, because batches are drawn at random;
                as in Keras with a `PyDataset`.
            class_weight: As in Keras; multiplies a record's loss before the clip.
            sample_weight: See `class_weight`.
            initial_epoch: As in Keras, as are the next four.
            steps_per_epoch: See `initial_epoch`.
            validation_steps: See `initial_epoch`.
            validation_batch_size: See `initial_epoch`.
            validation_freq: See `initial_epoch`.
            sampler: `PoissonSampler()` or `FixedSizeSampler()`, with arrays.
            once_per_epoch: With a data set: no record is in two batches of an epoch.
            assume: With a data set: "poisson" is the caller's word that its batches are
                Poisson samples of `train_size` records.
            train_size: With a data set: number N of its records.
            acknowledge_training_metrics: Allows callbacks that decide on a metric of
                the training data; the statement lists them.

        Returns:
            Keras' `History`.

        Raises:
            ValueError: if an argument would void the guarantee.
            RuntimeError: if the privacy budget is spent.
        """
        self._check_ready()
        notes = fit_arguments.check_training_metric_callbacks(
            callbacks, acknowledge_training_metrics, x, validation_data
        )
        optimizer, preprocess = self.optimizer, self._preprocess()
        if keras_compat.is_data_set(x):
            source = sources.given(
                optimizer,
                preprocess,
                x,
                class_weight=class_weight,
                shuffle=shuffle,
                steps_per_epoch=steps_per_epoch,
                epochs=max(0, epochs - initial_epoch),
                steps_per_execution=self.steps_per_execution,
                once_per_epoch=once_per_epoch,
                assume=assume,
                train_size=train_size,
                refused={
                    "y": y,
                    "sample_weight": sample_weight,
                    "batch_size": batch_size,
                    "validation_split": validation_split,
                    "sampler": sampler,
                },
            )
        else:
            source = sources.drawn(
                optimizer,
                preprocess,
                (x, y, sample_weight),
                batch_size=batch_size,
                class_weight=class_weight,
                held_out=0.0 if validation_data is not None else validation_split,
                sampler=sampler,
                steps_per_epoch=steps_per_epoch,
                epochs=max(0, epochs - initial_epoch),
                refused={
                    "shuffle": not shuffle,
                    "once_per_epoch": once_per_epoch,
                    "assume": assume,
                    "train_size": train_size,
                },
            )
            steps_per_epoch = None  # the data set has as many batches an epoch
        if validation_data is None:
            validation_data = source.validation_data
        size = self._prepare(source.batches.element_spec["rows"], source.some_rows)
        if preprocess is not None and validation_data is not None:
            validation_data = data.preprocessed_batches(
                validation_data, validation_batch_size or 32, preprocess
            )
            validation_batch_size = batch_size = None
        for note in [*notes, *source.notes]:
            self.privacy_ledger.ledger.note(note)
        self.privacy_ledger.begin_phase(source.phase, optimizer)
        self.fit_run = FitRun(source)
        try:
            return super().fit(
                distribution.replica_batches(self, source.batches, size),
                epochs=epochs,
                verbose=verbose,
                callbacks=self.fit_run.before(callbacks),
                validation_data=validation_data,
                shuffle=False,
                initial_epoch=initial_epoch,
                steps_per_epoch=steps_per_epoch,
                validation_steps=validation_steps,
                validation_batch_size=validation_batch_size or batch_size,
                validation_freq=validation_freq,
            )
        finally:
            self.fit_run = None
            optimizer.drop_parts()
            self._initial_epoch = None  # BackupAndRestore may have set it
            self.privacy_ledger.close_phase()

    def train_on_batch(
        self, x, y=None, sample_weight=None, class_weight=None, return_dict=False
    ):
        """Makes one private step on a batch that the caller chose.

        Nothing is assumed of how it was chosen: the ledger records a step in which
        every record may be. Arguments and result are Keras'.

        Raises:
            ValueError: if the optimizer has no `expected_batch_size`.
            RuntimeError: if the privacy budget is spent.
        """
        self._check_ready()
        optimizer, ledger = self.optimizer, self.privacy_ledger
        optimizer.resolve_sizes(None, None)
        batch = data.single_batch(x, y, sample_weight, class_weight, self._preprocess())
        spec = tf.nest.map_structure(tf.TensorSpec.from_tensor, batch["rows"])
        size = self._prepare(
            tf.nest.map_structure(
                lambda s: tf.TensorSpec([None, *s.shape[1:]], s.dtype), spec
            ),
            lambda: batch["rows"],
        )
        ledger.begin_phase(sources.single(optimizer), optimizer)
        try:
            ledger.limit_steps()
            batch["step"] = tf.constant(optimizer.releases(), tf.int64)
            batch["part"] = optimizer.parts_come
            self.make_train_function()
            self.reset_metrics()
            logs = self.train_function(distribution.replica_iterator(self, batch, size))
        finally:
            ledger.close_phase()
        logs = keras_compat.pythonify_logs(logs)
        return logs if return_dict else self._flatten_metrics_in_order(logs)

    # --- Keras' hooks ----------------------------------------------------------------

    def train_step(self, data):
        """Does one private step (see `private_step.py`); Keras calls it."""
        check_private_optimizer(self.optimizer)
        if not self.private_step or not (isinstance(data, dict) and "count" in data):
            raise RuntimeError(
                "train_step of a private model takes batches that `fit` has prepared. "
                "Call `fit` or `train_on_batch`."
            )
        self.private_step(data)
        return distribution.logs(self.get_metrics_result)

    def _preprocess(self):
        """The preprocessing function of a model that brings one, or `None`."""
        return None

    def _prepare(self, row_specs, some_rows) -> int:
        """Builds what is not built yet; returns the microbatch size.

        Args:
            row_specs: Specs of the rows, with an axis of records.
            some_rows: Returns a few of the rows, or `None`.

        Raises:
            ValueError: if the targets are missing, or the trainable variables changed
                since the optimizer was built.
            UnsupportedModelError: if a layer writes batch data into its state.
        """
        fit_arguments.check_targets(self, row_specs)
        with self.distribute_strategy.scope():
            keras_compat.build_for(self, row_specs)
            fit_arguments.check_variables(self)
            if self.private_step is None:
                self.private_step = PrivateStep.chosen(self, row_specs, some_rows())
        return self.private_step.microbatch.size()

    def _check_ready(self):
        # Before anything is planned: the run that is on follows its own plan.
        self.privacy_ledger.refuse_if_open()
        fit_arguments.check_ready(self, self._compiled_optimizer)
        step_checks.refuse_own_step(self, PrivateTraining, self._own_train_function)

    # --- privacy ---------------------------------------------------------------------

    @argument_names.explained()
    def privacy_statement(self, delta: float, accountant: str = "rdp"):
        """Returns the `PrivacyStatement` of all that has been trained so far.

        Args:
            delta: In (0, 1), well below 1/N.
            accountant: "rdp" or "pld".

        Returns:
            A `PrivacyStatement`: print it, read its attributes, or `to_json()`.
        """
        return statement.privacy_statement(
            self.privacy_ledger.sync(), delta, accountant
        )

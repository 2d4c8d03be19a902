"""Callbacks of private training."""

from typing import Any

import keras

from keras_dpopt import argument_names, composition, validation
from keras_dpopt.training import PrivateTraining


class PrivacyBudget(keras.callbacks.Callback):
    """Shows the epsilon spent, and lets no step exceed a target.

    It prints a line when it ends the training before the last step.

    The cap is a step limit that the optimizer holds: a step beyond it changes nothing,
    inside `steps_per_execution` too. This callback only sets it, from the model's whole
    ledger, and ends the training when it is reached. Later fits of the model keep to
    the budget as well, with or without the callback.

    Budgets at several deltas or by both accountants hold together: the one that is
    reached first ends the training. A budget for the same delta and accountant takes
    the place of an earlier one; a larger target is noted in the privacy statement. Of
    the targets of a model and of a file that is loaded into it the smaller one holds;
    to raise the target of a run that a backup resumes, list this callback after that of
    the backup.

    The epsilon is in the logs as "epsilon"; where the model has several budgets, as
    "epsilon_at_1e-05" with the delta, and "_pld" after it for that accountant.

    Args:
        target_epsilon: Positive: the epsilon that the model may reach in all.
        delta: In (0, 1), well below 1/N.
        accountant: "rdp" or "pld". With "pld", which takes seconds, epsilon is shown at
            the ends of epochs only.
        verbose: 0 prints nothing when the budget ends the training; 1 prints a line.

    Raises:
        RuntimeError: at the first epoch of `fit`, if a budget allows no step of it.
        TypeError: if the model is not private.

    Privacy:
        Steps are counted, not data looked at: the callback releases nothing.

    Example:
        >>> PrivacyBudget(target_epsilon=3.0, delta=1e-5).target_epsilon
        3.0
    """

    @argument_names.explained(name="PrivacyBudget")
    def __init__(
        self,
        target_epsilon: float,
        delta: float,
        accountant: str = "rdp",
        verbose: int = 1,
    ):
        super().__init__()
        self.target_epsilon = validation.check_positive(
            "target_epsilon", target_epsilon
        )
        self.delta = validation.check_delta(delta)
        self.accountant = composition.check_accountant(accountant)
        self.verbose = verbose

    def on_train_begin(self, logs=None):
        """Sets the budget."""
        del logs
        if not isinstance(self.model, PrivateTraining):
            raise TypeError(
                "PrivacyBudget needs a private model, got "
                f"{type(self.model).__name__}. Use keras_dpopt.DPModel, DPSequential "
                "or make_private(model)."
            )
        self.model.privacy_ledger.set_budget(
            self.target_epsilon, self.delta, self.accountant
        )

    def on_train_batch_end(self, batch, logs=None):
        """Adds the epsilon so far to the progress bar."""
        del batch
        if self.accountant == "rdp":
            self._show(logs)

    def on_epoch_end(self, epoch, logs=None):
        """Adds the epsilon so far to the progress bar and `History`."""
        del epoch
        self._show(logs)

    def on_train_end(self, logs=None):
        """Says so if this budget has ended the training."""
        del logs
        model: Any = self.model
        if not self.verbose or not model.fit_run.ended_by_budget():
            return
        spent = model.privacy_ledger.sync().spent_budget()
        if spent is None or spent.key != (self.delta, self.accountant):
            return
        planned = model.fit_run.planned_steps
        of_planned = "" if planned is None else f" of {planned}"
        epsilon = model.privacy_ledger.ledger.epsilon(self.delta, self.accountant)
        print(
            f"PrivacyBudget: budget reached after {model.fit_run.steps_made()}"
            f"{of_planned} steps: epsilon {epsilon:.4g} of {spent.target_epsilon:g} at "
            f"delta {self.delta:g}."
        )

    def _show(self, logs: dict[str, Any] | None):
        if logs is not None:
            ledger: Any = self.model.privacy_ledger.sync()  # type: ignore[union-attr]
            name = "epsilon"
            if len(ledger.budgets) > 1:
                name += f"_at_{self.delta:g}"
                name += "_pld" if self.accountant == "pld" else ""
            logs[name] = ledger.epsilon(self.delta, self.accountant)

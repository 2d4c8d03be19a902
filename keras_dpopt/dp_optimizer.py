"""The base class of all private optimizers.

It alone owns variables. A subclass fills four slots (query, mechanism, filter, rule)
with parts that are pure functions.
"""

import inspect
from typing import Any

import keras

from keras_dpopt import (
    argument_names,
    arguments,
    keras_compat,
    mechanisms,
    planned_fit,
    post_processing,
    validation,
)
from keras_dpopt.filters import NoFilter
from keras_dpopt.keys import ForkOnRestore, SecretKeys
from keras_dpopt.optimizer_saving import OptimizerSaving
from keras_dpopt.optimizer_state import OptimizerState, shared_variable
from keras_dpopt.partial_sum import PartialSum
from keras_dpopt.queries import GradientQuery
from keras_dpopt.release_count import ReleaseCount
from keras_dpopt.step_interface import StepInterface
from keras_dpopt.types import PrivatizedGradient

# Filled by the classes: no arguments of the users of most of them.
_SLOTS = {"query", "mechanism", "filter", "rule", "noise_correction"}

_CORRECTIONS = ("filtered", "exact", "unfiltered", None)


class DPOptimizer(
    StepInterface, OptimizerSaving, ReleaseCount, keras.optimizers.Optimizer
):
    """Base class of the private optimizers; use a subclass.

    A private optimizer works with a `keras_dpopt.DPModel` alone, whose training step
    hands it clipped and noised gradients; `apply` refuses every other gradient.

    Args:
        learning_rate: A float, a `keras.optimizers.schedules.LearningRateSchedule` or a
            callable.
        query: Where the gradient is taken (`queries.py`).
        mechanism: What clips and noises (`mechanisms.py`); `None` makes the Gaussian
            one, or that of `dp_sum_query`, from the arguments below.
        filter: The temporal filter (`filters.py`).
        rule: The update rule (`update_rules.py`).
        noise_correction: Which noise variance the rule takes out of its second moment:
            "filtered" (after the filter, as if it had always run), "exact" (after the
            filter, which starts with the first step), "unfiltered" (before the filter)
            or `None` (zero). All follow a noise that changes.
        l2_norm_clip: Clipping norm C > 0 of one record's gradient, all trainable
            variables jointly.
        noise_multiplier: sigma >= 0, the standard deviation of the noise on the sum of
            clipped gradients, in units of C. 0 is not private.
        clipping: "flat", "automatic", "per_layer", "adaptive" or one of the classes of
            `clipping_styles.py`: how C bounds a record.
        rescale_to_unit_norm: Whether the released gradient is divided by C, so that the
            learning rate does not depend on it (De et al., 2022).
        expected_batch_size: Positive int B, the constant that the noised sum is divided
            by. `None` takes `batch_size` of `fit`.
        microbatch_size: Positive int, how many records are held in memory at a time.
            It never changes the result. `None` chooses one.
        logical_batch_steps: Positive int k: a logical batch comes as k physical ones,
            each a batch to Keras. Their clipped sums are added up, and noise and
            update come once, with the last one; B, the ledger and the learning rate
            schedule are of logical batches. No record may be in two of the k.
        gradient_engine: "auto", "bookkeeping", "vectorized" or "loop"; see
            `explain_engine` of the model.
        augmentation_multiplicity: Positive int K: each record is evaluated K times,
            with the model's random layers drawing anew, and its K gradients are
            averaged before the one clip (De et al., 2022).
        dp_sum_query: A TF Privacy `SumAggregationDPQuery` in place of `l2_norm_clip`
            and `noise_multiplier`.
        seed: int for a repeatable run, which is not private against whoever knows the
            seed, and whose noise repeats in every run with that seed. Never saved.
        weight_decay: Decoupled weight decay, as in Keras.
        use_ema: As in Keras, with `ema_momentum` and `ema_overwrite_frequency`.
        ema_momentum: As in Keras.
        ema_warmup: Whether the average of update t has momentum
            min(ema_momentum, (1+t)/(10+t)), t from 0 on.
        ema_overwrite_frequency: As in Keras.
        name: Name of the optimizer.

    Raises:
        TypeError: on an argument of another library, with our name for it.
        ValueError: on a value out of range, or a Keras argument that would act after
            the noise.
    """

    def __init__(
        self,
        learning_rate,
        *,
        query=None,
        mechanism=None,
        filter=None,
        rule,
        noise_correction=None,
        l2_norm_clip=None,
        noise_multiplier=None,
        clipping="flat",
        rescale_to_unit_norm=False,
        expected_batch_size=None,
        microbatch_size=None,
        logical_batch_steps=1,
        gradient_engine="auto",
        augmentation_multiplicity=1,
        dp_sum_query=None,
        seed=None,
        weight_decay=None,
        use_ema=False,
        ema_momentum=0.99,
        ema_warmup=False,
        ema_overwrite_frequency=None,
        name=None,
        **unknown,
    ):
        self._check_names(unknown)
        arguments.check_choice("noise_correction", noise_correction, _CORRECTIONS)
        super().__init__(
            learning_rate=arguments.check_learning_rate(learning_rate),
            weight_decay=arguments.check_weight_decay(weight_decay),
            use_ema=use_ema,
            ema_momentum=ema_momentum,
            ema_overwrite_frequency=ema_overwrite_frequency,
            name=name,
        )
        self.query: Any = query or GradientQuery()
        if mechanism is None:
            mechanism = mechanisms.make(
                l2_norm_clip,
                noise_multiplier,
                dp_sum_query,
                clipping,
                rescale_to_unit_norm,
            )
        self.mechanism: Any = mechanism
        self.filter: Any = filter or NoFilter()
        self.rule = rule
        self.noise_correction = noise_correction
        self.augmentation_multiplicity = validation.check_positive_integer(
            "augmentation_multiplicity", augmentation_multiplicity
        )
        self.ema_warmup = arguments.check_flag("ema_warmup", ema_warmup)
        self.microbatch_size = arguments.check_optional_size(
            "microbatch_size", microbatch_size
        )
        self.logical_batch_steps = validation.check_positive_integer(
            "logical_batch_steps", logical_batch_steps
        )
        if self.logical_batch_steps > 1 and self.query.stages > 1:
            raise ValueError(
                f"{type(self).__name__} goes over each batch more than once, which "
                "logical_batch_steps cannot: its parts are gone. Leave it out, and "
                "bound the memory with `microbatch_size`."
            )
        self.gradient_engine = arguments.check_engine_name(gradient_engine)
        self._initial_batch_size = arguments.check_optional_size(
            "expected_batch_size", expected_batch_size
        )
        self.keys = SecretKeys(arguments.check_seed(seed))
        self._fork_on_restore = ForkOnRestore(self.keys)
        self.batch_size_variable = shared_variable(
            self, "expected_batch_size", self._initial_batch_size or 0, "int64"
        )
        self._train_size: Any = None
        if self.query.uses_train_size or rule.uses_train_size:
            self._train_size = shared_variable(self, "train_size", 0, "int64")
        self._make_release_count()
        self._state: Any = None  # an OptimizerState, once built

    def _check_names(self, given: dict[str, Any]) -> None:
        """Raises on arguments that the class does not know.

        A class that makes its mechanism itself calls it first, or a misspelled
        `noise_multiplier` would pass for a missing one.
        """
        known = set(_names(DPOptimizer)) - _SLOTS | set(_names(type(self)))
        unknown = {name: v for name, v in given.items() if name not in known}
        arguments.check_unknown_arguments(type(self).__name__, unknown, sorted(known))

    # --- accounting ------------------------------------------------------------------

    @argument_names.explained()
    def planned_epsilon(
        self,
        *,
        delta: float,
        train_size: int,
        epochs: int,
        batch_size: int | None = None,
        sampler: Any = None,
        accountant: str = "rdp",
    ) -> float:
        """Returns what a fit on arrays would cost with this optimizer.

        It is what `privacy_statement` says after that fit of an untrained model,
        whatever the optimizer: one or two releases a step, noise that follows the
        learning rate, or a run that is one release. Nothing is changed.

        Args:
            delta: The delta of the guarantee, in (0, 1); well below 1/N.
            train_size: N, the number of training records, at least 1.
            epochs: Of the fit, at least 1.
            batch_size: That of the fit, 1 to N; `None` takes `expected_batch_size`.
            sampler: That of the fit, `FixedSizeSampler()` say; or `None`.
            accountant: "rdp" or "pld".

        Returns:
            Epsilon, at least 0; infinity without noise.

        Raises:
            ValueError: as `fit` with these arguments.
        """
        size = arguments.resolve_batch_size(self.expected_batch_size, batch_size)
        return planned_fit.epsilon(
            self,
            delta=delta,
            train_size=train_size,
            batch_size=size,
            epochs=epochs,
            sampler=sampler,
            accountant=accountant,
        )

    # --- Keras' interface ------------------------------------------------------------

    def build(self, variables):
        """Makes the slots of the parts for each variable.

        Args:
            variables: The trainable variables of the model.
        """
        if self.built:
            return
        variables = list(variables)
        super().build(variables)
        slots = {**dict.fromkeys(self.query.slots, 0.0), **self.filter.slots}
        self.mechanism = self.mechanism.built_for(
            _layers(variables) * self.query.views,
            [v.shape for v in variables] * self.query.views,
        )
        partial_sum = None
        if self.logical_batch_steps > 1:
            zero = self.mechanism.zero_sum(self.query.record_specs(variables))
            partial_sum = PartialSum(self.logical_batch_steps, zero)
        self._state = OptimizerState.create(
            self,
            variables,
            {**slots, **self.rule.slots},
            {**self.filter.scalars, **self.rule.scalars},
            self.mechanism.initial_state(),
            self.mechanism.state_is_secret,
            partial_sum,
        )

    def apply(
        self, grads, trainable_variables=None, regularization=None, step_state=None
    ):
        """Applies a privatized gradient.

        Args:
            grads: `PrivatizedGradient`, in the order of the variables that the
                optimizer was built for.
            trainable_variables: Those variables, or `None`.
            regularization: Gradients of the weight regularizers, which depend on no
                data, in the same order; or `None`.
            step_state: The `StepState` that the query got, or `None` for one as it is
                before the next release.

        Raises:
            TypeError: if `grads` is anything else than a `PrivatizedGradient`.
        """
        if not isinstance(grads, PrivatizedGradient):
            raise TypeError(
                f"{type(self).__name__} got gradients that were not made by the "
                "private training step, so they are neither clipped nor noised. Train "
                "with `keras_dpopt.DPModel`, `DPSequential` or "
                "`keras_dpopt.make_private(model)`."
            )
        variables = keras_compat.optimizer_variables_of(self)
        if trainable_variables is not None and [id(v) for v in trainable_variables] != [
            id(v) for v in variables
        ]:
            raise ValueError(
                "The model's trainable variables are not those that the optimizer was "
                "built for. Compile the model again, with a new optimizer."
            )
        with keras.name_scope(self.name):
            if step_state is None:
                step_state = self.step_state(
                    [v.value for v in variables], self.release_count.value
                )
            post_processing.update(
                self, self._state, variables, grads, regularization, step_state
            )
            keras_compat.update_moving_average(self, self.ema_warmup)
            self.iterations.assign_add(1)

    def update_step(self, gradient, variable, learning_rate):
        """Refuses: the parts make the update, from a privatized gradient."""
        raise TypeError(
            f"{type(self).__name__}.update_step takes no raw gradients. Train with "
            "`keras_dpopt.DPModel`."
        )


def _names(cls: type) -> list[str]:
    """Names of the arguments of a class."""
    _, *parameters = inspect.signature(cls.__init__).parameters.values()
    return [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]


def _layers(variables) -> list[int]:
    """For each variable, the number of its layer."""
    names = [v.path.rpartition("/")[0] for v in variables]
    numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return [numbers[name] for name in names]


def check_private_optimizer(optimizer: Any, jit_compile: bool = False) -> None:
    """Raises if a private model could not train privately with this optimizer."""
    example = "`keras_dpopt.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.1)`"
    if optimizer is None:
        raise ValueError(
            "No optimizer was given, and a private model has no default one. Compile "
            f"with `optimizer=`, say, {example}."
        )
    if isinstance(optimizer, DPOptimizer):
        if jit_compile and not optimizer.mechanism.supports_jit:
            raise ValueError(
                "A dp_sum_query draws its own noise and cannot run under XLA. Leave "
                "jit_compile out, or give l2_norm_clip and noise_multiplier."
            )
        return
    name = optimizer if isinstance(optimizer, str) else type(optimizer).__name__
    raise ValueError(
        f"A private model trains with a private optimizer only, got {name!r}, which "
        f"neither clips nor noises. Compile with, say, {example}."
    )

"""The base class of all private optimizers.

It alone owns variables. A subclass fills four slots (query, mechanism, filter, rule)
with parts that are pure functions.
"""

import warnings
from typing import Any

import keras
import tensorflow as tf

from keras_dpopt import arguments, digest, keras_compat, mechanisms, post_processing
from keras_dpopt.filters import NoFilter
from keras_dpopt.keys import ForkOnRestore, SecretKeys
from keras_dpopt.optimizer_state import OptimizerState, scalar_variable
from keras_dpopt.queries import GradientQuery
from keras_dpopt.release_count import ReleaseCount
from keras_dpopt.types import PrivatizedGradient

_COUNT = "release_count"
_CORRECTIONS = ("filtered", "exact", "unfiltered", None)


class DPOptimizer(ReleaseCount, keras.optimizers.Optimizer):
    """Base class of the private optimizers; use a subclass.

    A private optimizer works with a `keras_dpopt.DPModel` alone, whose training step
    hands it clipped and noised gradients; `apply` refuses every other gradient.

    Args:
        learning_rate: A float, a `keras.optimizers.schedules.LearningRateSchedule` or a
            callable.
        query: Where the gradient is taken (`queries.py`).
        filter: The temporal filter (`filters.py`).
        rule: The update rule (`update_rules.py`).
        noise_correction: Which noise variance the rule takes out of its second moment:
            "filtered" (after the filter, steady state), "exact" (after the filter, at
            this time), "unfiltered" (before the filter) or `None` (zero).
        l2_norm_clip: Clipping norm C > 0 of one record's gradient, all trainable
            variables jointly.
        noise_multiplier: sigma >= 0, the standard deviation of the noise on the sum of
            clipped gradients, in units of C. 0 is not private.
        expected_batch_size: Positive int B, the constant that the noised sum is divided
            by. `None` takes `batch_size` of `fit`.
        microbatch_size: Positive int, how many records are held in memory at a time.
            It never changes the result. `None` chooses one.
        gradient_engine: "auto", "vectorized" or "loop".
        dp_sum_query: A TF Privacy `SumAggregationDPQuery` in place of `l2_norm_clip`
            and `noise_multiplier`.
        seed: int for a repeatable run, which is not private against whoever knows the
            seed, and whose noise repeats in every run with that seed. Never saved.
        weight_decay: Decoupled weight decay, as in Keras.
        use_ema: As in Keras, with `ema_momentum` and `ema_overwrite_frequency`.
        ema_momentum: As in Keras.
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
        filter=None,
        rule,
        noise_correction=None,
        l2_norm_clip=None,
        noise_multiplier=None,
        expected_batch_size=None,
        microbatch_size=None,
        gradient_engine="auto",
        dp_sum_query=None,
        seed=None,
        weight_decay=None,
        use_ema=False,
        ema_momentum=0.99,
        ema_overwrite_frequency=None,
        name=None,
        **unknown,
    ):
        arguments.check_unknown_arguments(type(self).__name__, unknown)
        if noise_correction not in _CORRECTIONS:
            raise ValueError(
                f"noise_correction={noise_correction!r} is unknown. Use one of "
                f"{', '.join(map(repr, _CORRECTIONS))}."
            )
        super().__init__(
            learning_rate=arguments.check_learning_rate(learning_rate),
            weight_decay=arguments.check_weight_decay(weight_decay),
            use_ema=use_ema,
            ema_momentum=ema_momentum,
            ema_overwrite_frequency=ema_overwrite_frequency,
            name=name,
        )
        self.query: Any = query or GradientQuery()
        self.mechanism = mechanisms.make(l2_norm_clip, noise_multiplier, dp_sum_query)
        self.filter: Any = filter or NoFilter()
        self.rule = rule
        self.noise_correction = noise_correction
        self.l2_norm_clip = l2_norm_clip
        self.noise_multiplier = noise_multiplier
        self.microbatch_size = arguments.check_optional_size(
            "microbatch_size", microbatch_size
        )
        self.gradient_engine = arguments.check_engine_name(gradient_engine)
        self._initial_batch_size = arguments.check_optional_size(
            "expected_batch_size", expected_batch_size
        )
        self.keys = SecretKeys(arguments.check_seed(seed))
        self._fork_on_restore = ForkOnRestore(self.keys)
        self._expected_batch_size = scalar_variable(
            self, "expected_batch_size", self._initial_batch_size or 0, "int64"
        )
        self._make_release_count()
        self._state: Any = None  # an OptimizerState, once built

    # --- what the training step asks -------------------------------------------------

    @property
    def expected_batch_size(self) -> int | None:
        """The constant divisor B, or `None` while nothing has set it."""
        return int(self._expected_batch_size.numpy()) or None

    def resolve_batch_size(self, batch_size: int | None) -> int:
        """Fixes the divisor B to `batch_size`, or to what the constructor got.

        Raises:
            ValueError: if neither is there, or both and they differ.
        """
        resolved = arguments.resolve_batch_size(self.expected_batch_size, batch_size)
        self._expected_batch_size.assign(resolved)
        return resolved

    def noise_multipliers(self) -> tuple[float, ...]:
        """Returns the noise multipliers of one release, for the ledger."""
        state = self.mechanism_state() if self.built else self.mechanism.initial_state()
        return self.mechanism.noise_multipliers(state)

    def points(self, weights):
        """Returns the query's evaluation points at these weights."""
        last_update = None
        if self.query.uses_last_update:
            # d is the change made by the last update. If anything else has assigned
            # the weights since, there was no such change at these weights.
            same = tf.equal(
                digest.weights_digest(weights), self._state.weights_digest.value
            )
            last_update = [
                tf.where(same, slots["last_update"].value, 0.0)
                for slots in self._state.per_variable
            ]
        return self.query.points(weights, last_update)

    def mechanism_state(self):
        """Returns the mechanism's state as tensors."""
        return tf.nest.map_structure(
            lambda v: tf.convert_to_tensor(v.value), self._state.mechanism
        )

    def release(self, clipped_sum) -> PrivatizedGradient:
        """Lets the mechanism noise a clipped sum; counts the release first."""
        number = tf.identity(self.release_count.value)
        with tf.control_dependencies([number]):
            counted = self.release_count.value.assign_add(1)
        # The count comes before the noise and before any weight: a step that is cut
        # short is a step that counts.
        with tf.control_dependencies([counted]):
            gradient, new_state = self.mechanism.release(
                clipped_sum,
                self.mechanism_state(),
                self.keys.noise,
                number,
                tf.cast(self._expected_batch_size.value, tf.float32),
            )
        tf.nest.map_structure(
            lambda v, new: v.assign(new), self._state.mechanism, new_state
        )
        return gradient

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
        names = (*self.filter.slots, *self.rule.slots)
        if self.query.uses_last_update:
            names += ("last_update",)
        self._state = OptimizerState.create(
            self,
            variables,
            names,
            (*self.filter.noise_slots, *self.rule.scalar_slots),
            self.mechanism.initial_state(),
        )

    def apply(self, grads, trainable_variables=None, regularization=None):
        """Applies a privatized gradient.

        Args:
            grads: `PrivatizedGradient`, in the order of the variables that the
                optimizer was built for.
            trainable_variables: Those variables, or `None`.
            regularization: Gradients of the weight regularizers, which depend on no
                data, in the same order; or `None`.

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
            post_processing.update(self, self._state, variables, grads, regularization)
            keras_compat.update_moving_average(self)
            self._iterations.assign_add(1)

    def update_step(self, gradient, variable, learning_rate):
        """Refuses: the parts make the update, from a privatized gradient."""
        raise TypeError(
            f"{type(self).__name__}.update_step takes no raw gradients. Train with "
            "`keras_dpopt.DPModel`."
        )

    # --- saving ----------------------------------------------------------------------

    def named_variables(self) -> dict[str, Any]:
        """Returns all that is saved, by names that do not depend on layer names."""
        named = {
            "iterations": self._iterations,
            "expected_batch_size": self._expected_batch_size,
        }
        if isinstance(self._learning_rate, keras.Variable):
            named["learning_rate"] = self._learning_rate
        if self._state is not None:
            named.update(self._state.named())
        if self.built and self.use_ema:
            for i, v in enumerate(self._model_variables_moving_average):
                named[f"average.{i}"] = v
        return named

    def save_own_variables(self, store):
        """Saves the state and the release count, without the secret keys."""
        for name, variable in self.named_variables().items():
            store[name] = variable.numpy()
        store[_COUNT] = self.release_count.numpy()

    def load_own_variables(self, store):
        """Loads the state and draws fresh keys, so that no old draw is used again.

        State of another optimizer is left alone, with a warning, as in Keras.
        """
        self.keys.refresh()
        saved = {name: store[name] for name in store.keys()}  # noqa: SIM118
        self.skip_releases(int(saved.pop(_COUNT, 0)))
        named = self.named_variables()
        if saved and not _fits(saved, named):
            warnings.warn(
                f"The saved optimizer state does not fit this {type(self).__name__}, "
                "which starts anew. Compile the model with the optimizer that it was "
                "saved with, and build it, before loading.",
                stacklevel=2,
            )
            return
        if self._initial_batch_size:
            saved.pop("expected_batch_size", None)  # the constructor's word stands
        for name, value in saved.items():
            named[name].assign(value)

    def get_config(self):
        """Returns the configuration; the seed is a secret and never in it."""
        base = super().get_config()
        kept = ("name", "learning_rate", "weight_decay", "use_ema", "ema_momentum")
        config = {key: base[key] for key in (*kept, "ema_overwrite_frequency")}
        config.update(
            expected_batch_size=self._initial_batch_size,
            microbatch_size=self.microbatch_size,
            gradient_engine=self.gradient_engine,
        )
        if isinstance(self.mechanism, mechanisms.ForeignMechanism):
            raise ValueError(
                "An optimizer with a dp_sum_query cannot be saved, because TF Privacy "
                "queries have no configuration. Save the weights alone, with "
                "`model.save_weights`."
            )
        config.update(
            l2_norm_clip=self.l2_norm_clip, noise_multiplier=self.noise_multiplier
        )
        return config


def _fits(saved: dict[str, Any], named: dict[str, Any]) -> bool:
    return set(saved) == set(named) and all(
        tuple(saved[name].shape) == tuple(v.shape) for name, v in named.items()
    )


def check_private_optimizer(optimizer: Any, jit_compile: bool = False) -> None:
    """Raises if a private model could not train privately with this optimizer."""
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
        "neither clips nor noises. Compile with, say, "
        "`keras_dpopt.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.1)`."
    )

"""The base class of all private optimizers.

It alone owns variables. A subclass fills four slots (query, mechanism, filter, rule)
with parts that are pure functions.
"""

from typing import Any

import keras
import tensorflow as tf
from keras import ops

from keras_dpopt import arguments, digest, keras_compat, mechanisms
from keras_dpopt.filters import NoFilter
from keras_dpopt.keys import SecretKeys
from keras_dpopt.optimizer_state import OptimizerState, assign, scalar_variable
from keras_dpopt.queries import GradientQuery
from keras_dpopt.release_count import ReleaseCount
from keras_dpopt.types import FilterOutput, PrivatizedGradient

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
        self.query = query or GradientQuery()
        self.mechanism = mechanisms.make(l2_norm_clip, noise_multiplier, dp_sum_query)
        self.filter = filter or NoFilter()
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
        self._expected_batch_size = scalar_variable(
            self, "expected_batch_size", self._initial_batch_size or 0, "float32"
        )
        self._make_release_count()
        self._state: OptimizerState | None = None

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
        self._expected_batch_size.assign(float(resolved))
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
        number = tf.identity(self._release_count.value)
        with tf.control_dependencies([number]):
            counted = self._release_count.value.assign_add(1)
        # The count comes before the noise and before any weight: a step that is cut
        # short is a step that counts.
        with tf.control_dependencies([counted]):
            gradient, new_state = self.mechanism.release(
                clipped_sum,
                self.mechanism_state(),
                self.keys.noise,
                number,
                tf.convert_to_tensor(self._expected_batch_size.value),
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
            self._update(variables, grads, regularization)
            keras_compat.update_moving_average(self)
            self._iterations.assign_add(1)

    def update_step(self, gradient, variable, learning_rate):
        """Refuses: the parts make the update, from a privatized gradient."""
        raise TypeError(
            f"{type(self).__name__}.update_step takes no raw gradients. Train with "
            "`keras_dpopt.DPModel`."
        )

    def _update(self, variables, gradient, regularization):
        scalars = {name: v.value for name, v in self._state.scalars.items()}
        noise_variance, noise_slots = self._corrected_variance(gradient, scalars)
        shared, rule_scalars = self.rule.begin(
            {name: scalars[name] for name in self.rule.scalar_slots},
            self._iterations.value + 1,
            noise_variance,
        )
        learning_rate = ops.cast(self.learning_rate, "float32")
        new_weights = []
        for i, (variable, slots) in enumerate(
            zip(variables, self._state.per_variable, strict=True)
        ):
            raw = gradient.values[i]
            if regularization is not None and regularization[i] is not None:
                raw = raw + regularization[i]
            values = {name: slot.value for name, slot in slots.items()}
            filtered, filter_slots = self.filter.update(
                {name: values[name] for name in self.filter.slots}, raw
            )
            step, rule_slots = self.rule.update(
                {name: values[name] for name in self.rule.slots},
                FilterOutput(filtered, raw),
                learning_rate,
                shared,
            )
            old = variable.value
            new = old - self._decay(variable, learning_rate) - step
            if variable.constraint is not None:
                new = variable.constraint(new)
            new_slots = {**filter_slots, **rule_slots}
            if "last_update" in slots:
                new_slots["last_update"] = new - old
            assign(slots, new_slots)
            variable.assign(new)
            new_weights.append(new)
        assign(self._state.scalars, {**noise_slots, **rule_scalars})
        if self.query.uses_last_update:
            self._state.weights_digest.assign(digest.weights_digest(new_weights))

    def _decay(self, variable, learning_rate):
        if self.weight_decay is None or not keras_compat.uses_weight_decay(
            self, variable
        ):
            return 0.0
        return learning_rate * self.weight_decay * variable.value

    def _corrected_variance(self, gradient, scalars):
        """The noise variance that the rule subtracts, and the filter's new slots."""
        if gradient.noise_stddev is None:
            if self.noise_correction is not None:
                raise ValueError(
                    f"{type(self).__name__} subtracts the variance of the noise, which "
                    "this dp_sum_query does not tell. Set noise_correction=None, or "
                    "give l2_norm_clip and noise_multiplier."
                )
            return 0.0, {name: scalars[name] for name in self.filter.noise_slots}
        variance = ops.square(gradient.noise_stddev)
        (steady, exact), noise_slots = self.filter.propagate(
            {name: scalars[name] for name in self.filter.noise_slots}, variance
        )
        choice = {"filtered": steady, "exact": exact, "unfiltered": variance}
        return choice.get(self.noise_correction, 0.0 * variance), noise_slots

    # --- saving ----------------------------------------------------------------------

    def named_variables(self) -> dict[str, Any]:
        """Returns all that is saved, by names that do not depend on layer names."""
        named = {
            "iterations": self._iterations,
            "expected_batch_size": self._expected_batch_size,
            "release_count": self._release_count,
            "step_limit": self._step_limit,
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
        """Saves the state, without the secret keys."""
        for name, variable in self.named_variables().items():
            store[name] = variable.numpy()

    def load_own_variables(self, store):
        """Loads the state and draws fresh keys, so that no old draw is used again.

        Raises:
            ValueError: if the optimizer is not built or the saved state does not fit.
        """
        named = self.named_variables()
        if self._state is None or set(store.keys()) != set(named):
            raise ValueError(
                "The saved optimizer state does not fit this optimizer, and without it "
                "the number of the next release would be lost. Build the model and "
                "compile it with the optimizer it was saved with before loading."
            )
        count = int(self._release_count.numpy())
        for name, variable in named.items():
            variable.assign(store[name])
        self._release_count.assign(max(count, int(self._release_count.numpy())))
        self.keys.refresh()

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

"""The only module that touches what Keras does not make public.

Each function says which internal it stands on; `tests/keras_compat_test.py` has a test
for each that fails when Keras moves it.
"""

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend
from keras.src.losses.loss import Loss
from keras.src.models.functional import Functional
from keras.src.models.model import functional_init_arguments
from keras.src.random.seed_generator import SeedGenerator, global_seed_generator
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import (
    array_data_adapter,
    array_slicing,
    data_adapter_utils,
)
from keras.src.utils.python_utils import pythonify_logs

__all__ = [
    "Functional",
    "KerasSaveable",
    "Loss",
    "SeedGenerator",
    "functional_init_arguments",
    "pythonify_logs",
]


# --- data --------------------------------------------------------------------------


def arrays_in_memory(x: Any, y: Any, sample_weight: Any, class_weight: Any) -> tuple:
    """Converts arrays, frames or tensors to NumPy as `fit` of Keras does.

    float64 becomes floatx, a class weight becomes a sample weight, sizes are checked:
    all by Keras' own `ArrayDataAdapter`, asked for one batch of all the rows.
    """
    sizes = [len(leaf) for leaf in keras.tree.flatten(x) if leaf is not None]
    size = max(sizes, default=0)
    if not size:
        # An empty batch, of a caller who draws Poisson batches; the adapter has no
        # batch of no rows.
        if class_weight is not None:
            sample_weight = np.ones(0)
        return tuple(_empty_of_floatx(part) for part in (x, y, sample_weight))
    adapter = array_data_adapter.ArrayDataAdapter(
        x, y, sample_weight, class_weight=class_weight, batch_size=size
    )
    return unpack_x_y_sample_weight(next(iter(adapter.get_numpy_iterator())))


def _empty_of_floatx(structure: Any) -> Any:
    def convert(leaf):
        array = np.asarray(leaf)
        is_float = array.dtype.kind == "f"
        return array.astype(keras.config.floatx()) if is_float else array

    return None if structure is None else keras.tree.map_structure(convert, structure)


def unpack_x_y_sample_weight(element: Any) -> tuple:
    """Splits an element of a data set as Keras does."""
    return data_adapter_utils.unpack_x_y_sample_weight(element)


def train_validation_split(arrays: tuple, validation_split: float) -> tuple:
    """Splits arrays into (training, validation), the last rows validating."""
    return array_slicing.train_validation_split(arrays, validation_split)


def is_data_set(x: Any) -> bool:
    """Whether `x` is batches that the caller made, and not rows in memory."""
    if isinstance(x, tf.data.Dataset | keras.utils.PyDataset | types.GeneratorType):
        return True
    module = type(x).__module__.split(".")[0]
    return module in ("grain", "torch") and not hasattr(x, "shape")


def data_adapter(x: Any, class_weight: Any = None, shuffle: bool = False) -> Any:
    """Returns Keras' adapter for a data set, `PyDataset`, generator or loader.

    `shuffle` is for a `PyDataset`, which Keras draws in random order; a `tf.data` set
    has its own.
    """
    return data_adapters.get_data_adapter(
        x,
        class_weight=class_weight,
        shuffle=shuffle and isinstance(x, keras.utils.PyDataset),
    )


# --- models ------------------------------------------------------------------------


def build_for(model: keras.Model, row_specs: dict) -> None:
    """Builds model, loss, metrics and optimizer for batches of rows of these specs.

    Stands on `Trainer._symbolic_build`.
    """
    batch = tf.nest.map_structure(
        lambda spec: keras.KerasTensor(spec.shape, spec.dtype.name), row_specs
    )
    model._symbolic_build(
        data_batch=(batch["x"], batch.get("y"), batch.get("sample_weight"))
    )


def replace_base(cls: type, base: type, functional: type) -> None:
    """Makes a subclass of `base` that is constructed as a functional model one.

    Keras' own rewriting of the bases (`inject_functional_model_class`) would reach up
    to `base` and spoil it for the subclasses with a `call`.
    """
    if not issubclass(cls, functional):
        for parent in cls.__bases__:
            if issubclass(parent, base) and parent is not base:
                replace_base(parent, base, functional)
        bases = (functional if b is base else b for b in cls.__bases__)
        cls.__bases__ = tuple(bases)


def flat_layers(model: keras.Model) -> Sequence[keras.Layer]:
    """Returns the model and all layers in it, nested ones too."""
    return model._flatten_layers()


def seed_states(model: keras.Model) -> list:
    """Returns the state variables of all seed generators, the global one's last."""
    generators: list[SeedGenerator] = []
    for layer in flat_layers(model):
        for generator in layer._seed_generators:
            if generator not in generators:
                generators.append(generator)
    return [g.state for g in [*generators, global_seed_generator()]]


def keras_mask(tensor: Any) -> Any:
    """Returns the mask that Keras carries on a tensor, or `None`."""
    return backend.get_keras_mask(tensor)


def set_keras_mask(tensor: Any, mask: Any) -> None:
    """Puts a mask on a tensor."""
    backend.set_keras_mask(tensor, mask)


def collected_losses(scope: keras.StatelessScope) -> list:
    """Returns the `add_loss` and activity losses collected in a stateless scope."""
    return list(scope.losses)


def state_of(scope: keras.StatelessScope) -> dict[int, Any]:
    """Returns `id(variable) -> value` at this moment in a stateless scope."""
    return dict(scope.state_mapping)


def own_variables(layer: keras.Layer) -> list:
    """Returns the variables of a layer and of its metrics."""
    return [*layer.variables, *layer.metrics_variables]


def call_for_training(model: keras.Model, x: Any, training: bool = True) -> Any:
    """Calls the model as Keras' `train_step` does, or its `test_step`."""
    return model(x, training=training) if model._call_has_training_arg else model(x)


def call_nested(model: keras.Model, inputs: Any, training: Any, mask: Any) -> Any:
    """Calls a model with the arguments that its `call` has."""
    kwargs = {}
    if model._call_has_training_arg:
        kwargs["training"] = training
    if mask is not None and model._call_has_mask_arg:
        kwargs["mask"] = mask
    return model(inputs, **kwargs)


def overridden_training(model: keras.Model) -> list[str]:
    """Returns the training methods that the model's class has of its own."""
    names = ("train_step", "compute_loss", "_compute_loss")
    return [n for n in names if getattr(type(model), n) is not getattr(keras.Model, n)]


def steps_without_privacy(model: keras.Model) -> int:
    """Returns how many steps plain models in `model` made by optimizers of their own.

    Stands on `Model.optimizer`, an attribute from `compile` on.
    """
    optimizers = [
        vars(layer).get("optimizer")
        for layer in flat_layers(model)
        if isinstance(layer, keras.Model) and not hasattr(layer, "privacy_ledger")
    ]
    return sum(int(o.iterations) for o in optimizers if o is not None)


def overrides_compute_loss(model: keras.Model) -> bool:
    """Whether the model's class has a `compute_loss` of its own."""
    return type(model).compute_loss is not keras.Model.compute_loss


# --- compiled losses ---------------------------------------------------------------


def compiled_losses(model: keras.Model) -> Any:
    """Returns the model's built `CompileLoss`, or `None`."""
    return model._compile_loss


def record_loss(compile_loss: Any, loss_fn: Callable) -> Callable:
    """Returns a `CompileLoss` whose every single loss runs through `loss_fn`.

    The output structure, the matching of names and the loss weights stay Keras' own;
    `loss_fn(loss, y, y_pred, sample_weight)` replaces the call of each single loss, and
    the per-output trackers stay out of it (they would see one record).

    Stands on `CompileLoss._flat_losses`, a list of `(path, loss, weight, name)`, and on
    its `call`, which zips that list with the metrics.
    """
    flat_losses = [
        entry._replace(loss=functools.partial(loss_fn, entry.loss))
        for entry in compile_loss._flat_losses
    ]
    inert = [_Inert() for _ in compile_loss._metrics]
    return _copy_of(compile_loss, _flat_losses=flat_losses, _metrics=inert)


def _copy_of(compile_loss: Any, **changed: Any) -> Any:
    copied = object.__new__(type(compile_loss))  # copy.copy would pickle it
    copied.__dict__.update(compile_loss.__dict__, **changed)
    return copied


def compute_loss(model: keras.Model, x: Any, y: Any, y_pred: Any) -> Any:
    """Calls a model's own `compute_loss` on one record, as Keras' `train_step` does.

    Stands on `Trainer._compute_loss`. The trackers of the compiled loss stay out of it.
    """
    compiled = model._compile_loss
    if compiled is not None:
        inert = [_Inert() for _ in compiled._metrics]
        model._compile_loss = _copy_of(compiled, _metrics=inert)
    try:
        return model._compute_loss(x, y, y_pred, None, training=True)
    finally:
        model._compile_loss = compiled


def update_loss_trackers(
    model: keras.Model,
    record_losses: Any,
    y: Any,
    y_pred: Any,
    sample_weight: Any,
    count: Any,
) -> None:
    """Feeds the loss of `count` records to the trackers of the compiled loss.

    Stands on `Model._loss_tracker`; and on `CompileLoss`, which has trackers of its own
    where there are several outputs, and updates them when it is called. It weighs them
    with the static batch size, which records of a microbatch do not have.
    """
    model._loss_tracker.update_state(record_losses)
    compiled = model._compile_loss
    if compiled is not None and compiled.metrics:
        trackers = [_Counted(metric, count) for metric in compiled._metrics]
        _copy_of(compiled, _metrics=trackers)(y, y_pred, sample_weight)


class _Counted:
    """A metric that gets the number of records as its weight."""

    def __init__(self, metric: Any, count: Any):
        self._metric, self._count = metric, count

    def update_state(self, value: Any, sample_weight: Any = None) -> None:
        """Updates the metric."""
        del sample_weight
        self._metric.update_state(value, sample_weight=self._count)


class _Inert:
    """Takes the place of a metric that must not see single records."""

    variables = ()

    def update_state(self, *args, **kwargs):
        """Does nothing."""


# --- optimizers --------------------------------------------------------------------


def update_moving_average(optimizer: Any, warmup: bool = False) -> None:
    """Does Keras' EMA of the weights after an update, as `apply` of Keras does.

    e = mu e + (1 - mu) w, mu = `ema_momentum`; with `warmup` mu = min(`ema_momentum`,
    (1 + t) / (10 + t)) at update t = `iterations` = 0, 1, ... (De et al. 2022). Update
    0 copies the weights. Stands on `Optimizer._model_variables_moving_average`.
    """
    if not optimizer.use_ema:
        return
    step = tf.cast(optimizer.iterations.value, tf.float32)
    limit = (1.0 + step) / (10.0 + step) if warmup else 1.0
    mu = tf.where(step == 0.0, 0.0, tf.minimum(optimizer.ema_momentum, limit))
    every = optimizer.ema_overwrite_frequency
    averages = optimizer._model_variables_moving_average
    for variable, average in zip(optimizer._trainable_variables, averages, strict=True):
        new = mu * average.value + (1.0 - mu) * variable.value
        average.assign(new)
        if every:
            overwrite = (optimizer.iterations.value + 1) % every == 0
            variable.assign(tf.where(overwrite, new, variable.value))


def uses_weight_decay(optimizer: keras.optimizers.Optimizer, variable: Any) -> bool:
    """Whether the optimizer decays `variable` (see `exclude_from_weight_decay`)."""
    return optimizer._use_weight_decay(variable)


def optimizer_variables_of(optimizer: keras.optimizers.Optimizer) -> list:
    """Returns the model variables that the optimizer was built for."""
    return list(optimizer._trainable_variables)


def strategies_of(model: keras.Model) -> tuple:
    """Returns the strategies in whose scopes model and optimizer were made."""
    return model._distribute_strategy, model.optimizer._distribution_strategy

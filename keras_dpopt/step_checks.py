"""What a private step must not do, read off the graph of it.

By these roads raw data would get past the clipping and the noise: state that a layer or
a metric keeps, and values that a loss or a learning rate takes from such state.
"""

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from keras_dpopt import keras_compat
from keras_dpopt.types import UnsupportedModelError

# Stateful operations that leave nothing behind that a record could reach. All others
# are refused: variables and tables that are written, queues, Python functions, files.
_HARMLESS = {
    "Assert",
    "Empty",
    "EnsureShape",
    "If",
    "LookupTableFindV2",
    "LookupTableSizeV2",
    "ReadVariableOp",
    "ResourceGather",
    "ResourceGatherNd",
    "StatefulPartitionedCall",
    "VariableShape",
    "While",
}
_HARMLESS_PREFIXES = (
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "Random",
    "TensorArray",
    "TruncatedNormal",
)


def refuse_state(graph: tf.Graph) -> None:
    """Refuses a model with operations that keep state from record to record."""
    definition = graph.as_graph_def()
    nodes = list(definition.node)
    for function in definition.library.function:
        nodes += list(function.node_def)
    found = sorted({node.op for node in nodes if _keeps_state(node.op)})
    if found:
        raise UnsupportedModelError(
            "A layer or loss writes or keeps state outside of Keras "
            f"({', '.join(found)}), which would carry raw data past the clipping and "
            "the noise. Remove that state, or compute it from public data before "
            "training."
        )


def _keeps_state(name: str) -> bool:
    definition = op_def_registry.get(name)
    # Of a function on the host TensorFlow knows only what the user says of it.
    stateful = name == "PyFuncStateless" or (
        definition is not None and definition.is_stateful
    )
    return (
        stateful and name not in _HARMLESS and not name.startswith(_HARMLESS_PREFIXES)
    )


def refuse_metric_reads(graph: Any, model: keras.Model) -> None:
    """Refuses a gradient that depends on a metric, so on all records seen so far."""
    metrics = {
        id(copy.handle): v
        for v in model.metrics_variables
        for copy in getattr(v.value, "values", (v.value,))  # one on each replica
    }
    read = [metrics[id(t)] for t, _ in graph.captures if id(t) in metrics]
    if read:
        raise UnsupportedModelError(
            f"A layer or loss reads the metric variable {read[0].path}, which holds "
            "raw data of other records. Take the value from elsewhere."
        )


def guarded_report(model: keras.Model, report: Any) -> None:
    """Runs `report`, which updates losses and metrics, and nothing else with it.

    What it writes is held back; metrics get theirs, and any other write is refused: the
    report sees records without clip and noise.
    """
    metrics = list(model.metrics_variables)
    with keras.StatelessScope(
        [(v, tf.convert_to_tensor(v.value)) for v in metrics]
    ) as s:
        before = keras_compat.state_of(s)
        report()
        after = keras_compat.state_of(s)
    _refuse_other_writes(before, after, (id(v) for v in metrics))
    for variable in metrics:
        variable.assign(after[id(variable)])


def _refuse_other_writes(before: dict, after: dict, metrics: Iterable[int]) -> None:
    written = {key for key, value in after.items() if before.get(key) is not value}
    if written - set(metrics):
        raise UnsupportedModelError(
            "A metric, a loss or compute_metrics writes to a variable that is not a "
            "metric's own, which would carry raw data past the clipping and the noise. "
            "Keep its state in variables of a keras.Metric."
        )


def refuse_own_step(model: Any, base: Any, train_function: Any) -> None:
    """Refuses a private model whose training step is not the library's.

    Args:
        model: The model.
        base: The class whose methods make the private step.
        train_function: The train function that they have made, if any.
    """
    if model.train_function is not train_function:
        raise UnsupportedModelError(
            "The model's train_function is not the private one. Compile the model "
            "again."
        )
    for name in ("train_step", "make_train_function", "_maybe_symbolic_build"):
        if name in vars(model) or getattr(type(model), name) is not getattr(base, name):
            raise UnsupportedModelError(
                f"{type(model).__name__} has its own {name}, which would take the "
                "place of the private one. Remove it, and keep to `call`, "
                "`compute_loss` on a batch of one, and metrics."
            )

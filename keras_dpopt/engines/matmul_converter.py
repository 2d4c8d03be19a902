"""A detour around a fault of TensorFlow's batched matrix product.

With oneDNN on (the default on x86), TensorFlow 2.21 multiplies `[m, 1, t, d]` by
`[d, n]` wrongly: it reads and writes outside the tensors, which ends in a crash or in
wrong numbers. A batch of one sequence in a vectorized map has this very shape. Without
the axis of length 1 the product is right, so it is taken out before and put back after.

`tests/engines_test.py` says in numbers when a TensorFlow no longer needs this.
"""

import contextlib
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.parallel_for import pfor

_OPERATIONS = ("BatchMatMulV2", "BatchMatMulV3")


@contextlib.contextmanager
def sound_matmul():
    """Makes vectorized maps that are traced inside multiply without unit axes."""
    registry = pfor._pfor_converter_registry
    converters = {name: registry[name] for name in _OPERATIONS if name in registry}
    registry.update(dict.fromkeys(converters, _convert))
    try:
        yield
    finally:
        registry.update(converters)


def _convert(pfor_input: Any) -> Any:
    pfor_input.expanddim_inputs_for_broadcast()
    product = matmul(
        pfor_input.input(0)[0],
        pfor_input.input(1)[0],
        pfor_input.get_attr("adj_x"),
        pfor_input.get_attr("adj_y"),
    )
    return pfor.wrap(product, True)


def matmul(x: tf.Tensor, y: tf.Tensor, adjoint_a=False, adjoint_b=False) -> tf.Tensor:
    """Multiplies batches of matrices, without the batch axes that are 1 in both.

    Args:
        x: `[..., p, q]` (`[..., q, p]` if `adjoint_a`), of known rank.
        y: `[..., q, r]` (`[..., r, q]` if `adjoint_b`), of known rank; the batch axes
            broadcast.
        adjoint_a: As in `tf.matmul`.
        adjoint_b: As in `tf.matmul`.

    Returns:
        What `tf.matmul` should.
    """
    rank = max(x.shape.rank, y.shape.rank)
    unit = [
        axis
        for axis in range(rank - 2)
        if _size(x, axis - rank) == 1 and _size(y, axis - rank) == 1
    ]
    product = tf.matmul(
        _without(x, unit, rank),
        _without(y, unit, rank),
        adjoint_a=adjoint_a,
        adjoint_b=adjoint_b,
    )
    for axis in unit:
        product = tf.expand_dims(product, axis)
    return product


def _size(tensor, axis: int):
    """Size of an axis counted from the end, 1 where the tensor has no such axis."""
    return 1 if -axis > tensor.shape.rank else tensor.shape[axis]


def _without(tensor, axes, rank: int):
    own = [axis - rank for axis in axes if rank - axis <= tensor.shape.rank]
    return tf.squeeze(tensor, own) if own else tensor

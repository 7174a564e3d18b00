"""Which dimensions of a shape follow from the number of rows of a batch.

The graph of a step does not know how many rows a replica has. A copy of its
part that computes a shape is made in a graph of its own, where the batch has
`ROWS` rows and every other unknown dimension of it is `OTHER` long:

    in the step    [?, 10] -> reshape [?, 2, 5] -> shape = (?, 2, 5)
    in the copy    [ROWS, 10]                   -> shape = (ROWS, 2, 5)

TensorFlow infers the shapes of the copy; nothing is computed. A dimension that
is a multiple of `ROWS` has rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

# Primes, so large that no dimension of a model is a multiple.
ROWS = 1_000_003
OTHER = 7_368_787

# A shape, or what one is computed from, has no more elements.
_SMALL = 64

_HAS_FUNCTIONS: dict[str, bool] = {}


class RowDimensions:
    """Finds the dimensions of shapes that are computed from a batch.

    Args:
        data: Tensors with one row for each example, of unknown number. What
            knows its first dimension, or is no plain tensor, is left out.
    """

    def __init__(self, data: Iterable[Any]) -> None:
        self._graph = tf.Graph()
        self._copies: dict[Any, tf.Tensor] = {}
        with self._graph.as_default():
            for tensor in data:
                if tf.is_symbolic_tensor(tensor) and _lacks_rows(tensor):
                    shape = [OTHER if n is None else n for n in tensor.shape]
                    shape[0] = ROWS
                    self._copies[_origin(tensor).ref()] = _placeholder(
                        tensor.dtype, shape
                    )

    def of(self, shape: tf.Tensor) -> list[int | None]:
        """Returns the dimensions of a shape in the copy.

        Args:
            shape: A vector of integers, in the graph of the step.

        Returns:
            The dimensions, None for one that cannot be inferred.
        """
        copy = self._copy_of(shape)
        with self._graph.as_default():
            inferred = tf.fill(copy, 0.0).shape
        if inferred.rank is None:
            return [None] * int(shape.shape[0] or 0)
        return inferred.as_list()

    def of_tensor(self, tensor: tf.Tensor) -> list[int | None]:
        """Returns the dimensions of a tensor in the copy."""
        shape = self._copy_of(tensor).shape
        return [] if shape.rank is None else shape.as_list()

    def _copy_of(self, tensor: tf.Tensor) -> tf.Tensor:
        stack = [_origin(tensor)]
        while stack:
            wanted = stack[-1]
            if wanted.ref() in self._copies:
                stack.pop()
            elif _is_leaf(wanted):
                self._stop_at(wanted)
            else:
                missing = [
                    source
                    for source in map(_origin, wanted.op.inputs)
                    if source.ref() not in self._copies
                ]
                if not missing:
                    self._copy(wanted.op)
                stack += missing
        return self._copies[_origin(tensor).ref()]

    def _stop_at(self, tensor: tf.Tensor) -> None:
        """Takes from the step what is known of a tensor there."""
        with self._graph.as_default():
            self._copies[tensor.ref()] = _placeholder(
                tensor.dtype, tensor.shape
            )

    def _copy(self, op: tf.Operation) -> None:
        attributes = {
            name: value
            for name, value in op.node_def.attr.items()
            if not name.startswith("_")
        }
        inputs = [self._copies[_origin(each).ref()] for each in op.inputs]
        types = [output.dtype for output in op.outputs]
        try:
            with self._graph.as_default():
                copy = self._graph.create_op(
                    op.type, inputs, types, attrs=attributes
                )
            for output, own in zip(copy.outputs, op.outputs, strict=True):
                output.set_shape(own.shape)
                self._copies[own.ref()] = output
        # Two dimensions of the batch must be equal, which are not here.
        except (TypeError, ValueError, tf.errors.OpError):
            for own in op.outputs:
                self._stop_at(own)


def _lacks_rows(tensor: tf.Tensor) -> bool:
    rank = tensor.shape.rank
    return rank is not None and rank > 0 and tensor.shape[0] is None


def _placeholder(dtype: tf.DType, shape: Any) -> tf.Tensor:
    return tf.compat.v1.placeholder(dtype, shape)


def _origin(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor that an inner function has captured, or itself."""
    while tensor.op.type == "Placeholder":
        captures = getattr(tensor.graph, "captures", ())
        outer = next((o for o, inner in captures if inner is tensor), None)
        if outer is None or not tf.is_symbolic_tensor(outer):
            return tensor
        tensor = outer
    return tensor


def _is_leaf(tensor: tf.Tensor) -> bool:
    """Whether to take what the step knows of a tensor, without its origin."""
    op, elements = tensor.op, tensor.shape.num_elements()
    if elements is not None:
        may_be_shape = tensor.dtype.is_integer and elements <= _SMALL
        if not may_be_shape:
            return True
    if op.type == "Const":
        return False
    if tensor.dtype in (tf.resource, tf.variant) or not op.inputs:
        return True
    return op.op_def.is_stateful or _calls_functions(op)


def _calls_functions(op: tf.Operation) -> bool:
    """Whether the outputs of an operation are made by functions of a graph."""
    if op.type not in _HAS_FUNCTIONS:
        _HAS_FUNCTIONS[op.type] = any(
            attribute.type in ("func", "list(func)")
            for attribute in op.op_def.attr
        )
    return _HAS_FUNCTIONS[op.type]

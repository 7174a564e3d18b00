"""Which dimensions of a shape follow from the number of rows of a batch.

The graph of a step does not know how many rows a replica has. A copy of its
part that computes a shape is made in a graph of its own, where the batch has a
number of rows, and every other unknown dimension of it has a length:

    in the step    [?, 10] -> reshape [?, 2, 5] -> shape = (?, 2, 5)
    in the copy    [ROWS, 10]                   -> shape = (ROWS, 2, 5)

TensorFlow infers the shapes of the copy; nothing is computed. A dimension that
is a multiple of `ROWS` has rows. One that is the same in a copy with another
number of rows does not follow from them.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

# Primes. No dimension of a model is a multiple of the first, and the second is
# long enough for layers that make sequences or images smaller; with three such
# axes a shape has less than 2**63 elements, as TensorFlow demands.
ROWS, OTHER = 1_000_003, 1_009
# What another copy has in place of the first.
_ROWS = 1_500_007

# Of a tensor, by TensorFlow.
_MOST_ELEMENTS = 2**63 - 1
# A shape, or what one is computed from, has no more elements.
_SMALL = 64

_HAS_FUNCTIONS: dict[str, bool] = {}


class Follows(enum.Enum):
    """What a dimension follows from."""

    ROWS = "the number of rows, in proportion"
    MIXED = "the number of rows otherwise"
    OTHERS = "other lengths, or nothing"
    UNKNOWN = "what no shape shows"


@dataclasses.dataclass(frozen=True)
class Dimension:
    """A dimension of a shape.

    Attributes:
        follows: What it follows from.
        length: Its length, for each row where it is in proportion to them;
            None where that differs between batches, or is not known.
    """

    follows: Follows
    length: int | None = None


class RowDimensions:
    """Finds the dimensions of shapes that are computed from a batch.

    Args:
        data: Tensors with one row for each example, of unknown number. What
            knows its first dimension, or is no plain tensor, is left out.
    """

    def __init__(self, data: Iterable[Any]) -> None:
        self._data = [
            tensor
            for tensor in data
            if tf.is_symbolic_tensor(tensor) and _lacks_rows(tensor)
        ]
        self._open = any(None in tensor.shape[1:] for tensor in self._data)
        self._copies: dict[int, _Copy] = {}

    def of(self, shape: tf.Tensor) -> list[Dimension]:
        """Returns the dimensions of a shape.

        Args:
            shape: A vector of integers, in the graph of the step.
        """
        known = tf.fill(shape, 0.0).shape
        return self._read(known, lambda copy: copy.of(shape))

    def of_tensor(self, tensor: tf.Tensor) -> list[Dimension]:
        """Returns the dimensions of a tensor in the graph of the step."""
        return self._read(tensor.shape, lambda copy: copy.of_tensor(tensor))

    def _read(
        self,
        known: tf.TensorShape,
        lengths: Callable[[_Copy], list[int | None]],
    ) -> list[Dimension]:
        """Returns dimensions, of which the step knows some.

        Args:
            known: What the step knows.
            lengths: Returns the lengths that they have in a copy.
        """
        if known.rank is None:
            return []
        here = known.as_list()
        if None not in here:
            return [Dimension(Follows.OTHERS, length) for length in here]
        first = lengths(self._copy(ROWS))
        second = first
        asked = [n for n, length in zip(first, here, strict=True) if not length]
        if any(n is not None and n % ROWS for n in asked):
            second = lengths(self._copy(_ROWS))
        return [
            self._dimension(*found)
            for found in zip(here, first, second, strict=True)
        ]

    def _copy(self, rows: int) -> _Copy:
        if rows not in self._copies:
            self._copies[rows] = _Copy(self._data, rows)
        return self._copies[rows]

    def _dimension(
        self, known: int | None, first: int | None, second: int | None
    ) -> Dimension:
        """Returns a dimension by its lengths in copies.

        Args:
            known: What the step knows.
            first: With `ROWS` rows.
            second: With another number of rows, where the first is no multiple
                of `ROWS`.
        """
        if known is not None:
            return Dimension(Follows.OTHERS, known)
        # Nothing is left of a length that is shorter than a window.
        if not first or second is None:
            return Dimension(Follows.UNKNOWN)
        if first % ROWS == 0:
            # Where lengths differ between batches, no copy has those of all.
            each = None if self._open else first // ROWS
            return Dimension(Follows.ROWS, each)
        return Dimension(Follows.OTHERS if first == second else Follows.MIXED)


class _Copy:
    """A part of a step in a graph of its own.

    Args:
        data: As for `RowDimensions`, all of them tensors without rows.
        rows: How many rows the batch has there. Every other unknown dimension
            of it is `OTHER` long.
    """

    def __init__(self, data: Iterable[tf.Tensor], rows: int) -> None:
        self._graph = tf.Graph()
        self._copies: dict[Any, tf.Tensor] = {}
        with self._graph.as_default():
            for tensor in data:
                shape = [OTHER if n is None else n for n in tensor.shape]
                shape[0] = rows
                if math.prod(shape) > _MOST_ELEMENTS:
                    shape[1:] = tensor.shape[1:]
                self._copies[_origin(tensor).ref()] = _placeholder(
                    tensor.dtype, shape
                )

    def of(self, shape: tf.Tensor) -> list[int | None]:
        """Returns the lengths that a shape has here, None for unknown ones."""
        copy = self._copy_of(shape)
        with self._graph.as_default():
            inferred = tf.fill(copy, 0.0).shape
        if inferred.rank is None:
            return [None] * int(shape.shape[0] or 0)
        return inferred.as_list()

    def of_tensor(self, tensor: tf.Tensor) -> list[int | None]:
        """Returns the lengths that a tensor has here, if its rank is known."""
        found = self._copy_of(tensor).shape
        if found.rank is None:
            return [None] * (tensor.shape.rank or 0)
        return found.as_list()

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

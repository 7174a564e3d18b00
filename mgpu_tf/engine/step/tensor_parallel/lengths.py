"""Which layers code computes after that asks for the length of their outputs.

    x * 2.0 if x.shape[-1] == 64 else x * 3.0

A device that has a part of `x` knows no length of it, so that the code goes the
way of an unknown length. Two traces are compared: with the length, and without.
Where they differ, outputs are not left in parts.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.row_proof.writes import body_of, functions_of
from mgpu_tf.engine.step.tensor_parallel.structure import Pass

# They differ between two traces of the same code, or with the length alone.
_NAMES = frozenset(["seed", "seed2", "shape", "_class", "_output_shapes"])
_SHAPES = frozenset(["Shape", "ShapeN", "Size"])


def asked_for(
    known: Pass,
    unknown: Pass,
    layers: Collection[int],
    through: Collection[int] = (),
) -> set[int]:
    """Returns the layers after which two traces differ.

    Args:
        known: A trace that knows the lengths of outputs.
        unknown: One that does not know those of some layers.
        layers: These layers, by identity.
        through: Other layers whose outputs have the lengths of their inputs.
    """
    one = _Trace(known, layers, through)
    other = _Trace(unknown, layers, through)
    if one.called != other.called or len(one.ends) != len(other.ends):
        return set(layers)
    found: set[int] = set()
    for left, right in zip(one.ends, other.ends, strict=True):
        if not _same(left, right, one, other):
            found |= one.above(left) | other.above(right)
    return found


def asked_inside(known: Pass, unknown: Pass) -> set[int]:
    """Returns the layers whose own code two traces show to differ.

    Args:
        known: As for `asked_for`.
        unknown: As there.
    """
    one, other = _Trace(known, ()), _Trace(unknown, ())
    if one.called != other.called:
        return set(one.called)
    return {
        layer
        for layer, left, right in zip(
            one.called, one.made, other.made, strict=True
        )
        if left is not None
        and right is not None
        and not _same(left, right, one, other)
    }


class _Trace:
    """A trace, cut at the calls of the layers that are noted.

    Attributes:
        called: The layers that were called, in order.
        made: What each of them computed, before the copy of it that is noted.
        ends: What they were called with, and what the model returned.
    """

    def __init__(
        self,
        one: Pass,
        layers: Collection[int],
        through: Collection[int] = (),
    ) -> None:
        calls = [one.calls[first] for first in sorted(one.calls)]
        self.called = [call.key for call in calls]
        self.made = [_made(call.outputs) for call in calls]
        self.ends = [
            leaf
            for given in [*[call.inputs for call in calls], one.returned]
            for leaf in tf.nest.flatten(given, expand_composites=True)
            if tf.is_symbolic_tensor(leaf)
        ]
        self._number = {
            leaf.name: (place, index)
            for place, call in enumerate(calls)
            for index, leaf in enumerate(
                tf.nest.flatten(call.outputs, expand_composites=True)
            )
            if tf.is_symbolic_tensor(leaf)
        }
        # Which of the layers a tensor is made of, and what is of shapes alone.
        self._made_of: dict[str, frozenset[int]] = {}
        self._of_shapes: set[str] = set()
        # Variables, by the placeholders of their handles.
        graph = one.operations[0].graph
        self._handles = {
            inside.name: id(outside)
            for outside, inside in graph.captures
            if inside.dtype == tf.resource
        }
        self._given = [tf.nest.flatten(call.inputs) for call in calls]
        for op in one.operations:
            self._look_at(op, layers, through)

    def _look_at(
        self,
        op: tf.Operation,
        layers: Collection[int],
        through: Collection[int],
    ) -> None:
        made_of = frozenset[int]().union(*map(self.above, op.inputs))
        shapes = [each.name in self._of_shapes for each in op.inputs]
        constants = [each.op.type == "Const" for each in op.inputs]
        of_shapes = op.type in _SHAPES and bool(made_of)
        of_shapes |= any(shapes) and all(
            shape or constant
            for shape, constant in zip(shapes, constants, strict=True)
        )
        for tensor in op.outputs:
            number = self.number(tensor)
            if number is not None:
                layer = self.called[number[0]]
                made_of = frozenset([layer] if layer in layers else [])
                if layer in through:
                    given = self._given[number[0]]
                    made_of = made_of.union(*map(self.above, given))
            elif of_shapes:
                self._of_shapes.add(tensor.name)
            self._made_of[tensor.name] = made_of

    def above(self, tensor: Any) -> frozenset[int]:
        """Returns the layers that a tensor is made of, up to the last calls."""
        if not tf.is_symbolic_tensor(tensor):
            return frozenset()
        return self._made_of.get(tensor.name, frozenset())

    def number(self, tensor: tf.Tensor) -> tuple[int, int] | None:
        """Returns of which call a tensor is an output, and of its outputs."""
        return self._number.get(tensor.name)

    def passed(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the tensor that one with another static shape is."""
        while (
            self.number(tensor) is None
            and tensor.op.type == "PlaceholderWithDefault"
        ):
            tensor = tensor.op.inputs[0]
        return tensor

    def handle(self, tensor: tf.Tensor) -> int | None:
        """Returns the identity of a variable's handle; None of others."""
        return self._handles.get(tensor.name)

    def is_of_shapes(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor is made of the shapes of such outputs alone."""
        return tensor.name in self._of_shapes


def _made(output: Any) -> tf.Tensor | None:
    """Returns what a layer computed, of which a call notes a copy."""
    if not tf.is_symbolic_tensor(output):
        return None
    copy = output.op
    if copy.type == "PlaceholderWithDefault":
        copy = copy.inputs[0].op
    return copy.inputs[0]


def _same(
    left: tf.Tensor, right: tf.Tensor, one: _Trace, other: _Trace
) -> bool:
    """Returns whether two traces have computed a tensor alike.

    From the same calls. What is made of a shape in the graph is judged there.
    """
    pairs, seen = [(left, right)], set()
    while pairs:
        left, right = pairs.pop()
        left, right = one.passed(left), other.passed(right)
        if (left.name, right.name) in seen or other.is_of_shapes(right):
            continue
        seen.add((left.name, right.name))
        number = one.number(left)
        if number is not None or other.number(right) is not None:
            if number != other.number(right):
                return False
            continue
        if (
            left.value_index != right.value_index
            or one.handle(left) != other.handle(right)
            or _described(left.op) != _described(right.op)
        ):
            return False
        pairs += zip(left.op.inputs, right.op.inputs, strict=True)
    return True


def _described(op: tf.Operation) -> Any:
    """Returns what an operation does, besides what it is given."""
    attributes = op.node_def.attr
    names = _NAMES
    if keras_internals.gradient_given(op) is None:
        names |= {"_gradient_op_type"}  # Each trace counts its own.
    return (
        op.type,
        len(op.inputs),
        {
            name: attributes[name].SerializeToString(deterministic=True)
            for name in attributes
            if name not in names and not attributes[name].HasField("func")
        },
        [_body(op, function) for function in functions_of(op)],
    )


def _body(op: tf.Operation, function: Any) -> Any:
    """Returns what a function does that an operation calls."""
    body = body_of(op, function)
    if body is None:
        return object()  # It is not known: no other one is like it.
    return [
        (_described(each), [given.name for given in each.inputs])
        for each in body.get_operations()
    ]

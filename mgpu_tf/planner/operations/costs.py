"""Floating-point operations and bytes of each operation of a step.

    operations, moved = cost_of(graph, operation, rows=64)

A product of matrices of shapes `[m, k]` and `[k, n]` takes 2 m k n operations;
a convolution as many as the product that it is. All else takes one for each
element that it makes. The bytes are those of what an operation takes and
makes, which is what has to pass between memory and the device at least.

This module does not import TensorFlow.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from mgpu_tf.planner.operations.graph import BATCH, Graph, Operation
from mgpu_tf.planner.operations.liveness import ALIASES

PRODUCTS = frozenset({"MatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum"})
CONVOLUTIONS = frozenset({"Conv2D", "Conv3D"})
_OF_INPUT = frozenset({"Conv2DBackpropInput", "Conv3DBackpropInputV2"})
_OF_FILTER = frozenset({"Conv2DBackpropFilter", "Conv3DBackpropFilterV2"})
DEPTHWISE = frozenset(
    {
        "DepthwiseConv2dNative",
        "DepthwiseConv2dNativeBackpropInput",
        "DepthwiseConv2dNativeBackpropFilter",
    }
)
# They look at sizes, and at nothing that a batch holds.
_FREE = frozenset(
    {
        "Const",
        "Shape",
        "ShapeN",
        "Size",
        "Rank",
        "BroadcastGradientArgs",
        "VariableShape",
        "ConcatOffset",
    }
)


class Cost(NamedTuple):
    """What an operation takes.

    Attributes:
        operations: Floating-point operations.
        moved: Bytes between memory and the device.
        is_product: Whether it runs on the units for products of matrices.
    """

    operations: float
    moved: float
    is_product: bool


def cost_of(graph: Graph, each: Operation, rows: float) -> Cost:
    """Returns what an operation takes for a number of rows."""
    if each.kind in ALIASES or each.kind in _FREE:
        return Cost(0.0, 0.0, False)
    inside = each.attributes.get("inside")
    if inside:
        costs = [cost_of(graph, one, rows) for one in inside]
        return Cost(
            sum(
                c.operations * o.times
                for c, o in zip(costs, inside, strict=True)
            ),
            sum(c.moved * o.times for c, o in zip(costs, inside, strict=True)),
            True,
        )
    tensors = graph.tensors
    taken = [tensors[i] for i in each.inputs]
    made = [tensors[i] for i in each.outputs]
    moved = sum(t.bytes(rows) for t in (*taken, *made))
    elements = sum(t.elements(rows) for t in made)
    kind = each.kind
    if kind in PRODUCTS:
        return Cost(_product(graph, each, rows), moved, True)
    if kind in CONVOLUTIONS:
        kernel = taken[1].shape
        work = made[0].elements(rows) * math.prod(kernel[:-1])
        return Cost(2 * work, moved, True)
    if kind in _OF_INPUT:
        work = taken[2].elements(rows) * math.prod(taken[1].shape[:-1])
        return Cost(2 * work, moved, True)
    if kind in _OF_FILTER:
        work = taken[2].elements(rows) * math.prod(made[0].shape[:-1])
        return Cost(2 * work, moved, True)
    if kind in DEPTHWISE:
        kernel = next(
            (t.shape for t in (*taken, *made) if _is_kernel(t.shape)), (1, 1)
        )
        largest = max(t.elements(rows) for t in (*taken, *made))
        return Cost(2 * largest * math.prod(kernel[:2]), moved, False)
    return Cost(elements, moved, False)


def _is_kernel(shape: tuple[int, ...]) -> bool:
    return len(shape) == 4 and shape[0] % BATCH != 0


def _product(graph: Graph, each: Operation, rows: float) -> float:
    """Returns the operations of a product: 2 for each pair multiplied."""
    first = graph.tensors[each.inputs[0]]
    made = graph.tensors[each.outputs[0]]
    if each.kind == "Einsum":
        return 2 * _einsum(graph, each, rows)
    transposed = each.attributes.get("transpose_a") or each.attributes.get(
        "adj_x"
    )
    if len(first.shape) < 2:
        return made.elements(rows)
    inner = first.shape[-2] if transposed else first.shape[-1]
    if inner and inner % BATCH == 0:
        inner_rows = inner // BATCH * rows
    else:
        inner_rows = inner
    return 2 * made.elements(rows) * inner_rows


def _einsum(graph: Graph, each: Operation, rows: float) -> float:
    """Returns the product of the lengths of all letters of an einsum."""
    equation = each.attributes.get("equation", "")
    taken, _, _ = equation.partition("->")
    lengths: dict[str, float] = {}
    for letters, tensor in zip(taken.split(","), each.inputs, strict=False):
        shape = graph.tensors[tensor].shape
        if "." in letters or len(letters) != len(shape):
            return graph.tensors[each.outputs[0]].elements(rows)
        for letter, length in zip(letters, shape, strict=True):
            scaled = length and length % BATCH == 0
            lengths[letter] = length // BATCH * rows if scaled else length
    return math.prod(lengths.values())


def work_by_layer(graph: Graph, rows: float = 1.0) -> list[float]:
    """Returns the operations of each layer's forward pass."""
    found = [0.0] * len(graph.layers)
    for each in graph.forward():
        if each.layer >= 0:
            found[each.layer] += cost_of(graph, each, rows).operations
    return found


def step_operations(graph: Graph, rows: float) -> float:
    """Returns the floating-point operations of forward and backward pass."""
    return sum(
        cost_of(graph, each, rows).operations for each in graph.operations
    )

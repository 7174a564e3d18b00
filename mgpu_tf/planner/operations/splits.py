"""What a tensor axis divides of a graph: weights, and activations between.

    column -> activation -> row          the outputs of the first are parts
    attention                            by heads

A linear layer keeps its outputs in parts where what follows works on each
element alone, up to a linear layer; then that one sums. This follows the
structure that the engine finds (`engine/step/tensor_parallel/structure.py`).

With `sequence_parallel` each device has a part of the positions of what stands
between: what comes from a sum, up to the next layer in parts.

This module does not import TensorFlow.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Set

from mgpu_tf.planner.operations.graph import Graph, Operation, Weight

LINEAR = {"Dense", "EinsumDense", "Conv1D", "Conv2D", "Conv3D"}
ATTENTION = {"MultiHeadAttention", "GroupedQueryAttention"}
BETWEEN = {"Activation", "ReLU", "Dropout", "LeakyReLU", "ELU"}
TABLES = {"Embedding", "ReversibleEmbedding"}
KINDS = LINEAR | ATTENTION | BETWEEN | TABLES
_OVER_FEATURES = {
    "BatchMatMulV2",
    "Cumsum",
    "Einsum",
    "LogSoftmax",
    "MatMul",
    "Reverse",
    "Roll",
    "Softmax",
    "Transpose",
}
_SMALLEST = 2
_RANK_OF_SEQUENCES = 3


@dataclasses.dataclass(frozen=True)
class Parts:
    """What is divided.

    Attributes:
        weights: The places of the weights that are, among those of the graph.
        tensors: The numbers of the tensors that are.
        layers: The places in `Graph.inner` of the layers with such weights.
        summed: For each layer that ends in a sum over the tensor axis, the
            number of the tensor that is summed.
        gathered: Likewise of layers whose outputs are gathered.
        whole_inputs: The places in `Graph.inner` of the layers that compute
            parts of their outputs from whole inputs.
    """

    weights: frozenset[int]
    tensors: frozenset[int]
    layers: frozenset[int]
    summed: dict[int, int]
    gathered: dict[int, int]
    whole_inputs: frozenset[int]


@functools.lru_cache(maxsize=8)
def parts_of(graph: Graph) -> Parts:
    """Returns what a tensor axis of any length above 1 divides."""
    stays = _stays_in_parts(graph)
    made = _outputs(graph, "inner")
    weights: set[int] = set()
    divided_layers: set[int] = set()
    summed: dict[int, int] = {}
    gathered: dict[int, int] = {}
    whole_outputs: set[int] = set()
    whole_inputs: set[int] = set()
    for place, layer in enumerate(graph.inner):
        if layer.kind in ATTENTION:
            divided_layers.add(place)
            whole_inputs.add(place)
            whole_outputs.add(made.get(place, -1))
            summed[place] = made.get(place, -1)
        elif layer.kind in TABLES or place in stays.arrives:
            summed[place] = made.get(place, -1)
        elif layer.kind in LINEAR:
            whole_inputs.add(place)
            if place in stays.leaves:
                divided_layers.add(place)
            else:
                gathered[place] = made.get(place, -1)
    for place, weight in enumerate(graph.weights):
        kind = graph.inner[weight.inner].kind if weight.inner >= 0 else ""
        known = kind in LINEAR | ATTENTION | TABLES
        if known and len(weight.shape) >= _SMALLEST and weight.trainable:
            weights.add(place)
    tensors = set(stays.tensors)
    for each in graph.operations:
        own = each.inner in divided_layers
        between = _kind(graph, each) not in LINEAR | ATTENTION | TABLES
        if own or (between and not tensors.isdisjoint(each.inputs)):
            tensors.update(
                tensor
                for tensor in each.outputs
                if graph.tensors[tensor].has_rows
                and tensor not in whole_outputs
            )
    return Parts(
        frozenset(weights),
        frozenset(tensors),
        frozenset(graph.weights[place].inner for place in weights),
        summed,
        gathered,
        frozenset(whole_inputs),
    )


def divided_tensors(graph: Graph, length: int) -> frozenset[int]:
    """Returns the numbers of the tensors that a tensor axis divides."""
    return parts_of(graph).tensors if length > 1 else frozenset()


@functools.lru_cache(maxsize=8)
def sequence_tensors(graph: Graph) -> frozenset[int]:
    """Returns the tensors of which each device has a part of the positions.

    Those are computed from sums of shape `[rows, positions, features]`, by
    what keeps rows and positions.
    """
    parts = parts_of(graph)
    sizes = {}
    for tensor in parts.summed.values():
        shape = graph.tensors[tensor].shape if tensor >= 0 else ()
        if len(shape) == _RANK_OF_SEQUENCES:
            sizes[tensor] = math.prod(shape[:2])
    found = dict(sizes)
    for each in graph.operations:
        taken = [found[t] for t in each.inputs if t in found]
        if not taken or each.inner in parts.whole_inputs:
            continue
        for tensor in each.outputs:
            one = graph.tensors[tensor]
            if one.has_rows and math.prod(one.shape) % taken[0] == 0:
                found[tensor] = taken[0]
    return frozenset(found.keys() - parts.tensors)


def weights_with_parts(graph: Graph, length: int) -> list[Weight]:
    """Returns the weights, those that a tensor axis divides marked so."""
    if length == 1:
        return graph.weights
    divided = parts_of(graph).weights
    return [
        dataclasses.replace(weight, split=len(weight.shape) - 1)
        if place in divided
        else weight
        for place, weight in enumerate(graph.weights)
    ]


@dataclasses.dataclass(frozen=True)
class _Stays:
    """What stays in parts between layers.

    Attributes:
        leaves: The layers that leave their outputs in parts.
        arrives: Those that take them, and sum.
        tensors: What is in parts, of the forward pass.
    """

    leaves: set[int]
    arrives: set[int]
    tensors: set[int]


def _stays_in_parts(graph: Graph) -> _Stays:
    """Leaves the outputs of all linear layers in parts, but for whose cannot.

    That is where something else than a linear layer of the same kind takes
    them, and does not work on each element alone.
    """
    leaves = {p for p, layer in enumerate(graph.inner) if layer.kind in LINEAR}
    while True:
        found, cannot = _with(graph, leaves)
        if not cannot:
            return found
        leaves -= cannot


def _with(graph: Graph, leaves: set[int]) -> tuple[_Stays, set[int]]:
    """Returns what is in parts then, and which layers cannot leave them."""
    # The layers whose parts a tensor is made of.
    sources: dict[int, set[int]] = {}
    arrives: set[int] = set()
    cannot: set[int] = set()
    for each in graph.forward():
        place, kind = each.inner, _kind(graph, each)
        taken = [sources[t] for t in each.inputs if t in sources]
        of = set().union(*taken) - {place}
        rows = [t for t in each.outputs if graph.tensors[t].has_rows]
        if kind in LINEAR:
            if of and all(graph.inner[one].kind == kind for one in of):
                arrives.add(place)
            else:
                cannot |= of
            if place in leaves - arrives:
                sources |= {tensor: {place} for tensor in rows}
        elif taken and each.kind != "Shape":
            if kind in BETWEEN or _by_element(graph, each, sources.keys()):
                sources |= dict.fromkeys(rows, of)
            else:
                cannot |= of
    return _Stays(leaves - arrives, arrives, set(sources)), cannot


def _by_element(graph: Graph, each: Operation, in_parts: Set[int]) -> bool:
    """Whether all that an operation makes is made of elements in parts."""
    sizes = {math.prod(graph.tensors[t].shape) for t in each.outputs}
    alike = {
        t for t in each.inputs if math.prod(graph.tensors[t].shape) in sizes
    }
    by_element = len(sizes) == 1 and each.kind not in _OVER_FEATURES
    return by_element and bool(alike) and in_parts >= alike


def _kind(graph: Graph, each: Operation) -> str:
    return graph.inner[each.inner].kind if each.inner >= 0 else ""


def outputs_of(graph: Graph) -> dict[int, int]:
    """Returns the last tensor with rows that each layer makes."""
    return _outputs(graph, "layer")


def _outputs(graph: Graph, of: str) -> dict[int, int]:
    found = {}
    for each in graph.forward():
        for tensor in each.outputs:
            if graph.tensors[tensor].has_rows:
                found[getattr(each, of)] = tensor
    return found

"""What a tensor axis divides of a graph: weights, and activations between.

    column -> activation -> row          the outputs of the first are parts
    attention                            by heads

A linear layer keeps its outputs in parts where the next layers work on each
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

from mgpu_tf.planner.operations.graph import Graph, Weight

LINEAR = {"Dense", "EinsumDense", "Conv1D", "Conv2D", "Conv3D"}
ATTENTION = {"MultiHeadAttention", "GroupedQueryAttention"}
BETWEEN = {"Activation", "ReLU", "Dropout", "LeakyReLU", "ELU"}
TABLES = {"Embedding", "ReversibleEmbedding"}
KINDS = LINEAR | ATTENTION | BETWEEN | TABLES
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
    follows = _followers(graph)
    made = _outputs(graph, "inner")
    weights: set[int] = set()
    divided_layers: set[int] = set()
    summed: dict[int, int] = {}
    gathered: dict[int, int] = {}
    whole_outputs: set[int] = set()
    whole_inputs: set[int] = set()
    rows: set[int] = set()
    for place, layer in enumerate(graph.inner):
        if layer.kind in ATTENTION:
            divided_layers.add(place)
            whole_inputs.add(place)
            whole_outputs.add(made.get(place, -1))
            summed[place] = made.get(place, -1)
        elif layer.kind in TABLES:
            summed[place] = made.get(place, -1)
        elif layer.kind in LINEAR and place not in rows:
            whole_inputs.add(place)
            chain, end = _chain(graph, follows, place)
            if end is None:
                gathered[place] = made.get(place, -1)
                continue
            divided_layers.update([place, *chain])
            rows.add(end)
            summed[end] = made.get(end, -1)
    for place, weight in enumerate(graph.weights):
        kind = graph.inner[weight.inner].kind if weight.inner >= 0 else ""
        known = kind in LINEAR | ATTENTION | TABLES
        if known and len(weight.shape) >= _SMALLEST and weight.trainable:
            weights.add(place)
    tensors = {
        tensor
        for each in graph.operations
        if each.inner in divided_layers
        for tensor in each.outputs
        if graph.tensors[tensor].has_rows and tensor not in whole_outputs
    }
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


def _chain(
    graph: Graph, follows: dict[int, set[int]], place: int
) -> tuple[list[int], int | None]:
    """Returns the layers up to the next linear one, and that one."""
    chain: list[int] = []
    here = place
    while True:
        after = follows.get(here, set())
        if len(after) != 1:
            return [], None
        (here,) = after
        kind = graph.inner[here].kind
        if kind in LINEAR and kind == graph.inner[place].kind:
            return chain, here
        if kind not in BETWEEN:
            return [], None
        chain.append(here)


def _followers(graph: Graph) -> dict[int, set[int]]:
    """Returns which layers take what each layer makes; -1 for the others."""
    maker: dict[int, int] = {}
    found: dict[int, set[int]] = {}
    for each in graph.forward():
        for tensor in each.inputs:
            by = maker.get(tensor)
            if by is not None and by != each.inner and by >= 0:
                found.setdefault(by, set()).add(each.inner)
        for tensor in each.outputs:
            maker[tensor] = each.inner
    return {k: v for k, v in found.items() if -1 not in v}


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

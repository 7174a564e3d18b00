"""What a tensor axis divides of a graph: weights, and activations between.

    column -> activation -> row          the outputs of the first are parts
    attention                            by heads

A linear layer keeps its outputs in parts where the next layers work on each
element alone, up to a linear layer; then that one sums. This follows the
structure that the engine finds (`engine/step/tensor_parallel/structure.py`).

This module does not import TensorFlow.
"""

from __future__ import annotations

import dataclasses
import functools

from mgpu_tf.planner.operations.graph import Graph, Weight

_LINEAR = {"Dense", "EinsumDense", "Conv1D", "Conv2D", "Conv3D"}
_ATTENTION = {"MultiHeadAttention", "GroupedQueryAttention"}
_BETWEEN = {"Activation", "ReLU", "Dropout", "LeakyReLU", "ELU"}
_TABLES = {"Embedding", "ReversibleEmbedding"}
_SMALLEST = 2


@dataclasses.dataclass(frozen=True)
class Parts:
    """What is divided.

    Attributes:
        weights: The places of the weights that are, among those of the graph.
        tensors: The numbers of the tensors that are.
        summed: For each layer that ends in a sum over the tensor axis, the
            number of the tensor that is summed.
        gathered: Likewise of layers whose outputs are gathered.
    """

    weights: frozenset[int]
    tensors: frozenset[int]
    summed: dict[int, int]
    gathered: dict[int, int]


@functools.lru_cache(maxsize=8)
def parts_of(graph: Graph) -> Parts:
    """Returns what a tensor axis of any length above 1 divides."""
    follows = _followers(graph)
    made = outputs_of(graph)
    weights: set[int] = set()
    divided_layers: set[int] = set()
    summed: dict[int, int] = {}
    gathered: dict[int, int] = {}
    whole_outputs: set[int] = set()
    rows: set[int] = set()
    for place, layer in enumerate(graph.layers):
        if layer.kind in _ATTENTION:
            divided_layers.add(place)
            whole_outputs.add(made.get(place, -1))
            summed[place] = made.get(place, -1)
        elif layer.kind in _TABLES:
            summed[place] = made.get(place, -1)
        elif layer.kind in _LINEAR and place not in rows:
            chain, end = _chain(graph, follows, place)
            if end is None:
                gathered[place] = made.get(place, -1)
                continue
            divided_layers.update([place, *chain])
            rows.add(end)
            summed[end] = made.get(end, -1)
    for place, weight in enumerate(graph.weights):
        kind = graph.layers[weight.layer].kind if weight.layer >= 0 else ""
        known = kind in _LINEAR | _ATTENTION | _TABLES
        if known and len(weight.shape) >= _SMALLEST and weight.trainable:
            weights.add(place)
    tensors = {
        tensor
        for each in graph.operations
        if each.layer in divided_layers
        for tensor in each.outputs
        if graph.tensors[tensor].has_rows and tensor not in whole_outputs
    }
    return Parts(
        frozenset(weights),
        frozenset(tensors),
        summed,
        gathered,
    )


def divided_tensors(graph: Graph, length: int) -> frozenset[int]:
    """Returns the numbers of the tensors that a tensor axis divides."""
    return parts_of(graph).tensors if length > 1 else frozenset()


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
        kind = graph.layers[here].kind
        if kind in _LINEAR and kind == graph.layers[place].kind:
            return chain, here
        if kind not in _BETWEEN:
            return [], None
        chain.append(here)


def _followers(graph: Graph) -> dict[int, set[int]]:
    """Returns which layers take what each layer makes; -1 for the loss."""
    maker: dict[int, int] = {}
    found: dict[int, set[int]] = {}
    for each in graph.forward():
        for tensor in each.inputs:
            by = maker.get(tensor)
            if by is not None and by != each.layer and by >= 0:
                found.setdefault(by, set()).add(each.layer)
        for tensor in each.outputs:
            # What stands between layers belongs to the one before it.
            maker[tensor] = each.layer
    return {k: v for k, v in found.items() if -1 not in v}


def outputs_of(graph: Graph) -> dict[int, int]:
    """Returns the last tensor with rows that each layer makes."""
    found = {}
    for each in graph.forward():
        for tensor in each.outputs:
            if graph.tensors[tensor].has_rows:
                found[each.layer] = tensor
    return found

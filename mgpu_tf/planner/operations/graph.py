"""A training step as a list of operations with sizes, and nothing else.

    graph = trace(build_model)              # `tracing.py`; no memory is taken
    graph.bytes_of(graph.tensors[7], 64)    # of 64 rows

A graph is traced once, with `BATCH` rows, and says how large each tensor is
for any number of rows: a dimension that is a multiple of `BATCH` grows with
it. `BATCH` is a prime, so that no dimension of a model is one by chance.

This module does not import TensorFlow.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

BATCH = 1009


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """A value that an operation makes.

    Attributes:
        shape: Its dimensions; those of rows are multiples of `BATCH`.
        itemsize: Bytes of an element.
        floating: Whether its elements are real numbers.
    """

    shape: tuple[int, ...]
    itemsize: int = 4
    floating: bool = True

    @property
    def has_rows(self) -> bool:
        """Whether its size grows with the batch."""
        return any(n % BATCH == 0 and n for n in self.shape)

    def elements(self, rows: float) -> float:
        """Returns how many elements there are for a number of rows."""
        found = 1.0
        for length in self.shape:
            scaled = length and length % BATCH == 0
            found *= length // BATCH * rows if scaled else length
        return found

    def bytes(self, rows: float) -> float:
        """Returns the bytes for a number of rows."""
        return self.elements(rows) * self.itemsize


@dataclasses.dataclass(slots=True)
class Operation:
    """An operation.

    Attributes:
        kind: Its type in TensorFlow, such as "MatMul".
        inputs: The numbers of the tensors that it takes.
        outputs: The numbers of the tensors that it makes.
        layer: The place in `Graph.layers` of the layer that it computes; -1
            for what is of none, such as the loss.
        backward: Whether it is of the backward pass.
        times: How often it runs: more than once in a loop.
        attributes: What its cost depends on, such as `transpose_a`.
        inner: The place in `Graph.inner` of the layer that it computes; -1 for
            what is of none of those.
    """

    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    layer: int = -1
    backward: bool = False
    times: int = 1
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    inner: int = -1


@dataclasses.dataclass(frozen=True, slots=True)
class Weight:
    """A variable of a model.

    Attributes:
        path: Its path, such as "dense/kernel".
        shape: Its shape.
        itemsize: Bytes of an element.
        tensor: The number of its value among the tensors.
        trainable: Whether it is trained.
        layer: The place of the first layer that has it; -1 for none.
        inner: Likewise of the layers in `Graph.inner`.
        gradient: The number of its gradient, None without one.
        sparse: Whether the gradient is rows of an embedding.
        split: The dimension along which a tensor axis divides it, None where
            it is whole on every device.
        table: Whether it is a table of which rows are looked up.
    """

    path: str
    shape: tuple[int, ...]
    itemsize: int
    tensor: int
    trainable: bool = True
    layer: int = -1
    inner: int = -1
    gradient: int | None = None
    sparse: bool = False
    split: int | None = None
    table: bool = False

    @property
    def elements(self) -> int:
        """Returns how many elements it has."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Returns how many bytes it has."""
        return self.elements * self.itemsize


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer that a model holds directly, or in a model inside of it.

    Attributes:
        name: Its name.
        kind: The name of its class.
        again: Whether it can be computed once more in the backward pass.
    """

    name: str
    kind: str
    again: bool = True


@dataclasses.dataclass(eq=False)
class Graph:
    """Forward pass, loss and gradients of one device.

    Attributes:
        name: The name of the model.
        tensors: What the operations make.
        operations: In an order in which they can run.
        weights: The variables of the model.
        layers: Its layers, in the order in which they are called.
        inputs: The numbers of the tensors of a batch.
        slots: Bytes that the optimizer keeps for each element of a trainable
            weight, in the order of the weights.
        other_bytes: Bytes of the optimizer's and the metrics' other state.
        averaged: Whether the optimizer keeps an average of weights.
        clips: Whether the optimizer needs all gradients before the first
            update.
        optimizer: The name of the class of the optimizer.
        loss: The number of the tensor of the loss.
        inner: The calls of layers that a tensor axis may divide, of those of
            Keras's that the layers are made of, in their order.
        stages: How many stages the layers can be cut into at most; 1 where a
            pipeline does not take the model, None for one for each layer.
    """

    name: str
    tensors: list[Tensor]
    operations: list[Operation]
    weights: list[Weight]
    layers: list[Layer]
    inputs: list[int]
    slots: list[float]
    other_bytes: int = 0
    averaged: bool = False
    clips: bool = False
    optimizer: str = ""
    loss: int = -1
    inner: list[Layer] = dataclasses.field(default_factory=list)
    stages: int | None = None

    @property
    def most_stages(self) -> int:
        """Returns how many stages a pipeline can have."""
        layers = len(self.layers)
        return layers if self.stages is None else min(layers, self.stages)

    @property
    def trainable(self) -> list[Weight]:
        """Returns the weights that are trained."""
        return [weight for weight in self.weights if weight.trainable]

    @property
    def parameters(self) -> int:
        """Returns the number of trained parameters."""
        return sum(weight.elements for weight in self.trainable)

    @property
    def slot_bytes(self) -> float:
        """Returns the bytes that the optimizer keeps of all weights."""
        pairs = zip(self.trainable, self.slots, strict=True)
        return sum(weight.elements * each for weight, each in pairs)

    def bytes_of(self, tensor: int, rows: float) -> float:
        """Returns the bytes of a tensor for a number of rows."""
        return self.tensors[tensor].bytes(rows)

    def sizes(self, rows: float) -> tuple[float, ...]:
        """Returns the bytes of all tensors for a number of rows."""
        return _sizes(self, rows)

    def forward(self) -> Iterator[Operation]:
        """Yields the operations of the forward pass and the loss."""
        return (each for each in self.operations if not each.backward)


@functools.lru_cache(maxsize=16)
def _sizes(graph: Graph, rows: float) -> tuple[float, ...]:
    return tuple(tensor.bytes(rows) for tensor in graph.tensors)

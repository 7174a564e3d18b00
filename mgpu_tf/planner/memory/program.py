"""The operations of one device in a layout, in the order in which they run.

A graph is of one device with whole weights. Here it becomes that of a device
among others: weights are gathered before a layer and forgotten after it,
layers are computed once more, gradients are summed or scattered, and what a
tensor axis divides is a part.

This module does not import TensorFlow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from mgpu_tf.planner.layout import Layout
from mgpu_tf.planner.memory.rules import RULES, Rules
from mgpu_tf.planner.memory.scratch import FITTED, scratch_of
from mgpu_tf.planner.operations import splits
from mgpu_tf.planner.operations.graph import Graph, Operation, Weight
from mgpu_tf.planner.operations.liveness import ALIASES, Peak, Schedule


class Program:
    """What one device runs in a step.

    Args:
        graph: The step of one device.
        rows: How many rows it has at a time.
        layout: What is divided how.
        layers: The layers of its stage; all by default.
        rules: What the engine holds when.
        fitted: The scratch of operations, by kind.
    """

    def __init__(
        self,
        graph: Graph,
        rows: float,
        layout: Layout,
        layers: range | None = None,
        rules: Rules = RULES,
        fitted: Mapping[str, float] = FITTED,
    ) -> None:
        self._graph = graph
        self._layout = layout
        self._rules = rules
        self._fitted = fitted
        self._layers = layers or range(len(graph.layers))
        self._is_last = self._layers.stop >= len(graph.layers)
        divided = splits.divided_tensors(graph, layout.tensor)
        # Of which each device has a part of the positions, and who takes all.
        self._sequences: frozenset[int] = frozenset()
        self._take_whole: frozenset[int] = frozenset()
        if layout.sequence_parallel:
            self._sequences = splits.sequence_tensors(graph)
            self._take_whole = splits.parts_of(graph).whole_inputs
        self._whole: dict[int, int] = {}
        # What devices of a tensor axis sum or join, each with copies of others.
        self._exchanged: set[int] = set()
        if layout.tensor > 1:
            parts = splits.parts_of(graph)
            self._exchanged = {*parts.summed.values(), *parts.gathered.values()}
        self._weights = splits.weights_with_parts(graph, layout.tensor)
        sizes = list(graph.sizes(rows))
        for number in divided | self._sequences:
            sizes[number] /= layout.tensor
        for weight in graph.weights:
            sizes[weight.tensor] = 0.0
        for number in graph.inputs:
            sizes[number] = 0.0
        self._by_gradient: dict[int, Weight] = {}
        for weight in self._weights:
            if weight.gradient is not None:
                self._by_gradient[weight.gradient] = weight
                if not weight.sparse:
                    sizes[weight.gradient] = self.computed_bytes(weight)
        self._schedule = Schedule(sizes, rules.beside)
        # What a tensor of the graph is here: itself, gathered, or made again.
        self._here: dict[int, int] = {}
        self._pending: list[tuple[Weight, int]] = []
        self._gathered_of: dict[int, Weight] = {
            weight.tensor: weight
            for weight in self._weights
            if layout.gathers_layers and weight.elements >= rules.smallest_split
        }
        self._results: list[int] = []

    # What is held of weights.

    def computed_bytes(self, weight: Weight) -> float:
        """Returns the bytes of a weight as this device computes with it."""
        parts = self._layout.tensor if weight.split is not None else 1
        return weight.bytes / parts

    def stored_bytes(self, weight: Weight) -> float:
        """Returns the bytes of a weight that this device updates."""
        size = self.computed_bytes(weight)
        divided = (
            self._layout.fsdp > 1
            and weight.elements >= self._rules.smallest_split
        )
        return size / self._layout.fsdp if divided else size

    @property
    def weights(self) -> list[Weight]:
        """Returns the weights of the layers that this device has."""
        return [
            weight
            for weight in self._weights
            if weight.layer in self._layers
            or (weight.layer < 0 and self._is_last)
        ]

    # What runs.

    def peak(self) -> Peak:
        """Returns the most that is held beside what is stored."""
        operations = self._in_order()
        forward = [each for each in operations if not each.backward]
        backward = [each for each in operations if each.backward]
        if self._layout.gathers_layers:
            self._gathering(forward)
        else:
            for each in forward:
                self._run(each)
        by_layer: dict[int, list[Operation]] = {}
        for each in forward:
            by_layer.setdefault(each.layer, []).append(each)
        if self._layout.gathers_layers:
            self._here.clear()
            self._gathering(backward, by_layer)
        else:
            done: set[int] = set()
            for each in backward:
                self._again(each.layer, by_layer, done)
                self._run(each)
        self._finish()
        return self._schedule.result()

    def _in_order(self) -> list[Operation]:
        own = self._own()
        # A stage, and a layer that is gathered, has a function for each pass.
        apart = self._layout.pipeline > 1 or self._layout.gathers_layers
        return own if apart else as_they_run(own)

    def kept_bytes(self, *, inputs_only: bool = False) -> float:
        """Returns what is kept of a forward pass until its backward pass.

        Args:
            inputs_only: Whether only what the layers take from others is
                kept, to compute them again.
        """
        own = self._in_order()
        made = {
            tensor: each
            for each in own
            if not each.backward
            for tensor in each.outputs
        }
        taken = {
            tensor for each in own if each.backward for tensor in each.inputs
        }
        if inputs_only:
            taken = {t for each in own for t in each.inputs}
            taken = {t for t in taken if t not in made}
            made = dict.fromkeys(taken, own[0])
        names = {t: self._root(t, made) for t in taken if t in made}
        size = self._schedule.size
        return sum(size(root) for root in set(names.values()))

    def _root(self, tensor: int, made: Mapping[int, Operation]) -> int:
        """Returns the tensor whose buffer another one names anew."""
        while tensor in made and made[tensor].kind in ALIASES:
            inputs = made[tensor].inputs
            if not inputs or tensor in inputs:
                break
            tensor = inputs[0]
        return tensor

    def _own(self) -> list[Operation]:
        if len(self._layers) == len(self._graph.layers):
            return self._graph.operations
        return [
            each
            for each in self._graph.operations
            if each.layer in self._layers or (each.layer < 0 and self._is_last)
        ]

    def _gathering(
        self,
        operations: Sequence[Operation],
        by_layer: dict[int, list[Operation]] | None = None,
    ) -> None:
        """Runs operations layer by layer, with weights gathered before."""
        order: list[int] = []
        for each in operations:
            if each.layer not in order:
                order.append(each.layer)
        needed = {
            layer: [w for w in self._gathered_of.values() if w.layer == layer]
            for layer in order
        }
        with_weights = [layer for layer in order if needed[layer]]
        there: set[int] = set()
        done: set[int] = set()

        def gather(layer: int) -> None:
            if layer in there:
                return
            there.add(layer)
            for weight in needed[layer]:
                buffer = self._schedule.new(self.computed_bytes(weight))
                self._schedule.run(
                    "Gather", [], [buffer], kind="gathered weights"
                )
                self._here[weight.tensor] = buffer

        for each in operations:
            layer = each.layer
            if needed.get(layer) and layer not in done:
                place = with_weights.index(layer)
                ahead = with_weights[
                    place : place + 1 + self._rules.layers_ahead
                ]
                for one in ahead:
                    gather(one)
            if by_layer is not None:
                self._again(layer, by_layer, done)
            done.add(layer)
            self._run(each)

    def _again(
        self,
        layer: int,
        by_layer: dict[int, list[Operation]],
        done: set[int],
    ) -> None:
        """Runs the forward pass of a layer once more, where it is to be."""
        if layer in done or layer < 0 or not self._layout.recomputes:
            return
        done.add(layer)
        if not self._graph.layers[layer].again:
            return
        for each in by_layer.get(layer, []):
            made = [
                self._schedule.new(self._schedule.size(output))
                for output in each.outputs
            ]
            self._run(each, made)
            self._here |= dict(zip(each.outputs, made, strict=True))

    def _run(
        self, each: Operation, outputs: Sequence[int] | None = None
    ) -> None:
        here = self._here
        taken = [here.get(t, t) for t in each.inputs] if here else each.inputs
        if each.inner in self._take_whole:
            taken = [
                self._joined(own) if known in self._sequences else own
                for known, own in zip(each.inputs, taken, strict=True)
            ]
        made = outputs or each.outputs
        scratch = scratch_of(each, self._fitted)
        if scratch:
            scratch *= sum(map(self._schedule.size, [*taken, *made]))
        scratch += sum(
            self._schedule.size(t) for t in made if t in self._exchanged
        )
        inside = each.attributes.get("inside")
        if inside:
            scratch += self._inside(inside)
        held = [t for t in made if t in self._by_gradient]
        kind = "temporary" if each.backward else "activations"
        if held:
            kind = "gradients"
        self._schedule.run(each.kind, taken, made, kind=kind, scratch=scratch)
        for gradient in held:
            self._made(self._by_gradient[gradient], gradient)

    def _joined(self, part: int) -> int:
        """Returns the whole sequence of which each device has a part."""
        if part not in self._whole:
            size = self._schedule.size(part) * self._layout.tensor
            whole = self._whole[part] = self._schedule.new(size)
            self._schedule.run("Gather", [part], [whole], kind="activations")
        return self._whole[part]

    def _inside(self, operations: Sequence[Operation]) -> float:
        """Returns the most that a turn of a loop holds."""
        turn = Schedule([self._schedule.size(i) for i in range(self._count)])
        for each in operations:
            turn.run(each.kind, each.inputs, each.outputs)
        return turn.result().bytes

    @property
    def _count(self) -> int:
        return len(self._graph.tensors)

    # What becomes of gradients.

    def _made(self, weight: Weight, gradient: int) -> None:
        held = self._pending
        if self._scatters and held and held[0][0].layer != weight.layer:
            # They travel while the layer below computes.
            self._flush()
        held.append((weight, gradient))
        at_once = self._rules.reduces_at_once and not self._scatters
        if at_once or self._layout.devices == 1:
            self._flush()

    @property
    def _scatters(self) -> bool:
        """Whether gradients are scattered layer by layer."""
        layout = self._layout
        can = layout.fsdp > 1 and layout.pipeline == 1
        return can and self._rules.scatters_at_once

    def _flush(self) -> None:
        """Sums the gradients that wait, and updates their weights."""
        for weight, gradient in self._pending:
            summed = gradient
            if self._scatters:
                received = self._schedule.new(self.computed_bytes(weight))
                self._schedule.run(
                    "Scatter", [gradient], [received], kind="reduction"
                )
                gradient = received
            if self._layout.data * self._layout.fsdp > 1:
                size = self.stored_bytes(weight)
                if not self._scatters:
                    size *= self._rules.reduction_copies
                summed = self._schedule.new(size)
                self._schedule.run(
                    "Reduce", [gradient], [summed], kind="reduction"
                )
            self._results.append(summed)
        self._pending.clear()
        if not self._graph.clips:
            rules = self._rules
            self._update(
                rules.parts_behind if self._scatters else rules.updates_behind
            )

    def _update(self, left: int) -> None:
        """Applies gradients until there are so many left."""
        while len(self._results) > left:
            self._schedule.run("Update", [self._results.pop(0)], [])

    def _finish(self) -> None:
        self._flush()
        self._update(0)


def as_they_run(operations: list[Operation]) -> list[Operation]:
    """Returns operations in the order in which TensorFlow begins them.

    It runs an operation as soon as what it takes is there. So what the
    backward pass makes of activations alone, as the derivative of an
    activation, is made right after them, in the forward pass: then that is
    kept, and not what it was made of.

    Args:
        operations: Those of the forward pass, then those of the backward pass.
    """
    forward = [each for each in operations if not each.backward]
    there = {
        tensor: place
        for place, each in enumerate(forward)
        for tensor in each.outputs
    }
    followed_by: list[list[Operation]] = [[] for _ in forward]
    later: list[Operation] = []
    made_later: set[int] = set()
    for each in operations:
        if not each.backward:
            continue
        places = [there[t] for t in each.inputs if t in there]
        waits = not made_later.isdisjoint(each.inputs)
        if waits or not places or max(places) == len(forward) - 1:
            later.append(each)
            # What takes nothing, as a constant, is there from the beginning.
            if each.inputs:
                made_later.update(each.outputs)
            continue
        there.update(dict.fromkeys(each.outputs, max(places)))
        followed_by[max(places)].append(
            dataclasses.replace(each, backward=False)
        )
    return [
        *(
            one
            for each, following in zip(forward, followed_by, strict=True)
            for one in (each, *following)
        ),
        *later,
    ]

"""The layouts that a plan compares.

    for layout in layouts(machines, 512, graph): ...

Every product of data, fsdp, tensor and pipeline that is a number of devices
up to all of them, with the options that trade time for memory: recomputing,
accumulating, micro-batches, parts of sequences. No pipeline is among them where
the engine cannot cut the model.

This module does not import TensorFlow.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from mgpu_tf.planner.layout import Layout
from mgpu_tf.planner.operations import splits
from mgpu_tf.planner.operations.graph import Graph
from mgpu_tf.planner.speed.step_time import Machines

# A step is cut into no more parts than that.
MOST_ACCUMULATION = 64
_MICRO = (2, 4, 8)


def layouts(
    machines: Machines,
    global_batch_size: int,
    graph: Graph,
    *,
    all_devices: bool = False,
) -> Iterator[Layout]:
    """Yields the layouts of machines, those without options first.

    Args:
        machines: The machines.
        global_batch_size: Rows of an update. Each replica gets one or more.
        graph: A traced model, which shows how long a pipeline can be.
        all_devices: Whether every device must take part.
    """
    total = machines.devices
    counts = [total] if all_devices else _counts(machines)
    for devices in counts:
        for axes in _axes(devices, machines, graph.most_stages):
            yield from _with_options(axes, global_batch_size, graph)


def _counts(machines: Machines) -> list[int]:
    """Returns numbers of devices: powers of 2 of a machine, whole machines."""
    within = [
        2**power
        for power in range(machines.per_node.bit_length())
        if 2**power < machines.per_node
    ]
    nodes = [
        2**power
        for power in range(machines.nodes.bit_length())
        if 2**power < machines.nodes
    ]
    whole = [machines.per_node * each for each in [*nodes, machines.nodes]]
    return sorted({*within, *whole})


def _axes(devices: int, machines: Machines, stages: int) -> Iterator[Layout]:
    """Yields the axes whose product is a number of devices."""
    several = devices > machines.per_node
    for tensor in _divisors(devices):
        # Sums between layers stay within a machine that has several devices.
        if 1 < machines.per_node < tensor:
            continue
        for pipeline in _divisors(devices // tensor):
            if pipeline > 1 and pipeline > stages:
                continue
            # A machine has whole pipelines, or a block of stages of one.
            own = machines.per_node
            if several and pipeline % own and own % pipeline:
                continue
            if (
                several
                and min(tensor, pipeline) > 1
                and own % (tensor * pipeline)
            ):
                continue  # Of what is in parts it has all stages.
            rest = devices // tensor // pipeline
            for fsdp in _divisors(rest):
                yield Layout(rest // fsdp, fsdp, tensor, pipeline)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _with_options(
    axes: Layout, global_batch_size: int, graph: Graph
) -> Iterator[Layout]:
    """Yields a layout with each choice of options."""
    several_layers = any(layer.again for layer in graph.layers)
    recomputes: list[str | None] = [None]
    if axes.pipeline > 1:
        recomputes.append("stages")
    elif several_layers and not axes.recomputes:
        recomputes.append("layers")
    shards = ["weights"]
    if axes.fsdp > 1 and axes.tensor == axes.pipeline == 1:
        shards.append("optimizer")
    micro: list[int | None] = [None]
    if axes.pipeline > 1:
        micro = [axes.pipeline * each for each in _MICRO]
    sequences = [False]
    if axes.tensor > 1 and splits.sequence_tensors(graph):
        sequences.append(True)
    steps = [2**power for power in range(MOST_ACCUMULATION.bit_length())]
    for accumulation, recompute, shard, parts, sequence in itertools.product(
        steps, recomputes, shards, micro, sequences
    ):
        layout = dataclasses.replace(
            axes,
            accumulation=accumulation,
            recompute=recompute,
            shard=shard,
            micro_batches=parts,
            sequence_parallel=sequence,
        )
        smallest = layout.replicas * accumulation * layout.parts
        if smallest <= global_batch_size:
            yield layout

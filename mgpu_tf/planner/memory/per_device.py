"""How much memory each device takes in a step, by kind, before it is run.

    estimate = estimate_memory(build_model, 256, "fsdp", devices=4)
    print(estimate.text())
    estimate.largest.total                  # bytes

Neither the devices nor the memory have to be there: the model is traced
without values (`tracing.py`), and the most that is alive at one time is found
in the list of operations (`liveness.py`).

This module imports TensorFlow when a model is traced, and not before.

References: S. Rajbhandari et al.: ZeRO, SC 2020, section 3; D. Narayanan et
al.: PipeDream-Flush, ICML 2021, for micro-batches in flight.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mgpu_tf.errors import ConfigurationError
from mgpu_tf.planner.layout import Layout, layout_of
from mgpu_tf.planner.memory.program import Program
from mgpu_tf.planner.memory.rules import RULES, Rules
from mgpu_tf.planner.memory.scratch import FITTED, STORED, wasted_bytes
from mgpu_tf.planner.operations import costs
from mgpu_tf.planner.operations.graph import Graph
from mgpu_tf.planner.operations.liveness import KINDS, Peak
from mgpu_tf.reports.scaling import aligned

if TYPE_CHECKING:
    import keras

_MIB = 1 << 20

# What a process that trains takes beside its tensors: code, threads, Python.
PROCESS_BYTES = 600 * _MIB
COORDINATOR_BYTES = 700 * _MIB
_STORING = ("ps", "coordinator")


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """What one device takes.

    Attributes:
        name: What it is, such as "device", "stage 1" or "ps".
        count: How many devices take as much.
        by_kind: Bytes by kind of memory, in the order of `KINDS`.
    """

    name: str
    count: int
    by_kind: Mapping[str, float]

    @property
    def total(self) -> float:
        """Returns all bytes."""
        return sum(self.by_kind.values())

    @property
    def stored(self) -> float:
        """Returns the bytes that stay between steps, whatever the batch."""
        return sum(self.by_kind.get(kind, 0.0) for kind in STORED)


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """What a step takes.

    Attributes:
        devices: Each kind of device once.
        host: Bytes of each process on its host: batches that wait, and the
            process itself.
    """

    devices: tuple[DeviceMemory, ...]
    host: float

    @property
    def largest(self) -> DeviceMemory:
        """Returns the device that computes and takes most."""
        computing = [d for d in self.devices if d.name not in _STORING]
        return max(computing, key=lambda device: device.total)

    @property
    def all_devices(self) -> float:
        """Returns the bytes of all devices together."""
        return sum(device.total * device.count for device in self.devices)

    def text(self) -> str:
        """Returns a table in MiB, for a terminal."""
        shown = [
            kind
            for kind in KINDS
            if any(device.by_kind.get(kind) for device in self.devices)
        ]
        head = ["MiB", *(f"{d.count} x {d.name}" for d in self.devices)]
        rows = [head]
        for kind in shown:
            rows.append(
                [
                    kind,
                    *(
                        f"{device.by_kind.get(kind, 0.0) / _MIB:,.1f}"
                        for device in self.devices
                    ),
                ]
            )
        rows.append(
            ["total", *(f"{d.total / _MIB:,.1f}" for d in self.devices)]
        )
        return "\n".join(
            [*aligned(rows), f"host, each process: {self.host / _MIB:,.0f} MiB"]
        )


def estimate_memory(
    build_model: Callable[[], keras.Model] | Graph,
    global_batch_size: int,
    strategy: str = "one_device",
    *,
    devices: int = 1,
    data: Any = None,
    **options: Any,
) -> MemoryEstimate:
    """Estimates what a training step takes, without running it.

    Example:
        estimate_memory(build_model, 256, "fsdp", devices=4).largest.total

    Args:
        build_model: Returns a compiled model; or a graph of `trace`.
        global_batch_size: Rows of an update, over all devices.
        strategy: A name for `create_strategy`.
        devices: The devices of all workers.
        data: A batch, as in `trace`.
        **options: As in `layout_of`: the sizes of axes, `shard`,
            `micro_batches`, `recompute`, `accumulation`, `num_ps`.

    Returns:
        The estimate.

    Raises:
        ConfigurationError: An option is wrong, or the model cannot be traced.
    """
    graph = graph_of(build_model, data)
    layout = layout_of(strategy, devices, **options)
    return memory_of(graph, layout, global_batch_size)


def graph_of(
    build_model: Callable[[], keras.Model] | Graph, data: Any = None
) -> Graph:
    """Returns the graph of a model, traced where it is not one already."""
    if isinstance(build_model, Graph):
        return build_model
    from mgpu_tf.planner.operations.tracing import trace

    return trace(build_model, data)


def memory_of(
    graph: Graph,
    layout: Layout,
    global_batch_size: int,
    *,
    rules: Rules = RULES,
    fitted: Mapping[str, float] = FITTED,
) -> MemoryEstimate:
    """Estimates what a layout takes.

    Args:
        graph: A traced model.
        layout: What is divided how.
        global_batch_size: Rows of an update.
        rules: What the engine holds when.
        fitted: The scratch of operations, by kind.
    """
    rows = layout.rows(global_batch_size)
    batch = sum(graph.tensors[i].bytes(rows) for i in graph.inputs)
    host = PROCESS_BYTES + rules.batches_ahead * batch
    found: list[DeviceMemory]
    if layout.num_ps:
        found = _with_servers(graph, layout, rows, batch, rules, fitted)
    elif layout.pipeline > 1:
        found = _stages(graph, layout, rows, batch, rules, fitted)
    else:
        program = Program(graph, rows, layout, rules=rules, fitted=fitted)
        kinds = _stored(graph, program, layout)
        kinds["batches"] = batch
        peak = program.peak()
        _add(kinds, peak)
        kinds["allocator"] = wasted_bytes(kinds, layout, fitted)
        found = [DeviceMemory("device", layout.devices, _in_order(kinds))]
    return MemoryEstimate(tuple(found), host)


def _stored(graph: Graph, program: Program, layout: Layout) -> dict[str, float]:
    """Returns what is there between steps."""
    slots = {
        weight.tensor: each
        for weight, each in zip(graph.trainable, graph.slots, strict=True)
    }
    kinds = dict.fromkeys(KINDS, 0.0)
    keeps_whole = layout.fsdp > 1 and layout.shard != "weights"
    for weight in program.weights:
        stored = program.stored_bytes(weight)
        kinds["parameters"] += stored
        if keeps_whole and stored < program.computed_bytes(weight):
            kinds["parameters"] += program.computed_bytes(weight)
        part = stored / weight.itemsize
        if not weight.trainable:
            continue
        kept = slots[weight.tensor] * part
        average = part * weight.itemsize if graph.averaged else 0.0
        kinds["slots"] += kept - average
        kinds["averages"] += average
        if layout.accumulation > 1:
            sums = stored
            if layout.fsdp > 1 and layout.shard == "optimizer":
                sums = program.computed_bytes(weight)
            kinds["gradients"] += sums
    kinds["other"] = float(graph.other_bytes)
    return kinds


def _add(kinds: dict[str, float], peak: Peak) -> None:
    for kind, size in peak.by_kind.items():
        kinds[kind] += size


def _in_order(kinds: Mapping[str, float]) -> dict[str, float]:
    return {kind: kinds.get(kind, 0.0) for kind in KINDS}


@functools.lru_cache(maxsize=16)
def stages_of(graph: Graph, count: int) -> list[range]:
    """Returns the layers of each stage, as the engine cuts them.

    The most expensive stage is as cheap as can be; the cost of a layer is
    half its part of the parameters and half its part of the work.

    Args:
        graph: A traced model.
        count: How many stages.

    Raises:
        ConfigurationError: There are fewer layers than stages.
    """
    layers = len(graph.layers)
    if layers < count:
        raise ConfigurationError(
            "A pipeline needs a layer for each stage. Received: "
            f"{layers} layers for {count} stages. Use fewer stages."
        )
    sizes = [0.0] * layers
    for weight in graph.weights:
        if weight.layer >= 0:
            sizes[weight.layer] += weight.elements
    works = costs.work_by_layer(graph)
    all_sizes, all_works = sum(sizes) or 1.0, sum(works) or 1.0
    each = [
        0.5 * size / all_sizes + 0.5 * work / all_works
        for size, work in zip(sizes, works, strict=True)
    ]
    sums = [0.0, *itertools.accumulate(each)]
    best = [[float("inf")] * (layers + 1) for _ in range(count + 1)]
    cut = [[0] * (layers + 1) for _ in range(count + 1)]
    best[0][0] = 0.0
    for stage in range(1, count + 1):
        for end in range(stage, layers + 1):
            for begin in range(stage - 1, end):
                most = max(best[stage - 1][begin], sums[end] - sums[begin])
                if most < best[stage][end]:
                    best[stage][end], cut[stage][end] = most, begin
    bounds = [layers]
    for stage in range(count, 0, -1):
        bounds.append(cut[stage][bounds[-1]])
    bounds.reverse()
    return [range(a, b) for a, b in itertools.pairwise(bounds)]


def _stages(
    graph: Graph,
    layout: Layout,
    rows: int,
    batch: float,
    rules: Rules,
    fitted: Mapping[str, float],
) -> list[DeviceMemory]:
    """Returns what each stage of a pipeline takes.

    Beside the micro-batch that is computed a stage keeps the activations of
    those between their two passes, and the sums of its gradients; of weights
    that are split, whole ones for the length of a step.
    """
    micro = rows / layout.parts
    found = []
    for number, layers in enumerate(stages_of(graph, layout.pipeline)):
        program = Program(
            graph, micro, layout, layers, rules=rules, fitted=fitted
        )
        kinds = _stored(graph, program, layout)
        peak = program.peak()
        _add(kinds, peak)
        kept = program.kept_bytes(inputs_only=layout.recompute == "stages")
        live = layout.parts
        if layout.schedule == "1f1b":
            live = min(layout.parts, layout.pipeline - number)
        kinds["micro-batches"] = (live - 1) * kept
        if layout.parts > 1:
            kinds["gradients"] += sum(
                program.computed_bytes(weight)
                for weight in program.weights
                if weight.trainable
            )
        kinds["gathered weights"] += sum(
            program.computed_bytes(weight)
            for weight in program.weights
            if program.stored_bytes(weight) < program.computed_bytes(weight)
        )
        if number == 0 or number == layout.pipeline - 1:
            kinds["batches"] = batch
        kinds["allocator"] = wasted_bytes(kinds, layout, fitted)
        count = layout.replicas * layout.tensor
        found.append(DeviceMemory(f"stage {number}", count, _in_order(kinds)))
    return found


def _with_servers(
    graph: Graph,
    layout: Layout,
    rows: int,
    batch: float,
    rules: Rules,
    fitted: Mapping[str, float],
) -> list[DeviceMemory]:
    """Returns what workers, servers and the coordinator take.

    A worker reads all weights for a step, and sends all gradients. A server
    holds a part of weights and slots, and what one worker has sent.
    """
    alone = Layout(accumulation=layout.accumulation, recompute=layout.recompute)
    program = Program(graph, rows, alone, rules=rules, fitted=fitted)
    peak = program.peak()
    worker = dict.fromkeys(KINDS, 0.0)
    worker["parameters"] = sum(float(w.bytes) for w in graph.weights)
    worker["batches"] = batch
    _add(worker, peak)
    held = _stored(graph, program, alone)
    server = dict.fromkeys(KINDS, 0.0)
    for kind in ("parameters", "slots", "averages", "other"):
        server[kind] = held[kind] / layout.num_ps
    server["gradients"] = held["parameters"] / layout.num_ps
    coordinator = dict.fromkeys(KINDS, 0.0)
    coordinator["other"] = float(COORDINATOR_BYTES)
    return [
        DeviceMemory("worker", layout.data, _in_order(worker)),
        DeviceMemory("ps", layout.num_ps, _in_order(server)),
        DeviceMemory("coordinator", 1, _in_order(coordinator)),
    ]

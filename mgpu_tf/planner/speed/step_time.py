"""How long a step takes in a layout, and what limits it.

    time = step_time(graph, layout, 512, machines)
    time.seconds, time.limited_by

Computing is the sum over operations of the longer of its arithmetic and its
bytes; communication is that of the layout. Parts of the two overlap. The step
of many devices is as long as that of the slowest.

This module does not import TensorFlow.

References: Qi et al., "Paleo", ICLR 2017, for times from a graph of
operations; Huang et al., "GPipe", NeurIPS 2019, for the bubble.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from mgpu_tf.mesh import bubble, packs
from mgpu_tf.planner.devices import LINKS, Device, Link, link
from mgpu_tf.planner.layout import Layout
from mgpu_tf.planner.operations import splits
from mgpu_tf.planner.operations.costs import Cost, cost_of
from mgpu_tf.planner.operations.graph import Graph, Operation
from mgpu_tf.planner.speed.communication import Network

# What joins machines where nothing is said of it.
_ETHERNET = link("25gbe")


@dataclasses.dataclass(frozen=True)
class Machines:
    """The machines of a plan.

    Attributes:
        device: What each device is.
        per_node: Devices of a machine.
        nodes: Machines.
        between: The link between machines.
        inside: The link between devices of a machine. Default: the device's.
        sharing: How many devices are parts of one, and share its arithmetic.
        precision: The policy of the model.
        input_examples_per_second: What each machine can prepare. None: more
            than is needed.
        price: Of a device for an hour, in any unit. None: unknown.
    """

    device: Device
    per_node: int = 1
    nodes: int = 1
    between: Link = _ETHERNET
    inside: Link | None = None
    sharing: int = 1
    precision: str = "float32"
    input_examples_per_second: float | None = None
    price: float | None = None

    @property
    def devices(self) -> int:
        """Returns the number of all devices."""
        return self.per_node * self.nodes

    @property
    def network(self) -> Network:
        """Returns the links."""
        inside = self.inside or LINKS[self.device.inside]
        return Network(
            self.per_node,
            self.nodes,
            inside,
            self.between,
            self.device.efficiencies.link,
        )


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The parts of a step, in seconds.

    Attributes:
        computing: Arithmetic of products.
        memory: Operations that memory bandwidth limits.
        starting: Starting operations and the step.
        communication: What is exchanged and not hidden.
        hidden: What is exchanged while devices compute.
        bubble: Stages that wait.
        stragglers: Waiting for the slowest.
        input: Waiting for data.
    """

    computing: float
    memory: float
    starting: float
    communication: float
    hidden: float
    bubble: float
    stragglers: float
    input: float

    @property
    def seconds(self) -> float:
        """Returns the seconds of a step."""
        return sum(
            getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "hidden"
        )

    @property
    def limited_by(self) -> str:
        """Returns the largest part by name."""
        parts = {
            "computing": self.computing,
            "memory bandwidth": self.memory,
            "starting operations": self.starting,
            "communication": self.communication,
            "bubble": self.bubble,
            "stragglers": self.stragglers,
            "input": self.input,
        }
        return max(parts, key=lambda name: parts[name])


@dataclasses.dataclass(frozen=True)
class _Work:
    """The seconds of a pass: products, the others, and starting them."""

    products: float = 0.0
    others: float = 0.0
    starting: float = 0.0

    @property
    def seconds(self) -> float:
        return self.products + self.others + self.starting


def step_time(
    graph: Graph, layout: Layout, global_batch_size: int, machines: Machines
) -> StepTime:
    """Predicts a step that ends with an update.

    Args:
        graph: A traced model.
        layout: What is divided how.
        global_batch_size: Rows of an update.
        machines: Where it runs.
    """
    rows = layout.rows(global_batch_size)
    good = machines.device.efficiencies
    forward, backward = passes(graph, layout, rows / layout.parts, machines)
    parts = layout.parts * layout.accumulation
    stages = layout.pipeline
    again = (
        forward
        if layout.recomputes or layout.recompute == "stages"
        else _Work()
    )
    one = [forward, backward, again]
    share = min(machines.sharing, layout.devices)
    work = _Work(
        sum(w.products for w in one) * parts / stages * share,
        sum(w.others for w in one) * parts / stages * share,
        sum(w.starting for w in one) * parts / stages * share,
    )
    update = _update_seconds(graph, layout, machines) * share
    whole = work.seconds + update
    exchanged, free = _exchanged(graph, layout, rows, machines)
    # Only the last of accumulated steps exchanges gradients.
    behind = (backward.seconds + again.seconds) * share * layout.parts / stages
    hidden = min(exchanged, good.overlap * behind)
    exposed = exchanged - hidden + free
    idle = 0.0
    if stages > 1:
        part = bubble(stages, layout.parts)
        idle = work.seconds * part / (1 - part)
    spent = whole + exposed + idle + good.step_seconds
    late = spent * good.deviation * _slowest(layout.devices)
    waiting = 0.0
    ready = machines.input_examples_per_second
    if ready:
        nodes = math.ceil(layout.devices / machines.per_node)
        needed = global_batch_size / (ready * nodes)
        waiting = max(0.0, needed - spent - late)
    return StepTime(
        computing=work.products,
        memory=work.others + update,
        starting=work.starting + good.step_seconds,
        communication=exposed,
        hidden=hidden,
        bubble=idle,
        stragglers=late,
        input=waiting,
    )


def passes(
    graph: Graph, layout: Layout, rows: float, machines: Machines
) -> tuple[_Work, _Work]:
    """Returns the work of a forward and of a backward pass of some rows."""
    divided = splits.divided_tensors(graph, layout.tensor)
    if layout.sequence_parallel:
        divided |= splits.sequence_tensors(graph)
    found = [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    device = machines.device
    good = device.efficiencies
    rate = device.rate(machines.precision) * good.products
    vector = device.vector_rate() * good.products
    bandwidth = device.bytes_per_second * good.memory
    parts = splits.parts_of(graph).layers if layout.tensor > 1 else frozenset()
    for each, cost in _costs(graph, rows):
        own = 1.0
        if layout.tensor > 1 and (
            each.inner in parts or any(t in divided for t in each.outputs)
        ):
            own = 1.0 / layout.tensor
        sums = found[each.backward]
        arithmetic = (
            cost.operations * own / (rate if cost.is_product else vector)
        )
        moving = cost.moved * own / bandwidth
        if cost.is_product and arithmetic >= moving:
            sums[0] += arithmetic
        else:
            sums[1] += max(arithmetic, moving)
        if cost.moved:
            sums[2] += good.overhead_seconds * each.times
    return _Work(*found[0]), _Work(*found[1])


@functools.lru_cache(maxsize=16)
def _costs(graph: Graph, rows: float) -> list[tuple[Operation, Cost]]:
    return [(each, cost_of(graph, each, rows)) for each in graph.operations]


def _update_seconds(graph: Graph, layout: Layout, machines: Machines) -> float:
    """Returns the seconds of the optimizer: it reads and writes all it has."""
    if layout.num_ps:
        return 0.0  # The servers do it.
    moved = 3 * sum(w.bytes for w in graph.trainable) + 2 * graph.slot_bytes
    axes = layout.tensor * layout.pipeline * layout.fsdp
    good = machines.device.efficiencies
    own = moved / axes / (machines.device.bytes_per_second * good.memory)
    starts = len(graph.trainable) / layout.pipeline * good.overhead_seconds
    return own + starts


def _slowest(devices: int) -> float:
    """Returns how many deviations the slowest of n is behind the mean."""
    return math.sqrt(2 * math.log(devices)) if devices > 1 else 0.0


def _exchanged(
    graph: Graph, layout: Layout, rows: float, machines: Machines
) -> tuple[float, float]:
    """Returns seconds of exchange: what computing can hide, and the rest."""
    network = machines.network
    within = layout.tensor * layout.pipeline
    sizes = [
        w.bytes // within
        for w in graph.trainable
        if w.gradient is not None and not w.sparse
    ]
    dense = float(sum(sizes))
    together = packs(sizes)
    sparse = sum(
        graph.tensors[w.gradient].bytes(rows)
        for w in graph.trainable
        if w.gradient is not None and w.sparse
    )
    if layout.num_ps:
        return 0.0, _with_servers(dense + sparse, layout, machines)
    hidden = free = 0.0
    stride = within
    if layout.fsdp > 1:
        gathers = 2.0 if layout.gathers_layers else 1.0
        gathers *= layout.accumulation if layout.splits_weights else 1.0
        gathered = gathers * network.all_gather(dense, layout.fsdp, stride)
        if layout.pipeline > 1:
            free += gathered  # Before the first micro-batch.
        else:
            hidden += gathered
        hidden += network.all_gather(dense, layout.fsdp, stride)
        shared = dense / layout.fsdp
        hidden += network.all_reduce(shared, layout.data, stride * layout.fsdp)
    else:
        # Nothing is left to compute when the last pack is there.
        seconds = network.all_reduce(dense, layout.data, stride)
        last = sum(sizes[place] for place in together[-1]) if together else 0
        exposed = seconds * last / max(dense, 1.0)
        free += exposed
        hidden += seconds - exposed
    if sparse and layout.replicas > 1:
        free += network.all_gather(
            sparse * layout.replicas, layout.replicas, stride
        )
    if layout.replicas > 1:
        slower = (
            network.between
            if network.crosses(layout.replicas, stride)
            else network.inside
        )
        free += len(together) * slower.latency_seconds
    if layout.tensor > 1:
        free += _tensor_seconds(graph, layout, rows, network)
    if layout.pipeline > 1:
        free += _pipeline_seconds(graph, layout, rows, network)
    return hidden, free


def _with_servers(size: float, layout: Layout, machines: Machines) -> float:
    """Returns the seconds in which weights come and gradients go.

    All workers share the links of the servers.
    """
    link = machines.between
    rate = link.bytes_per_second * machines.device.efficiencies.link
    crowd = max(1.0, layout.data / layout.num_ps)
    return 2 * (size * crowd / rate + link.latency_seconds)


def _tensor_seconds(
    graph: Graph, layout: Layout, rows: float, network: Network
) -> float:
    """Returns the seconds of sums between layers in parts, in all passes."""
    parts = splits.parts_of(graph)
    again = layout.recomputes or layout.recompute == "stages"
    times = layout.accumulation * layout.parts * (3 if again else 2)
    # The devices of a replica are its stages.
    stride = layout.pipeline
    found = 0.0
    for tensor in parts.summed.values():
        if tensor >= 0:
            size = graph.tensors[tensor].bytes(rows / layout.parts)
            found += network.all_reduce(size, layout.tensor, stride)
    for tensor in parts.gathered.values():
        if tensor >= 0:
            size = graph.tensors[tensor].bytes(rows / layout.parts)
            found += network.all_gather(size, layout.tensor, stride)
    return found * times / layout.pipeline


def _pipeline_seconds(
    graph: Graph, layout: Layout, rows: float, network: Network
) -> float:
    """Returns the seconds that sending between stages adds to the fill."""
    made = [
        graph.tensors[tensor].bytes(rows / layout.parts)
        for tensor in splits.outputs_of(graph).values()
    ]
    middle = sorted(made)[len(made) // 2] if made else 0.0
    hops = 2 * (layout.pipeline - 1 + layout.parts - 1)
    # Stages wait for the slowest link between two of them.
    one = network.send(middle, between=network.crosses(layout.pipeline))
    return hops * one * layout.accumulation

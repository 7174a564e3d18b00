"""Which layout to take: each candidate's memory, speed and price, best first.

    found = plan(build_model, 512, machines)
    found.best.layout, found.why
    found.to_dict()                           # for JSON

A candidate that fits comes before one that does not; of those that fit the
fastest is best, and of those within `ALIKE` of it the one of fewer devices and
fewer options. What recomputes or accumulates is looked at only where the same
layout without it does not fit.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mgpu_tf.errors import ConfigurationError, check_integer
from mgpu_tf.planner.choice.candidates import layouts
from mgpu_tf.planner.devices import Link
from mgpu_tf.planner.layout import Layout
from mgpu_tf.planner.memory.per_device import (
    MemoryEstimate,
    graph_of,
    memory_of,
)
from mgpu_tf.planner.operations.graph import Graph
from mgpu_tf.planner.speed.step_time import Machines, StepTime, step_time

if TYPE_CHECKING:
    import keras

# Speeds that differ by less are taken for the same.
ALIKE = 0.05
# More devices that give less than this are not worth it.
WORTH = 1.25
# What counts as good use of all devices.
GOOD = 0.8
_GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layout with what it takes.

    Attributes:
        layout: The layout.
        memory: What each device takes.
        room: Bytes that a device has.
        time: The parts of its step.
        examples_per_second: Of all devices.
        speedup: How much faster it is than one device with the same global
            batch, whether that fits or not.
        price: Of a million examples; None without a price of a device.
    """

    layout: Layout
    memory: MemoryEstimate
    room: float
    time: StepTime
    examples_per_second: float
    speedup: float
    price: float | None = None

    @property
    def bytes(self) -> float:
        """Returns the bytes of the device that takes most."""
        return self.memory.largest.total

    @property
    def fits(self) -> bool:
        """Whether each device has room."""
        return self.bytes <= self.room

    @property
    def efficiency(self) -> float:
        """Returns the speed-up for each device."""
        return self.speedup / self.layout.devices

    def to_dict(self) -> dict[str, Any]:
        """Returns the candidate for JSON."""
        options: dict[str, Any] = {
            "devices": self.layout.devices,
            **self.layout.options,
        }
        found = {
            "strategy": self.layout.strategy,
            "options": options,
            "memory_bytes_per_device": round(self.bytes),
            "memory_bytes_by_kind": {
                kind: round(size)
                for kind, size in self.memory.largest.by_kind.items()
                if size >= 1
            },
            "fits": self.fits,
            "bytes_left": round(self.room - self.bytes),
            "step_seconds": self.time.seconds,
            "examples_per_second": self.examples_per_second,
            "speedup": self.speedup,
            "efficiency": self.efficiency,
            "limited_by": self.time.limited_by,
        }
        if self.price is not None:
            found["price_per_million_examples"] = self.price
        return found


@dataclasses.dataclass(frozen=True)
class Plan:
    """Candidates, the best first, and the words about them.

    Attributes:
        model: The name of the model.
        parameters: How many are trained.
        global_batch_size: Rows of an update.
        machines: Where it is to run.
        candidates: The candidates.
        why: A sentence on the best.
        advice: Sentences on what else would help, or would not.
    """

    model: str
    parameters: int
    global_batch_size: int
    machines: Machines
    candidates: tuple[Candidate, ...]
    why: str
    advice: tuple[str, ...] = ()

    @property
    def best(self) -> Candidate:
        """Returns the best candidate."""
        return self.candidates[0]

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan for JSON."""
        return {
            "model": self.model,
            "parameters": self.parameters,
            "global_batch_size": self.global_batch_size,
            "device": self.machines.device.name,
            "devices": self.machines.devices,
            "why": self.why,
            "advice": list(self.advice),
            "candidates": [each.to_dict() for each in self.candidates],
        }


def plan(
    build_model: Callable[[], keras.Model] | Graph,
    global_batch_size: int,
    machines: Machines,
    *,
    data: Any = None,
    all_devices: bool = False,
    memory_bytes: float | None = None,
) -> Plan:
    """Compares the layouts of a training and chooses one.

    Args:
        build_model: Returns a compiled model; or a graph of `trace`.
        global_batch_size: Rows of an update, over all devices.
        machines: Where it is to run.
        data: A batch, as in `trace`.
        all_devices: Whether every device must take part.
        memory_bytes: What a device has. Default: as the table says.

    Returns:
        The plan.

    Raises:
        ConfigurationError: The model cannot be traced, or no layout gives
            each device a row.
    """
    check_integer("global_batch_size", global_batch_size, 1)
    graph = graph_of(build_model, data)
    room = memory_bytes or machines.device.memory_bytes
    compare = _Comparison(graph, global_batch_size, machines, room)
    found = list(compare.candidates(all_devices))
    if not found:
        raise ConfigurationError(
            "A plan needs a row for each device. Received: "
            f"global_batch_size={global_batch_size} for {machines.devices} "
            "devices. Use a larger batch."
        )
    found = _ordered(found)
    return Plan(
        graph.name,
        graph.parameters,
        global_batch_size,
        machines,
        tuple(found),
        _why(found, machines),
        tuple(_advice(found, compare)),
    )


class _Comparison:
    """Looks at the layouts of one model, batch and set of machines."""

    def __init__(
        self,
        graph: Graph,
        global_batch_size: int,
        machines: Machines,
        room: float,
    ) -> None:
        self.graph = graph
        self.batch = global_batch_size
        self.machines = machines
        self.room = room
        alone = step_time(graph, Layout(), global_batch_size, machines)
        self._alone = global_batch_size / alone.seconds

    def candidates(self, all_devices: bool) -> Iterator[Candidate]:
        """Yields what is worth a look: options only where they are needed."""
        fitting: set[tuple[int, ...]] = set()
        # What stays between steps is too large, whatever the batch.
        too_large: set[tuple[object, ...]] = set()
        every = layouts(
            self.machines, self.batch, self.graph, all_devices=all_devices
        )
        for layout in every:
            axes = (layout.data, layout.fsdp, layout.tensor, layout.pipeline)
            plain = layout.accumulation == 1 and layout.recompute is None
            stored = (*axes, layout.shard)
            if not plain and (axes in fitting or stored in too_large):
                continue
            candidate = self.look(layout)
            if candidate.fits:
                fitting.add(axes)
            elif max(d.stored for d in candidate.memory.devices) > self.room:
                too_large.add(stored)
            if candidate.fits or plain:
                yield candidate

    def look(
        self, layout: Layout, machines: Machines | None = None
    ) -> Candidate:
        """Returns a layout with what it takes."""
        machines = machines or self.machines
        time = step_time(self.graph, layout, self.batch, machines)
        rate = self.batch / time.seconds
        price = machines.price
        if price is not None:
            price = price * layout.devices / 3600 / rate * 1e6
        return Candidate(
            layout,
            memory_of(self.graph, layout, self.batch),
            self.room,
            time,
            rate,
            rate / self._alone,
            price,
        )

    def paying_batch(self, layout: Layout) -> int | None:
        """Returns a batch with which all of a layout's devices pay."""
        batch = self.batch
        while batch <= 1 << 20:
            batch *= 2
            alone = (
                batch
                / step_time(self.graph, Layout(), batch, self.machines).seconds
            )
            rate = (
                batch
                / step_time(self.graph, layout, batch, self.machines).seconds
            )
            if rate / alone / layout.devices >= GOOD:
                return batch
        return None

    def paying_link(self, layout: Layout) -> float | None:
        """Returns the bytes per second between machines that would pay."""
        if layout.devices <= self.machines.per_node:
            return None
        link = self.machines.between
        for factor in (2, 4, 8, 16, 32, 64, 128):
            faster = Link(
                link.name,
                link.bytes_per_second * factor,
                link.latency_seconds,
            )
            machines = dataclasses.replace(self.machines, between=faster)
            if self.look(layout, machines).efficiency >= GOOD:
                return faster.bytes_per_second
        return None


def _ordered(found: list[Candidate]) -> list[Candidate]:
    """Returns candidates, the best first."""
    fitting = [each for each in found if each.fits]
    others = sorted(
        (each for each in found if not each.fits), key=lambda c: c.bytes
    )
    if not fitting:
        return others
    fastest = max(each.examples_per_second for each in fitting)

    def rank(each: Candidate) -> tuple[bool, Any, float]:
        behind = each.examples_per_second < fastest * (1 - ALIKE)
        simple = (each.layout.devices, len(each.layout.options))
        if behind:
            return True, (-each.examples_per_second, 0), 0.0
        return False, simple, -each.examples_per_second

    return sorted(fitting, key=rank) + others


def _why(found: list[Candidate], machines: Machines) -> str:
    best = found[0]
    if not best.fits:
        short = (best.bytes - best.room) / _GIB
        return (
            f"No layout of {machines.devices} devices fits: {best.layout} is "
            f"nearest and lacks {short:,.2f} GiB on each device. Take more or "
            "larger devices, a smaller batch, or mixed precision."
        )
    left = (best.room - best.bytes) / _GIB
    text = (
        f"{best.layout}: it takes {best.bytes / _GIB:,.2f} GiB of each "
        f"device and leaves {left:,.2f}, and does "
        f"{best.examples_per_second:,.0f} examples/s, "
        f"{best.speedup:.1f} times one device, limited by "
        f"{best.time.limited_by}"
    )
    other = next(
        (
            each
            for each in found[1:]
            if each.fits
            and each.layout.strategy != best.layout.strategy
            and each.layout.devices == best.layout.devices
        ),
        None,
    )
    if other is not None:
        text += f"; {other.layout} does {other.examples_per_second:,.0f}"
    else:
        barred = next(
            (
                each
                for each in found
                if not each.fits
                and each.layout.devices == best.layout.devices
                and each.layout.strategy in ("mirrored", "one_device")
            ),
            None,
        )
        if barred is not None:
            lacks = (barred.bytes - barred.room) / _GIB
            text += f"; {barred.layout} lacks {lacks:,.2f} GiB"
    return text + "."


def _advice(found: list[Candidate], compare: _Comparison) -> Iterator[str]:
    """Yields when more devices do not pay, and what would make them pay."""
    best = found[0]
    if not best.fits:
        return
    fastest: dict[int, Candidate] = {}
    for each in found:
        if each.fits:
            known = fastest.get(each.layout.devices)
            if known is None or (
                each.examples_per_second > known.examples_per_second
            ):
                fastest[each.layout.devices] = each
    counts = sorted(fastest)
    largest = fastest[counts[-1]]
    for fewer, more in itertools.pairwise(counts):
        gain = (
            fastest[more].examples_per_second
            / fastest[fewer].examples_per_second
        )
        if gain < WORTH:
            yield (
                f"{more} devices do only {gain:.2f} times as much as {fewer}, "
                f"limited by {fastest[more].time.limited_by}."
            )
            break
    if largest.layout.devices == 1 or largest.efficiency >= GOOD:
        return
    batch = compare.paying_batch(largest.layout)
    link = compare.paying_link(largest.layout)
    ways = []
    if batch is not None:
        ways.append(f"a global batch of {batch:,}")
    if link is not None:
        ways.append(f"a link of {link * 8 / 1e9:,.0f} Gbit/s between machines")
    words = f"{GOOD:.0%} takes {' or '.join(ways)}"
    if not ways:
        words = f"no larger batch and no faster link brings {GOOD:.0%}"
    yield (
        f"{largest.layout.devices} devices reach {largest.efficiency:.0%} of "
        f"their speed; {words}."
    )

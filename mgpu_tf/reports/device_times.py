"""What each device did in profiled steps: computing, communication, idle.

    operations = operations_of(graphs, rows=32, devices=2)
    device_times(space.planes, operations, seconds=0.5)[1].computing

A profile names operations and says when each ran. The graph of the step says
on which device, and what it sends to others. The plane of a GPU has
its kernels.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mgpu_tf.reports.profile_file import length_of_union

# The part of its input that each of n devices sends.
_SENT = {
    "CollectiveReduceV2": lambda n: 2 * (n - 1) / n,  # In a ring.
    "CollectiveReduceV3": lambda n: 2 * (n - 1) / n,
    "NcclAllReduce": lambda n: 2 * (n - 1) / n,
    "CollectiveReduceScatterV2": lambda n: (n - 1) / n,
    "CollectiveAllToAllV2": lambda n: (n - 1) / n,
    "CollectiveGatherV2": lambda n: n - 1,
}
_GPU = re.compile(r"/device:(GPU:\d+)")
# Lines of a GPU's plane that repeat what is on others.
_DERIVED = ("XLA", "Steps", "TensorFlow", "Framework", "Launch", "Source")


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of a step.

    Attributes:
        device: Where it runs, such as `CPU:1`.
        communicates: Whether it exchanges tensors with other devices.
        sent_bytes: What its device sends with it, and of what it makes.
    """

    device: str
    communicates: bool
    sent_bytes: float = 0.0


@dataclasses.dataclass(frozen=True)
class DeviceTimes:
    """What a device did in profiled steps.

    Attributes:
        device: Its name.
        computing: Seconds in which an operation ran that does not
            communicate.
        communication: Seconds in which only operations ran that communicate.
        idle: The rest of the seconds.
        sent_bytes: What it sent to others in a step, by the shapes of the
            graph.
    """

    device: str
    computing: float
    communication: float
    idle: float
    sent_bytes: float


@dataclasses.dataclass(frozen=True)
class Profile:
    """What all devices did in profiled steps.

    Attributes:
        steps: How many there were.
        seconds: What they took in all, on the first worker.
        devices: Each device.
    """

    steps: int
    seconds: float
    devices: list[DeviceTimes]


def operations_of(
    graphs: Iterable[Any], rows: int, devices: int
) -> dict[str, Operation]:
    """Returns the operations of a step by name, those with a device.

    Args:
        graphs: The graphs of the step.
        rows: The rows of a device, for shapes that do not show them.
        devices: How many devices take part in a collective operation.
    """
    found: dict[str, Operation] = {}
    for graph in graphs:
        for op in graph.get_operations():
            if device := _device(op):
                part = _SENT.get(op.type)
                sent = _bytes_to_others(op, device, rows)
                if part is not None and devices > 1:
                    sent += part(devices) * _bytes(op.inputs[0], rows)
                found[op.name] = Operation(device, part is not None, sent)
    return found


def device_times(
    planes: Sequence[Any],
    operations: Mapping[str, Operation],
    seconds: float,
) -> list[DeviceTimes]:
    """Returns what each device did.

    Args:
        planes: Of the profile.
        operations: Those of the step.
        seconds: What the profiled steps took in all.
    """
    sent_bytes: dict[str, float] = collections.defaultdict(float)
    for operation in operations.values():
        sent_bytes[operation.device] += operation.sent_bytes
    spans = _spans(planes, operations)
    found = []
    for device in sorted({*spans, *sent_bytes}, key=_in_order):
        computing, communicating = spans.get(device, ([], []))
        busy = length_of_union([*computing, *communicating]) / 1e12
        alone = length_of_union(computing) / 1e12
        found.append(
            DeviceTimes(
                device,
                alone,
                busy - alone,
                max(0.0, seconds - busy),
                sent_bytes[device],
            )
        )
    return found


_Spans = dict[str, tuple[list[tuple[int, int]], list[tuple[int, int]]]]


def _spans(
    planes: Sequence[Any], operations: Mapping[str, Operation]
) -> _Spans:
    """Returns when each device computed, and when it communicated."""
    gpus = {match[1] for plane in planes if (match := _GPU.search(plane.name))}
    found: _Spans = collections.defaultdict(lambda: ([], []))
    for plane in planes:
        match = _GPU.search(plane.name)
        names = {key: value.name for key, value in plane.event_metadata.items()}
        known = {
            key: Operation(match[1], "nccl" in name.lower())
            if match
            else _operation(name, operations)
            for key, name in names.items()
        }
        for line in plane.lines:
            if match and line.name.startswith(_DERIVED):
                continue
            for event in line.events:
                operation = known.get(event.metadata_id)
                # What the host does for a GPU is not what the GPU does.
                if operation is None or (
                    not match and operation.device in gpus
                ):
                    continue
                begin = line.timestamp_ns * 1000 + event.offset_ps
                found[operation.device][operation.communicates].append(
                    (begin, begin + event.duration_ps)
                )
    return found


def _operation(
    name: str, operations: Mapping[str, Operation]
) -> Operation | None:
    """Returns the operation of an event: `while/body/_1/a/b:MatMul` is `a/b`.

    Where TensorFlow has made one operation of several, its name begins with
    that of one of them.
    """
    path, _, kind = name.rpartition(":")
    if not kind.replace("_", "").isalnum():
        return None
    parts = path.split("/")
    for end in (len(parts), len(parts) - 1):
        for begin in range(end):
            found = operations.get("/".join(parts[begin:end]))
            if found is not None:
                return found
    return None


def _bytes_to_others(op: Any, device: str, rows: int) -> float:
    """Returns the bytes of outputs that other devices take, once for each."""
    return sum(
        _bytes(tensor, rows)
        * len({_device(to) for to in tensor.consumers()} - {device, ""})
        for tensor in op.outputs
        if tensor.dtype.is_floating
    )


def _bytes(tensor: Any, rows: int) -> float:
    if tensor.shape.rank is None:
        return 0.0
    shape = [rows if size is None else size for size in tensor.shape]
    return float(math.prod(shape) * tensor.dtype.size)


def _device(op: Any) -> str:
    return str(op.device.rpartition("device:")[2])


def _in_order(device: str) -> tuple[str, int]:
    kind, _, number = device.rpartition(":")
    return kind, int(number) if number.isdigit() else 0

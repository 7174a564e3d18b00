"""A profile of some steps in the format that Perfetto and Chrome open.

    write(folder_of_the_profile, "step.json")
    # open step.json at https://ui.perfetto.dev, or in chrome://tracing

A process of the trace is a device or the host, a thread is a thread of
TensorFlow. The category of an operation is the part of the step that it belongs
to.

References: the Trace Event Format of Chrome.
"""

from __future__ import annotations

import json
from typing import Any

from mgpu_tf.reports.profile_file import newest_profile
from mgpu_tf.reports.profiling import PARTS

# More make a browser slow.
_MOST_EVENTS = 200_000


def write(folder: str, path: str) -> int:
    """Writes the newest profile of a folder as a trace.

    Args:
        folder: What `Profiler` has written into.
        path: The file.

    Returns:
        The number of operations in it.
    """
    events = _events(folder)
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)
    return sum(event["ph"] == "X" for event in events)


def _events(folder: str) -> list[dict[str, Any]]:
    space = newest_profile(folder)
    names: list[dict[str, Any]] = []
    timed: list[dict[str, Any]] = []
    for process, plane in enumerate(space.planes):
        lines = [line for line in plane.lines if line.events]
        if lines:
            names.append(_name("process_name", process, 0, plane.name))
        for thread, line in enumerate(lines):
            label = line.display_name or line.name or f"thread {line.id}"
            names.append(_name("thread_name", process, thread, label))
            for event in line.events:
                name = plane.event_metadata[event.metadata_id].name
                begin = line.timestamp_ns * 1000 + event.offset_ps
                timed.append(
                    {
                        "name": name.rpartition("/")[2] or name,
                        "cat": _part(name),
                        "ph": "X",
                        "pid": process,
                        "tid": thread,
                        "ts": begin / 1e6,
                        "dur": event.duration_ps / 1e6,
                        "args": {"full name": name},
                    }
                )
    timed.sort(key=lambda event: -event["dur"])
    kept = timed[:_MOST_EVENTS]
    first = min((event["ts"] for event in kept), default=0.0)
    for event in kept:
        event["ts"] -= first
    return names + sorted(kept, key=lambda event: event["ts"])


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {
        "name": kind,
        "ph": "M",
        "pid": process,
        "tid": thread,
        "args": {"name": name},
    }


def _part(name: str) -> str:
    return next((part for part in PARTS if f"/{part}/" in name), "other")

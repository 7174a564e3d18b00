"""What ran where, drawn: tasks, their devices, and places on the mesh.

    draw(report)

A task is a box of device tiles. Devices of one rank of `data` are in a frame of
its colour, where a copy of the weights has several devices.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterable, Sequence

from mgpu_tf.mesh import REPLICA_AXES, Mesh
from mgpu_tf.reports.charts import color
from mgpu_tf.reports.report import Report

STYLE = """
.tasks{display:flex;flex-wrap:wrap;gap:10px;font-size:12px}
.task{border:1px solid var(--rule);border-radius:8px;padding:8px 10px;
min-width:0}.task>p{margin:0 0 6px}.task>p span{color:var(--soft)}
.copies{display:flex;flex-wrap:wrap;gap:8px}
.copy{border-left:4px solid;border-radius:4px;padding-left:6px}
.copy>p{margin:0 0 3px;color:var(--soft)}
.devices{display:flex;flex-wrap:wrap;gap:5px}
.device{background:var(--page);border:1px solid var(--rule);border-radius:5px;
padding:2px 7px;line-height:1.35}.device span{display:block;color:var(--soft)}
""" + "".join(f".copy.c{n}{{border-color:var(--c{n})}}" for n in range(8))

# What a device of an axis has to itself.
_MEANING = {
    "data": "each has its own rows of a batch, and a copy of the weights",
    "fsdp": "each has its own rows, and stores a part of the weights",
    "tensor": "each computes with a part of the weights, of the same rows",
    "pipeline": "each has its own layers",
}


def draw(report: Report) -> str:
    """Returns the tasks with their devices, and what the axes mean."""
    devices = report.devices or [["device"]] * report.num_workers
    # Of replicas, where the strategy has none.
    mesh = Mesh(data=sum(map(len, devices)))
    if report.mesh:
        mesh = Mesh(**report.mesh)
    tasks = report.tasks or [
        {"task": f"worker {number}", "role": ""}
        for number in range(len(devices))
    ]
    first = itertools.accumulate(map(len, devices), initial=0)
    held = iter(zip(devices, first, strict=False))
    drawn = []
    for task in tasks:
        inside = ""
        if task["task"].startswith("worker"):
            names, place = next(held)
            inside = _copies(names, place, mesh)
        name = task["task"] if len(tasks) > 1 else "this machine"
        drawn.append(
            f'<div class="task"><p><b>{html.escape(name)}</b> '
            f"<span>{html.escape(task['role'])}</span></p>{inside}</div>"
        )
    return f'<div class="tasks">{"".join(drawn)}</div>{_axes(report, mesh)}'


def _copies(names: Sequence[str], first: int, mesh: Mesh) -> str:
    """Draws the devices of a task, those of a copy of the weights together."""
    places = range(first, first + len(names))
    named = dict(zip(places, names, strict=True))
    if mesh.data in (1, mesh.size):
        return _devices(named.items(), mesh)
    drawn = []
    for data, part in itertools.groupby(
        places, lambda place: mesh.rank("data", place // mesh.stages)
    ):
        tiles = _devices(((place, named[place]) for place in part), mesh)
        drawn.append(
            f'<div class="copy {color(data)}"><p>data {data}</p>{tiles}</div>'
        )
    return f'<div class="copies">{"".join(drawn)}</div>'


def _devices(named: Iterable[tuple[int, str]], mesh: Mesh) -> str:
    tiles = "".join(
        f'<div class="device">{html.escape(name)}'
        f"<span>{_place(place, mesh)}</span></div>"
        for place, name in named
    )
    return f'<div class="devices">{tiles}</div>'


def _place(place: int, mesh: Mesh) -> str:
    """Returns where a device is on the axes that have several."""
    replica, stage = place // mesh.stages, place % mesh.pipeline
    if mesh.size == 1:
        return "1 replica"
    if mesh.data == mesh.size:
        return f"replica {replica}"
    parts = [
        f"{axis} {mesh.rank(axis, replica)}"
        for axis in REPLICA_AXES[1:]
        if axis != "blocks" and mesh.length(axis) > 1
    ]
    parts += [f"stage {stage}"] * (mesh.pipeline > 1)
    return " · ".join(parts)


def _axes(report: Report, mesh: Mesh) -> str:
    parts = [
        f"<b>{axis} {mesh.length(axis)}</b>: {meaning}"
        for axis, meaning in _MEANING.items()
        if report.mesh and mesh.length(axis) > 1
    ]
    if report.pipeline:
        begins = report.pipeline["stages"]
        parts += [
            f"stage {n} begins with <b>{html.escape(str(layer))}</b>"
            for n, layer in enumerate(begins)
        ]
    return f"<p>Mesh: {'; '.join(parts)}.</p>" if parts else ""

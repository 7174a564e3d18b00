"""A run's time as pictures: what each stretch went to, and its events.

draw(report, time_axis(length(report)))
"""

from __future__ import annotations

from mgpu_tf.reports import tracks
from mgpu_tf.reports.charts import rounded
from mgpu_tf.reports.report import Report

# Parts of the time, in the order of their colours.
PARTS = {
    "step": "training steps",
    "start": "imports, the cluster, the model, the data",
    "compile": "tracing and compiling steps",
    "input": "steps that waited for data",
    "restart": "lost work, and pauses after failures",
    "evaluate": "evaluations",
    "save": "steps that waited for a checkpoint",
    "other": "callbacks, the progress bar, the end",
}
_PLACES = {name: place for place, name in enumerate(PARTS)}
# Kinds of events of checkpoints, and the colours of their dots.
_EVENTS = {
    "began": "step",
    "saved": "save",
    "resumed": "restart",
    "damaged": "restart",
    "moved aside": "other",
}
_TIME = "the time"


def length(report: Report) -> float:
    """Returns the seconds that an axis must reach; 0.0 for nothing to draw."""
    moments = [event["at"] for event in report.events]
    if report.time_line:
        bins = report.time_line["bins"]
        moments.append(sum(sum(one.values()) for one in bins))
        moments += [fault["at"] for fault in report.time_line["faults"]]
    return max(moments, default=0.0)


def draw(report: Report, axis: tracks.Axis) -> str:
    """Returns a bar of the time, and rows of events, along one axis."""
    rows, line = {}, report.time_line
    if line:
        rows[_TIME] = _bar(line["width"], line["bins"], axis)
    for kind, part in _EVENTS.items():
        moments = [
            (event["at"], f"step {event['step']}: {event['why']}")
            for event in report.events
            if event["what"] == kind
        ]
        if moments:
            rows[kind] = tracks.dots(moments, axis, _PLACES[part])
    if line and line["faults"]:
        faults = [(fault["at"], fault["text"]) for fault in line["faults"]]
        rows["faults"] = tracks.dots(faults, axis, _PLACES["restart"])
    return tracks.draw(rows, axis, tall=[_TIME])


def _bar(width: float, bins: list[dict[str, float]], axis: tracks.Axis) -> str:
    """Draws a column for each bin, divided by what its time went to."""
    found = []
    for number, one in enumerate(bins):
        whole = sum(one.values())
        begin = number * width
        parts = ", ".join(
            f"{name} {one[name] / whole:.0%}" for name in PARTS if one.get(name)
        )
        text = f"{rounded(begin)} to {rounded(begin + whole)} s: {parts}"
        height = 0.0
        for name, place in _PLACES.items():
            if seconds := one.get(name):
                top = height + seconds / whole
                end = begin + whole
                found.append((begin, end, height, top, place, text))
                height = top
    return tracks.boxes(found, axis)

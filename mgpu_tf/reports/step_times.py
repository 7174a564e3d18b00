"""What steps took on each worker, as histograms on one axis.

draw(report, log_axis(*between([report])))
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any

from mgpu_tf.reports import tracks
from mgpu_tf.reports.charts import number_text, rounded
from mgpu_tf.reports.report import Report

_SECTIONS = {
    "step": "The whole step, in ms",
    "compute": "Of it, gradients of the worker's own rows, in ms",
}
_LINES = {"p50": ("median", "first"), "p90": ("90%", "second")} | {
    "p99": ("99%", "third")
}


def between(reports: Iterable[Report]) -> tuple[float, float] | None:
    """Returns the least and the most seconds of all; None for no steps."""
    ends = [
        (one["bins"][0][0], one["bins"][-1][1])
        for report in reports
        for worker in report.distributions
        for one in worker.values()
        if one
    ]
    return (min(ends)[0], max(high for _, high in ends)) if ends else None


def draw(report: Report, axis: tracks.Axis) -> str:
    """Returns histograms of each worker, with a table of percentiles."""
    parts = []
    for section, title in _SECTIONS.items():
        found = {
            _name(report, number): worker[section]
            for number, worker in enumerate(report.distributions)
            if worker.get(section)
        }
        if found:
            rows = {name: _histogram(one, axis) for name, one in found.items()}
            drawn = tracks.draw(rows, axis, tall=list(rows))
            parts.append(f"<h3>{title}</h3>{drawn}{_table(found)}")
    return "".join(parts)


def _name(report: Report, number: int) -> str:
    if len(report.distributions) > 1:
        return f"worker {number}"
    return "all workers" if report.num_workers > 1 else "steps"


def _histogram(one: dict[str, Any], axis: tracks.Axis) -> str:
    highest = max(steps for _, _, steps in one["bins"])
    found = [
        (
            *(low, high, 0.0, steps / highest, 0),
            f"{rounded(1e3 * low)} to {rounded(1e3 * high)} ms: "
            f"{number_text(steps)} steps",
        )
        for low, high, steps in one["bins"]
    ]
    marks = [
        (one[key], f"{name}: {rounded(1e3 * one[key])} ms", kind)
        for key, (name, kind) in _LINES.items()
    ]
    return tracks.boxes(found, axis) + tracks.lines(marks, axis)


def _table(found: dict[str, dict[str, Any]]) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td>"
        + "".join(f"<td>{rounded(1e3 * one[key])}</td>" for key in _LINES)
        + f"<td>{rounded(1e3 * one['most'])}</td>"
        f"<td>{number_text(one['steps'])}</td></tr>"
        for name, one in found.items()
    )
    each = [one["steps"] / one["executions"] for one in found.values()]
    note = "Lines: median, 90%, 99%."
    if max(each) > 1:
        note += (
            " The steps of one call count with their mean: "
            f"{rounded(max(each))} steps a call."
        )
    heads = ["", *(name for name, _ in _LINES.values()), "most", "steps"]
    head = "".join(f"<th>{name}</th>" for name in heads)
    return (
        f'<table class="parts"><tr>{head}</tr>{rows}</table>'
        f'<p class="note">{note}</p>'
    )

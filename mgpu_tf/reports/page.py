"""The report of a run, or of two runs, as one page for a browser.

    path = write("runs/a")                  # runs/a/report.html
    text = page([Run("a", report)])

The page needs no other file and no network. It follows the light or dark theme
of the system.
"""

from __future__ import annotations

import dataclasses
import html
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from mgpu_tf.errors import ConfigurationError
from mgpu_tf.folders import write_whole
from mgpu_tf.reports import charts, placement, step_times, tracks, wall_time
from mgpu_tf.reports.charts import number_text, rounded
from mgpu_tf.reports.report import REPORT_FILE, Report

PAGE_FILE = "report.html"

_MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Run:
    """A run with the name that the page gives it."""

    name: str
    report: Report


def write(folder: str, *others: str, path: str | None = None) -> str:
    """Writes the page of a run, or of several side by side.

    Args:
        folder: With `report.json`.
        *others: The folders of runs to compare with.
        path: The file; `report.html` in the first folder by default.

    Returns:
        The path.

    Raises:
        ConfigurationError: A folder has no report, or the file cannot be
            written.
    """
    folders = [folder, *others]
    names = _names(folders)
    runs = [
        Run(name, _read(folder))
        for name, folder in zip(names, folders, strict=True)
    ]
    target = path or os.path.join(folder, PAGE_FILE)
    text = page(runs)
    try:
        write_whole(
            target,
            lambda to: pathlib.Path(to).write_text(text, encoding="utf-8"),
        )
    except OSError as error:
        raise ConfigurationError(
            "The page must be a file that can be written. Received: "
            f"{target!r} ({error.strerror}). Give another path."
        ) from None
    return target


def page(runs: Sequence[Run]) -> str:
    """Returns the page.

    Args:
        runs: One run, or several to compare.
    """
    title = " and ".join(run.name for run in runs)
    sections = [
        *map(_summary, runs),
        _card("Loss", _curves(runs, "loss")),
        *_metrics(runs),
        _card("Examples per second, by epoch", _throughput(runs)),
        *_of_each(runs),
        _configuration(runs),
    ]
    body = "".join(filter(None, sections))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body><header><h1>{html.escape(title)}</h1></header>"
        f"<main>{body}</main></body></html>\n"
    )


def _read(folder: str) -> Report:
    try:
        return Report.read(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"A run with a page has {REPORT_FILE} in its folder. Received: "
            f"{folder!r} ({type(error).__name__}). Give the --output_dir of a "
            "run that has ended."
        ) from None


def _names(folders: Sequence[str]) -> list[str]:
    """Returns the last parts of paths, longer where they are the same."""
    paths = [pathlib.Path(folder).resolve().parts for folder in folders]
    for length in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-length:]) for parts in paths]
        if len(set(names)) == len(set(paths)):
            break
    return names


def _card(title: str, content: str, wide: bool = False) -> str:
    kind = "card wide" if wide else "card"
    return (
        f'<section class="{kind}"><h2>{html.escape(title)}</h2>{content}'
        "</section>"
    )


def _summary(run: Run) -> str:
    report = run.report
    last = report.epochs[-1] if report.epochs else None
    facts = [
        ("strategy", report.strategy),
        ("workers", number_text(report.num_workers)),
        ("replicas", number_text(report.num_replicas)),
        ("global batch", number_text(report.global_batch_size)),
        ("steps", number_text(report.global_step)),
        ("examples", number_text(report.examples_seen)),
    ]
    facts += [
        (f"test {name}", number_text(value))
        for name, value in report.test.items()
    ]
    if last is not None:
        rate = number_text(round(last.examples_per_second))
        facts.append(("examples/s", rate))
    goodput = report.goodput
    if goodput:
        whole = goodput["wall_seconds"]
        facts.append(("time", f"{number_text(round(whole))} s"))
    if report.restarts:
        facts.append(("restarts", number_text(report.restarts)))
    tiles = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>"
        for name, value in facts
    )
    return _card(
        run.name, f"<dl>{tiles}</dl>{placement.draw(report)}", wide=True
    )


def _curves(runs: Sequence[Run], name: str) -> str:
    series: dict[str, list[float | None]] = {}
    marks = []
    for run in runs:
        label = f"{run.name}: " if len(runs) > 1 else ""
        for key in (name, f"val_{name}"):
            values = [_value(epoch, key) for epoch in run.report.epochs]
            if any(value is not None for value in values):
                series[label + key.replace("_", " ")] = values
        if name == "loss":
            marks += [
                charts.Mark(
                    batch["epoch"],
                    f"{label}batch {batch['batch']} of epoch {batch['epoch']} "
                    f"left out: loss {batch['loss']}",
                )
                for batch in run.report.left_out
            ]
    return charts.lines(series, "epoch", marks) if series else ""


def _value(epoch: Any, name: str) -> float | None:
    return epoch.loss if name == "loss" else epoch.metrics.get(name)


def _metrics(runs: Sequence[Run]) -> list[str]:
    names = dict.fromkeys(
        name
        for run in runs
        for epoch in run.report.epochs
        for name in epoch.metrics
        if not name.startswith("val_")
    )
    return [
        _card(name.replace("_", " ").capitalize(), _curves(runs, name))
        for name in names
    ]


def _throughput(runs: Sequence[Run]) -> str:
    return charts.lines(
        {
            run.name: [e.examples_per_second for e in run.report.epochs]
            for run in runs
        },
        "epoch",
        from_zero=True,
    )


def _of_each(runs: Sequence[Run]) -> list[str]:
    """Returns cards that are about one run, those of one kind in a row."""
    reports = [run.report for run in runs]
    # The same for all runs, so that they can be compared.
    time = tracks.time_axis(max(map(wall_time.length, reports)))
    steps = step_times.between(reports)
    found = [_of_one(report, time, steps) for report in reports]
    titles = dict.fromkeys(
        title for title in _ORDER if any(title in one for one in found)
    )
    cards = []
    for title in titles:
        row = [
            _card(
                f"{run.name}: {title}" if len(runs) > 1 else title,
                one.get(title, '<p class="none">Not measured.</p>'),
                wide=title == _TIME and len(runs) == 1,
            )
            for run, one in zip(runs, found, strict=True)
        ]
        joined = "".join(row)
        several = len(runs) > 1
        cards.append(
            f'<div class="wide pair">{joined}</div>' if several else joined
        )
    return cards


_TIME = "Where the time went"
_ORDER = (
    _TIME,
    "How long steps took",
    "A step on each worker",
    "Staleness, in updates",
    "Memory of variables",
    "Predicted and measured",
    "What happened",
)


def _of_one(
    report: Report,
    time: tracks.Axis,
    steps: tuple[float, float] | None,
) -> dict[str, str]:
    found = {"What happened": _events(report)}
    drawn = wall_time.draw(report, time) if wall_time.length(report) else ""
    if report.goodput:
        names = wall_time.PARTS
        parts = {name: report.goodput[f"{name}_seconds"] for name in names}
        drawn += charts.bar(parts, "s", names)
    if drawn:
        found[_TIME] = drawn
    if steps and report.distributions:
        axis = tracks.log_axis(*steps)
        found["How long steps took"] = step_times.draw(report, axis)
    if report.step_times:
        found["A step on each worker"] = _steps(report)
    staleness = [epoch.staleness for epoch in report.epochs]
    if any(staleness):
        series = {
            key: [None if s is None else s[key] for s in staleness]
            for key in ("mean", "p50", "p95", "max")
        }
        found["Staleness, in updates"] = charts.lines(
            series, "epoch", from_zero=True
        )
    if report.memory:
        found["Memory of variables"] = _memory(report)
    if report.predicted:
        found["Predicted and measured"] = _predicted(report.predicted)
    return found


def _predicted(predicted: dict[str, Any]) -> str:
    """Returns the planner's numbers beside those that were measured."""
    rows = []
    for name, key, size, unit in (
        ("memory of a device", "memory_bytes", _MIB, "MiB"),
        ("a step", "step_seconds", 1e-3, "ms"),
    ):
        values = predicted.get(key) or {}
        cells = "".join(
            f"<td>{_rounded(values.get(side), size, unit)}</td>"
            for side in ("predicted", "measured")
        )
        rows.append(f"<tr><td>{name}</td>{cells}</tr>")
    head = "<tr><th></th><th>predicted</th><th>measured</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def _rounded(value: float | None, size: float, unit: str) -> str:
    return "" if value is None else f"{rounded(value / size)} {unit}"


def _steps(report: Report) -> str:
    """Draws the time for input and gradients, by worker."""
    last = report.step_times[-1]["workers"]
    values = {
        f"worker {number}": [
            1e3 * one["input"],
            1e3 * one["compute"],
            1e3 * max(0.0, one["step"] - one["input"] - one["compute"]),
        ]
        for number, one in enumerate(last)
        if one
    }
    timed = {one["epoch"]: one["workers"] for one in report.step_times}
    spread = {
        f"worker {number}": [
            1e3 * timed[epoch][number]["step"]
            if timed.get(epoch, [None] * len(last))[number]
            else None
            for epoch in range(1, max(timed) + 1)
        ]
        for number in range(len(last))
    }
    return (
        charts.columns(values, "ms in the last epoch (medians)")
        + charts.legend(
            ["wait for rows", "compute gradients", "exchange, update, waiting"]
        )
        + (
            charts.lines(spread, "epoch (whole step, ms)", from_zero=True)
            if len(timed) > 1
            else ""
        )
    )


def _memory(report: Report) -> str:
    parts = ("weights", "optimizer", "other")
    values = {
        row["device"]: [row[part] / _MIB for part in parts]
        for row in report.memory
    }
    return charts.columns(values, "MiB") + charts.legend(parts)


def _events(report: Report) -> str:
    events = []
    if report.restarts:
        lost = (
            f"Time lost: {report.lost_seconds:.0f} s."
            if report.lost_seconds
            else "They came before the first step."
        )
        events.append(
            f"Restarts: {report.restarts}. Steps done again: "
            f"{report.lost_steps}. {lost}"
        )
    if report.lost_workers:
        events.append(f"Workers lost for a time: {report.lost_workers}.")
    events += [
        f"Epoch {batch['epoch']}, batch {batch['batch']}: left out, since its "
        f"loss was {batch['loss']}."
        for batch in report.left_out
    ]
    events += [
        f"Epoch {one['epoch']}: worker {one['worker']} was slow at "
        f"{one['section']}, {1e3 * one['seconds']:.3g} ms where the others "
        f"took {1e3 * one['others']:.3g} ms."
        for one in report.slow
    ]
    events += [f"Warning: {text}" for text in report.warnings]
    if not events:
        return '<p class="none">No restart, no fault, no warning.</p>'
    return (
        '<ol class="events">'
        + "".join(f"<li>{html.escape(text)}</li>" for text in events)
        + "</ol>"
    )


def _configuration(runs: Sequence[Run]) -> str:
    names = dict.fromkeys(
        name for run in runs for name in run.report.configuration
    )
    if not names:
        return ""
    head = "".join(f"<th>{html.escape(run.name)}</th>" for run in runs)
    rows = []
    for name in names:
        values = [str(run.report.configuration.get(name, "")) for run in runs]
        kind = ' class="differs"' if len(set(values)) > 1 else ""
        cells = "".join(f"<td>{html.escape(value)}</td>" for value in values)
        rows.append(f"<tr{kind}><td>{html.escape(name)}</td>{cells}</tr>")
    again = (
        "<p>Run it again: <code>mgpu-tf train --config=report.json</code></p>"
        if len(runs) == 1
        else ""
    )
    table = f"<table><tr><th></th>{head}</tr>{''.join(rows)}</table>"
    return _card("Configuration", f"{table}{again}", wide=True)


_STYLE = (
    f"{charts.STYLE}{tracks.STYLE}{placement.STYLE}"
    + """
:root{color-scheme:light dark;--page:#f4f6f9;--card:#fff;--text:#1f2430;
--soft:#5f6b7a;--rule:#dfe4ea}
@media (prefers-color-scheme:dark){:root{--page:#15181e;--card:#1f242d;
--text:#e8ebf0;--soft:#a2adbb;--rule:#39414d}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);
font:15px/1.5 system-ui,sans-serif}
header{padding:20px 24px 0}h1{font-size:22px;margin:0;overflow-wrap:anywhere}
main{display:grid;gap:16px;padding:16px 24px 32px;
grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr))}
.card{background:var(--card);border:1px solid var(--rule);border-radius:10px;
padding:14px 18px;min-width:0;overflow-x:auto}
.wide{grid-column:1/-1}.pair{display:grid;gap:16px;
grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr))}
h2{font-size:15px;margin:0 0 10px}h3{font-size:13px;margin:12px 0 2px}
dl{display:grid;gap:10px;margin:0 0 14px;
grid-template-columns:repeat(auto-fill,minmax(118px,1fr))}
dl div:first-child{grid-column:span 2}
dt{color:var(--soft);font-size:12px}dd{margin:0;font-size:18px;
overflow-wrap:anywhere}
table{border-collapse:collapse;width:100%;margin-top:10px;font-size:13px}
td,th{padding:4px 8px;border-top:1px solid var(--rule);text-align:left;
overflow-wrap:anywhere}th{overflow-wrap:break-word}
@media(max-width:640px){td,th{padding:4px}}
td:not(:first-child){font-variant-numeric:tabular-nums}
.differs td{font-weight:600}
.events{margin:0;padding-left:20px}.events li{margin:4px 0}
"""
)

"""A plan as a table for the terminal, and as a page with a picture.

This module does not import TensorFlow.
"""

from __future__ import annotations

from html import escape

from mgpu_tf.planner.choice.plans import Candidate, Plan
from mgpu_tf.planner.operations.liveness import KINDS
from mgpu_tf.reports.scaling import aligned

_GIB = 1 << 30
_SHOWN = 12
_WIDTH, _ROW, _LEFT = 900, 26, 300
_COLORS = dict(
    zip(
        KINDS,
        (
            "#2b6cb0",
            "#b7791f",
            "#6b46c1",
            "#97266d",
            "#2f855a",
            "#2c7a7b",
            "#68a063",
            "#c05621",
            "#718096",
            "#a0aec0",
            "#d69e9e",
            "#cbd5e0",
        ),
        strict=True,
    )
)

_STYLE = """
:root { color-scheme: light dark; --text: #1c2430; --dim: #5b6675;
  --page: #f6f7f9; --card: #ffffff; --line: #d9dee6; --mark: #c53030; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e8ee; --dim: #9aa5b4;
  --page: #14181e; --card: #1c222b; --line: #343d4a; --mark: #fc8181; } }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 60rem;
  background: var(--page); color: var(--text);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
.dim { color: var(--dim); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; }
th, td { text-align: right; padding: .25rem 0 .25rem 1.25rem;
  border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
svg { width: 100%; height: auto; background: var(--card); }
svg text { fill: var(--text); font: 13px system-ui, sans-serif; }
.key { display: inline-block; width: .8rem; height: .8rem;
  margin: 0 .3rem 0 1rem; }
"""

_HEAD = (
    "layout",
    "strategy",
    "devices",
    "GiB/device",
    "left",
    "examples/s",
    "speed-up",
    "efficiency",
    "limited by",
)


def text(plan: Plan, most: int = _SHOWN) -> str:
    """Returns a plan for a terminal.

    Args:
        plan: The plan.
        most: How many candidates are shown.
    """
    rows = [_cells(each) for each in plan.candidates[:most]]
    priced = plan.machines.price is not None
    head = [*_HEAD, *(["price/M"] if priced else [])]
    lines = [
        _title(plan),
        *aligned([head, *rows]),
        "",
        plan.why,
        *plan.advice,
    ]
    hidden = len(plan.candidates) - most
    if hidden > 0:
        lines.insert(len(rows) + 2, f"and {hidden} more; --json has all")
    return "\n".join(lines)


def page(plan: Plan, most: int = _SHOWN) -> str:
    """Returns a plan as one page for a browser, with nothing beside it.

    Args:
        plan: The plan.
        most: How many candidates are shown.
    """
    shown = plan.candidates[:most]
    priced = plan.machines.price is not None
    head = [*_HEAD, *(["price/M"] if priced else [])]
    title = escape(_title(plan))
    rows = "\n".join(
        "<tr>"
        + "".join(f"<td>{escape(c)}</td>" for c in _cells(each))
        + "</tr>"
        for each in shown
    )
    keys = "".join(
        f'<span class=key style="background:{_COLORS[kind]}"></span>{kind}'
        for kind in KINDS
        if any(each.memory.largest.by_kind.get(kind) for each in shown)
    )
    advice = "".join(f"<p>{escape(each)}</p>" for each in plan.advice)
    return (
        "<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n"
        '<meta name=viewport content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{title}</h1>\n<p>{escape(plan.why)}</p>\n{advice}\n"
        f"<h2>Memory of a device</h2>\n<p class=dim>{keys}</p>\n"
        f"{_memory_picture(shown)}\n"
        f"<h2>Speed</h2>\n{_speed_picture(shown)}\n"
        "<h2>Candidates</h2>\n<div class=scroll><table><tr>"
        + "".join(f"<th>{escape(name)}</th>" for name in head)
        + f"</tr>\n{rows}\n</table></div>\n</body>\n</html>\n"
    )


def _title(plan: Plan) -> str:
    machines = plan.machines
    where = f"{machines.devices} x {machines.device.name}"
    if machines.nodes > 1:
        where += f" in {machines.nodes} machines over {machines.between.name}"
    return (
        f"{plan.model}, {plan.parameters:,} parameters, global batch "
        f"{plan.global_batch_size:,}, on {where}"
    )


def _cells(each: Candidate) -> list[str]:
    left = (each.room - each.bytes) / _GIB
    cells = [
        str(each.layout),
        each.layout.strategy,
        str(each.layout.devices),
        f"{each.bytes / _GIB:,.2f}",
        f"{left:,.2f}" if each.fits else f"lacks {-left:,.2f}",
        f"{each.examples_per_second:,.0f}",
        f"{each.speedup:.2f}",
        f"{each.efficiency:.0%}",
        each.time.limited_by,
    ]
    if each.price is not None:
        cells.append(f"{each.price:,.2f}")
    return cells


def _memory_picture(shown: tuple[Candidate, ...]) -> str:
    """Returns bars of memory by kind, with a line at what a device has."""
    most = max(
        max(each.bytes for each in shown), max(each.room for each in shown)
    )
    scale = (_WIDTH - _LEFT - 70) / most
    parts = []
    for row, each in enumerate(shown):
        top = row * _ROW + 6
        parts.append(_label(each, top))
        left = float(_LEFT)
        for kind in KINDS:
            width = each.memory.largest.by_kind.get(kind, 0.0) * scale
            if width >= 0.5:
                parts.append(
                    f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" '
                    f'height="{_ROW - 8}" fill="{_COLORS[kind]}">'
                    f"<title>{kind}</title></rect>"
                )
            left += width
        parts.append(
            f'<text x="{left + 6:.1f}" y="{top + 13}">'
            f"{each.bytes / _GIB:,.2f} GiB</text>"
        )
    room = _LEFT + shown[0].room * scale
    height = len(shown) * _ROW + 8
    parts.append(
        f'<line x1="{room:.1f}" y1="0" x2="{room:.1f}" y2="{height}" '
        'stroke="var(--mark)" stroke-width="2" stroke-dasharray="5 4"/>'
    )
    return _svg(parts, height)


def _speed_picture(shown: tuple[Candidate, ...]) -> str:
    """Returns bars of examples per second."""
    most = max(each.examples_per_second for each in shown)
    scale = (_WIDTH - _LEFT - 120) / most
    parts = []
    for row, each in enumerate(shown):
        top = row * _ROW + 6
        width = each.examples_per_second * scale
        opacity = "" if each.fits else ' opacity="0.35"'
        parts.append(_label(each, top))
        parts.append(
            f'<rect x="{_LEFT}" y="{top}" width="{width:.1f}" '
            f'height="{_ROW - 8}" fill="#2b6cb0"{opacity}/>'
            f'<text x="{_LEFT + width + 6:.1f}" y="{top + 13}">'
            f"{each.examples_per_second:,.0f}/s</text>"
        )
    return _svg(parts, len(shown) * _ROW + 8)


def _label(each: Candidate, top: int) -> str:
    name = str(each.layout)
    if len(name) > 42:
        name = name[:41] + "…"
    return f'<text x="4" y="{top + 13}">{escape(name)}</text>'


def _svg(parts: list[str], height: int) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" '
        'xmlns="http://www.w3.org/2000/svg">' + "".join(parts) + "</svg>"
    )

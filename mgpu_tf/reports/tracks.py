"""Rows along one horizontal axis: time lines, distributions, busy devices.

    line = time_axis(longest_seconds)
    draw({"saved": dots([(4.0, "step 9")], line)}, line)

A row is HTML that is placed in percent of the axis. So text keeps its size,
whatever the width of the page.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Iterable, Mapping, Sequence

from mgpu_tf.reports.charts import color, number_text, round_step

# What a page with tracks needs, beside that of the charts.
STYLE = """
.tracks{display:grid;grid-template-columns:minmax(64px,max-content) 1fr;
gap:4px 10px;align-items:center;font-size:12px;margin:6px 0 4px;
padding-right:16px}
.tracks>span{color:var(--soft);max-width:130px;overflow-wrap:anywhere}
.track{position:relative;height:22px;background:
linear-gradient(var(--rule),var(--rule)) center/100% 1px no-repeat}
.track.tall{height:52px;background:none}
.track svg{shape-rendering:crispEdges;position:absolute;inset:0;
width:100%;height:100%}
.track i{position:absolute;top:50%;width:11px;height:11px;border-radius:50%;
margin:-5.5px;border:2px solid var(--card)}
.track b{position:absolute;top:0;bottom:0;width:2px;margin-left:-1px;
background:var(--text)}.track b.second{opacity:.65}.track b.third{opacity:.4}
.ticks{position:relative;height:38px;color:var(--soft);
border-top:1px solid var(--rule)}
.ticks span{position:absolute;top:3px;transform:translateX(-50%)}
.ticks p{position:absolute;bottom:0;margin:0;width:100%;text-align:center}
"""
_UNITS = (
    (86400.0, "days"),
    (3600.0, "hours"),
    (60.0, "minutes"),
    (1.0, "seconds"),
)


@dataclasses.dataclass(frozen=True)
class Axis:
    """A horizontal axis.

    Attributes:
        low: The value at its left end.
        high: The value at its right end.
        ticks: Values and what is written there.
        name: What it counts.
        log: Whether each step of it is a factor.
    """

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    name: str
    log: bool = False

    def percent(self, value: float) -> float:
        """Returns the place of a value, 0 to 100."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = map(math.log, (low, high, value))
        return min(100.0, max(0.0, 100.0 * (value - low) / (high - low)))


def axis_from_zero(most: float, name: str, size: float = 1.0) -> Axis:
    """Returns an axis with round numbers.

    Args:
        most: The value that it must reach.
        name: What it counts.
        size: The value of one unit of `name`.
    """
    most = max(most, 1e-6)
    step = round_step(most / size / 5)
    count = math.floor(most / size / step + 1e-9)
    ticks = [
        (n * step * size, number_text(round(n * step, 9)))
        for n in range(count + 1)
    ]
    return Axis(0.0, most, ticks, name)


def time_axis(longest: float) -> Axis:
    """Returns the axis of a run, in units that people read.

    Args:
        longest: The seconds that it must reach.
    """
    size, unit = next(
        ((s, u) for s, u in _UNITS if longest >= 2 * s), _UNITS[-1]
    )
    return axis_from_zero(longest, f"{unit} since the run began", size)


def log_axis(low: float, high: float) -> Axis:
    """Returns an axis of milliseconds, on which each factor is as long.

    Args:
        low: The least seconds.
        high: The most; above `low`.
    """
    every = [
        (10.0**power * n, number_text(float(f"{10.0**power * n * 1e3:.3g}")))
        for power in range(-8, 7)
        for n in (1, 2, 5)
    ]
    low = max((at for at, _ in every if at <= low), default=low)
    high = min((at for at, _ in every if at >= high), default=high)
    ticks = [(at, text) for at, text in every if low <= at <= high]
    # All, or the powers of ten, or some of them.
    while len(ticks) > 7:
        ticks = ticks[::3] if len(ticks) > 14 else ticks[::2]
    return Axis(low, high, ticks, "ms", log=True)


def draw(
    rows: Mapping[str, str], axis: Axis, *, tall: Sequence[str] = ()
) -> str:
    """Returns rows with their names, and the axis below.

    Args:
        rows: The HTML of each row by its name.
        axis: Their axis.
        tall: The names of rows that are twice as high.
    """
    drawn = "".join(
        f"<span>{html.escape(name)}</span>"
        f'<div class="track{" tall" * (name in tall)}">{row}</div>'
        for name, row in rows.items()
    )
    ticks = "".join(
        f'<span style="left:{axis.percent(at):.2f}%">{text}</span>'
        for at, text in axis.ticks
    )
    return (
        f'<div class="tracks">{drawn}<span></span>'
        f'<div class="ticks">{ticks}<p>{html.escape(axis.name)}</p></div></div>'
    )


def dots(
    moments: Iterable[tuple[float, str]], axis: Axis, place: int = 0
) -> str:
    """Returns a dot for each moment.

    Args:
        moments: Values, each with its text.
        axis: The axis.
        place: The number of the colour.
    """
    return "".join(
        f'<i class="b{color(place)}" style="left:{axis.percent(at):.2f}%" '
        f'title="{html.escape(text)}"></i>'
        for at, text in moments
    )


def lines(values: Iterable[tuple[float, str, str]], axis: Axis) -> str:
    """Returns a vertical line for each value, with its text and class."""
    return "".join(
        f'<b class="{kind}" style="left:{axis.percent(at):.2f}%" '
        f'title="{html.escape(text)}"></b>'
        for at, text, kind in values
    )


def boxes(
    found: Iterable[tuple[float, float, float, float, int, str]], axis: Axis
) -> str:
    """Returns boxes in a row that are stretched with the page.

    Args:
        found: Of each: from and to on the axis, bottom and top from 0 to 1,
            the number of its colour, and its text.
        axis: The axis.
    """
    drawn = "".join(
        f'<rect class="f{color(place)}" x="{axis.percent(left):.3f}" '
        f'y="{100 * (1 - top):.2f}" height="{100 * (top - bottom):.2f}" '
        f'width="{axis.percent(right) - axis.percent(left):.3f}">'
        f"<title>{html.escape(text)}</title></rect>"
        for left, right, bottom, top, place, text in found
    )
    return (
        '<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img">'
        f"{drawn}</svg>"
    )

"""Charts as SVG for a page that needs nothing else: lines, columns, one bar.

    lines({"loss": [1.2, 0.8], "val loss": [1.3, 1.0]}, "epoch")

Colours are classes of the page (`c0` to `c7`), so that they follow its theme.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Mapping, Sequence

# What a page with charts needs, beside colours --soft and --rule of its own.
STYLE = """
:root{--c0:#2f6fde;--c1:#d9730d;--c2:#22936a;--c3:#8a56c9;--c4:#c23b5a;
--c5:#0b8fa5;--c6:#8c6d1f;--c7:#64748b}
@media (prefers-color-scheme:dark){:root{--c0:#7aa7ff;--c1:#f2a45c;
--c2:#57cc9a;--c3:#bd98f2;--c4:#f07f9a;--c5:#57c4d8;--c6:#d8b75c;
--c7:#9fb0c3}}
svg{width:100%;height:auto;display:block}.bar{height:34px;border-radius:6px}
.grid{stroke:var(--rule)}.tick,.axis{fill:var(--soft);font-size:11px}
.plot{overflow:visible}
@media(max-width:640px){.tick,.axis{font-size:17px}}
.line{fill:none;stroke-width:2.2}.mark{stroke:var(--c4);stroke-width:1.5;
stroke-dasharray:4 3}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;margin:8px 0 0;font-size:13px}
.key{display:inline-block;width:10px;height:10px;border-radius:3px;
margin-right:6px}.none{color:var(--soft)}
.parts :is(th,td):not(.none){white-space:nowrap}
.note{color:var(--soft);font-size:12px;margin:6px 0}
""" + "".join(
    f".sc{n}{{stroke:var(--c{n})}}.fc{n}{{fill:var(--c{n})}}"
    f".bc{n}{{background:var(--c{n})}}"
    for n in range(8)
)

WIDTH, HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 12, 38
_TICKS = 4
_COLORS = 8


@dataclasses.dataclass(frozen=True)
class Mark:
    """A vertical line in a chart.

    Attributes:
        at: The value on the horizontal axis.
        text: What it stands for.
    """

    at: float
    text: str


def lines(
    series: Mapping[str, Sequence[float | None]],
    axis: str,
    marks: Sequence[Mark] = (),
    *,
    from_zero: bool = False,
) -> str:
    """Returns a line for each series, of values at 1, 2, 3, ...

    Args:
        series: Values by name; None, infinity and NaN leave a gap.
        axis: The name of the horizontal axis.
        marks: Vertical lines.
        from_zero: Whether the vertical axis begins at 0.
    """
    known = [
        v
        for values in series.values()
        for v in values
        if v is not None and _is_number(v)
    ]
    if not known:
        return '<p class="none">No values.</p>'
    longest = max(map(len, series.values()))
    low = 0.0 if from_zero else min(known)
    scale = _Scale(low, max(known), longest)
    parts = scale.grid(axis)
    for mark in marks:
        x = scale.x(mark.at)
        parts.append(
            f'<path class="mark" d="M {x:.1f} {_TOP} V {HEIGHT - _BOTTOM}">'
            f"<title>{html.escape(mark.text)}</title></path>"
        )
    for place, values in enumerate(series.values()):
        color = f"c{place % _COLORS}"
        points = [
            (scale.x(number), scale.y(value))
            for number, value in enumerate(values, 1)
            if value is not None and _is_number(value)
        ]
        path = " L ".join(f"{x:.1f} {y:.1f}" for x, y in points)
        # Thinner and thinner, so that lines which are equal are all seen.
        width = 2.0 + 2.0 * (len(series) - 1 - place)
        parts.append(
            f'<path class="line s{color}" style="stroke-width:{width}" '
            f'd="M {path}"/>'
        )
        if len(points) <= 40:
            parts += [
                f'<circle class="f{color}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
                for x, y in points
            ]
    return _svg(parts) + legend(list(series))


def columns(values: Mapping[str, Sequence[float]], unit: str) -> str:
    """Returns groups of columns, a group for each name.

    Args:
        values: The heights of a group by its name, in the order of colours.
        unit: What the vertical axis counts.
    """
    if not values:
        return '<p class="none">No values.</p>'
    highest = max((v for group in values.values() for v in group), default=0.0)
    scale = _Scale(0.0, highest, len(values))
    parts = scale.grid("", unit=unit, numbers=False)
    room = (WIDTH - _LEFT - _RIGHT) / len(values)
    for place, (name, group) in enumerate(values.items()):
        width = min(46.0, room * 0.8 / max(1, len(group)))
        left = _LEFT + room * (place + 0.5) - width * len(group) / 2
        for number, value in enumerate(group):
            y = scale.y(value)
            parts.append(
                f'<rect class="fc{number % _COLORS}" rx="2" '
                f'x="{left + number * width:.1f}" y="{y:.1f}" '
                f'width="{width - 2:.1f}" '
                f'height="{HEIGHT - _BOTTOM - y:.1f}"><title>'
                f"{html.escape(name)}: {number_text(value)} {unit}</title>"
                "</rect>"
            )
        parts.append(
            f'<text class="tick" text-anchor="middle" '
            f'x="{_LEFT + room * (place + 0.5):.1f}" '
            f'y="{HEIGHT - _BOTTOM + 16}">{html.escape(name)}</text>'
        )
    return _svg(parts)


def bar(
    parts: Mapping[str, float],
    unit: str,
    meaning: Mapping[str, str] | None = None,
) -> str:
    """Returns one bar, divided, with a table of its parts below.

    Args:
        parts: The size of each part by its name.
        unit: What sizes count.
        meaning: What each part is, in a few words.
    """
    whole = sum(parts.values()) or 1.0
    drawn, left = [], 0.0
    for place, size in enumerate(parts.values()):
        width = 1000 * size / whole
        drawn.append(
            f'<rect class="fc{place % _COLORS}" x="{left:.2f}" y="0" '
            f'width="{width:.2f}" height="34"/>'
        )
        left += width
    rows = "".join(
        f'<tr><td><span class="key bc{place % _COLORS}"></span>'
        f"{html.escape(name)}</td><td>{rounded(size)} {unit}</td>"
        f"<td>{size / whole:.0%}</td>"
        f'<td class="none">{html.escape((meaning or {}).get(name, ""))}'
        "</td></tr>"
        for place, (name, size) in enumerate(parts.items())
        if size > 0
    )
    return (
        '<svg class="bar" viewBox="0 0 1000 34" preserveAspectRatio="none" '
        f'role="img">{"".join(drawn)}</svg><table class="parts">{rows}</table>'
    )


def legend(names: Sequence[str], places: Sequence[int] = ()) -> str:
    """Returns what each colour stands for; nothing for a single one.

    Args:
        names: What they stand for.
        places: The numbers of the colours; 0, 1, 2, ... by default.
    """
    if len(names) < 2:
        return ""
    return (
        '<p class="legend">'
        + "".join(
            f'<span><span class="key b{color(place)}"></span>'
            f"{html.escape(name)}</span>"
            for place, name in zip(
                places or range(len(names)), names, strict=True
            )
        )
        + "</p>"
    )


def color(place: int) -> str:
    """Returns the class of a colour by its number, such as `c0`."""
    return f"c{place % _COLORS}"


def number_text(value: float) -> str:
    """Returns a number as people read it: 12,345 or 0.00123."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def rounded(value: float) -> str:
    """Returns a measured number with three digits: 12,300 or 0.0123."""
    return f"{float(f'{value:.3g}'):,g}"


def _is_number(value: float) -> bool:
    return math.isfinite(value)


class _Scale:
    """From values to places in the picture."""

    def __init__(self, low: float, high: float, count: int) -> None:
        if high <= low:
            low, high = low - abs(low or 1.0) / 2, high + abs(high or 1.0) / 2
        step = round_step((high - low) / _TICKS)
        self._step = step
        self._low = math.floor(low / step + 1e-9) * step
        self._high = math.ceil(high / step - 1e-9) * step
        self._count = count

    def x(self, number: float) -> float:
        """Returns the place of the n-th value."""
        room = WIDTH - _LEFT - _RIGHT
        if self._count < 2:
            return _LEFT + room / 2
        return _LEFT + room * (number - 1) / (self._count - 1)

    def y(self, value: float) -> float:
        """Returns the height of a value."""
        part = (value - self._low) / (self._high - self._low)
        return HEIGHT - _BOTTOM - part * (HEIGHT - _TOP - _BOTTOM)

    def grid(
        self, axis: str, *, unit: str = "", numbers: bool = True
    ) -> list[str]:
        """Returns the axes, their numbers and their names."""
        parts, value = [], self._low
        while value <= self._high + self._step / 2:
            y = self.y(value)
            parts.append(
                f'<path class="grid" d="M {_LEFT} {y:.1f} H {WIDTH - _RIGHT}"/>'
                f'<text class="tick" text-anchor="end" x="{_LEFT - 6}" '
                f'y="{y + 4:.1f}">{number_text(round(value, 12))}</text>'
            )
            value += self._step
        if numbers:
            every = max(1, math.ceil(self._count / 10))
            for number in range(1, self._count + 1, every):
                parts.append(
                    '<text class="tick" text-anchor="middle" '
                    f'x="{self.x(number):.1f}" y="{HEIGHT - _BOTTOM + 16}">'
                    f"{number}</text>"
                )
        parts.append(
            '<text class="axis" text-anchor="middle" '
            f'x="{(_LEFT + WIDTH - _RIGHT) / 2}" y="{HEIGHT - 6}">'
            f"{html.escape(axis or unit)}</text>"
        )
        return parts


def round_step(least: float) -> float:
    """Returns the next of 1, 2, 5, 10, ... that is not below a number."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * n for n in (1, 2, 5, 10) if power * n >= least * 0.999)


def _svg(parts: Sequence[str]) -> str:
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
        f"{''.join(parts)}</svg>"
    )

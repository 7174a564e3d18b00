"""Draws where each strategy keeps weights, gradients and rows, as SVG.

    python website/pictures.py          # writes docs/figures/strategies

A device is a box with one bar for each kind of data. The filled part of a bar
is what the device holds: of all weights, of all gradients, of the optimizer's
state, of the rows of a global batch. Each picture is drawn for light and for
dark pages.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib

FOLDER = pathlib.Path(__file__).parent.parent / "docs/figures/strategies"

PARTS = ("weights", "gradients", "optimizer", "rows")
THEMES = {
    "light": {
        "text": "#1f2430",
        "soft": "#667085",
        "line": "#98a2b3",
        "box": "#f5f7fa",
        "machine": "#d0d5dd",
        "track": "#e4e7ec",
        "weights": "#3b6fd4",
        "gradients": "#d9822b",
        "optimizer": "#7a5fc4",
        "rows": "#2f9e6e",
    },
    "dark": {
        "text": "#eceff4",
        "soft": "#a5adba",
        "line": "#7f8899",
        "box": "#262b36",
        "machine": "#4a5261",
        "track": "#3a414f",
        "weights": "#7aa5ff",
        "gradients": "#f0ab5f",
        "optimizer": "#b39cf0",
        "rows": "#5fd3a0",
    },
}

WIDTH, DEVICE, GAP, BAR, STEP = 720, 150, 22, 10, 29
HEAD = 30

Span = tuple[float, float]
WHOLE: Span = (0.0, 1.0)
NONE: Span = (0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class Device:
    """A box.

    Attributes:
        name: Its title.
        holds: Of each part the span that the device holds.
        machine: The machine it is in, 0 for the first.
    """

    name: str
    holds: dict[str, Span]
    machine: int = 0


@dataclasses.dataclass(frozen=True)
class Picture:
    """A strategy.

    Attributes:
        devices: The boxes of the first line.
        exchange: What the devices send each other.
        below: The boxes of a second line, such as servers.
        machines: The titles of the frames, if there are several machines.
    """

    devices: list[Device]
    exchange: str
    below: list[Device] = dataclasses.field(default_factory=list)
    machines: tuple[str, ...] = ()


def _share(place: int, count: int) -> Span:
    return place / count, (place + 1) / count


def _held(
    weights: Span = WHOLE,
    gradients: Span = WHOLE,
    optimizer: Span = WHOLE,
    rows: Span = WHOLE,
) -> dict[str, Span]:
    return dict(zip(PARTS, (weights, gradients, optimizer, rows), strict=True))


def pictures() -> dict[str, Picture]:
    """Returns the pictures by the names of their files."""
    return {
        "one_device": Picture(
            [Device("GPU 0", _held())], "nothing is exchanged"
        ),
        "mirrored": Picture(
            [Device(f"GPU {k}", _held(rows=_share(k, 4))) for k in range(4)],
            "gradients are summed over all GPUs; every GPU then makes the "
            "same update",
        ),
        "multi_worker_mirrored": Picture(
            [
                Device(f"GPU {k % 2}", _held(rows=_share(k, 4)), k // 2)
                for k in range(4)
            ],
            "gradients are summed over all GPUs of all machines",
            machines=("worker 0 (chief)", "worker 1"),
        ),
        "parameter_server": Picture(
            [
                Device(f"worker {k}", _held(NONE, WHOLE, NONE, _share(k, 3)))
                for k in range(3)
            ],
            "a worker reads weights, and sends gradients when they are ready",
            [
                Device(
                    f"server {k}",
                    _held(_share(k, 2), NONE, _share(k, 2), NONE),
                )
                for k in range(2)
            ],
        ),
        "central_storage": Picture(
            [
                Device(f"GPU {k}", _held(NONE, WHOLE, NONE, _share(k, 3)))
                for k in range(3)
            ],
            "GPUs read weights from the CPU, and send gradients to it",
            [Device("CPU", _held(WHOLE, WHOLE, WHOLE, NONE))],
        ),
        "fsdp": Picture(
            [
                Device(
                    f"GPU {k}",
                    _held(*[_share(k, 4)] * 3, _share(k, 4)),
                )
                for k in range(4)
            ],
            "the weights of a layer are gathered before it is computed; its "
            "gradients are summed and split",
        ),
        "tensor": Picture(
            [
                Device(
                    f"GPU {k}",
                    _held(*[_share(k % 2, 2)] * 3, _share(k // 2, 2)),
                )
                for k in range(4)
            ],
            "two GPUs compute the halves of each layer for the same rows, and "
            "sum what the layer needs",
        ),
        "pipeline": Picture(
            [
                Device(f"GPU {k}: stage {k + 1}", _held(*[_share(k, 3)] * 3))
                for k in range(3)
            ],
            "rows pass through the stages in micro-batches",
        ),
        "tpu": Picture(
            [Device(f"core {k}", _held(rows=_share(k, 4))) for k in range(4)],
            "gradients are summed over all cores",
        ),
    }


def draw(picture: Picture, theme: str) -> str:
    """Returns a picture as SVG.

    Args:
        picture: What is drawn.
        theme: `light` or `dark`.
    """
    colors = THEMES[theme]
    lines: list[str] = []
    frame = 26 if picture.machines else 0
    top = frame + 6
    height = HEAD + STEP * len(PARTS)
    _devices(lines, picture.devices, top, colors, bool(picture.machines))
    if picture.machines:
        _machines(lines, picture, top, height, colors)
    y = top + height + (18 if picture.machines else 14)
    if len(picture.devices) > 1:
        lines.append(
            f'<path d="M {WIDTH * 0.2} {y} H {WIDTH * 0.8}" stroke='
            f'"{colors["line"]}" stroke-width="2" marker-start="url(#a)" '
            'marker-end="url(#a)"/>'
        )
    y += 20
    lines.append(_text(WIDTH / 2, y, picture.exchange, colors["text"], 13))
    y += 14
    if picture.below:
        _devices(lines, picture.below, y, colors, False)
        y += height + 8
    _legend(lines, y + 12, colors)
    y += 24
    arrow = (
        '<defs><marker id="a" viewBox="0 0 10 10" refX="8" refY="5" '
        'markerWidth="7" markerHeight="7" orient="auto-start-reverse"><path '
        f'd="M 0 0 L 10 5 L 0 10 z" fill="{colors["line"]}"/></marker></defs>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" '
        f'font-family="sans-serif">{arrow}{"".join(lines)}</svg>\n'
    )


def _devices(
    lines: list[str],
    devices: list[Device],
    top: float,
    colors: dict[str, str],
    apart: bool,
) -> None:
    for left, device in zip(_lefts(devices, apart), devices, strict=True):
        height = HEAD + STEP * len(PARTS)
        lines.append(
            f'<rect x="{left}" y="{top}" width="{DEVICE}" height="{height}" '
            f'rx="8" fill="{colors["box"]}" stroke="{colors["line"]}"/>'
        )
        lines.append(
            _text(left + DEVICE / 2, top + 20, device.name, colors["text"], 14)
        )
        for place, part in enumerate(PARTS):
            y = top + HEAD + STEP * place + 12
            lines.append(
                _text(left + 10, y - 2, part, colors["soft"], 10, "start")
            )
            width = DEVICE - 20
            lines.append(_bar(left + 10, y, width, colors["track"]))
            begin, end = device.holds[part]
            if end > begin:
                lines.append(
                    _bar(
                        left + 10 + begin * width,
                        y,
                        (end - begin) * width,
                        colors[part],
                    )
                )


def _machines(
    lines: list[str],
    picture: Picture,
    top: float,
    height: float,
    colors: dict[str, str],
) -> None:
    lefts = _lefts(picture.devices, True)
    for place, name in enumerate(picture.machines):
        own = [
            left
            for left, device in zip(lefts, picture.devices, strict=True)
            if device.machine == place
        ]
        x, width = min(own) - 9, max(own) - min(own) + DEVICE + 18
        lines.append(
            f'<rect x="{x}" y="{top - 26}" width="{width}" '
            f'height="{height + 35}" rx="10" fill="none" stroke-width="1.5" '
            f'stroke="{colors["machine"]}" stroke-dasharray="5 4"/>'
        )
        lines.append(_text(x + width / 2, top - 9, name, colors["soft"], 12))


def _lefts(devices: list[Device], apart: bool) -> list[float]:
    gap = GAP
    between = [
        gap * (1.9 if apart and a.machine != b.machine else 1.0)
        for a, b in itertools.pairwise(devices)
    ]
    left = (WIDTH - DEVICE * len(devices) - sum(between)) / 2
    lefts = [left]
    for space in between:
        lefts.append(lefts[-1] + DEVICE + space)
    return lefts


def _legend(lines: list[str], y: float, colors: dict[str, str]) -> None:
    text = (
        "filled: what the device holds of all weights, gradients, state and "
        "rows"
    )
    lines.append(_text(WIDTH / 2, y, text, colors["soft"], 11))


def _bar(x: float, y: float, width: float, color: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" '
        f'rx="3" fill="{color}"/>'
    )


def _text(
    x: float, y: float, text: str, color: str, size: int, anchor: str = "middle"
) -> str:
    return (
        f'<text x="{x}" y="{y}" fill="{color}" font-size="{size}" '
        f'text-anchor="{anchor}">{text}</text>'
    )


def main() -> None:
    """Writes all pictures."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures().items():
        for theme in THEMES:
            path = FOLDER / f"{name}-{theme}.svg"
            path.write_text(draw(picture, theme), encoding="utf-8")


if __name__ == "__main__":
    main()

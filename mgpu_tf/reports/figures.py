"""Figures from tables of results. Needs matplotlib, the extra `plot`."""

from __future__ import annotations

from typing import Any

from mgpu_tf.errors import ConfigurationError
from mgpu_tf.reports.scaling import MEANING, PUBLISHED, ScalingTable


def draw_scaling(table: ScalingTable, path: str) -> None:
    """Draws speed-up against devices, with the ideal and published curves.

    Args:
        table: What was measured.
        path: Of the PNG to write.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    figure, axes = _new_figure()
    devices = [point.devices for point in table.points]
    axes.plot(devices, devices, "k--", linewidth=1, label="ideal")
    for name, curve in PUBLISHED.items():
        shown = {n: v for n, v in curve.items() if n <= max(devices)}
        axes.plot(
            list(shown), list(shown.values()), ":", marker=".", label=name
        )
    spread = [table.speedup(point) for point in table.points]
    middle = [values[1] for values in spread]
    below = [values[1] - values[0] for values in spread]
    above = [values[2] - values[1] for values in spread]
    axes.errorbar(
        devices,
        middle,
        yerr=[below, above],
        marker="o",
        capsize=4,
        label=f"mgpu_tf, {table.model}",
    )
    axes.set_xlabel("devices")
    axes.set_ylabel("speed-up")
    axes.set_xticks(devices)
    axes.set_ylim(bottom=0)
    axes.set_title(
        f"{table.scaling} scaling. {MEANING[table.kind]}",
        fontsize=8,
        wrap=True,
    )
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _new_figure() -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigurationError(
            "Figures need matplotlib. Received: it is not installed. Run: "
            "pip install 'mgpu_tf[plot]'"
        ) from None
    figure = Figure(figsize=(6, 4.5))
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()

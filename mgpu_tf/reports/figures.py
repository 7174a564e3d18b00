"""Figures from tables of results. Needs matplotlib, the extra `plot`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mgpu_tf.errors import ConfigurationError, installing
from mgpu_tf.reports.memory import MemoryTable
from mgpu_tf.reports.scaling import MEANING, ScalingTable


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
    for name, curve in table.published.items():
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
    # Below the picture, where it covers no point.
    axes.legend(
        fontsize=7, loc="upper left", bbox_to_anchor=(0, -0.14), ncols=2
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def draw_memory(
    tables: Mapping[str, MemoryTable], path: str, budget: int | None = None
) -> None:
    """Draws what the fullest device stores, a bar for each strategy.

    Args:
        tables: What `Trainer.memory` returned, by the name of the strategy.
        path: Of the PNG to write.
        budget: The bytes that a device has for variables and gradients, as a
            line; None for no line.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    figure, axes = _new_figure()
    fullest = [
        max(table.rows, key=lambda row: row.total) for table in tables.values()
    ]
    below = [0.0] * len(fullest)
    for part in ("weights", "optimizer", "other"):
        sizes = [getattr(row, part) / (1 << 20) for row in fullest]
        axes.barh(list(tables), sizes, left=below, label=part)
        below = [b + size for b, size in zip(below, sizes, strict=True)]
    if budget is not None:
        axes.axvline(
            budget / (1 << 20), color="black", linestyle="--", label="budget"
        )
    axes.invert_yaxis()
    axes.margins(x=0.02)
    axes.set_xlabel("MiB of variables on the fullest device")
    axes.tick_params(axis="y", labelsize=7)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def draw_curves(
    curves: Mapping[str, Sequence[float]], path: str, name: str = "loss"
) -> None:
    """Draws a value of each epoch, a line for each run.

    Args:
        curves: The values by the name of the run.
        path: Of the PNG to write.
        name: What the value is.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    figure, axes = _new_figure()
    # Thinner and thinner, so that curves which are equal are all seen.
    for place, (run, values) in enumerate(curves.items()):
        width = 1.5 * (len(curves) - place)
        epochs = list(range(1, len(values) + 1))
        axes.plot(epochs, values, linewidth=width, label=run)
    axes.set_xlabel("epoch")
    axes.set_ylabel(name)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def draw_points(
    points: Mapping[str, Mapping[int, float]],
    path: str,
    names: tuple[str, str],
    *,
    logarithmic: bool = False,
    marks: Mapping[str, float] | None = None,
) -> None:
    """Draws a value against a size, a line for each series.

    Args:
        points: For each series its values by size. Sizes are on a scale of
            powers of two.
        path: Of the PNG to write.
        names: What the size and the value are.
        logarithmic: Whether values are on a scale of powers of ten.
        marks: Sizes that a vertical line marks, by their name.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    figure, axes = _new_figure()
    for name, values in points.items():
        axes.plot(list(values), list(values.values()), marker="o", label=name)
    styles = (":", "--", "-.")
    for place, (name, size) in enumerate((marks or {}).items()):
        axes.axvline(
            size, color="black", linestyle=styles[place % 3], label=name
        )
    axes.set_xscale("log", base=2)
    if logarithmic:
        axes.set_yscale("log")
    axes.set_xlabel(names[0])
    axes.set_ylabel(names[1])
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
            f"{installing('plot')}"
        ) from None
    figure = Figure(figsize=(6, 4.5))
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()

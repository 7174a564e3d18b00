"""A report as tables on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from mgpu_tf.reports.goodput import Goodput
from mgpu_tf.reports.report import Report


def show(report: Report, console: Console | None = None) -> None:
    """Prints a run: a row for each epoch, then test scores and layout.

    Args:
        report: The run.
        console: Where to print; standard output by default.
    """
    console = console or Console()
    names = list(report.epochs[0].metrics) if report.epochs else []
    table = Table()
    for name in ("epoch", "loss", *names, "examples/s"):
        table.add_column(name, justify="right")
    for epoch in report.epochs:
        table.add_row(
            str(epoch.epoch),
            f"{epoch.loss:.6f}",
            *(f"{epoch.metrics[name]:.4f}" for name in names),
            f"{epoch.examples_per_second:,.0f}",
        )
    console.print(table)
    summary = Table.grid(padding=(0, 2))
    for name, value in report.test.items():
        summary.add_row(f"test {name}", f"{value:.4f}")
    if report.restarts:
        lost = f"{report.lost_steps} steps, {report.lost_seconds:.0f} s lost"
        summary.add_row("restarts", f"{report.restarts}, {lost}")
    if report.goodput is not None:
        summary.add_row("goodput", str(Goodput(**report.goodput)))
    noise = report.epochs[-1].gradient_noise if report.epochs else None
    if noise is not None:
        scale = noise["noise_scale"]
        told = "not known" if scale is None else f"{scale:,.0f} examples"
        summary.add_row("noise scale", told)
    if report.suggested_batch_size is not None:
        summary.add_row("suggested batch", str(report.suggested_batch_size))
    summary.add_row("strategy", report.strategy)
    summary.add_row("workers", str(report.num_workers))
    summary.add_row("replicas", str(report.num_replicas))
    summary.add_row("global batch", str(report.global_batch_size))
    console.print(summary)

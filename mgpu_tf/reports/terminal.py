"""Reports and traces as tables on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from mgpu_tf.reports.charts import rounded
from mgpu_tf.reports.goodput import Goodput
from mgpu_tf.reports.pipeline_trace import (
    Excerpt,
    PipelineTrace,
    alike,
    numbers,
    short,
)
from mgpu_tf.reports.report import Report

# Most of the seconds of a shorter run are its start.
_SHORT_RUN = 600.0


def show(report: Report, console: Console | None = None) -> None:
    """Prints a run: a row for each epoch, then test scores and layout.

    Args:
        report: The run.
        console: Where to print; standard output by default.
    """
    console = console or Console()
    names = list(report.epochs[0].metrics) if report.epochs else []
    # The progress bar leaves out the first call of an epoch, which may compile.
    table = Table(caption="examples/s with compiling")
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
        summary.add_row("time", _time_of(Goodput(**report.goodput)))
    if report.fused:
        fused = ", ".join(f"{n} {name}" for name, n in report.fused.items())
        summary.add_row("fused", fused)
    noise = report.epochs[-1].gradient_noise if report.epochs else None
    if noise is not None:
        scale = noise["noise_scale"]
        words = "not known" if scale is None else f"{scale:,.0f} examples"
        summary.add_row("noise scale", words)
    if report.suggested_batch_size is not None:
        summary.add_row("suggested batch", str(report.suggested_batch_size))
    if report.predicted is not None:
        summary.add_row("predicted", predicted_text(report.predicted))
    summary.add_row("strategy", report.strategy)
    summary.add_row("workers", str(report.num_workers))
    summary.add_row("replicas", str(report.num_replicas))
    summary.add_row("global batch", str(report.global_batch_size))
    console.print(summary)


def _time_of(goodput: Goodput) -> str:
    """Returns where the time went: the largest parts, on one line.

    Goodput is given for runs that take longer than to start.
    """
    whole = goodput.wall_seconds
    parts = {
        name.removesuffix("_seconds"): seconds
        for name, seconds in vars(goodput).items()
        if name != "wall_seconds" and seconds >= whole / 100
    }
    words = ", ".join(
        f"{name} {seconds:.0f}"
        for name, seconds in sorted(parts.items(), key=lambda p: -p[1])[:4]
    )
    share = "" if whole < _SHORT_RUN else f"; goodput {goodput.share:.0%}"
    return f"{whole:.0f} s: {words}{share}"


def predicted_text(predicted: dict[str, Any]) -> str:
    """Returns predictions beside what was measured, as one line."""
    memory, step = predicted["memory_bytes"], predicted["step_seconds"]
    words = []
    if memory["measured"]:
        words.append(
            f"{rounded(memory['predicted'] / 1e6)} MB of each device "
            f"({rounded(memory['measured'] / 1e6)} measured)"
        )
    words.append(
        f"{rounded(step['predicted'] * 1e3)} ms a step "
        f"({rounded(step['measured'] * 1e3)} measured)"
    )
    return ", ".join(words)


def show_trace(trace: PipelineTrace, console: Console | None = None) -> None:
    """Prints the stages of a pipeline.

    Args:
        trace: The trace of a run.
        console: Where to print; standard output by default.
    """
    console = console or Console()
    step, prediction = trace.step, trace.prediction

    def stage(place: int, name: str, text: str) -> None:
        console.rule(f"{place} {name}", align="left")
        console.print(text, markup=False, highlight=False)

    console.print(
        f"{trace.model} on {trace.strategy}: {trace.summary}",
        markup=False,
        highlight=False,
    )
    stage(1, "Data loading", "The global batch of the first step.")
    for batch in step.batches:
        if batch.rows:
            console.print(
                f"Rows {numbers(batch.rows[:6])} ... of {trace.num_examples:,}",
                markup=False,
                highlight=False,
            )
        console.print(_excerpts("", batch.data))
    stage(2, "Distribution to the devices", trace.distribution)
    for place, share in enumerate(step.shares):
        console.print(_excerpts(share.title(place), share.data))
    stage(
        3,
        "Training on each device",
        "Gradients are means over the rows of the device.",
    )
    for place, share in enumerate(step.shares):
        title = share.title_of_training(place)
        console.print(_excerpts(title, share.gradients))
    stage(4, "Gradient aggregation", trace.aggregation)
    console.print(_excerpts("What the optimizer got", alike(step.received)))
    table = Table(title="What it did", title_justify="left")
    for name in ("weight", "stored on", "before", "after"):
        table.add_column(name)
    for weight in step.weights:
        table.add_row(
            weight.name,
            ", ".join(map(short, weight.devices)),
            "\n".join(weight.before.lines()),
            "\n".join(weight.after.lines()),
        )
    console.print(table)
    stage(5, "Epochs", "How far weights moved is a part of their norm.")
    head, rows = trace.epoch_table()
    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    stage(6, "Prediction", "The inputs are split, and the outputs combined.")
    console.print(_excerpts("Inputs", prediction.data))
    for place, share in enumerate(prediction.shares):
        console.print(_excerpts(share.title(place), share.outputs))
    console.print(_excerpts("Combined outputs", prediction.combined))


def _excerpts(title: str, excerpts: Sequence[Excerpt]) -> Table:
    table = Table(title=title or None, title_justify="left")
    for name in ("", "shape", "stored on", "values"):
        table.add_column(name)
    for each in excerpts:
        table.add_row(
            each.name,
            # Rich reads brackets as markup.
            numbers(each.shape).replace("[", "\\["),
            short(each.device),
            "\n".join(each.lines()),
        )
    return table

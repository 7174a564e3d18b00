"""A pipeline trace as one page for a browser, with nothing beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from mgpu_tf.reports import charts, tracks
from mgpu_tf.reports.pipeline_trace import (
    Excerpt,
    PipelineTrace,
    ShareTrace,
    alike,
    numbers,
    short,
)

# What a device does, with its colour.
_DOES = {"computing": 0, "communication": 1, "idle": 7}

_STYLE = """
:root { color-scheme: light dark; --text: #1c2430; --dim: #5b6675;
  --soft: var(--dim); --rule: var(--line);
  --page: #f6f7f9; --card: #ffffff; --line: #d9dee6; --mark: #1f5fbf; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e8ee; --dim: #9aa5b4;
  --page: #14181e; --card: #1c222b; --line: #343d4a; --mark: #7fb0ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 72rem;
  background: var(--page); color: var(--text);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; margin: 2.25rem 0 .25rem; }
h2 span { color: var(--mark); margin-right: .5rem; }
h3 { font-size: 1rem; margin: 0 0 .25rem; }
p { margin: .25rem 0 .75rem; } .dim { color: var(--dim); }
.cards { display: grid; gap: .75rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
.card { background: var(--card); border: 1px solid var(--line);
  border-radius: .5rem; padding: .75rem; min-width: 0; }
.item { padding: .3rem 0; border-top: 1px solid var(--line);
  font-size: .875rem; overflow-wrap: anywhere; }
.item:first-of-type { border-top: 0; }
.n { font-family: ui-monospace, monospace; }
.scroll { overflow-x: auto; }
.pair { display: grid; gap: .75rem; grid-template-columns: 1fr 1fr; }
.pair > div { min-width: 0; } .chart { max-width: 38rem; }
table { border-collapse: collapse; font-size: .875rem; }
th, td { text-align: right; padding: .25rem 0 .25rem 1.25rem;
  border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
tr:last-child td { border-bottom: 0; }
th { color: var(--dim); font-weight: 600; }
"""


def page(trace: PipelineTrace) -> str:
    """Returns the page.

    Args:
        trace: The trace of a run.

    Returns:
        HTML in UTF-8. It loads nothing, and follows the light or dark scheme
        of the reader.
    """
    title = f"Pipeline of {trace.model} on {trace.strategy}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p class=dim>{escape(trace.summary)}</p>",
        *_loading(trace),
        *_distribution(trace),
        *_training(trace),
        *_aggregation(trace),
        *_profile(trace),
        *_epochs(trace),
        *_prediction(trace),
    ]
    return (
        "<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n"
        '<meta name=viewport content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{charts.STYLE}{tracks.STYLE}{_STYLE}</style>\n</head>\n"
        "<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def _loading(trace: PipelineTrace) -> Iterable[str]:
    yield _stage(1, "Data loading", "The global batch of the first step.")
    for batch in trace.step.batches:
        yield '<div class="card">'
        if batch.rows:
            yield (
                f"<p>Rows <span class=n>{numbers(batch.rows[:6])}</span> and "
                f"{len(batch.rows) - 6:,} more of {trace.num_examples:,}.</p>"
                if len(batch.rows) > 6
                else f"<p>Rows {numbers(batch.rows)}.</p>"
            )
        yield from _items(batch.data)
        yield "</div>"


def _distribution(trace: PipelineTrace) -> Iterable[str]:
    yield _stage(2, "Distribution to the devices", trace.distribution)
    rows = {
        f"{place}: {short(share.device)}": [float(share.after - share.first)]
        for place, share in enumerate(trace.step.shares)
    }
    yield from _chart("Rows of each device", charts.columns(rows, "rows"))
    yield from _cards(trace.step.shares, "data")


def _training(trace: PipelineTrace) -> Iterable[str]:
    yield _stage(
        3,
        "Training on each device",
        "Forward and backward pass. The gradient is the mean over the rows of "
        "the device.",
    )
    losses = {
        f"{place}: {short(share.device)}": [share.loss]
        for place, share in enumerate(trace.step.shares)
        if share.loss is not None
    }
    if losses:
        yield from _chart("Loss of each device", charts.columns(losses, "loss"))
    yield from _cards(trace.step.shares, "gradients")


def _aggregation(trace: PipelineTrace) -> Iterable[str]:
    yield _stage(4, "Gradient aggregation", trace.aggregation)
    sizes = {
        f"{place}: {short(share.device)}": [
            sum(math.prod(each.shape) for each in share.gradients) / 1000
        ]
        for place, share in enumerate(trace.step.shares)
    }
    unit = "thousand numbers"
    yield from _chart("Gradients of each device", charts.columns(sizes, unit))
    yield '<div class="card"><h3>What the optimizer got</h3>'
    yield from _items(alike(trace.step.received))
    yield '</div><p></p><div class="card"><h3>What it did</h3>'
    for weight in trace.step.weights:
        devices = ", ".join(map(short, weight.devices))
        yield _head(weight.name, weight.before.shape, devices)
        yield (
            '<div class="pair">'
            f"<div><div class=dim>before</div>{_values(weight.before)}</div>"
            f"<div><div class=dim>after</div>{_values(weight.after)}</div>"
            "</div></div>"
        )
    yield "</div>"


def _profile(trace: PipelineTrace) -> Iterable[str]:
    """Draws what each device did, and what it sent."""
    profile = trace.profile
    if profile is None:
        return
    yield "<h2>The time of each device</h2>"
    yield (
        f"<p class=dim>In a step, the mean of {profile.steps} later steps. "
        "Communication is the time in which a device did nothing else; it "
        "includes waiting for the other devices. Bytes are counted in the "
        "graph: what other devices take, and of a collective operation what a "
        "ring sends.</p>"
    )
    axis = tracks.axis_from_zero(profile.seconds / profile.steps, "ms", 1e-3)
    rows = {}
    for one in profile.devices:
        left, boxes = 0.0, []
        for name, place in _DOES.items():
            seconds = getattr(one, name) / profile.steps
            text = f"{name}: {charts.rounded(1e3 * seconds)} ms"
            boxes.append((left, left + seconds, 0.2, 0.8, place, text))
            left += seconds
        rows[one.device] = tracks.boxes(boxes, axis)
    yield '<div class="card">' + tracks.draw(rows, axis, tall=list(rows))
    yield charts.legend(list(_DOES), list(_DOES.values()))
    yield from _table(
        ["device", *(f"{name}, ms" for name in _DOES), "sent, KiB"],
        [
            [
                one.device,
                *(
                    charts.rounded(1e3 * getattr(one, name) / profile.steps)
                    for name in _DOES
                ),
                charts.rounded(one.sent_bytes / 1024),
            ]
            for one in profile.devices
        ],
    )
    yield "</div>"


def _epochs(trace: PipelineTrace) -> Iterable[str]:
    yield _stage(5, "Epochs", "How far weights moved is a part of their norm.")
    yield '<div class="card">'
    yield from _table(*trace.epoch_table())
    yield "</div>"
    losses = {"loss": [epoch.logs["loss"] for epoch in trace.epochs]}
    yield from _chart("Loss", charts.lines(losses, "epoch"))


def _prediction(trace: PipelineTrace) -> Iterable[str]:
    yield _stage(
        6, "Prediction", "The inputs are split, and the outputs combined."
    )
    yield '<div class="card"><h3>Inputs</h3>'
    yield from _items(trace.prediction.data)
    yield "</div><p></p>"
    yield from _cards(trace.prediction.shares, "outputs")
    yield '<p></p><div class="card"><h3>Combined outputs</h3>'
    yield from _items(trace.prediction.combined)
    yield "</div>"


def _stage(place: int, name: str, text: str) -> str:
    return (
        f"<h2><span>{place}</span>{escape(name)}</h2>"
        f"<p class=dim>{escape(text)}</p>"
    )


def _chart(title: str, drawn: str) -> Iterable[str]:
    yield f'<p></p><div class="card"><h3>{escape(title)}</h3>'
    yield f'<div class="chart">{drawn}</div></div><p></p>'


def _cards(shares: Sequence[ShareTrace], part: str) -> Iterable[str]:
    yield '<div class="cards">'
    for place, share in enumerate(shares):
        yield f'<div class="card"><h3>{escape(share.title(place))}</h3>'
        yield from _items(getattr(share, part))
        yield "</div>"
    yield "</div>"


def _items(excerpts: Sequence[Excerpt]) -> Iterable[str]:
    for each in excerpts:
        head = _head(each.name, each.shape, short(each.device))
        yield f"{head}{_values(each)}</div>"


def _head(name: str, shape: list[int], devices: str) -> str:
    return (
        f'<div class="item"><b>{escape(name)}</b> '
        f"<span class=n>{numbers(shape)}</span> "
        f"<span class=dim>on {escape(devices)}</span>"
    )


def _values(excerpt: Excerpt) -> str:
    lines = "".join(f"<div>{escape(line)}</div>" for line in excerpt.lines())
    return f'<div class="n">{lines}</div>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterable[str]:
    yield '<div class="scroll"><table><tr>'
    yield "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>"
    for row in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
        yield f"<tr>{cells}</tr>"
    yield "</table></div>"

"""The page and the tables of a trace that is made up."""

import dataclasses
import io
import re

import numpy as np
from rich.console import Console

from mgpu_tf.reports import terminal, trace_html
from mgpu_tf.reports.device_times import DeviceTimes, Profile
from mgpu_tf.reports.pipeline_trace import (
    BatchTrace,
    EpochTrace,
    Excerpt,
    PipelineTrace,
    PredictionTrace,
    ShareTrace,
    StepTrace,
    WeightTrace,
    alike,
    short,
)

CPU = "/job:localhost/replica:0/task:0/device:CPU:"


def excerpt(name, shape, device=CPU + "0"):
    values = np.arange(float(np.prod(shape))).reshape(shape)
    return Excerpt.of(name, values, device)


def share(number):
    return ShareTrace(
        CPU + str(number),
        0,
        2 * number,
        2 * number + 2,
        0.5,
        [excerpt("inputs", (2, 9))],
        [excerpt("a/kernel", (9, 2), CPU + str(number))],
        [excerpt("outputs", (2, 3))],
    )


TRACE = PipelineTrace(
    strategy="mirrored",
    num_workers=1,
    num_replicas=2,
    in_step=True,
    model="<b>net</b>",
    num_parameters=1234,
    optimizer="SGD",
    num_examples=1000,
    global_batch_size=4,
    step=StepTrace(
        [BatchTrace([7, 1, 5, 3], [excerpt("inputs", (4, 9))])],
        [share(0), share(1)],
        [excerpt("a/kernel", (9, 2), CPU + n) for n in "01"],
        [
            WeightTrace(
                "a/kernel",
                [CPU + "0", CPU + "1"],
                excerpt("a/kernel", (9, 2)),
                excerpt("a/kernel", (9, 2)),
            )
        ],
        {"loss": 1.0},
    ),
    epochs=[
        EpochTrace(1, {"accuracy": 0.5, "loss": 1.5, "late": 3.0}, 0.25),
        EpochTrace(2, {"accuracy": 0.75, "loss": 1.25, "late": 3.0}, 0.125),
    ],
    prediction=PredictionTrace(
        [excerpt("inputs", (4, 9))],
        [share(0), share(1)],
        [excerpt("outputs", (4, 3))],
    ),
    test={"loss": 2.0, "accuracy": 0.25},
)


def test_an_excerpt_shows_the_first_rows_and_numbers():
    shown = excerpt("a", (3, 2, 4))
    assert shown.values == [[0, 1, 2, 3, 4, 5], [8, 9, 10, 11, 12, 13]]
    assert shown.lines() == ["0 1 2 3 4 5", "8 9 10 11 12 13 ..."]
    assert excerpt("a", (8,)).lines() == ["0 1 2 3 4 5 ..."]
    assert excerpt("a", (2, 3)).lines() == ["0 1 2", "3 4 5"]
    assert excerpt("a", ()).lines() == ["0"]
    assert excerpt("a", (0, 3)).lines() == []
    text = Excerpt.of("words", np.array([[b"one", b"two"]], object), "")
    assert text.lines() == ["one two"]


def test_devices_in_short():
    assert short(CPU + "1") == "CPU:1"
    assert short("/job:ps/replica:0/task:2/device:GPU:0") == "ps 2 GPU:0"
    assert short("/job:worker/replica:0/task:1") == "worker 1 CPU:0"
    assert short("") == "host"


def test_what_is_the_same_on_all_devices_is_told_once():
    [once] = alike(TRACE.step.received)
    assert once.device == "CPU:0, CPU:1"


def test_epochs_have_the_metrics_of_the_test():
    head, rows = TRACE.epoch_table()
    assert head[1:3] == ["loss", "accuracy"]
    assert rows == [
        ["1", "1.5000", "0.5000", "", "25.00%"],
        ["2", "1.2500", "0.7500", "-0.2500", "12.50%"],
        ["test", "2.0000", "0.2500", "", ""],
    ]


def test_aggregation_by_strategy():
    assert TRACE.aggregation.endswith("0.5 x device 0 + 0.5 x device 1.")
    late = dataclasses.replace(TRACE, in_step=False)
    assert "do not wait" in late.aggregation
    part = [excerpt("a/kernel", (5, 2))]
    split = dataclasses.replace(
        TRACE, step=dataclasses.replace(TRACE.step, received=part)
    )
    assert "its part of the sum" in split.aggregation


def test_the_page_stands_alone():
    page = trace_html.page(TRACE)
    assert "prefers-color-scheme: dark" in page
    assert not re.search(r"<script|https?:|url\(|@import|src=|<link", page)
    assert "<b>net" not in page
    assert "&lt;b&gt;net" in page
    for tag in ("div", "table", "tr", "td", "p", "h2", "h3", "span"):
        opened = len(re.findall(rf"<{tag}[ >]", page))
        assert opened == page.count(f"</{tag}>"), tag
    assert "[7, 1, 5, 3]" in page
    assert "Device 1: CPU:1, rows 2 to 3" in page


def test_bars_of_what_each_device_did():
    devices = [
        DeviceTimes("CPU:0", 0.2, 0.1, 0.1, 2048.0),
        DeviceTimes("CPU:1", 0.1, 0.2, 0.1, 1024.0),
    ]
    profile = Profile(steps=4, seconds=0.4, devices=devices)
    page = trace_html.page(dataclasses.replace(TRACE, profile=profile))
    found = re.findall(
        r'<rect class="fc(\d)" x="([\d.]+)" .*? width="([\d.]+)">', page
    )
    assert [tuple(map(float, one)) for one in found if one[0] in "017"][
        -6:
    ] == [
        (0.0, 0.0, 50.0),
        (1.0, 50.0, 25.0),
        (7.0, 75.0, 25.0),
        (0.0, 0.0, 25.0),
        (1.0, 25.0, 50.0),
        (7.0, 75.0, 25.0),
    ]
    assert "computing: 50 ms" in page
    assert "<td>CPU:0</td><td>50</td><td>25</td><td>25</td><td>2</td>" in page
    assert "mean of 4 later steps" in page
    assert "time of each device" not in trace_html.page(TRACE)


def test_the_terminal_has_the_same():
    console = Console(record=True, width=120, file=io.StringIO())
    terminal.show_trace(TRACE, console)
    text = console.export_text()
    for part in (
        "[4, 9]",
        "Device 1: CPU:1, rows 2 to 3",
        "CPU:0, CPU:1",
        "0.5 x device 0 + 0.5 x device 1",
        "25.00%",
        "<b>net</b> on mirrored",
    ):
        assert part in text, part

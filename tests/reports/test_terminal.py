"""The tables hold the report's numbers."""

import dataclasses
import io

import pytest
from rich.console import Console

from mgpu_tf.reports import terminal
from mgpu_tf.reports.report import EpochReport, Report

REPORT = Report(
    strategy="multi_worker_mirrored",
    num_workers=2,
    num_replicas=8,
    global_batch_size=64,
    global_step=46,
    examples_seen=2874,
    epochs=[
        EpochReport(1, 1.25, {"accuracy": 0.5, "auc": 0.625}, 2.0, 718.5),
        EpochReport(2, 0.1234567, {"accuracy": 0.75, "auc": 1}, 0.1, 14370.0),
    ],
    test={"loss": 0.43219, "accuracy": 0.9},
    weights_sha256="ab" * 32,
    fused={"Adam": 1, "BatchNormalization": 19},
)


def shown(report):
    console = Console(record=True, width=100, file=io.StringIO())
    terminal.show(report, console)
    return [
        line.replace("│", " ").replace("┃", " ").split()
        for line in console.export_text().splitlines()
    ]


@pytest.mark.parametrize(
    "row",
    [
        "epoch loss accuracy auc examples/s",
        "1 1.250000 0.5000 0.6250 718",
        "2 0.123457 0.7500 1.0000 14,370",
        "examples/s with compiling",
        "test loss 0.4322",
        "test accuracy 0.9000",
        "fused 1 Adam, 19 BatchNormalization",
        "strategy multi_worker_mirrored",
        "workers 2",
        "replicas 8",
        "global batch 64",
    ],
)
def test_row(row):
    assert row.split() in shown(REPORT)


def test_no_epochs():
    rows = shown(dataclasses.replace(REPORT, epochs=[]))
    assert ["epoch", "loss", "examples/s"] in rows
    assert ["replicas", "8"] in rows


def test_standard_output(capsys):
    terminal.show(REPORT)
    assert "0.123457" in capsys.readouterr().out


def test_noise_scale_and_what_it_suggests():
    noise = {"noise_scale": 1234.4, "gradient_square": 0.1}
    epoch = dataclasses.replace(REPORT.epochs[-1], gradient_noise=noise)
    rows = shown(
        dataclasses.replace(REPORT, epochs=[epoch], suggested_batch_size=1232)
    )
    assert ["noise", "scale", "1,234", "examples"] in rows
    assert ["suggested", "batch", "1232"] in rows
    none = dataclasses.replace(epoch, gradient_noise={"noise_scale": None})
    rows = shown(dataclasses.replace(REPORT, epochs=[none]))
    assert ["noise", "scale", "not", "known"] in rows

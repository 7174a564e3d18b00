"""The report: a stable format, whole files, and one digest for weights."""

import dataclasses
import hashlib
import json
import struct
import tempfile

import numpy as np
import pytest

from mgpu_tf.reports.report import (
    REPORT_FILE,
    EpochReport,
    Report,
    suggested_batch_size,
    weights_sha256,
)


@pytest.fixture
def report():
    epochs = [
        EpochReport(1, 0.5, {"accuracy": 0.75}, 2.0, 700.0),
        EpochReport(2, 0.1 + 0.2, {"accuracy": 0.875}, 1.0, 1400.0),
    ]
    return Report(
        strategy="mirrored",
        num_workers=2,
        num_replicas=8,
        global_batch_size=64,
        global_step=46,
        examples_seen=2874,
        epochs=epochs,
        test={"loss": 0.25, "accuracy": 0.9},
        weights_sha256="ab" * 32,
    )


def test_round_trip(report, tmp_path):
    path = report.write(str(tmp_path))
    assert path == str(tmp_path / "report.json")
    assert Report.read(str(tmp_path)) == report


def test_field_names(report, tmp_path):
    """Others read this file: fields may be added, none is removed."""
    report.write(str(tmp_path))
    values = json.loads((tmp_path / "report.json").read_text())
    assert values.keys() >= {
        "strategy",
        "num_workers",
        "num_replicas",
        "global_batch_size",
        "global_step",
        "examples_seen",
        "epochs",
        "test",
        "weights_sha256",
    }
    assert values["epochs"][1].keys() >= {
        "epoch",
        "loss",
        "metrics",
        "seconds",
        "examples_per_second",
    }
    assert values["epochs"][1]["loss"] == 0.1 + 0.2
    assert [epoch["epoch"] for epoch in values["epochs"]] == [1, 2]


def test_fields_are_documented():
    import mgpu_tf.reports.report

    for kind in (Report, EpochReport):
        for field in dataclasses.fields(kind):
            assert field.name in mgpu_tf.reports.report.__doc__


def test_written_whole(report, tmp_path, monkeypatch):
    # A file from another disk could not be moved in one step.
    monkeypatch.setattr(tempfile, "tempdir", "/no such folder")
    report.write(str(tmp_path))
    again = dataclasses.replace(report, global_step=47)
    again.write(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [REPORT_FILE]
    assert Report.read(str(tmp_path)).global_step == 47
    assert (tmp_path / REPORT_FILE).stat().st_mode & 0o777 == 0o644


def test_failed_write_leaves_the_old_file(report, tmp_path):
    report.write(str(tmp_path))
    unwritable = dataclasses.replace(report, test={"loss": object()})
    with pytest.raises(TypeError):
        unwritable.write(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [REPORT_FILE]
    assert Report.read(str(tmp_path)) == report


def test_replaced_not_rewritten(report, tmp_path):
    """Who has the old file open reads all of the old file."""
    report.write(str(tmp_path))
    with open(tmp_path / REPORT_FILE) as old:
        dataclasses.replace(report, global_step=47).write(str(tmp_path))
        assert json.load(old)["global_step"] == 46


VALUES = np.arange(12, dtype=np.float32).reshape(3, 4)


def test_digest_by_hand():
    digest = hashlib.sha256()
    digest.update(struct.pack("<12f", *range(12)))
    digest.update(struct.pack("<q", -2))
    digest.update(struct.pack("<2d", 0.5, 1e300))
    weights = [VALUES, np.int64(-2), np.array([0.5, 1e300])]
    assert weights_sha256(weights) == digest.hexdigest()
    assert weights_sha256(iter(weights)) == digest.hexdigest()


@pytest.mark.parametrize(
    "same",
    [
        VALUES.astype(">f4"),
        np.asfortranarray(VALUES),
        np.asfortranarray(VALUES.astype(">f4")),
        np.repeat(np.repeat(VALUES, 2, axis=0), 3, axis=1)[::2, ::3],
        VALUES[::-1].copy()[::-1],
        np.broadcast_to(VALUES, (1, 3, 4))[0],
    ],
    ids=[
        "big-endian",
        "fortran",
        "big-endian fortran",
        "strided",
        "reversed",
        "broadcast",
    ],
)
def test_digest_ignores_the_layout(same):
    np.testing.assert_array_equal(same, VALUES)
    assert weights_sha256([same]) == weights_sha256([VALUES])


@pytest.mark.parametrize(
    "other",
    [
        VALUES.T,
        VALUES + np.float32(1e-6),
        VALUES.astype(np.float64),
        -VALUES,
    ],
    ids=["transposed", "one bit", "another type", "sign of zero"],
)
def test_digest_sees(other):
    assert weights_sha256([other]) != weights_sha256([VALUES])


def test_digest_sees_the_order():
    first, second = VALUES, VALUES + 1
    assert weights_sha256([first, second]) != weights_sha256([second, first])


def test_digest_of_half_precision():
    import ml_dtypes

    weight = np.array([1.0, -2.0], ml_dtypes.bfloat16)
    expected = hashlib.sha256(bytes([0x80, 0x3F, 0x00, 0xC0])).hexdigest()
    assert weights_sha256([weight]) == expected


def test_fields_of_a_later_version_are_left_out(report, tmp_path):
    path = tmp_path / "report.json"
    report.write(str(tmp_path))
    values = json.loads(path.read_text())
    values["added_later"] = 1
    values["epochs"][0]["added_later"] = 2
    path.write_text(json.dumps(values))
    assert Report.read(str(tmp_path)) == report


@pytest.mark.parametrize(
    ("noise_scale", "replicas", "batch"),
    [
        (103.7, 8, 104),
        (99.9, 8, 96),
        (0.3, 4, 4),
        (900.2, 1, 900),
        (0.0, 4, None),
        (-2.0, 4, None),
        (float("inf"), 4, None),
        (float("nan"), 4, None),
        (None, 4, None),
    ],
)
def test_suggested_batch_size(noise_scale, replicas, batch):
    assert suggested_batch_size(noise_scale, replicas) == batch

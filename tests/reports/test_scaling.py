import dataclasses
import json
import os
import sys

import pytest

from mgpu_tf import cli
from mgpu_tf.commands import benchmark
from mgpu_tf.reports.scaling import ScalingPoint, ScalingTable
from tests import clusters


def table():
    return ScalingTable(
        "mlp",
        "processes",
        "weak",
        [
            ScalingPoint(1, 64, [90.0, 100.0, 110.0], 0.5),
            ScalingPoint(4, 256, [380.0, 300.0, 320.0], 0.5),
        ],
    )


def test_speedup_and_efficiency():
    first, second = table().points
    assert table().speedup(first) == [0.9, 1.0, 1.1]
    assert table().speedup(second) == [3.0, 3.2, 3.8]
    assert table().efficiency(second) == 0.8


def test_speedup_where_the_first_point_has_several_devices():
    points = [ScalingPoint(2, 8, [10.0], 0.0), ScalingPoint(4, 8, [15.0], 0.0)]
    several = ScalingTable("mlp", "gpu", "strong", points)
    assert several.speedup(points[0])[1] == 2.0
    assert several.speedup(points[1])[1] == 3.0


def test_text_has_published_curves_beside_gpus_alone():
    lines = table().text().splitlines()
    assert "this is speed-up" in lines[1]
    assert lines[4].split()[:3] == ["4", "320", "3.20"]
    assert len(lines) == 5
    on_gpus = dataclasses.replace(table(), kind="gpu").text().splitlines()
    assert "3.5 on 4" in on_gpus[5]
    assert max(map(len, [*lines, *on_gpus])) <= 80


def test_reads_what_it_wrote(tmp_path):
    path = str(tmp_path / "scaling.json")
    table().write(path)
    assert ScalingTable.read(path) == table()


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--devices=1,two", "devices must be numbers"),
        ("--devices=2,2", "each once"),
        ("--devices=0", "1 or more"),
        ("--kind=cores", "Received: 'cores'"),
        ("--model=mpl", "Received: 'mpl'"),
        ("--strong --weak", "weak or strong"),
        ("--repeats=0", "repeats must be 1 or more"),
        ("--kind=processes --devices=1,4000", "One process to a core"),
    ],
)
def test_a_mistake_is_one_line(flag, message, capsys):
    from mgpu_tf import cli

    assert cli.main(["benchmark", *flag.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.full
def test_two_virtual_devices(tmp_path):
    done = clusters.mgpu_tf(
        "benchmark",
        "--devices=1,2",
        "--strong",
        "--steps=2",
        "--repeats=2",
        "--batch_size=8",
        f"--output_dir={tmp_path}",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "overhead of more replicas, not speed-up" in done.stdout
    with open(tmp_path / "scaling.json", encoding="utf-8") as file:
        value = json.load(file)
    assert [point["devices"] for point in value["points"]] == [1, 2]
    for point in value["points"]:
        assert point["global_batch_size"] == 8
        assert len(point["examples_per_second"]) == 2
    one, two = (point["loss"] for point in value["points"])
    assert one == pytest.approx(two, rel=1e-4)
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="one process to a core"
)
def test_two_processes(tmp_path):
    done = clusters.mgpu_tf(
        "benchmark",
        "--kind=processes",
        "--devices=2",
        "--steps=2",
        "--repeats=2",
        "--batch_size=8",
        f"--output_dir={tmp_path}",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "this is speed-up" in done.stdout
    (point,) = ScalingTable.read(str(tmp_path / "scaling.json")).points
    assert (point.devices, point.global_batch_size) == (2, 16)
    assert len(point.examples_per_second) == 2
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_numbers_are_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "_in_this_process", lambda *_: table())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["benchmark", f"--output_dir={tmp_path}"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["scaling.json"]
    error = capsys.readouterr().err
    assert "without scaling.png, which needs matplotlib: pip install" in error

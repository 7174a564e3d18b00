"""The main job through the command line, with real processes."""

import functools
import os
import zipfile

import keras
import numpy as np
import pytest

from mgpu_tf import job
from mgpu_tf.config import RunConfig
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.launch.job import RESTARTS
from mgpu_tf.reports.report import Report, weights_sha256
from tests import clusters
from tests.tiers import tiered

STRATEGIES = {
    "one_device": (),
    "mirrored": ("--num_virtual_devices=4",),
    "multi_worker_mirrored": ("--num_workers=2",),
}
ROWS = tiered(list(STRATEGIES), ["one_device"], ["multi_worker_mirrored"])


@pytest.fixture(scope="module")
def output(tmp_path_factory, data_dir):
    """The folder of a run of the small network on a strategy, run once."""

    @functools.cache
    def of(name):
        folder = str(tmp_path_factory.mktemp(name))
        done = clusters.mgpu_tf(
            "train",
            f"--strategy={name}",
            "--epochs=2",
            f"--data_dir={data_dir}",
            f"--output_dir={folder}",
            *STRATEGIES[name],
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return folder, done

    return of


@pytest.mark.parametrize("name", ROWS)
def test_report(name, output):
    folder, _ = output(name)
    report = Report.read(folder)
    assert report.strategy == name
    assert report.num_workers == (2 if "multi" in name else 1)
    assert report.num_replicas == {"one_device": 1, "mirrored": 4}.get(name, 2)
    assert report.global_batch_size == 64
    assert report.global_step == 2 * 23
    assert report.examples_seen == 2 * 1437
    assert [epoch.epoch for epoch in report.epochs] == [1, 2]
    assert list(report.epochs[0].metrics) == ["accuracy"]
    assert set(report.test) == {"loss", "accuracy"}
    assert report.test["accuracy"] > 0.8
    assert report.fused == {"Adam": 1, "GELU": 2}
    assert [task["task"] for task in report.tasks] == [
        f"worker {number}" for number in range(report.num_workers)
    ]
    # The times of steps, but of those in calls that traced.
    assert len(report.distributions) == report.num_workers
    for worker in report.distributions:
        assert 0 < worker["step"]["steps"] < report.global_step
        assert (worker["compute"] is None) == (report.num_workers == 1)
    for kind in ("start", "compile", "step", "evaluate"):
        spent = sum(one.get(kind, 0.0) for one in report.time_line["bins"])
        expected = report.goodput[f"{kind}_seconds"]
        assert spent == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("name", ROWS)
def test_model_is_the_one_reported(name, output):
    folder, _ = output(name)
    model = keras.saving.load_model(os.path.join(folder, "model.keras"))
    weights = model.get_weights()
    assert weights_sha256(weights) == Report.read(folder).weights_sha256


def test_restarts_before_the_first_step_are_reported(
    tmp_path, monkeypatch, data_dir, strategies
):
    strategies["one_device"]  # The CPU is split before the first operation.
    monkeypatch.setenv(RESTARTS, "2")
    config = RunConfig(
        strategy="one_device",
        epochs=1,
        data_dir=str(data_dir),
        output_dir=str(tmp_path),
        report="html",
    )
    assert job.run(config).restarts == 2
    page = (tmp_path / "report.html").read_text()
    assert "Restarts: 2. Steps done again: 0. They came before" in page
    assert "No restart" not in page


@pytest.mark.parametrize("name", ROWS[1:])
def test_same_numbers_as_one_device(name, output):
    ours = Report.read(output(name)[0])
    theirs = Report.read(output("one_device")[0])
    np.testing.assert_allclose(
        [epoch.loss for epoch in ours.epochs],
        [epoch.loss for epoch in theirs.epochs],
        rtol=1e-5,
    )
    assert ours.test == pytest.approx(theirs.test, rel=1e-4)


@pytest.mark.parametrize("name", ROWS)
def test_terminal_is_quiet(name, output):
    """Progress and tables on standard output, nothing on the other."""
    _, done = output(name)
    told = "mgpu-tf: data: each worker reads its own rows\n"
    workers = 2 if name == "multi_worker_mirrored" else 1
    assert done.stderr == (told if workers > 1 else "")
    assert "[worker 1]" not in done.stdout
    assert done.stdout.count(f"mgpu_tf: {name} on ") == 1
    assert "Epoch 1/2" in done.stdout
    assert done.stdout.count("test accuracy") == 1
    assert "TensorFlow" not in done.stdout


@pytest.mark.full
def test_example_script_on_its_own_and_under_launch(data_dir):
    """`experiments/train.py` is the same file in both."""
    script = os.path.join(clusters.ROOT, "experiments", "train.py")
    command = [script, "--epochs=1", f"--data_dir={data_dir}"]
    alone = clusters.run(command)
    cluster = clusters.mgpu_tf(
        "launch", "--num_workers=2", "--", clusters.PYTHON, *command
    )
    lines = []
    for done in (alone, cluster):
        assert done.returncode == 0, done.stdout + done.stderr
        found = [line for line in done.stdout.splitlines() if "test" in line]
        assert len(found) == 1, done.stdout
        lines.append(found[0].removeprefix("[worker 0] "))
    assert lines[0][:16] == lines[1][:16]


@pytest.mark.parametrize(
    ("loaded", "taken"),
    [
        (("abc", "def"), ("abc", "def")),
        ((("abc", "def"), ("g", "h")), ("abc", "def")),
        # Two inputs and two targets.
        ((("abc", "def"), ("ghi", "jkl")), (("abc", "def"), ("ghi", "jkl"))),
        ([["abc", "def"], ["g", "h"]], ("abc", "def")),
    ],
)
def test_parity_takes_the_training_data_of_a_split(loaded, taken):
    assert job._training_data(loaded) == taken


def test_a_file_made_to_fill_the_memory_is_not_loaded(tmp_path):
    path = str(tmp_path / "model.keras")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("config.json", b" " * (101 << 20))
    with pytest.raises(ConfigurationError, match=r"100 times .*'config.json'"):
        job._from_file(path, pytest.fail)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model.weights.h5", bytes(99 << 20))
    assert job._from_file(path, len) == len(path)

"""The commands of docs/large_batches.md, and the experiments beside it."""

import json
import pathlib
import re
import shlex

import keras
import pytest

import mgpu_tf
from tests import clusters

ROOT = pathlib.Path(clusters.ROOT)
DOCS = ROOT / "docs" / "large_batches.md"
BLOCKS = dict.fromkeys(("sh", "python"))
for _kind in BLOCKS:
    BLOCKS[_kind] = re.findall(rf"```{_kind}\n(.*?)```", DOCS.read_text(), re.S)
COMMANDS = [
    line for block in BLOCKS["sh"] for line in block.strip().splitlines()
]


def test_the_page_has_commands_and_code():
    assert len(COMMANDS) == 4
    assert len(BLOCKS["python"]) == 2


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS)
def test_command(command, tmp_path):
    done = clusters.mgpu_tf(*shlex.split(command)[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ("noise scale" in done.stdout) is ("--noise_scale" in command)
    if "--html" in command:
        assert (tmp_path / "trace.html").exists()


@pytest.mark.parametrize("code", BLOCKS["python"])
def test_code(code):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    exec(code, {"model": model, "mgpu_tf": mgpu_tf})


@pytest.mark.full
def test_the_study_of_large_batches_goes_on_where_it_was(tmp_path):
    arguments = [
        "experiments/large_batch.py",
        f"--output_dir={tmp_path}",
        "--seeds=1",
        "--train_rows=1024",
        "--test_rows=500",
        "--epochs=3",
    ]
    done = clusters.run(arguments, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "large_batch.json"
    runs = json.loads(path.read_text())["runs"]
    assert len(runs) == 9
    assert all(0 <= run["0"]["error"] <= 1 for run in runs.values())
    before = path.stat().st_mtime_ns
    again = clusters.run(arguments, cwd=ROOT)
    assert path.stat().st_mtime_ns == before
    assert again.stdout.splitlines()[-9:] == done.stdout.splitlines()[-9:]
    other = clusters.run([*arguments, "--epochs=4"], cwd=ROOT)
    assert "goes on with the same settings" in other.stdout + other.stderr


@pytest.mark.full
def test_the_noise_scale_against_its_definition(tmp_path):
    done = clusters.run(
        [
            "experiments/noise_scale.py",
            f"--output_dir={tmp_path}",
            "--epochs=2",
        ],
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "noise_scale.json").read_text())
    assert len(results["by definition"]) == 2
    for logged, direct in zip(
        results["logged"], results["by definition"], strict=True
    ):
        # The logged one is behind; it is no other order of magnitude.
        assert direct / 5 < logged < direct * 5


@pytest.mark.full
def test_the_study_of_optimizers(tmp_path):
    done = clusters.run(
        [
            "experiments/lars.py",
            f"--output_dir={tmp_path}",
            "--seeds=1",
            "--train_rows=512",
            "--test_rows=200",
            "--epochs=3",
            "--batches=128",
        ],
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "lars.json").read_text())
    assert set(results["summary"]) == {"SGD", "LARS", "Lamb"}
    assert len(results["runs"]) == 15
    assert (tmp_path / "lars.png").exists()

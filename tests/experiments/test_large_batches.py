"""The commands of two pages on steps, and the experiments beside them."""

import json
import pathlib
import re
import shlex

import keras
import pytest

import mgpu_tf
from tests import clusters

ROOT = pathlib.Path(clusters.ROOT)
TEXT = "".join(
    (ROOT / "docs" / name).read_text()
    for name in ("large_batches.md", "trace.md")
)
BLOCKS = {
    kind: re.findall(rf"```{kind}\n(.*?)```", TEXT, re.S)
    for kind in ("sh", "python")
}
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


@pytest.mark.matrix
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


@pytest.mark.matrix
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


@pytest.mark.matrix
def test_the_study_of_batch_sizes(tmp_path):
    arguments = [
        "experiments/batch_size_study.py",
        f"--output_dir={tmp_path}",
        "--seeds=1",
        "--rates=2",
        "--batches=128,256,512",
        "--train_rows=4096",
        "--test_rows=500",
        "--epochs=4",
        "--target_error=0.7",
        "--momentum=0",
        "--learning_rate=0.2",
    ]
    done = clusters.run(arguments, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "batch_size_study.json"
    results = json.loads(path.read_text())
    # Two rates and a seed of each batch, and the run of the noise scale.
    assert len(results["runs"]) == 10
    for run in results["runs"].values():
        assert (run["steps"] is None) is (run["error"] > 0.7)
    [noise] = [r for key, r in results["runs"].items() if "noise" in key]
    assert noise["noise_scale"]
    other = clusters.run([*arguments, "--rates=3"], cwd=ROOT)
    assert "goes on with the same settings" in other.stdout + other.stderr


@pytest.mark.full
def test_what_the_study_of_batch_sizes_reads_off(tmp_path):
    """Runs that follow steps = 50 (1 + 64 / batch), all in the file."""
    settings = {
        "train_rows": 64,
        "test_rows": 64,
        "epochs": 1,
        "learning_rate": 0.02,
        "momentum": 0.9,
        "target_error": 0.15,
        "rates": 5,
        "batches": ["8", "32", "128", "512"],
    }
    failed = {"steps": None, "error": 0.5}
    runs = {}
    for batch, steps in {8: 450, 32: 150, 128: 75, 512: 56}.items():
        key = f"batch {batch} rate {{}} seed {{}}"
        found = {"steps": steps, "error": 0.15}
        runs[key.format(0.0025, 100)] = runs[key.format(0.01, 100)] = failed
        runs[key.format(0.005, 100)] = found
        # The median is not moved by one run without the target.
        runs |= {key.format(0.005, seed): found for seed in (0, 1)}
        runs[key.format(0.005, 2)] = failed
    # 32 / 64, 96 / 128 and all of 32 rows are noise: 2.25 / (3 / 128) is 96.
    runs["batch 32 rate 0.005 seed 100 noise scale"] = {
        "steps": 150,
        "error": 0.15,
        "noise_scale": [32.0, 96.0, None],
    }
    path = tmp_path / "batch_size_study.json"
    path.write_text(json.dumps({"settings": settings, "runs": runs}))
    done = clusters.run(
        [
            "experiments/batch_size_study.py",
            f"--output_dir={tmp_path}",
            "--train_rows=64",
            "--test_rows=64",
            "--epochs=1",
            "--batches=8,32,128,512",
        ],
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(path.read_text())
    assert results["runs"] == runs
    summary = results["summary"]
    assert summary["perfect_scaling_to"] == 32
    assert summary["maximal_from"] == 128
    assert summary["critical_batch"] == pytest.approx(64, rel=0.02)
    assert summary["fewest_steps"] == pytest.approx(50, rel=0.01)
    assert summary["noise_scale_predicts"] == pytest.approx(96)
    assert all(row["rate_settled"] for row in summary["batches"].values())
    assert (tmp_path / "batch_size_study.png").exists()

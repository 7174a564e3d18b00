"""The commands of docs/model_parallel.md, and the experiment that it names."""

import json
import pathlib
import re
import shlex

import pytest

from tests import clusters
from tests.tiers import tiered

ROOT = pathlib.Path(clusters.ROOT)
DOCS = ROOT / "docs" / "model_parallel.md"
COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", DOCS.read_text(), re.S)
    for line in block.strip().splitlines()
]


def test_the_page_has_commands():
    assert len(COMMANDS) == 15


PLAN = [c for c in COMMANDS if c.startswith("mgpu-tf plan")]


@pytest.mark.parametrize(
    "command",
    tiered([c for c in COMMANDS if c.startswith("mgpu-tf")], PLAN),
)
def test_command(command, tmp_path):
    done = clusters.mgpu_tf(*shlex.split(command)[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.full
def test_experiment(tmp_path):
    [command] = [c for c in COMMANDS if "model_parallel.py" in c]
    done = clusters.run(
        [*shlex.split(command)[1:], f"--output_dir={tmp_path}", "--epochs=1"],
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results["refused"]) == {"one_device", "mirrored, 4 devices"}
    assert "fsdp over" in results["refused"]["one_device"]
    assert max(results["differences"].values()) < 1e-5
    stored = results["largest_device"]
    assert stored["fsdp 4"] < 0.3 * stored["one device, no budget"]
    in_one_process = ("tensor 2", "pipeline 2")
    for name in (*in_one_process, *(f"data 2 x {n}" for n in in_one_process)):
        assert stored[name] < 0.6 * stored["one device, no budget"]
    assert (tmp_path / "memory.png").stat().st_size > 1000
    assert (tmp_path / "losses.png").stat().st_size > 1000


@pytest.mark.full
def test_one_weird_trick(tmp_path):
    """The bytes of the graph are those of the formula, and mixed has least."""
    [command] = [c for c in COMMANDS if "one_weird_trick.py" in c]
    done = clusters.run(
        [*shlex.split(command)[1:], f"--output_dir={tmp_path}", "--steps=2"],
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "one_weird_trick.json").read_text())
    for found in results["small"].values():
        assert found["counted"] == pytest.approx(found["formula"], rel=0.01)
        assert found["difference"] < 1e-9
    for sizes in (
        {way: found["counted"] for way, found in results["small"].items()},
        results["alexnet"],
    ):
        assert min(sizes, key=sizes.get) == "mixed"
    assert (tmp_path / "one_weird_trick.png").stat().st_size > 1000


@pytest.mark.full
def test_parts_of_sequences_take_less():
    """The losses are equal; 46 to 48 MiB were measured, for 50 to 52."""
    small = ["--blocks=3", "--width=256", "--recompute"]
    found = []
    for flag in ("--nosequence_parallel", "--sequence_parallel"):
        done = clusters.run(
            ["experiments/sequence_memory.py", flag, *small], cwd=ROOT
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    whole, parts = found
    assert whole["loss"] == pytest.approx(parts["loss"], rel=1e-6)
    assert min(parts["beside_mib"]) < min(whole["beside_mib"])

"""The commands of docs/clusters.md, and the counts of its table."""

import json
import pathlib
import shlex
import sys

import pytest

from tests import clusters, pages

PAGE = (pathlib.Path(clusters.ROOT) / "docs" / "clusters.md").read_text()


@pytest.mark.full
def test_commands(tmp_path):
    """Each runs as it stands."""
    blocks = pages.blocks("clusters.md", "sh")
    for line in "".join(blocks).splitlines():
        program = shlex.join([sys.executable, "-m", "mgpu_tf"])
        line = line.replace("mgpu-tf train", f"{program} train")
        words = shlex.split(line.replace("mgpu-tf", program, 1))
        done = clusters.run(words[1:], cwd=tmp_path)
        assert done.returncode == 0, done.stderr + done.stdout


@pytest.mark.full
def test_the_experiment_of_balance(tmp_path):
    """The slow worker takes fewer rows; the losses are the same."""
    done = clusters.run(
        ["experiments/balance.py", "--rounds=1", f"--output_dir={tmp_path}"]
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    fast, slow = map(int, found["auto"]["shares"].split(","))
    assert fast > 1.3 * slow
    assert found["equal"]["shares"] == "equal"
    assert found["auto"]["losses"] == pytest.approx(
        found["equal"]["losses"], rel=1e-12
    )
    assert "round 1: " in done.stdout


@pytest.mark.full
def test_what_tasks_send(tmp_path):
    """The first task gets one message of each other task, which send two."""
    done = clusters.run(["experiments/control_messages.py", "--tasks=3,64"])
    assert done.returncode == 0, done.stderr
    rows = [
        json.loads(line)
        for line in done.stdout.splitlines()
        if line.startswith("{")
    ]
    assert [(row["tasks"], row["what"]) for row in rows] == [
        (tasks, what) for tasks in (3, 64) for what in ("agreement", "shares")
    ]
    for row in rows:
        tasks = row["tasks"]
        assert row["agree"]
        assert row["first_requests"] == tasks
        assert row["other_requests"] == 2
        assert row["service_requests"] == 3 * tasks - 2
        assert f"| {tasks} | {row['what']}" in PAGE or tasks == 3

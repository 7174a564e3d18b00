"""`mgpu-tf status`: the tasks of a job, from outside."""

import subprocess
import time

import pytest

from mgpu_tf import cli
from mgpu_tf.launch import status
from tests import clusters

BODY = """
import os, time
from mgpu_tf.cluster import heartbeat
heartbeat.begin("task")
for step in range(3000):
    heartbeat.count(step)
    with heartbeat.at(heartbeat.STEP):
        time.sleep(0.01)
"""


def test_a_job_that_runs_and_has_ended(tmp_path, capsys):
    command = [clusters.PYTHON, "-m", "mgpu_tf", "launch", "--num_workers=2"]
    with subprocess.Popen(
        [*command, f"--log_dir={tmp_path}", "--startup_seconds=0", "--"]
        + [clusters.PYTHON, "-c", BODY],
        env=clusters.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            deadline = time.monotonic() + clusters.LIMIT_SECONDS
            while time.monotonic() < deadline:
                if (tmp_path / status.FILE).exists():
                    job = status.read(str(tmp_path))
                    steps = [task.step for task in job.tasks]
                    if len(steps) == 2 and min(steps) > 20:
                        break
                time.sleep(0.05)
            assert job.is_running
            assert job.restarts == 0
            assert [task.name for task in job.tasks] == ["worker 0", "worker 1"]
            for task in job.tasks:
                assert 10 < task.steps_per_second < 101
                assert task.seconds < 60
            assert cli.main(["status", str(tmp_path)]) == 0
            lines = capsys.readouterr().out.splitlines()
            assert lines[0] == "the job runs; restarts: 0"
            assert lines[2].split()[:2] == ["worker", "0"]
        finally:
            process.terminate()
    assert cli.main(["status", str(tmp_path)]) == 0
    assert "has ended" in capsys.readouterr().out


SERVED = """
import json, os, time
from mgpu_tf.cluster import heartbeat
heartbeat.begin("task")
if json.loads(os.environ["TF_CONFIG"])["task"]["type"] != "chief":
    heartbeat.mark(heartbeat.SERVE)
    time.sleep(60)
for step in range(7):
    heartbeat.count(step)
    with heartbeat.at(heartbeat.STEP):
        time.sleep(0.01)
with heartbeat.at(heartbeat.EVALUATE):
    time.sleep(60)
"""


def test_a_job_with_parameter_servers(tmp_path, capsys):
    """The coordinator has steps; who serves it has none."""
    command = [clusters.PYTHON, "-m", "mgpu_tf", "launch", "--num_workers=2"]
    with subprocess.Popen(
        [*command, "--num_ps=1", f"--log_dir={tmp_path}", "--startup_seconds=0"]
        + ["--", clusters.PYTHON, "-c", SERVED],
        env=clusters.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            deadline = time.monotonic() + clusters.LIMIT_SECONDS
            phases = []
            while time.monotonic() < deadline:
                if (tmp_path / status.FILE).exists():
                    tasks = status.read(str(tmp_path)).tasks
                    phases = [task.phase for task in tasks]
                    if phases == ["evaluate", "serve", "serve", "serve"]:
                        break
                time.sleep(0.05)
            assert cli.main(["status", str(tmp_path)]) == 0
        finally:
            process.terminate()
    _, head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["task", "step", "steps/s", "phase", "for"]
    chief, *servers = [row.split() for row in rows]
    assert chief[:3] == ["chief", "0", "6"]
    assert "evaluate" in chief
    assert [row[:3] for row in servers] == [
        ["ps", "0", "serve"],
        ["worker", "0", "serve"],
        ["worker", "1", "serve"],
    ]


@pytest.mark.parametrize("folder", [[], ["/nowhere"], ["a", "b"]])
def test_refused(folder, capsys):
    assert cli.main(["status", *folder]) == 2
    error = capsys.readouterr().err
    assert "log_dir of a job" in error
    assert error.count("\n") == 1

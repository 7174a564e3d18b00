"""`mgpu-tf train` with parameter servers: output, logs, the page of the run."""

import json
import re

import pytest

from mgpu_tf.launch import noise
from tests import clusters


@pytest.mark.full
def test_what_is_printed_and_written(tmp_path, monkeypatch):
    monkeypatch.delenv(noise.LEVEL, raising=False)
    done = clusters.mgpu_tf(
        *("train", "--strategy=parameter_server", "--num_workers=2"),
        *("--num_ps=1", "--epochs=1", "--log_dir=logs", "--output_dir=run"),
        "--report=html",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if not line.startswith("[chief 0] ")] == []
    assert "parameter_server with 2 workers and 1 server" in lines[0]
    assert done.stderr == ""
    for task in ("worker-0", "worker-1", "ps-0"):
        log = (tmp_path / "logs" / f"{task}.log").read_text()
        name = task.replace("-", " ")
        assert f"\nmgpu_tf: {name} serves the coordinator at " in log
        assert "device_count {" in log
    tasks = json.loads((tmp_path / "run" / "report.json").read_text())["tasks"]
    names = ["coordinator", "worker 0", "worker 1", "ps 0"]
    assert [task["task"] for task in tasks] == names
    page = (tmp_path / "run" / "report.html").read_text()
    found = re.findall(r"<b>(.*?)</b> <span>(.*?)</span>", page)
    assert found[:4] == [(task["task"], task["role"]) for task in tasks]
    done = clusters.mgpu_tf("status", "logs", cwd=tmp_path)
    assert done.stdout.startswith("the job has ended; restarts: 0\n")

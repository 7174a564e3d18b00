"""Processes that wait to take the place of tasks."""

import dataclasses
import json
import os
import sys

import pytest

from mgpu_tf.errors import ConfigurationError
from mgpu_tf.launch import local
from mgpu_tf.launch.job import LaunchJob
from mgpu_tf.launch.policy import RestartPolicy
from mgpu_tf.launch.processes import spares
from tests import clusters
from tests.launch.test_local import PRELUDE

AGAIN = RestartPolicy(max_restarts=1, backoff_seconds=0.0)

# What a task sees of how it was started. The first attempt gives the spare time
# and fails.
TOLD = """
attempt = int(os.environ["MGPU_TF_RESTARTS"])
known = "tensorflow" in sys.modules
note(f"told{index}.{attempt}", json.dumps({
    "argv": sys.argv,
    "path": sys.path[:2],
    "name": __name__,
    "file": __file__,
    "main": sys.modules["__main__"].__dict__ is globals(),
    "config": config["task"],
    "input": sys.stdin.read(),
    "folder": os.getcwd(),
    "group": os.getpgid(0) == os.getpid(),
}))
note(f"known{index}.{attempt}", known)
print("attempt", attempt, flush=True)
if attempt == 0:
    wait_for("told0.0", "told1.0")
    server = serve()
    time.sleep(15 if index else 3600)
    sys.exit(3)
"""


@pytest.mark.full
@pytest.mark.parametrize("module", [False, True])
def test_a_spare_is_the_task(module, tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setenv("PYTHONPATH", clusters.PATH)
    monkeypatch.setattr(local, "SETTLED_SECONDS", 1.0)
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "told.py"
    script.write_text(PRELUDE + TOLD)
    named = ["-m", "told"] if module else [str(script)]
    command = [sys.executable, *named, str(tmp_path), "--x=1"]
    code = local.launch(command, 2, policy=AGAIN, spares=1, startup_seconds=99)
    assert code == 0
    told = [
        [
            json.loads((tmp_path / f"told{index}.{attempt}").read_text())
            for attempt in (0, 1)
        ]
        for index in (0, 1)
    ]
    for first, second in told:
        assert first == second
    known = [(tmp_path / f"known{i}.1").read_text() for i in (0, 1)]
    assert known == ["True", "False"]
    out = capfd.readouterr().out.splitlines()
    assert "[worker 0] attempt 1" in out and "[worker 1] attempt 1" in out


def test_a_spare_that_fails_is_told_once(capfd):
    code = "import sys; sys.exit(7)"
    waits = spares.Spares([sys.executable, "script.py"], 1)
    waits._command = [sys.executable, "-c", code]
    waits.keep()
    waits._waiting[0].wait()
    for _ in range(3):
        waits.keep()
    assert waits.take({}) is None
    assert capfd.readouterr().err.splitlines() == [
        "mgpu-tf launch: a spare process failed with exit code 7; the job goes "
        "on without spares."
    ]


def test_no_spare_is_left(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("")
    waits = spares.Spares([sys.executable, str(path)], 2)
    waits.keep()
    pids = [process.pid for process in waits._waiting]
    waits.close()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.parametrize(
    ("command", "waiting"),
    [
        ("python -P -m a.b -c", "python -P W -m a.b -c"),
        (
            "/x/python3.12 -X dev -Wignore s.py -m",
            "/x/python3.12 -X dev -Wignore W s.py -m",
        ),
        (
            "python --check-hash-based-pycs=always s.py",
            "python --check-hash-based-pycs=always W s.py",
        ),
    ],
)
def test_command_of_a_spare(command, waiting):
    found = spares.waiting_command(command.split())
    words = waiting.split()
    place = words.index("W")
    assert found[place].endswith("waiting.py")
    found[place] = "W"
    assert found == words


@pytest.mark.parametrize(
    "command",
    ["bash s.py", "python -c s", "python", "python -m", "python -Bmx"],
)
def test_commands_without_spares(command):
    with pytest.raises(ConfigurationError, match="a Python script or module"):
        spares.waiting_command(command.split())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"spares": -1}, "from 0 to the number of tasks, here 2"),
        ({"spares": 3}, "from 0 to the number of tasks, here 2"),
        ({"policy": RestartPolicy()}, "spares go with restarts"),
    ],
)
def test_spares_out_of_range(values, message):
    job = LaunchJob(("python", "s.py"), 2, policy=AGAIN, spares=1)
    with pytest.raises(ConfigurationError, match=message):
        dataclasses.replace(job, **values)


def test_no_spares_on_other_machines():
    done = clusters.mgpu_tf(
        *("launch", "--hosts=a,b", "--ssh", "--ssh_command=true"),
        *("--spares=1", "--max_restarts=1", "--", "python", "s.py"),
    )
    assert done.returncode == 2, done
    assert "processes of this machine" in done.stderr

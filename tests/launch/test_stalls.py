"""Tasks that make no progress, under the supervisor; without TensorFlow."""

import tempfile

import pytest

from mgpu_tf.cluster import watchdog
from mgpu_tf.launch import local
from mgpu_tf.launch.policy import RestartPolicy
from mgpu_tf.options import WatchOptions
from tests.launch.test_local import assert_gone, command, noted

BODY = """
from mgpu_tf.cluster import heartbeat

attempt = int(os.environ["MGPU_TF_RESTARTS"])
name = config["task"]["type"] + str(index)
heartbeat.begin()
note(f"{name}.{attempt}", os.getpid())


def until(name, phase, step=5):
    heartbeat.count(step)
    while not (folder / name).exists():
        heartbeat.mark(phase)
        time.sleep(0.05)


def waits_here():
    heartbeat.mark("step")
    heartbeat.mark("step")
    time.sleep(3600)
"""


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)


def launch(body, folder, num_workers=2, policy=None, tells=True, **options):
    before = BODY if tells else BODY.replace("heartbeat.begin()", "")
    return local.launch(
        command(before + body, folder),
        num_workers,
        policy=RestartPolicy(backoff_seconds=0.0, **(policy or {})),
        # The tasks serve no ports.
        startup_seconds=0.0,
        watch=WatchOptions(3.0, 60.0),
        **options,
    )


STOPS = """
heartbeat.count(5)
if attempt == 0:
    if index == 1:
        heartbeat.mark("step")
        os.kill(os.getpid(), signal.SIGSTOP)
    waits_here()
"""


def test_a_stopped_task_ends_the_job(tmp_path, capfd, monkeypatch):
    """With nothing in the folder of temporary files that a cleaner empties."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    logs = tmp_path / "logs"
    assert launch(STOPS, tmp_path, log_dir=str(logs)) == watchdog.STALLED
    err = capfd.readouterr().err
    assert "mgpu-tf launch: no progress for " in err
    assert (
        "Late: worker 1 (step 5, in step, stopped by a signal). The others: "
        "worker 0 (step 5, in step). All tasks are ended"
    ) in err
    # Each task's stacks are in its log.
    assert "in waits_here" in (logs / "worker-0.log").read_text()
    assert "<module>" in (logs / "worker-1.log").read_text()
    assert_gone(*noted(tmp_path, "worker0.0", "worker1.0"))
    lines = (logs / "last-steps-0.txt").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines if "worker 1" in line] == [
        "worker 1 step 0 start-up, for the first time",
        "worker 1 step 5 step, for the first time",
    ]
    assert f"what each task did last is in {logs}" in err
    assert not list(temporary.iterdir())


def test_a_job_that_stalls_begins_again(tmp_path, capfd):
    assert launch(STOPS, tmp_path, policy={"max_restarts": 1}) == 0
    err = capfd.readouterr().err
    assert err.count("no progress") == 1
    assert "restart 1 in 0.0 seconds" in err


def test_a_stopped_server_begins_again_alone(tmp_path, capfd):
    body = """
if name == "ps0":
    heartbeat.mark("serve")
    if attempt == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(3600)
if name == "worker0":
    heartbeat.mark("serve")
    time.sleep(3600)
wait_for("ps0.1")
"""
    policy = {"max_restarts": 1, "unit": "task"}
    assert launch(body, tmp_path, 1, policy=policy, num_ps=1) == 0
    err = capfd.readouterr().err
    assert "Late: ps 0 (serves, stopped by a signal)" in err
    assert "The late tasks are ended" in err
    assert "ps 0 failed with SIGKILL; restart 1 of 1" in err
    assert not (tmp_path / "worker0.1").exists()


def test_who_tells_nothing_is_not_watched(tmp_path):
    body = """
if index == 0:
    note("done")
    time.sleep(6)
else:
    wait_for("done")
"""
    # A script that does not use this package.
    assert launch(body, tmp_path, tells=False) == 0


def test_who_goes_on_is_let_alone(tmp_path):
    """For longer than the limit."""
    body = """
if index == 0:
    until("worker1.done", "callbacks")
else:
    end = time.monotonic() + 7
    while time.monotonic() < end:
        heartbeat.mark("save")
        time.sleep(0.1)
    note("worker1.done")
"""
    assert launch(body, tmp_path) == 0

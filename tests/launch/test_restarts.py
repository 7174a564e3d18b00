"""Restarts, over real processes that need no TensorFlow."""

import os
import pathlib
import signal

import pytest

from mgpu_tf.errors import PREEMPTED, ConfigurationError
from mgpu_tf.launch import local
from mgpu_tf.launch.policy import RestartPolicy
from mgpu_tf.launch.processes import process
from mgpu_tf.launch.processes.process import oom_kills
from tests.launch.test_local import (
    STAY,
    assert_gone,
    command,
    launched,
    noted,
    runs,
)

BODY = """
attempt = int(os.environ["MGPU_TF_RESTARTS"])
name = f"{config['task']['type']}{index}"
workers = len(config["cluster"]["worker"])
note(f"{name}.{attempt}", os.getpid())
"""


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)


def launch(body, folder, num_workers=2, **kwargs):
    options = {"backoff_seconds": 0.0} | kwargs.pop("policy", {})
    return local.launch(
        command(BODY + body, folder),
        num_workers,
        policy=RestartPolicy(**options),
        **kwargs,
    )


def test_job_begins_again_as_a_whole(tmp_path, capfd):
    body = """
if attempt < 2:
    if index == 1:
        wait_for(f"worker0.{attempt}")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3600)
print("attempt", attempt)
"""
    assert launch(body, tmp_path, policy={"max_restarts": 2}) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == [
        "[worker 0] attempt 2",
        "[worker 1] attempt 2",
    ]
    assert err.splitlines() == [
        "mgpu-tf launch: worker 1 failed with SIGKILL; ended worker 0.",
        "mgpu-tf launch: restart 1 in 0.0 seconds.",
        "mgpu-tf launch: worker 1 failed with SIGKILL; ended worker 0.",
        "mgpu-tf launch: restart 2 in 0.0 seconds.",
    ]
    assert_gone(*noted(tmp_path, "worker0.0", "worker0.1"))


def test_stubborn_tasks_do_not_hold_up_a_restart(tmp_path):
    body = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if attempt == 0:
    if index == 1:
        wait_for("worker0.0")
        sys.exit(3)
    time.sleep(3600)
"""
    code = launch(
        body, tmp_path, policy={"max_restarts": 1}, grace_seconds=3600.0
    )
    assert code == 0


def test_gives_up_with_the_first_cause(tmp_path, capfd):
    body = """
if index == 1:
    wait_for(f"worker0.{attempt}")
    print("about to fail")
    sys.exit(5)
time.sleep(3600)
"""
    assert launch(body, tmp_path, policy={"max_restarts": 1}) == 5
    assert capfd.readouterr().err.endswith(
        "gave up after 1 restarts: worker 1 failed with exit code 5. "
        "Its last lines:\n    about to fail\n"
    )


def test_one_task_alone(tmp_path, capfd):
    body = """
port = config["cluster"]["worker"][0]
note(f"port{attempt}.{name}", port.rpartition(":")[2])
if name == "worker0":
    if attempt == 0:
        sys.exit(9)
    note("again")
if name == "chief0":
    wait_for("again")
    sys.exit(0)
time.sleep(3600)
"""
    policy = {"max_restarts": 1, "unit": "task"}
    assert launch(body, tmp_path, num_ps=1, policy=policy) == 0
    assert "worker 0 failed with exit code 9; restart 1 of 1" in (
        capfd.readouterr().err
    )
    # The same address, and nobody else began again.
    first, second = noted(tmp_path, "port0.worker0", "port1.worker0")
    assert first == second
    for name in ("chief0", "ps0", "worker1"):
        assert_gone(*noted(tmp_path, f"{name}.0"))
        assert not (tmp_path / f"{name}.1").exists()


def test_end_of_the_budget_for_one_task(tmp_path):
    body = """
if name == "ps0":
    sys.exit(9)
time.sleep(3600)
"""
    policy = {"max_restarts": 2, "unit": "task"}
    assert launch(body, tmp_path, num_ps=1, policy=policy) == 9
    assert_gone(*noted(tmp_path, "ps0.2"))
    assert not (tmp_path / "ps0.3").exists()


def test_fewer_workers_when_one_stays_dead(tmp_path, capfd):
    body = """
note(f"workers{workers}.{attempt}.{index}")
if index == 2:
    wait_for(f"worker0.{attempt}", f"worker1.{attempt}")
    sys.exit(6)
if workers == 3:
    time.sleep(3600)
"""
    policy = {"max_restarts": 1, "min_workers": 2}
    assert launch(body, tmp_path, num_workers=3, policy=policy) == 0
    assert "going on with 2 workers" in capfd.readouterr().err
    assert (tmp_path / "workers3.1.2").exists()
    assert (tmp_path / "workers2.2.1").exists()


def test_no_fewer_than_the_least(tmp_path):
    policy = {"min_workers": 1}
    assert launch("sys.exit(6)", tmp_path, num_workers=2, policy=policy) == 6
    assert {p.name for p in tmp_path.glob("worker0.*")} <= {
        "worker0.0",
        "worker0.1",
    }


def test_log_files(tmp_path, capfd):
    body = """
print("attempt", attempt, "of", index)
if attempt == 0:
    wait_for("worker0.0", "worker1.0")
    sys.exit(1) if index else time.sleep(3600)
"""
    logs = tmp_path / "logs"
    code = launch(
        body,
        tmp_path,
        policy={"max_restarts": 1},
        log_dir=str(logs),
        chief_has_terminal=True,
    )
    assert code == 0
    assert "[worker 1] attempt 1 of 1" in capfd.readouterr().out
    lines = (logs / "worker-1.log").read_text().splitlines()
    assert [line.partition(",")[0].split()[0] for line in lines] == [
        "---",
        "attempt",
        "---",
        "attempt",
    ]
    assert lines[-1] == "attempt 1 of 1"
    assert "attempt 1 of 0" in (logs / "worker-0.log").read_text()


def test_log_dir_that_cannot_be(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"log_dir must be a folder"):
        launch("", tmp_path, log_dir=str(tmp_path / "file"))


@pytest.mark.parametrize("saves", [True, False])
def test_preempted(saves, tmp_path):
    code = PREEMPTED if saves else 0
    body = f"""
def leave(number, frame):
    sys.exit({code})

signal.signal(signal.SIGTERM, leave)
"""
    with launched(body + STAY, tmp_path) as process:
        pids = noted(tmp_path, "pid0", "pid1")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
    assert process.returncode == (PREEMPTED if saves else 143)
    assert ("preempted: the tasks have saved" in err) is saves
    assert_gone(*pids)


def test_signal_in_a_pause_is_not_lost(tmp_path):
    body = """
note("failed")
sys.exit(1)
"""
    flags = ["--max_restarts=9", "--backoff_seconds=3600"]
    with launched(body, tmp_path, 1, *flags) as process:
        noted_line = process.stderr.readline() + process.stderr.readline()
        assert "restart 1 in 60.0 seconds" in noted_line
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert process.returncode == 143


def test_no_orphan_of_a_killed_supervisor(tmp_path):
    """Neither a task nor what a task has started."""
    with launched("""note("child", child())""" + STAY, tmp_path, 1) as process:
        pids = noted(tmp_path, "child", "pid0")
        assert all(runs(pid) for pid in pids)
        # Else it ends by itself, since nobody reads what it prints.
        assert process.stdout.readline() == "[worker 0] child\n"
        process.kill()
        assert_gone(*pids)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("low 0\noom 4\noom_kill 3\noom_group_kill 0\n", 3),
        ("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n", 2),
        ("oom_kill_disable 0\n", 0),
        ("", 0),
    ],
)
def test_out_of_memory_counters(text, count, tmp_path):
    path = tmp_path / "memory.events"
    path.write_text(text)
    missing = str(pathlib.Path(tmp_path, "missing"))
    assert oom_kills([missing, str(path)]) == count


def test_out_of_memory_is_told_apart(tmp_path, capfd, monkeypatch):
    counted = iter([0, 0, 0, 1])
    monkeypatch.setattr(
        "mgpu_tf.launch.processes.process.oom_kills", lambda: next(counted)
    )
    body = "os.kill(os.getpid(), signal.SIGKILL)"
    assert local.launch(command(BODY + body, tmp_path), 1) == 137
    assert local.launch(command(BODY + body, tmp_path), 1) == 137
    first, second = capfd.readouterr().err.splitlines()
    assert first.endswith("worker 0 failed with SIGKILL.")
    assert "SIGKILL (out of memory" in second


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_restarts": -1}, r"0 or more. Received: max_restarts=-1"),
        ({"min_workers": 0}, r"1 or more. Received: min_workers=0"),
        ({"unit": "all"}, r"'job' or the 'task'. Received: unit='all'"),
        ({"backoff_seconds": -1.0}, r"0 or more. Received: backoff"),
    ],
)
def test_policy_out_of_range(values, message):
    with pytest.raises(ConfigurationError, match=message):
        RestartPolicy(**values)


def test_pauses_grow_and_end():
    policy = RestartPolicy(backoff_seconds=0.5, longest_backoff_seconds=3.0)
    pauses = [policy.pause_seconds(n) for n in (0, 1, 2, 3, 4, 5000)]
    assert pauses == [0.5, 0.5, 1.0, 2.0, 3.0, 3.0]


def test_a_full_log_ends_no_job(tmp_path, capfd, monkeypatch):
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "worker-1.log").mkdir()
    body = "print('line\\n' * 100_000, end='')"
    opener = process.own_only

    def full(path, flags):
        if path.endswith("worker-0.log"):
            return os.open("/dev/full", os.O_WRONLY)
        return opener(path, flags)

    monkeypatch.setattr(process, "own_only", full)
    assert launch(body, tmp_path, log_dir=str(logs)) == 0
    out, err = capfd.readouterr()
    assert out.count("] line\n") == 200_000
    assert sorted(err.splitlines()) == [
        f"mgpu-tf launch: {logs}/worker-0.log cannot be written (No space left "
        "on device); the job goes on.",
        f"mgpu-tf launch: {logs}/worker-1.log cannot be written (Is a "
        "directory); the job goes on.",
    ]


def test_a_log_is_its_owners(tmp_path):
    assert launch("", tmp_path, log_dir=str(tmp_path / "logs")) == 0
    path = tmp_path / "logs" / "worker-1.log"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_coordinator_that_crashes_begins_again_alone(tmp_path, capfd):
    """As by a fault in TensorFlow's own code; the others stay."""
    body = """
if name == "chief0":
    wait_for("worker0.0", "ps0.0")
    if attempt == 0:
        os.kill(os.getpid(), signal.SIGSEGV)
    sys.exit()
time.sleep(3600)
"""
    policy = {"max_restarts": 1, "unit": "task"}
    options = {"num_ps": 1, "startup_seconds": 0.0}
    assert launch(body, tmp_path, 1, policy=policy, **options) == 0
    err = capfd.readouterr().err
    assert "chief 0 failed with SIGSEGV; restart 1 of 1" in err
    assert not (tmp_path / "worker0.1").exists()
    assert not (tmp_path / "ps0.1").exists()


def test_a_coordinator_saves_before_its_servers_end(tmp_path):
    """Servers and workers get SIGTERM when it has ended."""
    body = """
def leave(number, frame):
    time.sleep(1)
    others = [
        pathlib.Path("/proc", p.read_text()).exists()
        for p in folder.glob("up-*")
    ]
    note("saved", all(others))
    sys.exit(75)

if name == "chief0":
    signal.signal(signal.SIGTERM, leave)
    wait_for("up-worker0", "up-ps0")
    os.kill(os.getppid(), signal.SIGTERM)
else:
    note(f"up-{name}", os.getpid())
time.sleep(3600)
"""
    assert launch(body, tmp_path, num_workers=1, num_ps=1) == PREEMPTED
    assert (tmp_path / "saved").read_text() == "True"
    assert_gone(*noted(tmp_path, "up-worker0", "up-ps0"))

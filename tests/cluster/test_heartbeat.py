"""Where tasks are, and who is late."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from mgpu_tf.cluster import heartbeat, watchdog
from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.cluster.heartbeat import Beat, Entry
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.options import WatchOptions
from tests import clusters

LIMITS = WatchOptions(stall_timeout_seconds=60.0, first_step_seconds=300.0)


@pytest.fixture
def told(monkeypatch):
    """Has this process tell where it is; returns what it tells."""
    board = heartbeat.Board()
    monkeypatch.setenv(heartbeat.FILE, board.path)
    monkeypatch.setattr(heartbeat, "_here", None)
    heartbeat.begin()
    assert heartbeat.has_begun()
    yield board.read
    # The thread that tells that this process runs ends with the process.
    heartbeat._here = None
    board.close()


def test_what_a_task_tells(told):
    heartbeat.count(7)
    with heartbeat.call("fit"):
        with heartbeat.at(heartbeat.STEP):
            assert told().last.phase == "step"
        heartbeat.mark(heartbeat.CALLBACKS)
        with heartbeat.at(heartbeat.STEP), heartbeat.reading():
            beat = told()
    assert (beat.pid, beat.last.step, beat.last.phase) == (
        os.getpid(),
        7,
        "step",
    )
    assert beat.reading_since > 0
    firsts = {entry.phase: [] for entry in beat.entries}
    for entry in beat.entries:
        firsts[entry.phase].append(entry.is_first)
    assert firsts["step"] == [True, False]
    assert told().last.phase == heartbeat.SCRIPT
    assert told().reading_since == 0
    for _ in range(200):
        heartbeat.mark("save")
    beat = told()
    assert len(beat.entries) == heartbeat.ENTRIES
    assert beat.count > 200
    alive = beat.alive
    clusters_wait(lambda: told().alive > alive)


def test_the_last_checksums_are_recorded(told):
    for step in range(1, heartbeat.CHECKS + 3):
        heartbeat.checked(10 * step, 2**64 - step)
    for _ in range(2 * heartbeat.ENTRIES):
        heartbeat.mark(heartbeat.STEP)
    found = [(check.step, check.digest) for check in told().checks]
    steps = range(3, heartbeat.CHECKS + 3)
    assert found == [(10 * step, 2**64 - step) for step in steps]
    text = heartbeat.recorded({"worker 0": told()})
    assert "worker 0 step 100 checksum fffffffffffffff6\n" in text


def clusters_wait(condition):
    end = time.monotonic() + clusters.LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_child_of_the_task_is_not_the_task(told):
    code = (
        "from mgpu_tf.cluster import heartbeat as h\n"
        "h.begin(); assert not h.has_begun(); h.mark('save')"
    )
    before = told().count
    subprocess.run(
        [sys.executable, "-c", code], env=clusters.environment(), check=True
    )
    assert told().count == before


def test_nothing_is_told_without_a_supervisor(monkeypatch):
    monkeypatch.setattr(heartbeat, "_here", None)
    monkeypatch.delenv(heartbeat.FILE, raising=False)
    heartbeat.begin()
    assert not heartbeat.has_begun()
    with heartbeat.call("fit"), heartbeat.at("step"), heartbeat.reading():
        heartbeat.count(1)
        heartbeat.mark("save")


def test_a_board_that_is_gone_is_told(monkeypatch, caplog):
    monkeypatch.setattr(heartbeat, "_here", None)
    monkeypatch.setenv(heartbeat.FILE, "/proc/1/fd/999")
    heartbeat.begin()
    assert not heartbeat.has_begun()
    assert "no supervisor sees whether this task goes on" in caplog.text


def test_the_board_outlives_the_task_and_is_in_no_folder(tmp_path, monkeypatch):
    """So no cleaner of old files can take it away."""
    board = heartbeat.Board()
    monkeypatch.setenv(heartbeat.FILE, board.path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    code = (
        "from mgpu_tf.cluster import heartbeat as h, watchdog\n"
        "watchdog.begin(None); h.count(7); h.mark('save')"
    )
    subprocess.run(
        [sys.executable, "-c", code], env=clusters.environment(), check=True
    )
    last = board.read().last
    assert (last.step, last.phase) == (7, "save")
    assert not list(tmp_path.iterdir())
    assert os.fstat(board.descriptor).st_nlink == 0
    board.close()


def beat(step, phase, count=1, alive=1, reading=0.0, is_first=False, pid=-1):
    entry = Entry(0.0, step, phase, is_first)
    return Beat(pid, count, alive, reading, (entry,))


def looked(*rounds):
    """What the last look says; a round is a time, and the beats then."""
    watch = watchdog.Watch(LIMITS)
    found = None
    for now, *beats in rounds:
        # Looks are never far apart.
        names = {f"worker {i}": one for i, one in enumerate(beats)}
        found = watch.look(names, now)
    return found


def seconds(until, make):
    """Rounds for each second; `make` gives the beats of a second."""
    return [(float(now), *make(now)) for now in range(until + 1)]


def test_who_goes_on_is_let_alone():
    rounds = seconds(
        200, lambda now: [beat(now // 50, "step", now // 50, alive=now)] * 2
    )
    assert looked(*rounds) is None
    rounds = seconds(200, lambda now: [beat(1, "script", alive=now)] * 2)
    assert looked(*rounds) is None
    rounds = seconds(200, lambda now: [beat(0, "serve", alive=now)])
    assert looked(*rounds) is None
    rounds = seconds(
        200, lambda now: [beat(0, "step", alive=now, is_first=True)]
    )
    assert looked(*rounds) is None


@pytest.mark.parametrize(
    ("late", "words"),
    [
        (lambda now: beat(3, "step", alive=1), "step 3, in step, frozen"),
        (lambda now: beat(2, "step", alive=now), "step 2, in step"),
        (lambda now: beat(3, "callbacks", alive=now), "step 3, in callbacks"),
        (lambda now: beat(3, "script", alive=now), "step 3, in script"),
        (
            lambda now: beat(3, "step", alive=now, reading=1.0),
            "step 3, in step, Python code makes a batch",
        ),
        (lambda now: beat(0, "serve", alive=1), "serves, frozen"),
    ],
)
def test_the_late_one_is_named(late, words):
    rounds = seconds(60, lambda now: [beat(3, "step", alive=now), late(now)])
    assert looked(*rounds[:-1]) is None
    stall = looked(*rounds)
    assert stall.late == ("worker 1",)
    assert stall.text == (
        f"no progress for 60 seconds. Late: worker 1 ({words}). The others: "
        "worker 0 (step 3, in step)"
    )


def test_nobody_is_behind():
    rounds = seconds(60, lambda now: [beat(3, "step", alive=now)] * 2)
    stall = looked(*rounds)
    assert stall.late == ("worker 0", "worker 1")
    assert "No task is behind the others: worker 0 (step 3, in" in stall.text


def test_the_first_time_has_its_own_limit():
    def make(now):
        return [beat(0, "start-up", alive=now, is_first=True)]

    assert looked(*seconds(299, make)) is None
    assert looked(*seconds(300, make)).text == (
        "no progress for 300 seconds. worker 0 (step 0, in start-up)"
    )


def test_a_watcher_that_was_stopped_accuses_nobody():
    one = beat(3, "step")
    assert looked((0.0, one), (1.0, one), (5000.0, one)) is None


def test_zero_is_no_limit():
    watch = watchdog.Watch(WatchOptions(0.0, 0.0))
    for now in range(0, 10_000):
        assert watch.look({"worker 0": beat(0, "step")}, float(now)) is None


def test_options_from_the_environment(monkeypatch):
    monkeypatch.setenv("MGPU_TF_STALL_TIMEOUT_SECONDS", "5")
    assert WatchOptions.from_environment() == WatchOptions(5.0)
    monkeypatch.setenv("MGPU_TF_STALL_TIMEOUT_SECONDS", "soon")
    with pytest.raises(ConfigurationError, match=r"number of sec.*'soon'"):
        WatchOptions.from_environment()
    with pytest.raises(ConfigurationError, match=r"must be finite.*nan"):
        WatchOptions(float("nan"))


TASK = """
import time
from mgpu_tf.cluster import heartbeat, watchdog
from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.options import WatchOptions
cluster = ClusterConfig("worker", 1, worker=("a:1", "b:1"))
watchdog.begin(cluster, WatchOptions({stall}, 0.0))
heartbeat.mark("step")
heartbeat.mark("step")

def waits_here():
    print("ready", flush=True)
    while True:
        time.sleep(0.1)
        {body}

waits_here()
"""


@contextlib.contextmanager
def task(stall, folder, body="pass"):
    """A task that nobody supervises."""
    env = clusters.environment()
    env.pop(heartbeat.FILE, None)
    env["TMPDIR"] = str(folder)
    process = subprocess.Popen(
        [sys.executable, "-c", TASK.format(stall=stall, body=body)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_task_of_nobody_ends_by_itself(stopped, tmp_path):
    with task(3.0, tmp_path) as process:
        # What a cleaner of old files would delete.
        assert not list(tmp_path.iterdir())
        if stopped:
            process.send_signal(signal.SIGSTOP)
        assert process.wait(clusters.LIMIT_SECONDS) == -signal.SIGKILL
        err = process.stderr.read()
    state = ", stopped by a signal" if stopped else ""
    assert "mgpu_tf: no progress for " in err
    assert f"worker 1 (step 0, in step{state})" in err
    assert "in waits_here" in err


def test_a_process_that_is_alone_has_the_limit_that_it_was_given(tmp_path):
    """It is no task of a cluster, and nobody supervises it."""
    code = TASK.format(stall=3.0, body="pass").replace(
        "watchdog.begin(cluster,", "watchdog.begin(None,"
    )
    env = clusters.environment() | {"TMPDIR": str(tmp_path)}
    env.pop(heartbeat.FILE, None)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert "mgpu_tf: no progress for" in done.stderr


@pytest.mark.full
def test_who_is_gone_is_named(tmp_path):
    with task(60.0, tmp_path) as process:
        line = process.stderr.readline()
    assert line.startswith("mgpu_tf: worker 1 waits for worker 0 at a:1 (since")


def test_a_task_is_cut_off_where_the_first_one_is_not_reached():
    with socket.create_server(("127.0.0.1", 0)) as server:
        first = f"127.0.0.1:{server.getsockname()[1]}"
        workers = (first, "127.0.0.1:2")
        second = ClusterConfig("worker", 1, worker=workers)
        assert not watchdog.is_cut_off(second)
    assert watchdog.is_cut_off(second)
    # TensorFlow tells the first one; servers may come back.
    assert not watchdog.is_cut_off(ClusterConfig("worker", 0, worker=workers))
    served = ClusterConfig(
        "worker", 0, worker=workers[1:], chief=(first,), ps=("127.0.0.1:3",)
    )
    assert not watchdog.is_cut_off(served)


def test_a_task_that_was_stopped_goes_on_and_it_is_told(tmp_path):
    with task(60.0, tmp_path, "heartbeat.mark('save')") as process:
        process.send_signal(signal.SIGSTOP)
        time.sleep(3)
        process.send_signal(signal.SIGCONT)
        line = process.stderr.readline()
        assert line.startswith("mgpu_tf: worker 1 was stopped by a signal for")
        assert process.poll() is None

"""The supervisor, over real processes that need no TensorFlow."""

import contextlib
import itertools
import json
import pathlib
import signal
import subprocess
import sys
import time
import types

import pytest

from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.launch import local
from tests import clusters

# Before the body of each script: the task's place, and notes on disk by which
# tasks and tests wait for each other.
PRELUDE = """
import json, os, pathlib, signal, socket, subprocess, sys, time

config = json.loads(os.environ["TF_CONFIG"])
index = config["task"]["index"]
folder = pathlib.Path(sys.argv[1])


def note(name, text=""):
    (folder / "new").mkdir(exist_ok=True)
    path = folder / "new" / f"{index}.{name}"
    path.write_text(str(text))
    path.rename(folder / name)


def wait_for(*names):
    while not all((folder / name).exists() for name in names):
        time.sleep(0.01)


def child():
    code = "import time; print('child', flush=True); time.sleep(3600)"
    return subprocess.Popen([sys.executable, "-c", code]).pid


def wait_for_end(name):
    wait_for(name)
    while pathlib.Path("/proc", (folder / name).read_text()).exists():
        time.sleep(0.01)


def serve():
    port = int(config["cluster"]["worker"][index].rpartition(":")[2])
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    server.bind(("127.0.0.1", port))
    server.listen()
    return server

"""

ENDS_AT_ONCE = """
if index == 0:
    note("ready0", os.getpid())
    sys.exit()
wait_for_end("ready0")
"""

STAY = """
note(f"pid{index}", os.getpid())
time.sleep(3600)
"""


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)


def command(body, folder):
    return [sys.executable, "-c", PRELUDE + body, str(folder)]


def launch(body, folder, *flags, num_workers=2):
    """Runs a script by `mgpu-tf launch` to its end."""
    flags = [f"--num_workers={num_workers}", *flags]
    return clusters.mgpu_tf("launch", *flags, "--", *command(body, folder))


@contextlib.contextmanager
def launched(body, folder, num_workers=2, *flags):
    """A running `mgpu-tf launch`."""
    arguments = ["launch", f"--num_workers={num_workers}", *flags, "--"]
    process = subprocess.Popen(
        [sys.executable, "-m", "mgpu_tf", *arguments, *command(body, folder)],
        env=clusters.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def until(condition, seconds=clusters.LIMIT_SECONDS):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def noted(folder, *names):
    """What tasks have noted, as numbers, once they have."""
    paths = [pathlib.Path(folder) / name for name in names]
    until(lambda: all(path.exists() for path in paths))
    return [int(path.read_text()) for path in paths]


def runs(pid):
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        status = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def assert_gone(*pids):
    until(lambda: not any(runs(pid) for pid in pids), 120)


def test_every_task_gets_its_own_cluster(tmp_path):
    body = """
values = [os.environ["TF_CONFIG"], os.environ["TF_GRPC_REUSE_PORT"]]
print(json.dumps(values))
"""
    done = launch(body, tmp_path, num_workers=3)
    assert done.returncode == 0
    assert done.stderr == ""
    views = {}
    for line in done.stdout.splitlines():
        name, _, values = line.partition("] ")
        text, reuse_port = json.loads(values)
        assert reuse_port == "true"
        views[name] = ClusterConfig.from_json(text)
    assert sorted(views) == ["[worker 0", "[worker 1", "[worker 2"]
    for index, (_, view) in enumerate(sorted(views.items())):
        assert (view.task_type, view.task_index) == ("worker", index)
        assert view.num_workers == 3
        assert view.tasks == views["[worker 0"].tasks


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (b"one\ntwo\n", ["one", "two"]),
        (b"no end of line", ["no end of line"]),
        (b"\nafter\n", ["", "after"]),
        (b"dos\r\n", ["dos"]),
        (b"\r1/3\r2/3\r3/3\ndone\n", ["3/3", "done"]),
        (b"1/3" + b"\b" * 3 + b"2/3" + b"\b" * 3 + b"3/3\n", ["3/3"]),
        (b"\x1b[1m1/2\x1b[0m\r\x1b[1m2/2\x1b[0m\r\n", ["2/2"]),
        ("\u00e9 \u2501".encode() + b" \n", ["\u00e9 \u2501 "]),
    ],
    ids=ascii,
)
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output(written, read, stream, tmp_path, capfd):
    body = f"sys.{stream}.buffer.write({written!r})"
    assert local.launch(command(body, tmp_path), 1) == 0
    out, err = capfd.readouterr()
    assert out == "".join(f"[worker 0] {line}\n" for line in read)
    assert err == ""


def test_lines_stay_whole(tmp_path):
    body = """
for _ in range(200):
    print("a" * 500, "b" * 500)
"""
    done = launch(body, tmp_path, num_workers=3)
    lines = done.stdout.splitlines()
    text = f"{'a' * 500} {'b' * 500}"
    expected = [f"[worker {i}] {text}" for i in range(3) for _ in range(200)]
    assert sorted(lines) == expected


def test_chief_has_the_terminal(tmp_path, capfd):
    body = """print(f"\\rby {index}")"""
    done = local.launch(command(body, tmp_path), 2, chief_has_terminal=True)
    assert done == 0
    out = capfd.readouterr().out
    assert "\rby 0\n" in out
    assert "[worker 1] by 1\n" in out


def test_failure_ends_the_others(tmp_path):
    body = """
if index == 1:
    wait_for("pid0", "pid2")
    sys.exit(7)
"""
    done = launch(body + STAY, tmp_path, "--isolate=off", num_workers=3)
    assert done.returncode == 7
    assert done.stderr == (
        "mgpu-tf launch: worker 1 failed with exit code 7; "
        "ended worker 0, worker 2.\n"
    )
    assert_gone(*noted(tmp_path, "pid0", "pid2"))


def test_who_has_failed_first_is_named(tmp_path):
    body = """
if index == 0:
    wait_for("pid1")
    from mgpu_tf.errors import WorkerError
    raise WorkerError("worker 1: RuntimeError: no such row")
"""
    done = launch(body + STAY, tmp_path, "--isolate=off")
    assert done.returncode == 1
    assert done.stderr.endswith(
        "mgpu-tf launch: worker 0 failed with exit code 1 (since worker 1: "
        "RuntimeError: no such row); ended worker 1.\n"
    )


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (0, ""),
        (
            3,
            "mgpu-tf launch: worker 1 failed with exit code 3; worker 0 had "
            "ended with exit code 0 before.\n",
        ),
    ],
)
def test_success_of_one_ends_nothing(code, message, tmp_path):
    body = f"""
print("alone")
sys.exit({code})
"""
    done = launch(ENDS_AT_ONCE + body, tmp_path, "--isolate=off")
    assert (done.returncode, done.stderr) == (code, message)
    assert done.stdout == "[worker 1] alone\n"


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (signal.SIGKILL, "SIGKILL"),
        (signal.SIGTERM, "SIGTERM"),
        (signal.SIGABRT, "SIGABRT"),
        (40, "signal 40"),
    ],
)
def test_killed_by_a_signal(number, name, tmp_path, capfd):
    body = f"""
if index == 0:
    wait_for("pid1")
    os.kill(os.getpid(), {int(number)})
"""
    assert local.launch(command(body + STAY, tmp_path), 2) == 128 + number
    err = capfd.readouterr().err
    assert f"worker 0 failed with {name}; ended worker 1." in err
    assert_gone(*noted(tmp_path, "pid1"))


def set_clock(monkeypatch, num_workers, is_over):
    """Lets the supervisor's time pass all at once, when `is_over()`.

    Not before all tasks have started: it looks at the clock once for the
    attempt and once for each of them.
    """
    first = iter([0.0] * (1 + num_workers))

    def monotonic():
        return next(first, 1e6 if is_over() else 0.0)

    clock = types.SimpleNamespace(monotonic=monotonic)
    monkeypatch.setattr(local, "time", clock)


def test_not_started(tmp_path, capfd, monkeypatch):
    body = """
if index == 1:
    server = serve()
    note("serves")
"""

    set_clock(monkeypatch, 3, (tmp_path / "serves").exists)
    assert local.launch(command(body + STAY, tmp_path), 3) == 1
    err = capfd.readouterr().err
    assert err.startswith(
        "mgpu-tf launch: worker 0, worker 2 did not start within 300 seconds: "
    )
    assert len(err.splitlines()) == 1


def test_not_started_on_the_command_line(tmp_path):
    done = launch(STAY, tmp_path, "--startup_seconds=0.5")
    assert done.returncode == 1
    assert "worker 0, worker 1 did not start" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("body", "startup_seconds"),
    [
        ("server = serve()", 300.0),
        (ENDS_AT_ONCE + "server = serve()", 300.0),
        ("", 0),
    ],
    ids=["all serve", "one has ended", "no limit"],
)
def test_no_limit_to_what_has_started(
    body, startup_seconds, tmp_path, monkeypatch
):
    """Tasks stay until the supervisor has looked some times for the limit."""
    ready = """
note(f"ready{index}")
wait_for("enough")
"""
    looks = itertools.count()

    def is_over():
        if not all((tmp_path / f"ready{i}").exists() for i in range(2)):
            return False
        look = next(looks)
        if look == 4:
            (tmp_path / "enough").touch()
        return look > 1

    set_clock(monkeypatch, 2, is_over)
    done = local.launch(
        command(body + ready, tmp_path), 2, startup_seconds=startup_seconds
    )
    assert done == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(number, tmp_path):
    body = """
def leave(number, frame):
    print("received", signal.Signals(number).name)
    sys.exit()

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, leave)
"""
    with launched(body + STAY, tmp_path) as process:
        pids = noted(tmp_path, "pid0", "pid1")
        process.send_signal(number)
        out, err = process.communicate(timeout=clusters.LIMIT_SECONDS)
    assert process.returncode == 128 + number
    assert err == f"mgpu-tf launch: {number.name} received, ending 2 tasks.\n"
    assert sorted(out.splitlines()) == [
        f"[worker 0] received {number.name}",
        f"[worker 1] received {number.name}",
    ]
    assert_gone(*pids)


def test_ctrl_c_shows_no_traceback(tmp_path):
    """Only the log files have what Python prints of a KeyboardInterrupt."""
    logs = tmp_path / "logs"
    with launched(STAY, tmp_path, 2, f"--log_dir={logs}") as process:
        noted(tmp_path, "pid0", "pid1")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=clusters.LIMIT_SECONDS)
    assert out == ""
    assert err == "mgpu-tf launch: SIGINT received, ending 2 tasks.\n"
    paths = [path for path in logs.rglob("*.log") if "worker" in path.name]
    assert len(paths) == 2
    for path in paths:
        assert path.read_text().rstrip().endswith("KeyboardInterrupt")


def test_supervisor_killed(tmp_path):
    with launched(STAY, tmp_path) as process:
        pids = noted(tmp_path, "pid0", "pid1")
        assert all(runs(pid) for pid in pids)
        process.kill()
        assert_gone(*pids)


def test_output_closed(tmp_path):
    """As in `mgpu-tf launch ... | head`: no task waits for a reader."""
    body = """
def leave(number, frame):
    note(f"ended{index}")
    os._exit(0)

signal.signal(signal.SIGTERM, leave)
note(f"pid{index}", os.getpid())
print("first")
wait_for("closed")
while True:
    print("x" * 1000)
"""
    with launched(body, tmp_path) as process:
        pids = noted(tmp_path, "pid0", "pid1")
        process.stdout.readline()
        process.stdout.close()
        (tmp_path / "closed").touch()
        err = process.stderr.read()
        assert process.wait(clusters.LIMIT_SECONDS) == 128 + signal.SIGPIPE
    assert err == "mgpu-tf launch: SIGPIPE received, ending 2 tasks.\n"
    assert_gone(*pids)
    assert all((tmp_path / f"ended{index}").exists() for index in range(2))


def test_stubborn_tasks_are_killed(tmp_path):
    body = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if index == 0:
    wait_for("pid1")
    sys.exit(4)
"""
    done = local.launch(command(body + STAY, tmp_path), 2, grace_seconds=0.1)
    assert done == 4
    assert_gone(*noted(tmp_path, "pid1"))


@pytest.mark.parametrize(
    "parent", [0, 1], ids=["that failed", "that was ended"]
)
def test_children_of_a_task_are_ended(parent, tmp_path):
    body = f"""
if index == {parent}:
    note("child", child())
if index == 0:
    wait_for("child")
    sys.exit(5)
"""
    assert launch(body + STAY, tmp_path).returncode == 5
    assert_gone(*noted(tmp_path, "child"))


def test_children_are_ended_on_interrupt(tmp_path):
    with launched("""note("child", child())""" + STAY, tmp_path, 1) as process:
        pids = noted(tmp_path, "child", "pid0")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=clusters.LIMIT_SECONDS)
    assert process.returncode == 130
    assert_gone(*pids)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("no such program", "No such file or directory"),
        ("./data.txt", "Permission denied"),
    ],
)
def test_missing_program(program, reason, tmp_path):
    (tmp_path / "data.txt").touch(0o644)
    done = clusters.mgpu_tf(
        "launch", "--num_workers=2", "--", program, "x", cwd=tmp_path
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "mgpu-tf: The command must be a program that can be started. "
        f"Received: {program!r} ({reason}).\n"
    )


def test_arguments_arrive_unchanged():
    arguments = [
        "a b",
        "",
        "it's",
        '"quoted"',
        "back\\slash",
        "$HOME `id` *",
        "two\nlines",
        "--num_workers=5",
        "--help",
        "--",
        "\u00e9",
    ]
    code = "import json, sys; print(json.dumps(sys.argv[1:]))"
    done = clusters.mgpu_tf(
        "launch",
        "--num_workers=1",
        "--",
        sys.executable,
        "-c",
        code,
        *arguments,
    )
    assert done.returncode == 0
    assert json.loads(done.stdout.removeprefix("[worker 0] ")) == arguments


@pytest.mark.parametrize(
    ("num_workers", "startup_seconds", "message"),
    [
        (0, 1.0, "num_workers must be 1 or more. Received: 0."),
        (1, -1.0, "startup_seconds must be 0 or more.* Received: -1.0."),
        (1, float("nan"), "startup_seconds must be 0 or more.* Received: nan."),
    ],
)
def test_out_of_range(num_workers, startup_seconds, message):
    with pytest.raises(ConfigurationError, match=message):
        local.launch(["true"], num_workers, startup_seconds=startup_seconds)


def test_leaves_signal_handlers_as_they_were():
    before = [signal.getsignal(number) for number in local._SIGNALS]
    assert local.launch(["true"], 1) == 0
    with pytest.raises(ConfigurationError):
        local.launch(["no such program"], 1)
    assert [signal.getsignal(number) for number in local._SIGNALS] == before

"""Who reaches the ports of the tasks of this machine."""

import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time

import pytest

from mgpu_tf import cli
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.launch import isolation, local
from tests import clusters
from tests.launch.test_local import command, launch, launched, noted

# As TensorFlow's servers: on all interfaces.
SERVES = """
port = int(config["cluster"]["worker"][index].rpartition(":")[2])
server = socket.create_server(("", port), reuse_port=True)
note(f"port{index}", port)
wait_for("ready")
"""

PROBLEM = isolation._problem()
needs_namespaces = pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)


def reachable(port):
    """Whether this process, in its namespace, reaches a port of a task."""
    addresses = {"127.0.0.1", "::1"}
    addresses |= {
        info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)
    }
    for address in addresses:
        try:
            with socket.create_connection((address, port), 5.0):
                return True
        except OSError:
            continue
    return False


def network_of(pid):
    return os.readlink(f"/proc/{pid}/ns/net")


@needs_namespaces
@pytest.mark.parametrize(
    ("flags", "reached"),
    [((), False), (("--isolate=on",), False), (("--isolate=off",), True)],
)
def test_who_reaches_the_tasks(flags, reached, tmp_path):
    with launched(SERVES, tmp_path, 2, *flags) as process:
        ports = noted(tmp_path, "port0", "port1")
        assert [reachable(port) for port in ports] == [reached, reached]
        (tmp_path / "ready").touch()
        assert process.wait(clusters.LIMIT_SECONDS) == 0
        assert process.stderr.read() == ""


@needs_namespaces
@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_user_who_is_not_root():
    """In a user namespace, as the same user."""
    code = """
import codecs, ctypes, fcntl, os, socket
# Python's own files may be of root only.
for name in ("ascii", "idna", "utf-8"):
    codecs.lookup(name)
from mgpu_tf.launch.isolation import _own_network
os.setgroups([]); os.setgid(65534); os.setuid(65534)
ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE, as after exec.
with _own_network():
    print(os.getuid(), os.getgid(), open("/proc/net/dev").read().count(":"))
    server = socket.create_server(("127.0.0.1", 0))
    socket.create_connection(server.getsockname()).close()
    print(os.readlink("/proc/self/ns/net"))
"""
    done = clusters.run(["-c", code])
    if "in _become_own_user\n    _call" in done.stderr:
        pytest.skip("this kernel gives users no namespaces")
    assert done.returncode == 0, done.stderr
    ids, network = done.stdout.splitlines()
    assert ids == "65534 65534 1"
    assert network != network_of(os.getpid())


@needs_namespaces
def test_this_process_gets_its_network_back():
    before = network_of("thread-self")
    seen = []
    if os.geteuid():
        pytest.skip("a user's process stays")
    with isolation.isolated("on") as alone:
        assert alone
        inner = network_of("thread-self")
        thread = threading.Thread(
            target=lambda: seen.append(network_of("thread-self"))
        )
        thread.start()
        thread.join()
    assert seen == [inner]
    assert inner != before == network_of("thread-self")


@pytest.mark.parametrize(
    ("words", "environ", "found"),
    [
        (["python", "a.py", "--data=gs://a/b"], {}, "--data=gs://a/b"),
        (["python", "a.py", "https://x"], {}, "https://x"),
        (["python", "a.py", "file:///tmp/a"], {}, ""),
        (["python", "a.py", "C:/x", "a:b", "a//b"], {}, ""),
        (["python"], {"WANDB_API_KEY": "x"}, "WANDB_API_KEY"),
        (["python"], {"WANDB_API_KEY": ""}, ""),
    ],
)
def test_what_a_command_names_on_the_network(words, environ, found):
    assert isolation.outside(words, environ) == found


def test_a_job_that_names_an_address_has_the_network(tmp_path):
    body = "print(os.readlink('/proc/self/ns/net'))"
    done = clusters.mgpu_tf(
        *("launch", "--num_workers=1", "--"),
        *(*command(body, tmp_path), "gs://bucket/data"),
    )
    assert done.returncode == 0
    assert network_of("self") in done.stdout
    assert done.stderr == (
        "mgpu-tf launch: whoever reaches the ports of this machine can "
        "command the tasks: 'gs://bucket/data' may need the network. Write "
        "--isolate=on.\n"
    )


@pytest.mark.parametrize(
    ("dataset", "needs"),
    [
        ("digits", ""),
        ("images/32", ""),
        ("package.module:function", ""),
        ("mnist", "mnist"),
        ("prepared/sub:1.*.*", ""),
    ],
)
def test_a_set_that_has_to_be_downloaded(dataset, needs, tmp_path, monkeypatch):
    (tmp_path / "prepared").mkdir()
    given = []
    monkeypatch.setattr(
        local, "launch", lambda *_, **options: given.append(options) or 0
    )
    arguments = ["train", "--num_workers=2", f"--dataset={dataset}"]
    assert cli.main([*arguments, f"--data_dir={tmp_path}"]) == 0
    assert (given[0]["isolate"], given[0]["needs"]) == ("auto", needs)


@needs_namespaces
def test_a_failure_says_that_there_was_no_network(tmp_path):
    body = "socket.create_connection(('192.0.2.1', 80), 60)"
    done = launch(body, tmp_path, num_workers=1)
    assert done.returncode == 1
    assert "Network is unreachable" in done.stdout
    assert done.stderr.endswith("write --isolate=off.\n")
    done = launch("sys.exit(3)", tmp_path, "--isolate=off")
    assert "--isolate" not in done.stderr


def test_where_the_kernel_refuses(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(isolation, "_problem", lambda: "no such kernel")
    with pytest.raises(ConfigurationError, match="Received: no such kernel"):
        local.launch(["true"], 1, isolate="on")
    assert local.launch(["true"], 1, isolate="auto") == 0
    assert capfd.readouterr().err == (
        "mgpu-tf launch: whoever reaches the ports of this machine can "
        "command the tasks: no such kernel. Use a firewall, or run it as "
        "root.\n"
    )
    with pytest.raises(ConfigurationError, match="Unknown isolate"):
        local.launch(["true"], 1, isolate="yes")


def test_logs_are_of_the_owner_only(tmp_path):
    logs = tmp_path / "logs"
    done = launch("sys.exit(1)", tmp_path, f"--log_dir={logs}")
    assert done.returncode == 1
    assert logs.stat().st_mode & 0o777 == 0o700
    files = list(logs.iterdir())
    assert files
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


@needs_namespaces
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), marks=pytest.mark.full),
        # `test_who_reaches_the_tasks` has it by default.
        pytest.param(("--isolate=off",), marks=pytest.mark.matrix),
    ],
)
def test_no_port_of_a_training_is_reachable(flags, tmp_path):
    """Every port that a task of TensorFlow listens on."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "mgpu_tf", "train", "--num_workers=2"),
            *("--epochs=100000", f"--log_dir={tmp_path}", *flags),
            f"--checkpoint_dir={tmp_path / 'checkpoints'}",
        ],
        env=clusters.environment(),
        stderr=subprocess.DEVNULL,
    )
    try:
        while not list(tmp_path.glob("checkpoints/step-*")):
            assert process.poll() is None
            time.sleep(0.05)
        pids = [
            re.search(
                r"^--- process (\d+)",
                (tmp_path / f"worker-{index}.log").read_text(),
            )[1]
            for index in range(2)
        ]
        ports = set()
        for pid in pids:
            for name in ("tcp", "tcp6"):
                lines = pathlib.Path(f"/proc/{pid}/net/{name}").read_text()
                for line in lines.splitlines()[1:]:
                    words = line.split()
                    if words[3] == "0A":  # Listens.
                        ports.add(int(words[1].rpartition(":")[2], 16))
        assert len(ports) >= 2
        reached = {port for port in ports if reachable(port)}
        assert bool(reached) == bool(flags)
    finally:
        process.terminate()
        process.wait(clusters.LIMIT_SECONDS)

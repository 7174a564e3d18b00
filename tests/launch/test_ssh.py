"""`mgpu-tf launch --ssh`, over a real sshd on machines of their own."""

import json
import os
import pathlib
import re
import signal
import time

import pytest

from tests import clusters, pages
from tests.launch import losses
from tests.ssh import SshHosts

pytestmark = pytest.mark.full

HOSTS = ("host0", "host1", "host2")


@pytest.fixture(scope="module")
def hosts():
    with SshHosts(HOSTS) as running:
        yield running


def start(hosts, *flags, command, cwd=None):
    return hosts.popen(
        *(clusters.PYTHON, "-m", "mgpu_tf", "launch"),
        *(f"--hosts={','.join(HOSTS)}", "--ssh"),
        f"--ssh_command={hosts.ssh_command}",
        *flags,
        "--",
        *command,
        cwd=cwd,
    )


def gone(pids):
    """Waits until none of the processes is left."""
    deadline = time.monotonic() + 60
    while any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.1)


def test_the_script_of_all_platforms(hosts, tmp_path):
    command = (clusters.PYTHON, losses.SCRIPT, str(tmp_path))
    status, output = clusters.finish(start(hosts, command=command))
    assert status == 0, output
    losses.compare(tmp_path, output)
    for index in range(len(HOSTS)):
        line = f"TF_CONFIG names 3 workers, this is worker {index}"
        assert line in output


# Waits on its port as a server does; has a child that outlives it.
SERVES = """
import json, os, pathlib, socket, subprocess, sys, time
config = json.loads(os.environ["TF_CONFIG"])
task = config["task"]
host, port = config["cluster"][task["type"]][task["index"]].split(":")
server = socket.create_server((host, int(port)))
child = subprocess.Popen(["sleep", "3600"])
note = pathlib.Path(sys.argv[1], f"{task['index']}-{os.getpid()}.json")
seen = [socket.gethostname(), host, os.getcwd(), os.getpid(), child.pid]
note.with_suffix(".new").write_text(json.dumps(seen))
note.with_suffix(".new").rename(note)
print("ready", flush=True)
"""
STAYS = SERVES + "time.sleep(3600)\n"


def notes(folder, count):
    deadline = time.monotonic() + clusters.LIMIT_SECONDS
    while len(files := sorted(folder.glob("*.json"))) < count:
        assert time.monotonic() < deadline, files
        time.sleep(0.1)
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_the_launcher_ends_all(hosts, number, tmp_path):
    """Ctrl-C asks the tasks to end; after SIGKILL nobody can ask."""
    command = (clusters.PYTHON, "-c", STAYS, str(tmp_path))
    launcher = start(hosts, command=command, cwd=tmp_path)
    try:
        seen = notes(tmp_path, 3)
        assert [note[:3] for note in seen] == [
            [host, host, str(tmp_path)] for host in HOSTS
        ]
        launcher.send_signal(number)
        status, output = clusters.finish(launcher, 120)
    finally:
        launcher.kill()
    gone(pid for note in seen for pid in note[3:])
    if number == signal.SIGINT:
        assert status == 130
        assert "SIGINT received, ending 3 tasks" in output


FAILS_ONCE = (
    SERVES
    + """
if task["index"] == 1 and os.environ["MGPU_TF_RESTARTS"] == "0":
    time.sleep(1)
    sys.exit(7)
if os.environ["MGPU_TF_RESTARTS"] == "0":
    time.sleep(3600)
child.kill()
"""
)


def test_a_failure_starts_all_again(hosts, tmp_path):
    command = (clusters.PYTHON, "-c", FAILS_ONCE, str(tmp_path))
    status, output = clusters.finish(
        start(
            hosts,
            "--max_restarts=1",
            f"--log_dir={tmp_path}/logs",
            command=command,
            cwd=tmp_path,
        )
    )
    assert status == 0, output
    assert "worker 1 failed with exit code 7; ended" in output
    assert output.count("ready") == 6
    gone(pid for note in notes(tmp_path, 6) for pid in note[3:])
    log = (tmp_path / "logs" / "worker-1.log").read_text()
    assert re.findall("^ready$", log, re.M) == ["ready"] * 2


def test_a_cut_connection_ends_the_task(hosts, tmp_path):
    """The keeper hears nothing; so does the client, and it fails."""
    name = HOSTS[2]
    command = (clusters.PYTHON, "-c", STAYS, str(tmp_path))
    launcher = start(hosts, command=command, cwd=tmp_path)
    try:
        seen = notes(tmp_path, 3)
        hosts.network.cut(name)
        status, output = clusters.finish(launcher, 180)
        assert status == 255
        assert "worker 2 failed with exit code 255 (ssh failed)" in output
        gone(seen[0][3:] + seen[1][3:])
        deadline = time.monotonic() + 120
        while any(os.path.exists(f"/proc/{pid}") for pid in seen[2][3:]):
            assert time.monotonic() < deadline, "the task outlives the cut"
            time.sleep(0.5)
    finally:
        launcher.kill()
        hosts.network.mend(name)


def test_a_mistake_is_named(hosts, tmp_path):
    missing = tmp_path / "only here"
    missing.mkdir()
    launcher = start(hosts, command=("no-such-program",), cwd=missing)
    status, output = clusters.finish(launcher)
    assert status == 1
    line = "mgpu-tf: No such file or directory on this machine: no-such-program"
    assert line in output
    status, output = clusters.finish(
        hosts.popen(
            *(clusters.PYTHON, "-m", "mgpu_tf", "launch", "--hosts=nowhere"),
            *("--ssh", f"--ssh_command={hosts.ssh_command}", "--", "true"),
        )
    )
    assert status == 255
    assert "worker 0 failed with exit code 255 (ssh failed)" in output


def test_the_commands_of_the_page(hosts, tmp_path):
    """The ssh on the path has the key of the hosts.

    The README's command is that of the page without what restarts and logs.
    """
    page = (pathlib.Path(clusters.ROOT) / "README.md").read_text()
    [line] = re.findall(r"^mgpu-tf launch .*--ssh.*\n", page, re.M)
    script = re.search(r"```python\n(import mgpu_tf\n\n.*?)```", page, re.S)[1]
    (tmp_path / "digits.py").write_text(script)
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, program in (
        ("ssh", hosts.ssh_command.replace("ssh ", "/usr/bin/ssh ", 1)),
        ("mgpu-tf", f"{clusters.PYTHON} -m mgpu_tf"),
    ):
        (folder / name).write_text(f'#!/bin/sh\nexec {program} "$@"\n')
        (folder / name).chmod(0o755)
    lines = "".join(pages.blocks("machines.md", "sh"))
    flags = " --max_restarts=3 --log_dir=logs"
    assert line in lines.replace(flags, "")
    # What `python` is on the machines.
    lines = lines.replace("python ", f"{clusters.PYTHON} ")
    status, output = clusters.finish(
        hosts.popen(
            "bash", "-euxc", f"PATH={folder}:$PATH\n{lines}", cwd=tmp_path
        )
    )
    assert status == 0, output
    assert (tmp_path / "model.keras").exists()
    assert (tmp_path / "logs" / "worker-1.log").exists()
    assert "# worker 1, on host1" in output

"""`mgpu-tf ray` on a real Ray cluster of three nodes."""

import json
import pathlib
import re
import signal
import subprocess
import time

import pytest

from tests import clusters, pages
from tests.launch import losses
from tests.ray_cluster import RayCluster

pytestmark = pytest.mark.full

NODES = ("r0", "r1", "r2")
TRAIN = (
    *("train", "--epochs=12", "--global_batch_size=48", "--optimizer=sgd"),
    *("--learning_rate=0.05", "--model=cnn"),
)


@pytest.fixture(scope="module")
def ray():
    with RayCluster(NODES) as running:
        yield running


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one_device")
    return clusters.report_of_one_device(TRAIN, folder)


def until(found, process):
    """Waits until something is found, while a launcher runs."""
    deadline = time.monotonic() + clusters.LIMIT_SECONDS
    while not (result := found()):
        if process.poll() is not None:
            raise AssertionError(process.stdout.read())
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return result


def alive(pid):
    return pathlib.Path(f"/proc/{pid}").exists()


def gone(pids):
    deadline = time.monotonic() + 60
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


# Serves its port and writes down who it is; has a child of its own.
SERVES = """
import json, os, pathlib, signal, socket, subprocess, sys, time
config = json.loads(os.environ["TF_CONFIG"])
task = config["task"]
name = f"{task['type']} {task['index']}"
host, port = config["cluster"][task["type"]][task["index"]].split(":")
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
server.bind((host, int(port)))
server.listen()
child = subprocess.Popen(["sleep", "3600"])
note = pathlib.Path(sys.argv[1], f"{name}-{os.getpid()}.json")
seen = [name, socket.gethostname(), os.getcwd(), os.getpid(), child.pid]
note.with_suffix(".new").write_text(json.dumps(seen))
note.with_suffix(".new").rename(note)
print("ready", flush=True)
restarts = int(os.environ["MGPU_TF_RESTARTS"])
"""


def notes(folder, count, process):
    def found():
        files = sorted(folder.glob("*.json"))
        return files if len(files) >= count else None

    return [json.loads(file.read_text()) for file in until(found, process)]


def test_a_task_on_each_node_until_ctrl_c(ray, tmp_path):
    code = SERVES + "time.sleep(3600)\n"
    launcher = ray.mgpu_tf_ray(
        *("--num_workers=3", "--placement=STRICT_SPREAD"),
        command=("python", "-c", code, str(tmp_path)),
        cwd=tmp_path,
    )
    try:
        seen = notes(tmp_path, 3, launcher)
        assert [note[0] for note in seen] == [
            f"worker {index}" for index in range(3)
        ]
        assert {note[1] for note in seen} == set(NODES)
        assert {note[2] for note in seen} == {str(tmp_path)}
        launcher.send_signal(signal.SIGINT)
        status, output = clusters.finish(launcher, 180)
    finally:
        launcher.kill()
    assert status == 130, output
    assert "mgpu-tf ray: SIGINT received, ending 3 tasks" in output
    gone(pid for note in seen for pid in note[3:])


def test_a_killed_launcher_leaves_nothing(ray, tmp_path):
    code = SERVES + "signal.pause()\n"
    launcher = ray.mgpu_tf_ray(
        "--num_workers=2",
        command=("python", "-c", code, str(tmp_path)),
        cwd=tmp_path,
    )
    try:
        seen = notes(tmp_path, 2, launcher)
    finally:
        launcher.kill()
        launcher.communicate()
    gone(pid for note in seen for pid in note[3:])


def test_a_parameter_server_is_started_again_alone(ray, tmp_path):
    code = SERVES + (
        "if name == 'ps 0' and not restarts:\n"
        "    child.kill()\n"
        "    sys.exit(9)\n"
        "while name == 'chief 0' and len([*note.parent.glob('ps*n')]) < 2:\n"
        "    time.sleep(0.1)\n"
        "if name == 'chief 0':\n"
        "    child.kill()\n"
        "    sys.exit()\n"
        "time.sleep(3600)\n"
    )
    launcher = ray.mgpu_tf_ray(
        *("--num_workers=2", "--num_ps=1", "--max_restarts=1"),
        f"--log_dir={tmp_path}/logs",
        command=("python", "-c", code, str(tmp_path)),
        cwd=tmp_path,
    )
    status, output = clusters.finish(launcher)
    assert status == 0, output
    assert "ps 0 failed with exit code 9; restart 1 of 1" in output
    seen = notes(tmp_path, 5, launcher)
    names = [note[0] for note in seen]
    expected = ["chief 0", "ps 0", "ps 0", "worker 0", "worker 1"]
    assert names == expected, output
    gone(pid for note in seen for pid in note[3:])
    log = (tmp_path / "logs" / "ps-0.log").read_text()
    assert re.findall("^ready$", log, re.M) == ["ready"] * 2


@pytest.mark.parametrize(
    "flags",
    [
        ("--num_workers=3", "--placement=STRICT_SPREAD"),
        ("--num_workers=2", "--num_ps=1"),
    ],
    ids=["workers", "parameter servers"],
)
def test_the_script_of_all_platforms(ray, flags, tmp_path):
    launcher = ray.mgpu_tf_ray(
        *flags,
        command=("python", losses.SCRIPT, str(tmp_path)),
        cwd=tmp_path,
    )
    status, output = clusters.finish(launcher)
    assert status == 0, output
    losses.compare(tmp_path, output)


def test_no_room_is_one_line(ray, tmp_path):
    launcher = ray.mgpu_tf_ray(
        *("--num_workers=2", "--cpus_per_worker=50", "--startup_seconds=3"),
        command=("python", "train.py"),
        cwd=tmp_path,
    )
    status, output = clusters.finish(launcher, 180)
    assert status == 2
    assert "100 CPU, 0 GPU asked for with PACK, 6 CPU, 0 GPU free on 3" in (
        output
    )
    assert output.count("\n") == 1


def test_the_commands_of_the_page(ray, tmp_path):
    """Each runs as it stands in docs/ray.md, on the head of the cluster."""
    blocks = pages.blocks("ray.md", "sh")
    [script] = pages.blocks("ray.md", "python")
    readme = (pathlib.Path(clusters.ROOT) / "README.md").read_text()
    digits = re.search(r"```python\n(import mgpu_tf\n\n.*?)```", readme, re.S)[
        1
    ]
    (tmp_path / "digits.py").write_text(digits)
    own = ray.network.address(NODES[0])
    # Ray does not find by itself which node a namespace is.
    commands = [
        (
            "bash",
            "-euc",
            text.replace(" ray ", f" ray --node_ip_address={own} "),
        )
        for text in blocks
    ]
    here = f'num_workers=2, node_ip_address="{own}"'
    commands.append(
        ("python", "-c", script.replace("num_workers=2", here) + EXIT)
    )
    for *program, text in commands:
        text = text.replace("head:6379", ray.address)
        status, output = clusters.finish(
            ray.popen(*program, text, cwd=tmp_path, **PIPES)
        )
        assert status == 0, output
        assert (tmp_path / "model.keras").exists(), output
        (tmp_path / "model.keras").unlink()


PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
EXIT = "\nraise SystemExit(status)\n"


# Looks for nodes more often than each quarter of a minute.
SOON = """
import sys
from mgpu_tf.launch import elastic, local
local.SETTLED_SECONDS = elastic.LOOK_SECONDS = 1.0
from mgpu_tf.__main__ import main
sys.exit(main())
"""


def test_nodes_go_and_come_back(ray, tmp_path):
    """Three workers, then one, then three; no other restart is allowed."""
    code = SERVES + (
        "def saves(*_):\n"
        "    child.kill()\n"
        "    sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, saves)\n"
        "while not restarts or len(config['cluster']['worker']) < 3:\n"
        "    time.sleep(0.1)\n"
        "child.kill()\n"
    )
    own = ray.network.address(NODES[0])
    launcher = ray.popen(
        *("python", "-c", SOON, "ray", f"--address={ray.address}"),
        *(f"--node_ip_address={own}", "--num_workers=3", "--max_workers=3"),
        *("--placement=STRICT_SPREAD", "--"),
        *("python", "-c", code, str(tmp_path)),
        cwd=tmp_path,
        **PIPES,
    )
    try:
        notes(tmp_path, 3, launcher)
        for name in NODES[1:]:
            ray.network.kill(name)
        notes(tmp_path, 4, launcher)
        for name in NODES[1:]:
            ray.start(name)
        status, output = clusters.finish(launcher)
    finally:
        launcher.kill()
    assert status == 0, output
    assert "going on with 1 workers" in output
    assert "there are machines for 3 workers; the tasks save" in output
    files = sorted(
        tmp_path.glob("*.json"), key=lambda file: file.stat().st_mtime
    )
    seen = [json.loads(file.read_text()) for file in files]
    assert [note[1] for note in seen[3:4]] == ["r0"]
    assert {note[1] for note in seen[-3:]} == set(NODES)
    gone(pid for note in seen for pid in note[3:])


def test_a_killed_node_and_the_losses_of_one_device(ray, one_device, tmp_path):
    """All start again on the nodes that are left, from the checkpoint.

    It is the last test, for it takes a node.
    """
    command = (
        *("mgpu-tf", *TRAIN, f"--output_dir={tmp_path}"),
        *(f"--checkpoint_dir={tmp_path}/saved", "--save_every_steps=10"),
    )
    launcher = ray.mgpu_tf_ray(
        *("--num_workers=3", "--placement=SPREAD", "--max_restarts=2"),
        command=command,
        cwd=tmp_path,
    )
    try:
        until(lambda: [*tmp_path.glob("saved/step-*")], launcher)
        assert not (tmp_path / "report.json").exists(), "too late"
        ray.network.kill(NODES[2])
        status, output = clusters.finish(launcher)
    finally:
        launcher.kill()
    assert status == 0, output
    assert "mgpu-tf ray: restart 1 in" in output
    assert "resumed at step" in output
    report = clusters.report_in(tmp_path)
    assert report["num_workers"] == 3
    assert report["restarts"] >= 1
    assert report["examples_seen"] == one_device["examples_seen"]
    for own, other in zip(report["epochs"], one_device["epochs"], strict=True):
        assert own["loss"] == pytest.approx(other["loss"], rel=1e-3)

"""Three machines at 200 Mbit/s: equal numbers, and a link that is cut.

Tasks write to files that all machines see, so that what a task says behind the
cut link can be read.
"""

import json
import os
import time

import pytest

from tests import clusters
from tests.ssh import SshHosts

pytestmark = pytest.mark.full

HOSTS = ("host0", "host1", "host2")
RATE = "200mbit"
TRAIN = (
    *("train", "--epochs=2", "--global_batch_size=48", "--optimizer=sgd"),
    *("--learning_rate=0.05", "--model=cnn"),
)
# From the cut to the end of all tasks, also of the one behind it.
# TensorFlow's limit for a silent worker is 45 seconds, that of a keeper 60.
ENDS_WITHIN_SECONDS = 180


@pytest.fixture(scope="module")
def hosts():
    with SshHosts(HOSTS) as made:
        for host in HOSTS:
            made.network.limit(host, RATE)
        yield made


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one_device")
    return clusters.report_of_one_device(TRAIN, folder)


def start(hosts, folder):
    """Starts a supervised job; its tasks write HOST.log and HOST.pid."""
    folder.mkdir(exist_ok=True)
    train = (
        f"{clusters.PYTHON} -m mgpu_tf {' '.join(TRAIN)} --output_dir={folder} "
        f"--checkpoint_dir={folder}/saved --save_every_steps=10"
    )
    script = (
        f"echo $$ > {folder}/$(hostname).pid; "
        f"exec {train} >> {folder}/$(hostname).log 2>&1"
    )
    return hosts.popen(
        *(clusters.PYTHON, "-m", "mgpu_tf", "launch"),
        *(f"--hosts={','.join(HOSTS)}", "--ssh"),
        *(f"--ssh_command={hosts.ssh_command}", "--", "bash", "-c", script),
    )


def log_of(folder, host):
    return (folder / f"{host}.log").read_text()


def alive(folder, host):
    pid = int((folder / f"{host}.pid").read_text())
    return os.path.exists(f"/proc/{pid}")


def until(condition, seconds, told):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, told()
        time.sleep(0.1)


def assert_named(log, worker, others):
    """A task says of which others it hears nothing."""
    names = ", ".join(f"worker {k} at host{k}:2222" for k in others)
    assert f"worker {worker} waits for {names} (since" in log, log[-4000:]


def test_a_cut_link_and_the_losses_of_one_device(hosts, one_device, tmp_path):
    """The supervisor or a task names the lost one; all end, and resume."""
    control, cut = tmp_path / "control", tmp_path / "cut"
    status, output = clusters.finish(start(hosts, control))
    assert status == 0, output + log_of(control, HOSTS[0])[-4000:]
    report = clusters.report_in(control)
    assert report["num_workers"] == 3
    assert report["examples_seen"] == one_device["examples_seen"]
    for own, other in zip(report["epochs"], one_device["epochs"], strict=True):
        assert own["loss"] == pytest.approx(other["loss"], rel=1e-3)

    launcher = start(hosts, cut)
    try:
        until(
            lambda: launcher.poll() is not None or [*cut.glob("saved/step-*")],
            clusters.LIMIT_SECONDS,
            lambda: log_of(cut, HOSTS[0]),
        )
        assert launcher.poll() is None, launcher.stdout.read()
        assert not (cut / "report.json").exists(), "too late"
        hosts.network.cut(HOSTS[2])
        since = time.monotonic()
        status, output = clusters.finish(launcher, ENDS_WITHIN_SECONDS)
        until(
            lambda: not any(alive(cut, host) for host in HOSTS),
            since + ENDS_WITHIN_SECONDS - time.monotonic(),
            lambda: [host for host in HOSTS if alive(cut, host)],
        )
    finally:
        launcher.kill()
        hosts.network.mend(HOSTS[2])
    # Whichever sees it first: ssh, or TensorFlow in a task that waits.
    lost = {
        255: "worker 2 failed with exit code 255 (ssh failed)",
        1: "failed with exit code 1",
    }
    assert status in lost, output
    assert lost[status] in output
    assert not (cut / "report.json").exists()
    for waits, others in ((0, (2,)), (1, (2,)), (2, (0, 1))):
        assert_named(log_of(cut, HOSTS[waits]), waits, others)

    status, output = clusters.finish(start(hosts, cut))
    assert status == 0, output + log_of(cut, HOSTS[0])[-4000:]
    assert "resumed at step" in log_of(cut, HOSTS[0])
    assert clusters.report_in(cut)["weights_sha256"] == report["weights_sha256"]


def test_tasks_that_nobody_keeps_end_by_themselves(hosts, tmp_path):
    """Also the one behind the cut link, which nobody can tell."""
    tasks = {"worker": [f"{host}:2222" for host in HOSTS]}
    started = []
    try:
        for index, host in enumerate(HOSTS):
            place = {"type": "worker", "index": index}
            told = json.dumps({"cluster": tasks, "task": place})
            with open(tmp_path / f"{host}.log", "w") as log:
                started.append(
                    hosts.network.popen(
                        host,
                        [
                            *(clusters.PYTHON, "-m", "mgpu_tf", *TRAIN),
                            *("--save_every_steps=10", "--epochs=1000"),
                            f"--checkpoint_dir={tmp_path}/saved",
                        ],
                        env=clusters.environment(
                            TF_CONFIG=told, TF_CPP_MIN_LOG_LEVEL="3"
                        ),
                        stdout=log,
                        stderr=log,
                    )
                )
        until(
            lambda: [*tmp_path.glob("saved/step-*")],
            clusters.LIMIT_SECONDS,
            lambda: log_of(tmp_path, HOSTS[0]),
        )
        hosts.network.cut(HOSTS[2])
        since = time.monotonic()
        for process in started:
            process.wait(since + ENDS_WITHIN_SECONDS - time.monotonic())
    finally:
        for process in started:
            process.kill()
            process.wait()
        hosts.network.mend(HOSTS[2])
    logs = [log_of(tmp_path, host) for host in HOSTS]
    assert [process.returncode for process in started] == [1, 1, -9], logs
    for log in logs[:2]:
        last = log.splitlines()[-1]
        assert last.startswith("mgpu-tf: All tasks must reach each"), log
        assert "nothing from worker 2 for 45 seconds" in last
    assert_named(logs[2], 2, (0, 1))
    last = logs[2].splitlines()[-1]
    assert last.startswith("mgpu_tf: worker 2 was cut off: "), logs[2]
    assert "could not reach host0:2222" in last

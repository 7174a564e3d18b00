"""Three machines at 200 Mbit/s: equal numbers, and a link that is cut."""

import json
import re
import time

import pytest

from tests import clusters
from tests.network import Network

pytestmark = pytest.mark.full

HOSTS = ("host0", "host1", "host2")
RATE = "200mbit"
TRAIN = (
    *("train", "--epochs=6", "--global_batch_size=48", "--optimizer=sgd"),
    *("--learning_rate=0.05", "--model=cnn"),
)
# From the cut to the end of all tasks. TensorFlow's own limit for a lost
# heartbeat is about 10 seconds; the rest is for a busy machine.
ENDS_WITHIN_SECONDS = 120


@pytest.fixture(scope="module")
def network():
    with Network(HOSTS) as made:
        for host in HOSTS:
            made.limit(host, RATE)
        yield made


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one_device")
    done = clusters.mgpu_tf(
        *TRAIN, "--strategy=one_device", f"--output_dir={folder}"
    )
    assert done.returncode == 0, done.stderr
    return report_in(folder)


def report_in(folder):
    return json.loads((folder / "report.json").read_text())


class Job:
    """A training, a task on each machine, its output in files."""

    def __init__(self, network, folder):
        self._folder = folder
        tasks = {"worker": [f"{host}:2222" for host in HOSTS]}
        self.processes = []
        for index, host in enumerate(HOSTS):
            place = {"type": "worker", "index": index}
            with open(folder / f"{index}.log", "ab") as log:
                self.processes.append(
                    network.popen(
                        host,
                        [
                            *(clusters.PYTHON, "-m", "mgpu_tf", *TRAIN),
                            f"--output_dir={folder}",
                            f"--checkpoint_dir={folder}/saved",
                            "--save_every_steps=10",
                        ],
                        env=clusters.environment(
                            TF_CONFIG=json.dumps(
                                {"cluster": tasks, "task": place}
                            )
                        ),
                        stdout=log,
                        stderr=log,
                    )
                )

    def wait(self, seconds=clusters.LIMIT_SECONDS, count=3):
        deadline = time.monotonic() + seconds
        return [
            p.wait(max(0.1, deadline - time.monotonic()))
            for p in self.processes[:count]
        ]

    def kill(self):
        for process in self.processes:
            process.kill()
            process.wait()

    def logs(self):
        return "\n".join(
            (self._folder / f"{index}.log").read_text()
            for index in range(len(HOSTS))
        )


def compare(folder, one_device):
    report = report_in(folder)
    assert report["num_workers"] == 3
    assert report["examples_seen"] == one_device["examples_seen"]
    for own, other in zip(report["epochs"], one_device["epochs"], strict=True):
        assert own["loss"] == pytest.approx(other["loss"], rel=1e-3)


def test_a_cut_link_and_the_losses_of_one_device(network, one_device, tmp_path):
    """Who is left ends by itself and names the lost task; all resume."""
    job = Job(network, tmp_path)
    try:
        deadline = time.monotonic() + clusters.LIMIT_SECONDS
        while not list(tmp_path.glob("saved/step-*")):
            assert time.monotonic() < deadline, job.logs()
            assert not any(p.poll() for p in job.processes), job.logs()
            time.sleep(0.1)
        assert not (tmp_path / "report.json").exists(), "too late"
        network.cut(HOSTS[2])
        # Those on this side of the cut; a test ends the machine beyond it.
        codes = job.wait(ENDS_WITHIN_SECONDS, count=2)
    finally:
        job.kill()
        network.mend(HOSTS[2])
    assert all(codes), codes
    told = (tmp_path / "0.log").read_text()
    assert re.search(r"worker[ /:]*(replica:0/)?(task:)?2\b", told), told[
        -4000:
    ]
    assert not (tmp_path / "report.json").exists()
    again = Job(network, tmp_path)
    try:
        assert again.wait() == [0, 0, 0], again.logs()[-4000:]
    finally:
        again.kill()
    assert "resumed at step" in (tmp_path / "0.log").read_text()
    compare(tmp_path, one_device)

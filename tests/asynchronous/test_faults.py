"""Each role is killed in turn in one cluster, and training completes."""

import json
import os
import queue
import re
import signal
import subprocess
import threading
import time

import pytest

from mgpu_tf.engine.asynchronous.engine import MOST_STEPS
from tests import clusters

# One run, of minutes, for all of them.
pytestmark = pytest.mark.full

# What is killed in each epoch.
KILLED = [
    ["worker-0"],
    ["worker-0", "worker-1"],
    ["ps-0"],
    ["chief-0"],
    [],
]


class Cluster:
    """A running cluster, its output and its processes."""

    def __init__(self, folder):
        self.lines, self.pids = [], {}
        self._read = queue.Queue()
        self.process = subprocess.Popen(
            [
                clusters.PYTHON,
                *("-m", "mgpu_tf", "launch", "--num_workers=2", "--num_ps=1"),
                *("--startup_seconds=0", "--max_restarts=8", "--evaluator"),
                *("--backoff_seconds=0.1", "--", clusters.PYTHON, "-m"),
                *("tests.asynchronous.fault_worker", str(folder)),
            ],
            env=clusters.environment(TF_CPP_MIN_LOG_LEVEL="3"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._copier = threading.Thread(target=self._copy, daemon=True)
        self._copier.start()

    def _copy(self):
        with self.process.stdout as lines:
            for line in lines:
                self._read.put(line)
        self._read.put(None)

    def end(self):
        """Ends the launcher, and with it the cluster, if it still runs."""
        self.process.terminate()
        self.process.wait(clusters.LIMIT_SECONDS)
        self._copier.join(clusters.LIMIT_SECONDS)

    def wait_for(self, condition):
        """Reads lines until the condition holds."""
        deadline = time.monotonic() + clusters.LIMIT_SECONDS
        while not condition():
            line = self._read.get(timeout=deadline - time.monotonic())
            if line is None:
                raise AssertionError("ended:\n" + "".join(self.lines)[-6000:])
            self.lines.append(line)
            found = re.search(r"PID (\S+) (\d+)", line)
            if found:
                self.pids.setdefault(found[1], []).append(int(found[2]))

    def has(self, text):
        """Returns whether the last lines say so, from where it was asked."""
        return any(text in line for line in self.lines)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    cluster = Cluster(folder)
    try:
        for epoch, names in enumerate(KILLED):
            cluster.wait_for(lambda: cluster.has(f"AT {epoch}"))  # noqa: B023
            before = {name: len(cluster.pids[name]) for name in names}
            for name in names:
                # TensorFlow ends a coordinator so when a server and a worker
                # are lost together.
                by = signal.SIGSEGV if name == "chief-0" else signal.SIGKILL
                os.kill(cluster.pids[name][-1], by)
            cluster.wait_for(
                lambda: all(
                    len(cluster.pids[name]) > count
                    for name, count in before.items()  # noqa: B023
                )
            )
            folder.joinpath(f"killed-{epoch}").touch()
        cluster.wait_for(lambda: cluster.has("RESULT"))
        assert cluster.process.wait(clusters.LIMIT_SECONDS) == 0
    finally:
        cluster.end()
    return {
        "output": "".join(cluster.lines),
        "evaluator": json.loads(folder.joinpath("evaluator.json").read_text()),
        **json.loads(folder.joinpath("result.json").read_text()),
    }


def test_training_completes(result):
    assert result["global_step"] == 5 * 240
    assert result["examples_seen"] == 5 * 960
    assert len(result["losses"]) == len(result["val_loss"]) == 5
    assert result["losses"][-1] < result["losses"][0]
    assert result["test loss"] == pytest.approx(
        result["val_loss"][-1], rel=1e-5
    )


def test_steps_are_done_at_least_once(result):
    """A lost worker's piece is done again."""
    lost_workers = 3
    most = 1200 + MOST_STEPS * lost_workers
    assert 1200 <= result["iterations"] <= most


def test_recoveries_are_counted(result):
    # The parameter server and the coordinator; workers set nothing back.
    assert result["restarts"] == 2
    # Of three; TensorFlow finds out where a worker has work.
    assert 1 <= result["lost_workers"] <= 3
    assert 0 < result["lost_steps"] <= 2 * 240


def test_an_evaluator_has_seen_the_last_checkpoint(result):
    """It trains nothing, and agrees with the coordinator's evaluation."""
    epochs, scores = result["evaluator"]
    assert epochs[-1] == 5
    assert epochs == sorted(set(epochs))
    for name in ("val_loss", "val_accuracy"):
        expected = [result[name][epoch - 1] for epoch in epochs]
        assert scores[name] == pytest.approx(expected, rel=1e-5), name


def test_what_is_lost_is_told_in_a_line(result):
    assert "worker 0 was lost" in result["output"]
    assert "a parameter server was lost" in result["output"]
    assert "Traceback" not in result["output"]


def test_a_coordinator_that_crashes_is_told(result):
    assert "chief 0 failed with SIGSEGV; restart 5 of 8" in result["output"]

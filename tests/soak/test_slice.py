"""A few of the faults of `make soak`, over real processes."""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import time

import pytest

from mgpu_tf.checkpoints import store
from tests import clusters
from tests.soak.harness import (
    OF_CHIEF,
    SAVE_EVERY_STEPS,
    TOTAL_STEPS,
    Fault,
    Job,
)
from tests.soak.run import run_job


@functools.cache
def control_of(strategy):
    """A job that nothing has struck, once for all tests."""
    return run_job(strategy)


@pytest.mark.parametrize(
    ("strategy", "faults"),
    [
        pytest.param(
            "mirrored",
            [Fault("save", worker=0, step=61)],
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            "2_workers",
            [
                Fault("step", worker=1, step=22),
                Fault("save", worker=0, step=58),
                Fault("preempt", worker=0, step=91),
            ],
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            "2_workers_fsdp",
            [
                Fault("step", worker=0, step=22),
                Fault("save", worker=1, step=58),
            ],
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            "2_workers_tensor",
            [
                Fault("step", worker=1, step=37),
                Fault("save", worker=0, step=91),
            ],
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            "data_2_tensor_2",
            [
                Fault("step", worker=0, step=37),
                Fault("save", worker=0, step=91),
            ],
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            "data_2_pipeline_2",
            [
                Fault("step", worker=0, step=61),
                Fault("save", worker=0, step=122),
            ],
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            "2_workers",
            [
                Fault("stop", worker=0, step=22),
                Fault("pause", worker=0, step=58),
                Fault("stop", worker=1, step=91),
            ],
            marks=pytest.mark.matrix,
            id="stopped",
        ),
        pytest.param(
            "mirrored",
            [
                Fault("read", worker=0, step=22),
                Fault("damage", worker=0, step=42),
                Fault("readonly", worker=0, step=62),
                Fault("clock", worker=0, step=92),
            ],
            marks=pytest.mark.matrix,
            id="storage",
        ),
        pytest.param(
            "2_workers_local",
            [
                Fault("step", worker=1, step=22),
                Fault("save", worker=0, step=58),
            ],
            marks=pytest.mark.matrix,
        ),
    ],
)
def test_killed_and_the_same_bits(strategy, faults):
    control, result = control_of(strategy), run_job(strategy, faults)
    assert result.sha == control.sha
    assert result.step == control.step == TOTAL_STEPS
    assert (control.restarts, control.lost_steps) == (0, 0)
    ended = [fault for fault in faults if fault.kind != "pause"]
    assert result.restarts == len(ended)
    # Damage and a folder that is read-only take saves with them.
    lost = sum(4 if f.kind in OF_CHIEF else 2 for f in faults)
    assert result.lost_steps < lost * SAVE_EVERY_STEPS
    if any(fault.kind != "save" for fault in faults):
        assert result.lost_steps > 0


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["mirrored", "2_workers"])
def test_what_ends_the_run_is_mended_and_the_same_bits(strategy):
    """Storage that fails for long, and a checkpoint of a later release."""
    faults = [
        Fault("unreadable", worker=0, step=22),
        Fault("newer", worker=0, step=61),
    ]
    control, result = control_of(strategy), run_job(strategy, faults)
    assert (result.sha, result.step) == (control.sha, TOTAL_STEPS)
    # Nothing but what came after the last checkpoint was done again.
    assert 0 < result.lost_steps < len(faults) * 2 * SAVE_EVERY_STEPS


@pytest.mark.full
def test_the_bits_of_a_job_with_a_spare(tmp_path):
    """After each kill one task is a spare, and the other a new process."""
    faults = [Fault("step", 1, 22), Fault("save", 0, 58)]
    struck = Job("2_workers", str(tmp_path), ["--spares=1"]).run(faults)
    sha = control_of("2_workers").sha
    assert (struck.sha, struck.step) == (sha, TOTAL_STEPS)
    assert struck.restarts == 2


@pytest.mark.full
def test_fewer_workers_go_on_with_their_own_numbers(tmp_path):
    """A worker is killed and stays dead: as one device from there on."""

    def arguments(name, *others):
        return [
            "train",
            "--epochs=12",
            "--optimizer=momentum",
            "--save_every_steps=20",
            f"--checkpoint_dir={tmp_path / name}",
            f"--output_dir={tmp_path / 'out' / name}",
            *others,
        ]

    def report(name):
        path = tmp_path / "out" / name / "report.json"
        return json.loads(path.read_text())

    began = time.time()
    flags = ["--num_workers=2", "--min_workers=1", "--backoff_seconds=3"]
    process = subprocess.Popen(
        [
            clusters.PYTHON,
            "-m",
            "mgpu_tf",
            *arguments("fewer", *flags, f"--log_dir={tmp_path}"),
        ],
        env=clusters.environment(),
    )
    with process:
        while not store.newest(str(tmp_path / "fewer")):
            assert process.poll() is None
            time.sleep(0.01)
        log = (tmp_path / "worker-1.log").read_text()
        pid = int(re.search(r"^--- process (\d+)", log)[1])
        os.kill(pid, signal.SIGKILL)
        while os.path.exists(f"/proc/{pid}"):
            time.sleep(0.01)
        # In the pause before the restart.
        chief = (tmp_path / "worker-0.log").read_text()
        pid = int(re.search(r"^--- process (\d+)", chief)[1])
        while os.path.exists(f"/proc/{pid}"):
            time.sleep(0.01)
        shutil.copytree(tmp_path / "fewer", tmp_path / "one")
        assert process.wait(clusters.LIMIT_SECONDS) == 0
    done = clusters.mgpu_tf(*arguments("one", "--strategy=one_device"))
    assert done.returncode == 0, done.stderr
    fewer, one = report("fewer"), report("one")
    assert (fewer["num_workers"], fewer["global_batch_size"]) == (1, 64)
    assert fewer["global_step"] == one["global_step"] == 12 * 23
    assert fewer["weights_sha256"] == one["weights_sha256"]
    assert (fewer["restarts"], one["restarts"]) == (1, 1)
    spent = fewer["goodput"]
    wall = spent.pop("wall_seconds")
    assert wall < time.time() - began
    assert sum(spent.values()) == pytest.approx(wall, rel=0.01)
    # The pause, and what was done between the checkpoint and the kill.
    assert 3.0 < spent["restart_seconds"] < wall

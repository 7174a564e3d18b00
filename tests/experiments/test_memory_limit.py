"""The experiment of docs/model_parallel.md on a model under a limit."""

import json
import os
import signal

import pytest

from tests import clusters

EXPERIMENT = "experiments/memory_limit.py"


def writable_groups():
    """Whether this process may make control groups of memory."""
    groups = "/sys/fs/cgroup"
    return os.access(
        f"{groups}/memory" if os.path.exists(f"{groups}/memory") else groups,
        os.W_OK,
    )


@pytest.mark.full
@pytest.mark.skipif(not writable_groups(), reason="makes control groups")
def test_from_a_preset_to_a_saved_model(tmp_path):
    def command(*flags):
        return [f"{clusters.ROOT}/{EXPERIMENT}", "--preset=gpt2", *flags]

    made = clusters.run(
        command("--make", "--blocks=1", "--width=16"), cwd=tmp_path
    )
    assert made.returncode == 0, made.stderr
    killed = clusters.run(command("--limit_gib=0.1"), cwd=tmp_path)
    assert killed.returncode == -signal.SIGKILL
    losses = []
    for launch, flags in (
        ([], ["--strategy=one_device"]),
        (["--num_workers=2"], ["--limit_gib=4", "--save=trained.keras"]),
    ):
        job = command(*flags)
        done = (
            clusters.mgpu_tf(
                "launch", *launch, "--", clusters.PYTHON, *job, cwd=tmp_path
            )
            if launch
            else clusters.run(job, cwd=tmp_path)
        )
        assert done.returncode == 0, done.stderr
        found = [
            json.loads(line[line.index("{") :])
            for line in done.stdout.splitlines()
            if "losses" in line
        ]
        assert len(found) == (2 if launch else 1)
        losses += [each["losses"] for each in found]
    assert losses[1:] == [pytest.approx(losses[0], rel=1e-5)] * 2
    assert (tmp_path / "trained.keras").stat().st_size > 1000

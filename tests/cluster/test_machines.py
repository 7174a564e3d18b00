"""The commands of `mgpu-tf launch --hosts --print`, run on two machines."""

import subprocess

import pytest

from tests import clusters
from tests.network import Network

pytestmark = pytest.mark.full

TRAIN = ("train", "--epochs=2", "--global_batch_size=48")


def test_the_printed_commands_train(tmp_path):
    command = (clusters.PYTHON, "-m", "mgpu_tf", *TRAIN)
    printed = clusters.mgpu_tf(
        *("launch", "--hosts=host0,host1", "--print", "--"),
        *(*command, f"--output_dir={tmp_path}"),
    )
    lines = printed.stdout.splitlines()
    assert lines[::2] == ["# worker 0, on host0", "# worker 1, on host1"]
    with Network(["host0", "host1"]) as network:
        started = [
            network.popen(
                host,
                ["bash", "-c", line],
                env=clusters.environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for host, line in zip(("host0", "host1"), lines[1::2], strict=True)
        ]
        try:
            outputs = [
                p.communicate(timeout=clusters.LIMIT_SECONDS)[0]
                for p in started
            ]
        finally:
            for process in started:
                process.kill()
    assert [p.returncode for p in started] == [0, 0], outputs
    assert outputs[0].count("auto: TF_CONFIG names 2 workers") == 1
    assert outputs[1] == ""  # The chief speaks for all.
    alone = clusters.report_of_one_device(TRAIN, tmp_path / "one_device")
    ours = clusters.report_in(tmp_path)
    assert [epoch["loss"] for epoch in ours["epochs"]] == pytest.approx(
        [epoch["loss"] for epoch in alone["epochs"]], rel=1e-5
    )

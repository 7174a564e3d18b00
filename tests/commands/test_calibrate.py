"""`mgpu-tf calibrate` measures this machine, and plans read it."""

import pytest

from mgpu_tf import cli
from mgpu_tf.planner.machine.calibration import Calibration


@pytest.mark.full
def test_what_is_measured_is_what_a_plan_takes(tmp_path, capsys):
    path = str(tmp_path / "machine.json")
    assert cli.main(["calibrate", f"--output={path}"]) == 0
    assert f"written to {path}" in capsys.readouterr().out
    device = Calibration.read(path).device
    assert 1e9 < device.rates["float32"] < 1e14
    assert 1e8 < device.bytes_per_second < 1e13
    assert 0 < device.efficiencies.overhead_seconds < 1e-2
    flags = ["--model=mlp", "--input_shape=8x8x1", f"--calibration={path}"]
    assert cli.main(["plan", *flags]) == 0
    assert "on 1 x cpu" in capsys.readouterr().out


def test_it_takes_flags_only(capsys):
    assert cli.main(["calibrate", "extra"]) == 2
    assert "takes flags only" in capsys.readouterr().err

"""The file of what was measured."""

import pytest

from mgpu_tf.errors import ConfigurationError
from mgpu_tf.planner.devices import Device, Efficiencies, Link
from mgpu_tf.planner.machine.calibration import (
    VARIABLE,
    Calibration,
    default_path,
)

FOUND = Calibration(
    Device("cpu", 1e10, 5e9, {"float32": 1e10}, "memory", Efficiencies()),
    Link("measured", 1e7, 1e-4),
    workers=3,
)


def test_it_is_read_as_it_was_written(tmp_path):
    path = str(tmp_path / "new" / "calibration.json")
    FOUND.write(path)
    assert Calibration.read(path) == FOUND
    assert "between 3 workers" in FOUND.text()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"device": {}}', '{"device": 5, "workers": 1}']
)
def test_what_is_none(tmp_path, text):
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match="mgpu-tf calibrate wrote"):
        Calibration.read(str(path))
    with pytest.raises(ConfigurationError, match="FileNotFoundError"):
        Calibration.read(str(tmp_path / "nowhere"))


def test_numbers_that_nothing_can_have(tmp_path):
    path = str(tmp_path / "calibration.json")
    bad = Device("cpu", 1e10, 0.0, {"float32": 1e10})
    Calibration(bad).write(path)
    with pytest.raises(ConfigurationError, match="mgpu-tf calibrate wrote"):
        Calibration.read(path)


def test_the_variable_names_the_file(monkeypatch):
    monkeypatch.setenv(VARIABLE, "/somewhere/machine.json")
    assert default_path() == "/somewhere/machine.json"
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert default_path() == "/cache/mgpu_tf/calibration.json"

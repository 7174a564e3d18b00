"""What `mgpu-tf test` says of stages that went wrong."""

import json

import numpy as np
import pytest

from mgpu_tf.commands import test as command

ONE = [np.array([[0.1, 0.2]]), np.array([0.3])]


@pytest.fixture
def leave(tmp_path):
    """Leaves what a stage leaves; returns the folder."""

    def leave(stage, weights=ONE, found=None):
        np.savez(tmp_path / f"{stage}.npz", *weights)
        if found is not None:
            (tmp_path / f"{stage}.json").write_text(json.dumps(found))
        return str(tmp_path)

    return leave


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        (0.3, ""),
        (0.30001, ""),
        (0.301, "weights differ from one device by 1.0e-03"),
        (np.nan, "weights differ from one device by nan"),
    ],
)
def test_weights_are_compared(leave, second, problem):
    leave("one_device")
    folder = leave("replicas", [ONE[0], np.array([second])], {"devices": "2"})
    assert command._problem("replicas", folder, 0) == problem


@pytest.mark.parametrize("restarts", [0, 1, 2])
def test_one_process_is_restarted(leave, restarts):
    leave("one_device")
    folder = leave("workers", ONE, {"restarts": restarts, "steps": 24})
    problem = command._problem("workers", folder, 0)
    assert bool(problem) == (restarts != 1)
    assert f"{restarts} restarts" in problem or not problem


def test_a_stage_that_did_not_end(leave, tmp_path):
    assert command._problem("replicas", str(tmp_path), 0) == "exit code 0"
    folder = leave("workers", ONE, {"restarts": 1, "steps": 24})
    assert command._problem("workers", folder, 9) == "exit code 9"
    assert "no weights" in command._problem("workers", folder, 0)

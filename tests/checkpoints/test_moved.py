"""A checkpoint of 2 workers with 2 replicas each, loaded on 1 and on 4."""

import os
import shutil

import numpy as np
import pytest

from mgpu_tf.checkpoints import store
from tests import clusters
from tests.jobs import moved


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("moved"))


@pytest.fixture(scope="module")
def two_workers_x2(folder):
    return clusters.run_jobs(moved, 2, folder, num_virtual_devices=2)


@pytest.mark.full
def test_ended_in_the_middle(two_workers_x2, folder):
    assert two_workers_x2["ended"] == [{"ended": True}, {"ended": True}]
    newest = store.newest(os.path.join(folder, "ended"))
    # The step after the signal tells the other worker.
    assert newest.step == moved.STEP + 1
    # In the middle of an epoch, and of an update.
    assert newest.step % 10 and newest.step % 3


@pytest.mark.full
@pytest.mark.parametrize("column", ["one_device", "mirrored_x4"])
def test_goes_on_elsewhere(
    column, two_workers_x2, folder, strategies, tmp_path
):
    chief, other = two_workers_x2["whole"]
    assert chief["weights"] == other["weights"]
    copy = shutil.copytree(os.path.join(folder, "ended"), tmp_path / "copy")
    found = moved.train(strategies[column], str(copy))
    assert found["restarts"] == 1
    for name in ("loss", "accuracy"):
        np.testing.assert_allclose(found[name], chief[name], rtol=1e-5)
    for one, of_four in zip(found["weights"], chief["weights"], strict=True):
        np.testing.assert_allclose(one, of_four, atol=1e-6)

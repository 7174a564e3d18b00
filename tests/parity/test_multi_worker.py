"""Real processes against Keras's own `fit` on one device."""

import os

import numpy as np
import pytest

from tests import clusters
from tests.parity import cases, worker
from tests.parity.test_one_machine import stock

LAYOUTS = {"2_workers": (2, 1), "2_workers_x2": (2, 2)}
FLOAT32 = ["sgd/uneven", "adam/uneven"]


@pytest.fixture(scope="module", params=LAYOUTS)
def float64_cluster(request, tmp_path_factory):
    """One cluster for all cases; what its workers ended with."""
    folder = tmp_path_factory.mktemp(request.param)
    hashes = clusters.run_parity_cases(
        *LAYOUTS[request.param], "float64", list(cases.CASES), folder
    )
    return folder, hashes


@pytest.fixture(scope="module")
def float32_cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("float32")
    clusters.run_parity_cases(2, 1, "float32", FLOAT32, folder)
    return folder


def load(folder, name):
    return cases.Result.load(os.path.join(folder, worker.file_name(name)))


@pytest.mark.parametrize("name", cases.CASES)
def test_float64(name, float64_cluster, float64):
    folder, hashes = float64_cluster
    result, expected = load(folder, name), stock(name, "float64")
    assert len(hashes[name]) == 1, "workers ended with different weights"
    assert result.largest_difference(expected) < 1e-9
    assert result.loss_difference(expected) < 1e-9
    np.testing.assert_allclose(
        result.evaluation, expected.evaluation, rtol=1e-9
    )
    np.testing.assert_allclose(
        result.predictions, expected.predictions, atol=1e-9
    )


@pytest.mark.parametrize("name", FLOAT32)
def test_float32(name, float32_cluster):
    result, expected = load(float32_cluster, name), stock(name, "float32")
    assert result.loss_difference(expected) < 1e-5
    if name.startswith("sgd"):
        assert result.largest_difference(expected) < 1e-5

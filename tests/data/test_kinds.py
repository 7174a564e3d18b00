"""Each kind of data on one device, on replicas, and on two real workers."""

import numpy as np
import pytest

from tests import clusters
from tests.jobs import data_kinds
from tests.tiers import tiered

RELATIVE = 2e-6
# What the default tests have of them.
QUICK = [
    "infinite_dataset",
    "py_dataset_with_threads",
    "generator",
    "dataset_fn",
    "ragged",
    "records",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds")
    data_kinds.write_records(folder)
    return str(folder)


@pytest.fixture(scope="module")
def one_device(strategies, folder):
    known = {}

    def of(job):
        if job not in known:
            strategy = strategies["one_device"]
            known[job] = data_kinds.JOBS[job](strategy, folder)
        return known[job]

    return of


@pytest.fixture(scope="module")
def two_workers(folder):
    return clusters.run_jobs(data_kinds, 2, folder)


def check(job, observed, reference):
    assert observed["missed"] == [0.0] * data_kinds.EPOCHS
    assert reference["missed"] == [0.0] * data_kinds.EPOCHS
    if job not in data_kinds.OWN_BATCHES:
        np.testing.assert_allclose(
            observed["losses"], reference["losses"], rtol=RELATIVE
        )


@pytest.mark.parametrize("job", tiered(list(data_kinds.JOBS), QUICK, []))
def test_mirrored(job, strategies, one_device, folder):
    observed = data_kinds.JOBS[job](strategies["mirrored_x2"], folder)
    check(job, observed, one_device(job))


@pytest.mark.full
@pytest.mark.parametrize("job", data_kinds.JOBS)
def test_two_workers(job, two_workers, one_device):
    first, second = two_workers[job]
    assert first == second
    check(job, first, one_device(job))

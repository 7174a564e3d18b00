"""Rows on two real workers, in the cluster that other tests use as well."""

import pytest

from tests import clusters
from tests.jobs import rows
from tests.parity import cases, judge, worker

ROWS = [
    "adam_global_clipnorm",
    "last_batch_of_1",
    "accumulation_3_uneven",
    "loss_scale_overflow",
    "batch_norm_synchronized",
    "embedding_adam",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("two_workers"))


@pytest.fixture(scope="module")
def hashes(folder):
    return clusters.run_jobs(rows, 2, folder, ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_row(name, folder, hashes):
    result = cases.Result.load(worker.result_file(folder, name))
    holds, difference = judge.verdict(name, result, set(hashes[name]))
    assert holds, (difference, hashes[name])

"""Rows on two real workers, in the cluster that other tests use as well."""

import pytest

from tests import clusters
from tests.jobs import rows
from tests.parity import cases, judge, worker
from tests.tiers import tiered

ROWS = [
    "adam_global_clipnorm",
    "last_batch_of_1",
    "accumulation_3_uneven",
    "loss_scale_overflow",
    "batch_norm_synchronized",
    "embedding_adam",
]
# On other clusters the full tier has the others.
QUICK = [*ROWS[:2], "loss_scale_overflow", "embedding_adam"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("two_workers"))


@pytest.fixture(scope="module")
def hashes(folder, request):
    chosen = {
        item.callspec.params["name"]
        for item in request.session.items
        if item.module is request.module
    }
    names = [name for name in ROWS if name in chosen]
    return clusters.run_jobs(rows, 2, folder, names)


@pytest.mark.parametrize("name", tiered(ROWS, QUICK))
def test_row(name, folder, hashes):
    result = cases.Result.load(worker.result_file(folder, name))
    holds, difference = judge.verdict(name, result, set(hashes[name]))
    assert holds, (difference, hashes[name])

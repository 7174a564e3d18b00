"""Workers that differ: refused by name on all, and the cluster goes on."""

import pytest

from tests import clusters
from tests.jobs import alike, apart


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("alike"))
    return clusters.run_jobs(alike, 2, folder)


@pytest.fixture(scope="module")
def one_device(strategies):
    return alike.good(strategies["one_device"])


def name_of(job):
    return job.__name__


@pytest.mark.parametrize("job", alike.REFUSED, ids=name_of)
def test_refused_on_all_workers(job, two_workers):
    for observed in two_workers[job.__name__]:
        assert observed["told"].startswith(tuple(alike.REFUSED[job]))


@pytest.mark.parametrize("job", alike.WORK, ids=name_of)
def test_no_difference(job, two_workers):
    for observed in two_workers[job.__name__]:
        assert observed["told"] == "nothing"


@pytest.mark.parametrize("job", [*alike.REFUSED, *alike.WORK], ids=name_of)
def test_next_call_works(job, two_workers, one_device):
    for observed in two_workers[job.__name__]:
        assert observed["losses"] == pytest.approx(one_device, rel=1e-5)


def test_messages_do_not_grow_with_the_model(two_workers):
    for observed in two_workers["requests"]:
        assert observed["2"] == observed["20"]


@pytest.mark.full
def test_three_workers(tmp_path, one_device):
    """The one in the middle differs; the last one is told the same."""
    jobs = ["by_one", "weights", "generators"]
    found = clusters.run_jobs(alike, 3, str(tmp_path), jobs)
    for name in jobs:
        told = {observed["told"] for observed in found[name]}
        assert len(told) == 1
        assert told.pop().startswith(tuple(alike.REFUSED[alike.JOBS[name]]))
        for observed in found[name]:
            assert observed["losses"] == pytest.approx(one_device, rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("job", apart.TOLD, ids=name_of)
def test_workers_apart_are_ended_by_one_line(job, tmp_path):
    found = clusters.run_jobs(
        apart, 2, str(tmp_path), [job.__name__], shared=False
    )
    for observed in found[job.__name__]:
        assert apart.TOLD[job] in observed["told"]
        assert observed["later"].startswith(apart.LATER)
        assert "\n" not in observed["later"]

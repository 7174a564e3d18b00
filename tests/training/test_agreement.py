"""Workers that differ: refused by name on all, and the cluster goes on."""

import pytest

from tests import clusters
from tests.jobs import alike, apart
from tests.tiers import tiered

# The same fact of a worker, or the same place of a difference, as another's.
REPEATED = [
    alike.by_the_first,
    alike.other_exception,
    alike.batch_sizes,
    alike.paths,
    alike.bad_loss,
    alike.adapted,
    alike.optimizer,
    alike.loss,
    alike.prediction,
    alike.in_the_loop,
    alike.weights_in_build,
    alike.activation,
    alike.generators_of_steps,
    alike.validation,
]


def name_of(job):
    return job.__name__


def rows(*groups):
    jobs = [job for group in groups for job in group]
    quick = [job for job in jobs if job not in REPEATED]
    return pytest.mark.parametrize("job", tiered(jobs, quick), ids=name_of)


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory, request):
    """What the jobs of this tier observed."""
    chosen = {
        item.callspec.params["job"].__name__
        for item in request.session.items
        if item.module is request.module
        and "two_workers" in item.fixturenames
        and hasattr(item, "callspec")
    }
    names = [name for name in alike.JOBS if name in {*chosen, "requests"}]
    folder = str(tmp_path_factory.mktemp("alike"))
    return clusters.run_jobs(alike, 2, folder, names)


@pytest.fixture(scope="module")
def one_device(strategies):
    return alike.good(strategies["one_device"])


@rows(alike.REFUSED)
def test_refused_on_all_workers(job, two_workers):
    for observed in two_workers[job.__name__]:
        assert observed["told"].startswith(tuple(alike.REFUSED[job]))


@rows(alike.WORK)
def test_no_difference(job, two_workers):
    for observed in two_workers[job.__name__]:
        assert observed["told"] == "nothing"


@rows(alike.REFUSED, alike.WORK)
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


@pytest.mark.parametrize(
    "job",
    tiered(
        list(apart.TOLD),
        [],
        # The others differ in the name of the call.
        [apart.evaluate_on_epoch_end, apart.failure_of_one],
    ),
    ids=name_of,
)
def test_workers_apart_are_ended_by_one_line(job, tmp_path):
    found = clusters.run_jobs(
        apart, 2, str(tmp_path), [job.__name__], shared=False
    )
    for observed in found[job.__name__]:
        assert apart.TOLD[job] in observed["told"]
        assert observed["later"].startswith(apart.LATER)
        assert "\n" not in observed["later"]

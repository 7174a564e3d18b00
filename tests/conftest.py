"""Fixtures of all tests: strategies on parts of the CPU, float64."""

import gc
import os
import pathlib
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import hypothesis
import pytest

from tests import clusters, columns, leftovers, tiers
from tests.lean import sitecustomize  # noqa: F401  Before Keras is imported.

# Other work may take the processor for seconds.
hypothesis.settings.register_profile("shared machine", deadline=None)
hypothesis.settings.load_profile("shared machine")

# A graph is many objects: with Python's own threshold a sixth of the time that
# tests take is spent on looking for circles. Modules are frozen below.
gc.set_threshold(20_000, 10, 10)

# Here the tests of one row share what Keras computes, and nothing else.
BY_ROW = "tests/parity/test_one_machine.py"


def pytest_xdist_make_scheduler(config, log):
    """A process takes whole files, and one takes all that share a cluster."""
    from xdist.scheduler import LoadFileScheduling

    root = pathlib.Path(clusters.ROOT)
    sharing = {
        str(path.relative_to(root))
        for path in root.glob("tests/**/test_*.py")
        if "clusters.run_jobs(" in path.read_text()
    }

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            if file == BY_ROW:
                return nodeid.rpartition("-")[2]
            if file.startswith("tests/gpu/"):
                return nodeid  # Each has processes of its own.
            return "those that share a cluster" if file in sharing else file

    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config, items):
    tiers.leave_to_the_matrix(items)
    yield
    items[:] = tiers.in_turn(items, config.getoption("drawn_by", ""))


@pytest.fixture(scope="session", autouse=True)
def strategies():
    """Strategies in this process by name.

    For every test, since the CPU can be split before the first op only.
    """
    made = columns.strategies()
    gc.freeze()
    return made


@pytest.fixture(autouse=True)
def nothing_left_behind():
    yield
    leftovers.clear()


@pytest.fixture(scope="session", autouse=True)
def shared_clusters():
    """Ends the clusters that tests of several files shared."""
    yield
    clusters.end_shared()


@pytest.fixture(scope="module")
def of_this_run(request):
    """Tells which cases of a module's tests run, so that no others are made.

    The function that it gives takes names, the argument of tests that has
    them, and a test's name, if it is of one; it returns those that run.
    """

    def of(names, argument, test=""):
        wanted = {
            item.callspec.params.get(argument)
            for item in request.session.items
            if item.module is request.module
            and hasattr(item, "callspec")
            and test in ("", item.originalname)
        }
        return [name for name in names if name in wanted]

    return of


@pytest.fixture
def floatx_of():
    """Sets the type that a case is run in, for the length of a test."""
    from tests.parity import cases

    yield lambda case: cases.set_floatx(case.floatx)
    cases.set_floatx("float32")


@pytest.fixture
def float64():
    """Lets Keras make float64 weights, for the length of a test."""
    from tests.parity import cases

    cases.set_floatx("float64")
    yield
    cases.set_floatx("float32")


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """A folder for prepared data sets, new in each session."""
    return str(tmp_path_factory.mktemp("data"))


class Clock:
    """Stands for the clocks of `time`; moves when it is told to."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "time", clock)
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock

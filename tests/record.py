"""What became of each test, and the processor seconds of each file.

    pytest -p tests.record --record=FILE

Wall time says nothing on a machine that others use. Counted are the process
that runs a test, the processes that it started and that have ended, and what
shared clusters have spent on its jobs.
"""

import collections
import json
import pathlib
import resource

import pytest

from tests import clusters, deadline

_SPENT = "processor_seconds"
# What no test spent: to start, to collect, and to start and end clusters.
BETWEEN = "between tests"


def pytest_addoption(parser):
    parser.addoption("--record", metavar="FILE", help="Writes it here.")


def pytest_configure(config):
    config.pluginmanager.register(Record(config), "record of tests")


class Record:
    """Collects in each process, and writes in the one that started them.

    Args:
        config: Pytest's.
    """

    def __init__(self, config):
        self._config = config
        self._runs_tests = not config.getoption("numprocesses", None)
        self._seconds = collections.Counter()
        self._outcomes = {}
        self._before = 0.0

    def _spend(self, name):
        counted = [resource.RUSAGE_SELF]
        # Processes that run tests count their own, and all that they started.
        if self._runs_tests:
            counted.append(resource.RUSAGE_CHILDREN)
        now = clusters.spent_by_shared() + sum(
            used.ru_utime + used.ru_stime
            for used in map(resource.getrusage, counted)
        )
        self._seconds[name] += now - self._before
        self._before = now

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        self._spend(BETWEEN)
        yield
        self._spend(item.nodeid)

    def pytest_runtest_logreport(self, report):
        known = self._outcomes.get(report.nodeid)
        if report.failed:
            self._outcomes[report.nodeid] = "failed"
        elif report.skipped and known != "failed":
            left = deadline.NOT_RUN in str(report.longrepr)
            self._outcomes[report.nodeid] = "not run" if left else "skipped"
        elif known is None:
            self._outcomes[report.nodeid] = "passed"

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self):
        self._spend(BETWEEN)
        output = getattr(self._config, "workeroutput", None)
        if output is not None:
            output[_SPENT] = dict(self._seconds)
            return
        file = self._config.getoption("record")
        if file:
            path = pathlib.Path(file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self._values(), indent=1) + "\n")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self._seconds.update(getattr(node, "workeroutput", {}).get(_SPENT, {}))

    def _values(self):
        files = collections.Counter()
        for name, seconds in self._seconds.items():
            files[name.partition("::")[0]] += seconds
        return {
            "processor_seconds": round(sum(files.values()), 1),
            "files": _dearest_first(files),
            "tests": _dearest_first(self._seconds),
            "outcomes": self._outcomes,
        }


def _dearest_first(seconds):
    return {name: round(spent, 2) for name, spent in seconds.most_common()}

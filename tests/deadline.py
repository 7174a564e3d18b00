"""No test begins after a time, and then the run fails.

    pytest -p tests.deadline --until=SECONDS

A run that is killed says nothing. One that ends in time says which tests
were left.
"""

import time

import pytest

_REASON = "NOT RUN: the time is over"


def pytest_addoption(parser):
    parser.addoption(
        "--until",
        type=float,
        metavar="SECONDS",
        help="No test begins after this time, in seconds since 1970.",
    )


def pytest_configure(config):
    if config.getoption("until") is not None:
        config.pluginmanager.register(
            _Deadline(config.getoption("until")), "deadline"
        )


class _Deadline:
    def __init__(self, until):
        self._until = until
        self._left = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self):
        if time.time() > self._until:
            pytest.skip(_REASON)

    def pytest_runtest_logreport(self, report):
        self._left += report.skipped and _REASON in str(report.longrepr)

    def pytest_sessionfinish(self, session):
        if self._left:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        if self._left:
            terminalreporter.write_line(f"{self._left} tests {_REASON}")

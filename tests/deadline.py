"""No test begins after a time; a run that is killed says nothing.

    pytest -p tests.deadline --until=SECONDS [--drawn-by=COMMIT]

One that ends in time says which tests were left, and fails. With --drawn-by
the files come in an order that is drawn from a commit: what one leaves others
begin with, so a run that left some may be green.
"""

import time

import pytest

NOT_RUN = "NOT RUN: the time is over"


def pytest_addoption(parser):
    parser.addoption(
        "--until",
        type=float,
        metavar="SECONDS",
        help="No test begins after this time, in seconds since 1970.",
    )
    parser.addoption(
        "--drawn-by",
        default="",
        metavar="COMMIT",
        help="Draws the order of files from it; what is left fails nothing.",
    )


def pytest_configure(config):
    if config.getoption("until") is not None:
        config.pluginmanager.register(_Deadline(config), "deadline")


class _Deadline:
    def __init__(self, config):
        self._until = config.getoption("until")
        self._drawn = bool(config.getoption("drawn_by"))
        self._left = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self):
        if time.time() > self._until:
            pytest.skip(NOT_RUN)

    def pytest_runtest_logreport(self, report):
        self._left += report.skipped and NOT_RUN in str(report.longrepr)

    def pytest_sessionfinish(self, session):
        if self._left and not self._drawn:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        if self._left:
            terminalreporter.write_line(f"{self._left} tests {NOT_RUN}")

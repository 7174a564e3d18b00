"""Rows of the parity matrix; each returns the hash of the weights."""

import functools

from tests.parity import cases, worker

JOBS = {
    name: functools.partial(worker.trained, name=name) for name in cases.CASES
}

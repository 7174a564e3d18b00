"""Tasks of keras-hub on raw text, against their own `fit` on one device."""

import functools

import numpy as np
import pytest

from tests import clusters, columns
from tests.jobs import tasks

NEAR = 1e-12


@functools.cache
def reference(name):
    return tasks.observe(name, None)


def check(name, observed):
    expected = reference(name)
    assert observed.keys() == expected.keys()
    for part in ("history", "evaluation"):
        assert observed[part].keys() == expected[part].keys()
        for key, values in expected[part].items():
            np.testing.assert_allclose(
                observed[part][key], values, rtol=1e-6, err_msg=key
            )
    for part in ("before", "weights", "slots", "predictions"):
        assert len(observed[part]) == len(expected[part])
        for found, wanted in zip(observed[part], expected[part], strict=True):
            np.testing.assert_allclose(found, wanted, rtol=NEAR, atol=NEAR)
    moved = [
        before != after
        for before, after in zip(
            observed["before"], observed["weights"], strict=True
        )
    ]
    assert moved == observed["trainable"]


@pytest.mark.parametrize("name", tasks.PROGRAMS)
@pytest.mark.parametrize("column", columns.EVERY)
def test_raw_text(column, name, strategies):
    check(name, tasks.observe(name, strategies[column]))


@pytest.fixture(scope="module")
def of_workers(tmp_path_factory):
    return clusters.run_jobs(tasks, 2, str(tmp_path_factory.mktemp("tasks")))


@pytest.mark.parametrize("name", tasks.PROGRAMS)
def test_two_workers(name, of_workers):
    first, second = of_workers[name]
    assert first == second
    check(name, first)

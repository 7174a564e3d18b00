"""Two real workers: a bad batch is left out, a slow worker is named."""

import keras
import numpy as np
import pytest

from tests import clusters
from tests.jobs import failing

pytestmark = pytest.mark.full
# Each job with the part of a step in which a worker is slow.
SLOW = {
    "slow_input": "input",
    "slow_step": "compute",
    "slow_step_that_repeats": "compute",
}


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory, of_this_run):
    folder = str(tmp_path_factory.mktemp("failing"))
    names = ["restore", *of_this_run(SLOW, "job"), "healthy"]
    return clusters.run_jobs(failing, 2, folder, names)


def test_workers_leave_out_the_same_batch(two_workers):
    first, second = two_workers["restore"]
    assert first == second
    steps = failing.ROWS // failing.SIZE
    assert first["steps"] == steps - 1
    assert first["left_out"] == [failing.BAD + 1]
    keras.utils.set_random_seed(0)
    model = failing.build()()
    x, y = failing.numbers()
    for batch in set(range(steps)) - {failing.BAD}:
        rows = slice(failing.SIZE * batch, failing.SIZE * (batch + 1))
        model.train_on_batch(x[rows], y[rows])
    for mine, theirs in zip(first["weights"], model.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("job", SLOW)
def test_a_slow_worker_is_named_once(job, two_workers):
    first, second = two_workers[job]
    assert first == second
    ((worker, found, text),) = first
    assert (worker, found) == (1, SLOW[job])
    assert text.startswith("worker 1 is slow: in epoch ")


def test_a_healthy_job_names_nobody(two_workers):
    assert two_workers["healthy"] == [[], []]

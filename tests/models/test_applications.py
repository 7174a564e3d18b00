"""Models of `keras.applications` on two replicas and on two real workers.

All of them take a quarter of an hour, so the default suite has one:
`make test ARGS="-m slow"` runs the others.
"""

import numpy as np
import pytest

from tests import clusters
from tests.jobs import applications

QUICK = "MobileNet"
RTOL = 1e-9
NAMES = [
    name if name == QUICK else pytest.param(name, marks=pytest.mark.full)
    for name in applications.JOBS
]


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NAMES)
def test_losses_of_one_device(name, strategies, tmp_path):
    job = applications.JOBS[name]
    expected = job(strategies["one_device"], None)["losses"]
    mirrored = job(strategies["mirrored_x2"], None)["losses"]
    np.testing.assert_allclose(mirrored, expected, rtol=RTOL)
    if name == QUICK:
        return
    [first, second] = clusters.run_jobs(applications, 2, str(tmp_path), [name])[
        name
    ]
    assert first == second
    np.testing.assert_allclose(first["losses"], expected, rtol=RTOL)
    print(f"{name}: one device {expected}, mirrored {mirrored}, {first}")

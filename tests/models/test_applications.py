"""Models of `keras.applications` on two replicas and on two real workers.

All of them take a quarter of an hour, so the full tier has one, and the matrix
the others.
"""

import numpy as np
import pytest

from tests import clusters
from tests.jobs import applications
from tests.tiers import tiered

QUICK = "MobileNetV3Small"
RTOL = 1e-9


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", tiered(list(applications.JOBS), [], [QUICK]))
def test_losses_of_one_device(name, strategies, tmp_path):
    job = applications.JOBS[name]
    expected = job(strategies["one_device"], None)["losses"]
    mirrored = job(strategies["mirrored_x2"], None)["losses"]
    np.testing.assert_allclose(mirrored, expected, rtol=RTOL)
    [first, second] = clusters.run_jobs(applications, 2, str(tmp_path), [name])[
        name
    ]
    assert first == second
    np.testing.assert_allclose(first["losses"], expected, rtol=RTOL)
    print(f"{name}: one device {expected}, mirrored {mirrored}, {first}")

"""The script of all platforms, on one device and as processes of one machine.

The tests of Slurm, Ray, ssh and pods run it too.
"""

import pytest

from tests import clusters
from tests.launch import losses

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(None, id="one device"),
        # `tests/test_job.py` starts workers of this machine.
        pytest.param(
            ("--num_workers=3",), id="three workers", marks=pytest.mark.matrix
        ),
        pytest.param(
            ("--num_workers=2", "--num_ps=1"), id="a parameter server"
        ),
    ],
)
def test_the_losses_of_keras(flags, tmp_path):
    command = (clusters.PYTHON, losses.SCRIPT, str(tmp_path))
    if flags is None:
        done = clusters.run(command[1:])
    else:
        done = clusters.mgpu_tf("launch", *flags, "--", *command)
    assert done.returncode == 0, done.stderr
    losses.compare(tmp_path, done.stdout + done.stderr)

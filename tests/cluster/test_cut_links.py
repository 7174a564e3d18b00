"""Machines that lose their link come back, and the job ends as without it.

Before a release: `test_slow_links` cuts a link too, and compares bits.
"""

import pytest

from tests.soak.harness import TOTAL_STEPS, Fault
from tests.soak.run import run_job

pytestmark = pytest.mark.matrix


def test_the_bits_of_a_run_with_all_links():
    """In training, and while tasks start; a worker's and the chief's."""
    faults = [
        Fault("link", worker=2, step=37),
        Fault("start", worker=0, step=91),
    ]
    control, result = run_job("3_workers"), run_job("3_machines", faults)
    assert result.sha == control.sha
    assert result.step == control.step == TOTAL_STEPS
    assert result.restarts >= len(faults)
    assert result.lost_steps > 0

"""Random numbers of a resumed run are those of one that nothing stopped.

The weights of each program are compared with Keras's by the conformance suite.
"""

import pytest

from tests import clusters
from tests.conformance.draws import PROGRAMS
from tests.jobs import draws
from tests.tiers import tiered

COLUMNS = ["one_device", "mirrored_x3", "fsdp_x3", "tensor_x3"]


def assert_resumed(whole, resumed):
    """The same bits, and not from the first step."""
    assert resumed[:2] == whole[:2]
    assert whole[2] == draws.STEPS
    assert 0 < resumed[2] < draws.STEPS


@pytest.mark.parametrize(
    ("name", "column"),
    tiered(
        [(name, column) for name in PROGRAMS for column in COLUMNS],
        [],
        [("a ResNet with augmentation", "mirrored_x3")],
    ),
)
def test_same_bits(name, column, strategies, tmp_path):
    whole, stopped, resumed = draws.stopped_and_resumed(
        name, strategies[column], str(tmp_path)
    )
    assert stopped is None
    assert_resumed(whole, resumed)


@pytest.mark.full
def test_same_bits_on_three_workers(tmp_path):
    workers = clusters.run_jobs(draws, 3, str(tmp_path))
    for name in PROGRAMS:
        for whole, stopped, resumed in workers[name]:
            assert stopped is None
            assert whole == workers[name][0][0]
            assert_resumed(whole, resumed)

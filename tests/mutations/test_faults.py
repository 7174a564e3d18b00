"""Each fault can be planted: what it replaces is there once."""

import pathlib

import pytest

import mgpu_tf
from tests.mutations.faults import FAULTS

PACKAGE = pathlib.Path(mgpu_tf.__file__).parent


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_its_place_is_there(fault):
    assert (PACKAGE / fault.file).read_text().count(fault.right) == 1
    assert fault.wrong != fault.right

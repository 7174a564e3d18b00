"""Strategies in one process against Keras's own `fit` on one device."""

import numpy as np
import pytest

from tests.parity import cases

COLUMNS = ["one_device", "mirrored_x2", "mirrored_x4", "central_storage_x2"]

_stock = {}


def stock(name, floatx):
    """Keras's own result, computed once."""
    if (name, floatx) not in _stock:
        _stock[name, floatx] = cases.run_stock(cases.CASES[name])
    return _stock[name, floatx]


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("name", cases.CASES)
def test_float64(name, column, strategies, float64):
    expected = stock(name, "float64")
    result = cases.run(cases.CASES[name], strategies[column])
    assert result.largest_difference(expected) < 1e-9
    assert result.loss_difference(expected) < 1e-9
    np.testing.assert_allclose(
        result.evaluation, expected.evaluation, rtol=1e-9
    )
    np.testing.assert_allclose(
        result.predictions, expected.predictions, atol=1e-9
    )


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("name", ["sgd/uneven", "adam/uneven"])
def test_float32(name, column, strategies):
    expected = stock(name, "float32")
    result = cases.run(cases.CASES[name], strategies[column])
    assert result.loss_difference(expected) < 1e-5
    if name.startswith("sgd"):
        assert result.largest_difference(expected) < 1e-5

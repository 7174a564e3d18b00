"""Which tests the default leaves to the full tier (`make test-full`)."""

import pytest

full = pytest.mark.full


def tiered(rows, quick):
    """Returns rows for `parametrize`, those not in `quick` marked as full."""
    missing = [row for row in quick if row not in rows]
    assert not missing, missing
    marked = []
    for row in rows:
        values = row if isinstance(row, tuple) else (row,)
        marks = () if row in quick else (full,)
        marked.append(pytest.param(*values, marks=marks))
    return marked

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


def dealt(rows, columns, refused=()):
    """Returns pairs of a column and a row: each row with one column, in turn.

    `make parity` runs each row with each column.
    """
    pairs = []
    for turn, row in enumerate(rows):
        for skipped in range(len(columns)):
            pair = columns[(turn + skipped) % len(columns)], row
            if pair not in refused:
                pairs.append(pair)
                break
    return pairs

"""Which tier runs a test: default, full, or the whole matrix.

CONTRIBUTING.md has the rule.
"""

import collections

import pytest

full = pytest.mark.full
matrix = pytest.mark.matrix


def tiered(rows, quick, full_of=None):
    """Returns rows for `parametrize`, marked by the tier that runs them.

    Args:
        rows: Values, or tuples of values.
        quick: Those of the default tier.
        full_of: Those that the full tier has besides; all by default. The
            rest is in the matrix alone.
    """
    full_of = rows if full_of is None else full_of
    missing = [row for row in (*quick, *full_of) if row not in rows]
    assert not missing, missing
    marked = []
    for row in rows:
        values = row if isinstance(row, tuple) else (row,)
        marks = () if row in quick else full if row in full_of else matrix
        marked.append(pytest.param(*values, marks=marks))
    return marked


def sampled(rows, quick):
    """Returns the same of a matrix of which the full tier has a sample.

    Each value of each place is in a row of the default or the full tier.
    """
    return tiered(rows, quick, covering(rows, quick))


def covering(rows, held=()):
    """Returns rows so that each value of each place is in one of them.

    Args:
        rows: Tuples of one length.
        held: Rows whose values need no other row.
    """
    used = collections.Counter(pair for row in held for pair in enumerate(row))
    chosen = []

    def gain(row):
        pairs = [*enumerate(row)]
        # Of those that bring as much, the one with the rarest values.
        return sum(not used[p] for p in pairs), -sum(used[p] for p in pairs)

    while gain(row := max(rows, key=gain))[0]:
        chosen.append(row)
        used.update(enumerate(row))
    return chosen


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

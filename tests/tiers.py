"""Which tier runs a test: default, full, or the whole matrix.

CONTRIBUTING.md has the rule.
"""

import collections
import json
import pathlib
import zlib

import pytest

full = pytest.mark.full
matrix = pytest.mark.matrix


def tiered(rows, quick, full_of=None):
    """Returns rows for `parametrize`, marked by the tier that runs them.

    Args:
        rows: Values, or tuples of values.
        quick: Those of the default tier.
        full_of: Those of which the full tier has one; all by default. The
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


# Their cases share a cluster, which is most of what they take.
WHOLE = ("tests/cluster/", "tests/launch/")
FAULTS = pathlib.Path(__file__).parents[1] / "docs" / "mutations.json"


def leave_to_the_matrix(items):
    """Marks items so that the full tier has one case of each test.

    Which one depends on the test's name, so that the tests of a file train on
    different strategies. Cases that saw a planted fault stay too.

    Args:
        items: Those that pytest collected.
    """
    faults = json.loads(FAULTS.read_text())["faults"].values()
    seeing = {found["test"] for found in faults}
    tests = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("full") and not item.nodeid.startswith(
            WHOLE
        ):
            tests[item.nodeid.partition("[")[0]].append(item)
    for name, cases in tests.items():
        kept = cases[zlib.crc32(name.encode()) % len(cases)]
        for case in cases:
            if case is not kept and case.nodeid not in seeing:
                case.add_marker(matrix)

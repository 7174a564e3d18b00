"""The verdict on a row in a column."""

import functools
import re

import numpy as np

from tests.conformance.harness import differences, observe
from tests.conformance.ledger import Cell

# A worker that waits for others says so; it says nothing of numbers.
_OF_THE_START = "waits for"


@functools.cache
def reference(row):
    """What Keras alone leaves, once for all columns."""
    return observe(row, None)


def cell(row, column, strategy, options=None):
    """Runs a row in a column of this process."""
    if reference(row).kind != "ran":
        return left_out(row)
    return verdict(row, column, observe(row, strategy, options))


def left_out(row):
    """The cell of a row that Keras itself does not run."""
    why = reference(row).message.splitlines()[0]
    return Cell("left out", 0.0, f"Keras itself refuses: {why[:200]}")


def verdict(row, column, outcome):
    """Judges an outcome against the reference.

    Args:
        row: The row.
        column: Its column; on one device less is excused.
        outcome: What the row left there.

    Returns:
        The cell.
    """
    if outcome.kind == "refused":
        if "\n" in outcome.message:
            return Cell("CRASH", np.inf, f"refused, but {outcome.message}")
        return Cell("refused", 0.0, outcome.message)
    if outcome.kind == "crashed":
        return Cell("CRASH", np.inf, outcome.message)
    found = differences(outcome, reference(row))
    largest = max(found.values(), default=0.0)
    wrong = {k: v for k, v in found.items() if not v <= row.tolerance}
    if not wrong:
        return Cell("equal", largest)
    note = _worst(wrong)
    named = [w for w in outcome.warnings if _OF_THE_START not in w]
    if named:
        warning = named[0].splitlines()[0]
        return Cell("documented", largest, f"warned: {warning}")
    left = [label for label in wrong if not _excused(row, column, label)]
    if left:
        return Cell("SILENT", largest, note)
    phrases = "; ".join(excuse.phrase for excuse in row.excuses)
    return Cell("documented", largest, phrases)


def _excused(row, column, label):
    return any(
        re.search(excuse.what, label)
        for excuse in row.excuses
        if excuse.everywhere or column != "one_device"
    )


def _worst(wrong):
    """The labels that differ, the largest first."""
    order = sorted(wrong, key=lambda label: -wrong[label])
    shown = ", ".join(f"{label}: {wrong[label]:.1e}" for label in order[:3])
    more = f" and {len(order) - 3} more" if len(order) > 3 else ""
    return shown + more

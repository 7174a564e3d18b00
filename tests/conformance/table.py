"""The table of rows, docs/conformance.md or beside another ledger."""

import itertools
import os

from tests.conformance.ledger import ROOT

FILE = ROOT / "docs" / "conformance.md"
GUARANTEES = ROOT / "docs" / "guarantees.md"

HEAD = """# The conformance suite

Measured on {date} with {versions}, by `make conformance`, on parts of a CPU
and processes of one machine. {sources}

Each row is a program as a user of Keras writes it. It is run by Keras's own
`fit` on one device, and by the `Trainer` in each column: the same initial
weights, the same order of the examples, a smaller last batch. Compared are
losses, metrics, weights, other state, the slots of optimizers, scores and
predictions.

- **equal**: within 1e-9 in float64; within 1e-6 where a metric of Keras
  computes in float32, and 1e-5 where TensorFlow has no op for float64.
- **refused**: a `ConfigurationError` of one line that names the remedy.
- **documented**: it differs by nature, and [guarantees.md]({guarantees}) or
  a warning says so.
- A row that Keras itself does not run is left out.
"""


def write(ledger, columns, file=FILE):
    """Writes the table of what the ledger has.

    Args:
        ledger: Its cells.
        columns: In their order.
        file: Where to.
    """
    from tests.conformance.rows import ROWS

    guarantees = os.path.relpath(GUARANTEES, file.parent)
    head = HEAD.format(**ledger.head, guarantees=guarantees)
    known = {
        name: row
        for name, row in ROWS.items()
        if any(ledger.has(name, column) for column in columns)
    }
    lines = [head, _summary(ledger, columns, known), ""]
    by_group = itertools.groupby(
        sorted(known.values(), key=lambda row: row.group),
        key=lambda row: row.group,
    )
    notes = []
    for group, rows in by_group:
        lines += [
            f"## {group}",
            "",
            "| row | " + " | ".join(columns) + " |",
            "|---|" + "---|" * len(columns),
        ]
        for row in rows:
            cells = [ledger.cell(row.name, column) for column in columns]
            shown = " | ".join(_shown(cell, notes) for cell in cells)
            lines.append(f"| {_plain(row.name)} | {shown} |")
        lines.append("")
    lines += ["## Notes", ""]
    lines += [f"{i}. {note}" for i, note in enumerate(notes, 1)]
    file.write_text("\n".join(lines) + "\n")


def _summary(ledger, columns, rows):
    lines = [
        "| | " + " | ".join(columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    verdicts = ["equal", "refused", "documented", "SILENT", "CRASH", "left out"]
    for verdict in verdicts:
        counts = [
            sum(
                cell is not None and cell.verdict == verdict
                for cell in (ledger.cell(name, column) for name in rows)
            )
            for column in columns
        ]
        lines.append(f"| {verdict} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join(lines)


def _shown(cell, notes):
    """A cell as text; what it says is put among the notes, once."""
    if cell is None:
        return ""
    if cell.verdict == "equal":
        return f"equal {cell.difference:.0e}"
    note = _plain(cell.note)
    if note not in notes:
        notes.append(note)
    number = notes.index(note) + 1
    mark = f"**{cell.verdict}**" if cell.verdict.isupper() else cell.verdict
    return f"{mark} [{number}]"


def _plain(text):
    return " ".join(text.split()).replace("|", "\\|")

"""What was found so far, kept in a file as it comes."""

import dataclasses
import datetime
import importlib.metadata
import json

from tests import tables

ROOT = tables.ROOT
FILE = tables.CONFORMANCE.results
RED = ("SILENT", "CRASH")
# Stands in a cell while it is run: a process that dies leaves it there.
BEGUN = "begun"


@dataclasses.dataclass(frozen=True)
class Cell:
    """One row in one column.

    Attributes:
        verdict: See `run`; "left out" where Keras itself refuses.
        difference: The largest of all that were seen.
        note: What differs most, or the message.
    """

    verdict: str
    difference: float = 0.0
    note: str = ""


class Ledger:
    """Cells by row and column, in a file.

    Args:
        values: What the file holds.
        file: Its path.
    """

    def __init__(self, values, file=FILE):
        self._values = values
        self._file = file

    @classmethod
    def open(cls, keep=False, file=FILE):
        """Reads what an earlier run has left, if it was of the same sources.

        Args:
            keep: Whether cells that held are kept whatever has changed.
            file: Where it is kept.
        """
        head = _head()
        if file.exists():
            values = json.loads(file.read_text())
            same = all(values[name] == head[name] for name in head)
            for row in values["rows"].values():
                for column in list(row):
                    verdict = row[column]["verdict"]
                    if verdict == BEGUN:
                        row[column] = dataclasses.asdict(
                            Cell("CRASH", float("inf"), "the process died")
                        )
                    elif keep and verdict in RED:
                        del row[column]
            if same:
                return cls(values, file)
            if keep:
                return cls(values | head | {"kept": True}, file)
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        return cls(head | {"date": today, "rows": {}}, file)

    def has(self, name, column):
        return column in self._values["rows"].get(name, {})

    def cell(self, name, column):
        found = self._values["rows"].get(name, {}).get(column)
        return None if found is None else Cell(**found)

    def begin(self, name, column):
        """Notes that a cell is run now."""
        self._put(name, column, Cell(BEGUN))

    def note(self, name, column, cell):
        """Notes what was found, and prints it."""
        self._put(name, column, cell)
        print(
            f"{cell.verdict:10} {cell.difference:.1e} {column} | {name}"
            + (f" | {cell.note}" if cell.note else ""),
            flush=True,
        )

    def red(self):
        """Returns `(row, column)` of the cells that must not be."""
        return [
            (name, column)
            for name, row in self._values["rows"].items()
            for column, cell in row.items()
            if cell["verdict"] in RED
        ]

    def size(self):
        return sum(len(row) for row in self._values["rows"].values())

    @property
    def head(self):
        """When, with which versions and of which sources."""
        versions = self._values["versions"].items()
        return {
            "date": self._values["date"],
            "versions": ", ".join(f"{n} {v}" for n, v in versions),
            "sources": tables.stated(self._values),
        }

    def _put(self, name, column, cell):
        rows = self._values["rows"]
        rows.setdefault(name, {})[column] = dataclasses.asdict(cell)
        self._file.write_text(json.dumps(self._values, indent=1) + "\n")


def _head():
    return {
        "sources": tables.CONFORMANCE.digest(),
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("tensorflow", "keras", "numpy")
        },
    }

"""The tables that long runs write, and whether they are of these sources.

    python -m tests.tables          (or: make release-check)

Each change of the package makes every table old, so the tiers only tell it.
Before a release all must be new: this exits with status 1 where one is not.
"""

import dataclasses
import hashlib
import json
import pathlib
import sys

from tests import clusters

ROOT = pathlib.Path(clusters.ROOT)
# Of a digest, what pages and messages show.
SHOWN = 12


@dataclasses.dataclass(frozen=True)
class Table:
    """A page of docs/, and the results that it is made from.

    Attributes:
        name: Of `docs/NAME.json` and of the folder `tests/NAME`.
        command: What writes it.
    """

    name: str
    command: str

    @property
    def results(self):
        """The file with its results."""
        return ROOT / "docs" / f"{self.name}.json"

    def digest(self):
        """The SHA-256 of the package, and of what measures; not of tests."""
        digest = hashlib.sha256()
        measures = ROOT.glob(f"tests/{self.name}/*.py")
        for path in sorted(
            [
                *ROOT.glob("mgpu_tf/**/*.py"),
                *(p for p in measures if not p.name.startswith("test_")),
            ]
        ):
            digest.update(f"{path.relative_to(ROOT)}\n".encode())
            digest.update(path.read_bytes())
        return digest.hexdigest()

    def old(self):
        """One line that says why it is not of these sources; or nothing."""
        page = f"docs/{self.name}.json"
        if not self.results.exists():
            return f"{page} is missing. Run: {self.command}"
        values = json.loads(self.results.read_text())
        known, now = values.get("sources", "unknown"), self.digest()
        if known != now:
            why = f"of other sources: {known[:SHOWN]}, now {now[:SHOWN]}"
        elif values.get("kept"):
            why = "partly of older sources"
        elif values.get("part"):
            why = "a part of it only"
        else:
            return ""
        return f"{page} is {why}. Run: {self.command}"


def stated(values):
    """The sentence of a page about the sources that its results are of.

    Args:
        values: What the file with the results holds.
    """
    if "sources" not in values:
        return "The sources have changed since then."
    kept = " Some results are of older sources." if values.get("kept") else ""
    part = " Not all of its cells were run." if values.get("part") else ""
    return f"Digest of the sources: {values['sources'][:SHOWN]}.{kept}{part}"


PARITY = Table("parity", "make parity")
CONFORMANCE = Table("conformance", "make conformance")
SOAK = Table("soak", "make soak")
MATRIX = Table("matrix", "make matrix")
VERSIONS = Table("versions", "make test-versions")
MUTATIONS = Table("mutations", "make mutations")
ALL = (PARITY, CONFORMANCE, SOAK, MATRIX, VERSIONS, MUTATIONS)


def old():
    """A line for each table that is not of these sources."""
    return [line for line in (table.old() for table in ALL) if line]


def main():
    lines = old()
    for line in lines:
        print(line)
    if not lines:
        print(f"{len(ALL)} tables are of these sources")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())

"""The tests that are marked `matrix`, and the table of them.

    make matrix              (or: python -m tests.matrix.run)

They are the cells of a matrix of which the tiers have a sample. Results are in
docs/matrix.json, the table is docs/matrix.md. Hardware: any; on 2 quiet CPU
cores two hours. Exits with status 1 where one fails.
"""

import collections
import datetime
import importlib.metadata
import json
import subprocess
import sys

from tests import tables

ROOT = tables.ROOT
RESULTS = tables.MATRIX.results
PAGE = ROOT / "docs" / "matrix.md"
OUTCOMES = ("passed", "failed", "skipped")

HEAD = """# Cells that the tiers leave out

Measured on {date} with {versions}, by `make matrix`. Tests that train the same
program on many strategies are a matrix. `make test` and `make test-full` have
a sample of it; these are the other cells. {sources}

| file | {outcomes} |
|---|---|---|---|
"""


def write(values):
    """Keeps the results, and writes the table."""
    RESULTS.write_text(json.dumps(values, indent=1) + "\n")
    versions = ", ".join(f"{n} {v}" for n, v in values["versions"].items())
    text = HEAD.format(
        date=values["date"],
        versions=versions,
        sources=tables.stated(values),
        outcomes=" | ".join(OUTCOMES),
    )
    for file, counts in values["files"].items():
        cells = " | ".join(str(counts.get(each, 0)) for each in OUTCOMES)
        text += f"| `{file}` | {cells} |\n"
    PAGE.write_text(text)


def main():
    digest = tables.MATRIX.digest()
    record = ROOT / "runs" / "matrix.json"
    record.unlink(missing_ok=True)
    status = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-m", "matrix"),
            *("--numprocesses=3", "--no-loadscope-reorder"),
            *("-p", "tests.record", f"--record={record}", *sys.argv[1:]),
        ],
        cwd=ROOT,
        check=False,
    ).returncode
    files = collections.defaultdict(collections.Counter)
    outcomes = json.loads(record.read_text())["outcomes"]
    for test, outcome in sorted(outcomes.items()):
        files[test.partition("::")[0]][outcome] += 1
    values = {
        "sources": digest,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("tensorflow", "keras", "numpy")
        },
        # Of a run that was told to leave some out.
        "part": bool(sys.argv[1:]),
        "files": files,
    }
    write(values)
    return status


if __name__ == "__main__":
    sys.exit(main())

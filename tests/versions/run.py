"""The default tests with the versions at the ends of the range.

    make test-versions              (or: python -m tests.versions.run)
    make test-versions ENDS=oldest ARGS="tests/runtime tests/engine"

*oldest* has the first release series of TensorFlow and of Keras in the range
of setup.cfg, on the first Python; *newest* what the installer finds, on the
last. Each gets an environment of its own in .venvs/. Results are kept in
docs/versions.json; the table is in docs/versions.md. Hardware: any; on 2 quiet
CPU cores about 10 minutes for each. Exits with status 1 where a test fails.
"""

import argparse
import configparser
import dataclasses
import datetime
import glob
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

from packaging.requirements import Requirement

from tests import tables

ROOT = tables.ROOT
RESULTS = tables.VERSIONS.results
PAGE = ROOT / "docs" / "versions.md"
MARKS = ("<!-- ends: begin -->", "<!-- ends: end -->")
RANGED = ("tensorflow", "keras")
WHOLE = "all of `make test`"
COLUMNS = ("date", "end", "python", *RANGED, "tests", "passed", "failed")


@dataclasses.dataclass(frozen=True)
class End:
    """An end of the range.

    Attributes:
        python: Such as "3.11".
        requirements: What is installed besides the package and its tests.
    """

    python: str
    requirements: tuple[str, ...]


def ends():
    """The ends of the range that setup.cfg has, by name."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    pythons = re.findall(
        r"Python :: (3\.\d+)$", config["metadata"]["classifiers"], re.MULTILINE
    )
    first = tuple(
        f"{requirement.name}=={bound.version}.*"
        for requirement in map(
            Requirement, config["options"]["install_requires"].split()
        )
        for bound in requirement.specifier
        if requirement.name in RANGED and bound.operator == ">="
    )
    # A newer one goes with no protobuf that TensorFlow 2.19 goes with, and pip
    # does not know.
    first += ("tensorflow-metadata<1.18",)
    return {"oldest": End(pythons[0], first), "newest": End(pythons[-1], ())}


def interpreter(version):
    """The path of a Python of this version."""
    candidates = [
        shutil.which(f"python{version}"),
        *glob.glob(
            os.path.expanduser(f"~/.pyenv/versions/{version}.*/bin/python")
        ),
    ]
    code = "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"
    for candidate in filter(None, candidates):
        done = subprocess.run(
            [candidate, "-c", code], capture_output=True, text=True, check=False
        )
        found, _, path = done.stdout.strip().partition(" ")
        if found == version:
            return path
    sys.exit(
        f"Python {version} is not installed. Received: {os.environ['PATH']}"
    )


def environment(name, end):
    """Makes the environment of an end; returns its Python."""
    uv = pathlib.Path(sys.executable).with_name("uv")
    folder = ROOT / ".venvs" / name
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run(
            [
                uv,
                "venv",
                "--quiet",
                "--python",
                interpreter(end.python),
                folder,
            ],
            check=True,
        )
    subprocess.run(
        [
            *(uv, "pip", "install", "--quiet", "--python", python, "--upgrade"),
            *("-e", f"{ROOT}[test]", *end.requirements),
        ],
        check=True,
    )
    return python


def versions_in(python):
    """The versions of Python, TensorFlow and Keras in an environment."""
    code = (
        "import json, platform; from importlib.metadata import version; "
        "print(json.dumps({'python': platform.python_version()} | "
        f"{{name: version(name) for name in {RANGED}}}))"
    )
    done = subprocess.run(
        [python, "-c", code], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout)


def run(name, end, processes, arguments):
    """Runs the tests at an end; returns a row of the table."""
    python = environment(name, end)
    record = ROOT / "runs" / "versions" / f"{name}.json"
    record.unlink(missing_ok=True)
    code = subprocess.run(
        [
            *(python, "-m", "pytest", "-p", "tests.record"),
            *(f"--record={record}", f"--numprocesses={processes}"),
            *("--no-loadscope-reorder", *arguments),
        ],
        cwd=ROOT,
        check=False,
    ).returncode
    outcomes = json.loads(record.read_text())["outcomes"].values()
    return versions_in(python) | {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "end": name,
        "tests": " ".join(arguments) or WHOLE,
        "passed": sum(outcome == "passed" for outcome in outcomes),
        "failed": sum(outcome == "failed" for outcome in outcomes),
        "status": code,
    }


def table(rows):
    """The rows as a table of Markdown."""
    return "\n".join(
        [
            "| " + " | ".join(COLUMNS) + " |",
            "|" + "---|" * len(COLUMNS),
            *(
                "| " + " | ".join(str(row[name]) for name in COLUMNS) + " |"
                for row in rows
            ),
        ]
    )


def write(values):
    """Keeps the results, and writes the table."""
    RESULTS.write_text(json.dumps(values, indent=1) + "\n")
    before, rest = PAGE.read_text().split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    text = f"{tables.stated(values)}\n\n{table(values['rows'])}"
    PAGE.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}")


def main():
    known = ends()
    parser = argparse.ArgumentParser()
    parser.add_argument("--ends", default=",".join(known))
    parser.add_argument("--processes", default="3")
    arguments, tests = parser.parse_known_args()
    digest = tables.VERSIONS.digest()
    status = 0
    for name in arguments.ends.split(","):
        row = run(name, known[name], arguments.processes, tests)
        status = status or row["status"]
        values = {"sources": digest, "rows": []}
        if RESULTS.exists():
            old = json.loads(RESULTS.read_text())
            if old["sources"] == digest:
                values = old
        values["rows"] = [
            one
            for one in values["rows"]
            if (one["end"], one["tests"]) != (row["end"], row["tests"])
        ] + [row]
        whole = {one["end"] for one in values["rows"] if one["tests"] == WHOLE}
        values["part"] = whole != set(known)
        write(values)
    return status


if __name__ == "__main__":
    sys.exit(main())

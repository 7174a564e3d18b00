"""Plants each fault in a copy of the package, and says which tier sees it.

    make mutations
    python -m tests.mutations.run --only=clip --tests_of=../older --seconds=60

Of each fault the tests that are named with it run, those of the default tier
first, and no more of them than until one fails. That one runs on the unbroken
code too: where it fails there, it says nothing of the fault, which is not
decided. Results are kept in docs/mutations.json; the table is
docs/mutations.md. With --tests_of another checkout is broken and tested, to
compare with. Hardware: any; on 2 quiet CPU cores about 40 minutes. Exits with
status 1 where no test sees a fault, or one is not decided.
"""

import argparse
import datetime
import functools
import json
import os
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import time

from tests import tables
from tests.mutations.faults import FAULTS

RESULTS = tables.MUTATIONS.results
PAGE = tables.ROOT / "docs" / "mutations.md"

# What `pytest -m` selects, by the tier that runs it.
TIERS = {
    "default": "not full and not matrix and not gpu",
    "full": "full and not matrix",
    "matrix": "matrix",
}
# A fault may be a hang; a busy machine takes long without one.
LIMIT_SECONDS = 3600
UNSEEN = "**none**"
# The test that failed does so without the fault.
UNDECIDED = "**not decided**"
TIME_LIMIT = "the time limit"
GONE = "the line is gone"

HEAD = """# Faults that the tests see

By `make mutations`. Each fault is one edit of one file, planted in a copy of
the package; `tests/mutations/faults.py` has them. The tests that may see it
run until one fails. *Seen by* is the first tier with such a test: `default`
is `make test`, `full` is `make test-full`, `matrix` runs before a release. The
test passes without the fault: *not decided* is where it does not.
*Before* is what saw it before tests were moved from tier to tier; blank where
the test that sees it has its tier from before.

{stated} {count} of {all} faults were planted, {seen} are seen by the default or
the full tier.

| fault | file | seen by | before | test |
|---|---|---|---|---|
"""


def planted(fault, root, folder):
    """Copies a checkout, plants a fault; returns whether it was there."""
    for name in ("mgpu_tf", "tests", "experiments", "notebooks", "docs"):
        shutil.copytree(
            root / name,
            folder / name,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    for path in root.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    path = folder / "mgpu_tf" / fault.file
    text = path.read_text() if path.exists() else ""
    if text.count(fault.right) != 1:
        return False
    path.write_text(text.replace(fault.right, fault.wrong))
    return True


def tested(tests, folder, marks):
    """Runs tests of a checkout; returns the exit code and what was printed.

    In a fork of this process, which has imported TensorFlow: to import it
    costs more than most of the tests.
    """
    with tempfile.TemporaryFile("w+") as output:
        pid = os.fork()
        if not pid:
            code = 3
            try:
                os.setsid()
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                code = _pytest_in(tests, folder, marks)
            finally:
                sys.stdout.flush()
                os._exit(code)
        limit = time.monotonic() + LIMIT_SECONDS
        ended = (0, 0)
        try:
            while not ended[0] and time.monotonic() < limit:
                time.sleep(0.1)
                ended = os.waitpid(pid, os.WNOHANG)
        finally:
            if not ended[0]:
                os.killpg(pid, signal.SIGKILL)
                ended = os.waitpid(pid, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(ended[1]), output.read()


def _pytest_in(tests, folder, marks):
    """Runs tests of the checkout in a folder, with its package."""
    import pytest

    for name in list(sys.modules):
        if name.partition(".")[0] in ("tests", "mgpu_tf"):
            del sys.modules[name]
    os.chdir(folder)
    sys.path[0] = str(folder)
    os.environ["PYTHONPATH"] = str(folder)
    return pytest.main(
        ["-x", "-q", "-m", marks, "-p", "no:cacheprovider", *tests]
    )


@functools.cache
def passes(tests, root):
    """Returns whether tests pass on the unbroken code; each is run once.

    Of whatever tier: which one a case has depends on those collected with it.
    """
    return tested(tests, root, "not gpu")[0] == 0


def seen_by(fault, root):
    """Returns the tier that sees a fault, and the test that did."""
    tier, test = failed_with(fault, root)
    if tier in TIERS:
        tests = fault.tests if test == TIME_LIMIT else (test,)
        if not passes(tests, root):
            return UNDECIDED, test
    return tier, test


def failed_with(fault, root):
    """Plants a fault; returns the first tier of which a test fails, and it."""
    with tempfile.TemporaryDirectory(prefix="mgpu_tf_fault_") as name:
        folder = pathlib.Path(name)
        if not planted(fault, root, folder):
            return GONE, ""
        for tier, marks in TIERS.items():
            code, output = tested(fault.tests, folder, marks)
            if code in (0, 5):  # All passed, or there are none.
                continue
            failed = re.search(
                r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.M
            )
            if failed is not None:
                return tier, failed[1]
            if code == -signal.SIGKILL:
                return tier, TIME_LIMIT
            raise RuntimeError(output[-6000:])
    return UNSEEN, ""


def is_seen(found):
    return found in ("default", "full")


def write(values):
    """Keeps the results, and writes the table."""
    RESULTS.write_text(json.dumps(values, indent=1) + "\n")
    rows = [(f, values["faults"].get(f.name)) for f in FAULTS]
    rows = [(fault, row) for fault, row in rows if row is not None]
    text = HEAD.format(
        stated=tables.stated(values),
        count=len(rows),
        seen=sum(is_seen(row["seen"]) for _, row in rows),
        all=len(FAULTS),
    )
    for fault, row in rows:
        text += (
            f"| {fault.name} | `{fault.file}` | {row['seen']} | "
            f"{row.get('before', '')} | {row['test']} |\n"
        )
    PAGE.write_text(text)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="a pattern of names")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--tests_of", default="", help="another checkout")
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras  # noqa: F401  For all that are forked.

    digest = tables.MUTATIONS.digest()
    values = {"faults": {}}
    if RESULTS.exists():
        values = json.loads(RESULTS.read_text())
    end = time.monotonic() + arguments.seconds
    for fault in FAULTS:
        if time.monotonic() > end or not re.search(arguments.only, fault.name):
            continue
        row = values["faults"].setdefault(fault.name, {"seen": "", "test": ""})
        if arguments.tests_of:
            root = pathlib.Path(arguments.tests_of).resolve()
            row["before"], _ = seen_by(fault, root)
        elif row.get("sources") != digest or row["seen"] == UNDECIDED:
            row["seen"], row["test"] = seen_by(fault, tables.ROOT)
            row["sources"] = digest
            row["date"] = datetime.date.today().isoformat()
        print(f"{row['seen'] or row['before']:10} {fault.name}", flush=True)
        of = {row.get("sources") for row in values["faults"].values()}
        values["sources"] = digest
        values["kept"] = of != {digest} or len(values["faults"]) < len(FAULTS)
        write(values)
    found = [row["seen"] for row in values["faults"].values()]
    print(f"{len(found)} faults, {sum(map(is_seen, found))} seen")
    return 1 if not all(map(is_seen, found)) else 0


if __name__ == "__main__":
    sys.exit(main())

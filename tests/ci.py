"""What a change must pass: lint, docs, the default tests, the full tier.

    .ci/run

All that runs decides. A test that fails runs once more, alone; if it passes
then, it is printed as flaky and counted, to be mended or deleted. Hardware:
two cores, up to an hour; root, for what starts clusters. No test begins after
75 minutes, and none runs once more after 82. If tests of the default tier are
left then, the run fails. Those of the full tier come in an order that the
commit draws: what a busy machine leaves is counted, and the next commits begin
with other files.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
RECORDS = ROOT / "runs" / "ci"

LAST_TEST_MINUTES = 75
# What failed then is known, and has time to run alone.
LAST_AGAIN_MINUTES = 82
END_MINUTES = 88
# Of one tier. Where more fail, the reason is no chance.
MOST_FLAKY = 20

BEGAN = time.time()


def minutes():
    return (time.time() - BEGAN) / 60


def run(*command):
    """Runs it, at most until the end; says how long it took."""
    began = minutes()
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        status = process.wait(max(1.0, (END_MINUTES - began) * 60))
    except subprocess.TimeoutExpired:
        print(f"ENDED after {END_MINUTES} minutes", file=sys.stderr)
        status = 1
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    print(f"{' '.join(command[:2])}: {minutes() - began:.1f} min")
    return status


def pytest(
    target, record, *arguments, settings=(), until_minutes=LAST_TEST_MINUTES
):
    """Runs tests by `make`; returns the status and what became of each."""
    record.unlink(missing_ok=True)
    arguments = [
        "-p tests.deadline",
        f"--until={BEGAN + until_minutes * 60}",
        "-p tests.record",
        f"--record={record}",
        *arguments,
    ]
    status = run("make", target, *settings, f"ARGS={' '.join(arguments)}")
    return status, json.loads(record.read_text()) if record.exists() else {}


def tier(name, *arguments):
    """Runs a tier, and what failed once more; returns (passed, flaky)."""
    record = RECORDS / f"{name}.json"
    status, seen = pytest(name, record, *arguments)
    if not seen:
        return False, []
    spent = seen["processor_seconds"] / 60
    print(f"{name}: {spent:.1f} processor minutes. The dearest files:")
    for file, seconds in list(seen["files"].items())[:12]:
        print(f"  {seconds:6.0f} s  {file}")
    ends = seen["outcomes"]
    left = sum(end == "not run" for end in ends.values())
    print(f"{name}: {left} of {len(ends)} tests NOT RUN")
    failed = [test for test, end in ends.items() if end == "failed"]
    if not status or not 0 < len(failed) <= MOST_FLAKY:
        return not status, []
    # One to a line, since names have spaces and brackets.
    again = RECORDS / f"{name}-again.txt"
    again.write_text("".join(f"{test}\n" for test in failed))
    status, seen = pytest(
        name,
        RECORDS / f"{name}-again.json",
        f"@{again}",
        settings=[
            "THREE=--numprocesses=0",
            "FOUR=--numprocesses=0",
        ],
        until_minutes=LAST_AGAIN_MINUTES,
    )
    outcomes = seen.get("outcomes", {})
    flaky = [test for test in failed if outcomes.get(test) == "passed"]
    return not status and len(flaky) == len(failed), flaky


def commit():
    """Returns the name of the commit that is checked."""
    return subprocess.check_output(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, text=True
    ).strip()


def missing_for_clusters():
    """What the tests of the full tier that start clusters lack; or nothing."""
    if os.geteuid() or subprocess.call(["unshare", "--net", "true"]):
        return "root and network namespaces"
    for _ in range(3):
        # What it gets from a mirror may come the next time.
        if not run("make", "slurm"):
            return ""
    return "the packages of `make slurm`"


def main():
    # In turn with what the commands print.
    sys.stdout.reconfigure(line_buffering=True)
    RECORDS.mkdir(parents=True, exist_ok=True)
    red, flaky = [], []

    def decide(name, *arguments):
        passed, found = tier(name, *arguments)
        flaky.extend(found)
        if not passed:
            red.append(f"make {name}")

    if run("make", "lint"):
        red.append("make lint")
    if run("make", "docs"):
        red.append("make docs")
    decide("test")
    drawn = f"--drawn-by={commit()}"
    if missing := missing_for_clusters():
        red.append(f"make test-clusters, which needs {missing}: NOT RUN")
        decide("test-rest", drawn)
    else:
        decide("test-full", drawn)
    run(".venv/bin/python", "-m", "tests.tables")
    for test in flaky:
        print(f"FLAKY: {test}")
    print(f"{len(flaky)} flaky, {minutes():.1f} minutes in all")
    for what in red:
        print(f"NOT GREEN: {what}", file=sys.stderr)
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main())

"""Breaks jobs again and again, and compares their weights with controls.

    make soak FAULTS=30 SEED=2

Goes on from the ledger `docs/soak.json` where it has the same seed. Faults of
older sources stay in it, and do not count. Hardware: any; on 2 quiet cores a
fault costs 15 to 30 seconds. Expected last line: "30 faults, 30 completed, 30
right".
"""

import argparse
import dataclasses
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time

from tests import clusters, tables
from tests.soak.harness import (
    PAUSE_SECONDS,
    TASKS,
    TOTAL_STEPS,
    Job,
    faults_of,
)

FAULTS_OF_A_JOB = 7
# Its numbers depend on which worker was faster; its steps do not.
ASYNCHRONOUS = "parameter_server"
DOCS = os.path.join(clusters.ROOT, "docs")
LEDGER = str(tables.SOAK.results)
TABLE = os.path.join(DOCS, "soak.md")


def run_job(strategy, faults=()):
    with tempfile.TemporaryDirectory(prefix="mgpu_tf_soak_") as folder:
        return Job(strategy, folder).run(faults)


def read(seed):
    try:
        with open(LEDGER, encoding="utf-8") as file:
            ledger = json.load(file)
        if ledger["seed"] == seed:
            return ledger
    except FileNotFoundError:
        pass
    return {"seed": seed, "controls": {}, "jobs": []}


def write(ledger):
    with open(LEDGER + ".tmp", "w", encoding="utf-8") as file:
        json.dump(ledger, file, indent=1)
        file.write("\n")
    os.replace(LEDGER + ".tmp", LEDGER)
    with open(TABLE, "w", encoding="utf-8") as file:
        file.write(table(ledger))


def control_of(ledger, strategy):
    """Runs two without a fault; they must agree before anything is broken."""
    if strategy == ASYNCHRONOUS:
        return None
    known = ledger["controls"].setdefault(strategy, [])
    while len(known) < 2:
        result = run_job(strategy)
        known.append(result.sha)
        print(f"control {len(known)} of {strategy}: {result.sha[:12]}")
        write(ledger)
    if known[0] != known[1]:
        sys.exit(f"two controls of {strategy} differ")
    return known[0]


def strike(ledger, index, count):
    strategy = list(TASKS)[index % len(TASKS)]
    control = control_of(ledger, strategy)
    generator = random.Random(f"{ledger['seed']}/{index}")
    faults = faults_of(generator, strategy, count)
    entry = {
        "job": index,
        "strategy": strategy,
        "date": time.strftime("%Y-%m-%d"),
        "sources": tables.SOAK.digest(),
        "faults": [dataclasses.asdict(fault) for fault in faults],
    }
    try:
        result = run_job(strategy, faults)
        struck = [dataclasses.asdict(one) for one in result.struck]
        # Those after the end of the job have not struck.
        entry["faults"] = [
            fault | did
            for fault, did in zip(entry["faults"], struck, strict=False)
        ]
        facts = dataclasses.asdict(result)
        del facts["struck"]
        entry |= facts | {
            "completed": True,
            "right": result.step == TOTAL_STEPS
            and control in (None, result.sha),
        }
    except AssertionError as error:
        entry |= {"completed": False, "right": False, "error": str(error)}
    ledger["jobs"].append(entry)
    ledger["sources"] = entry["sources"]
    write(ledger)
    print(
        f"job {index}, {strategy}, {count} faults: "
        + ("right" if entry["right"] else "NOT right")
    )


def totals(ledger, sources=None):
    """How many faults there were, in jobs that completed, that ended right.

    Args:
        sources: Of jobs of these sources alone; of all by default.
    """

    def count(name):
        return sum(
            len(job["faults"])
            for job in ledger["jobs"]
            if job.get(name, True) and sources in (None, job.get("sources"))
        )

    return count("faults"), count("completed"), count("right")


# What each kind of fault is, in the order of the page.
MEANING = {
    "step": "a task is killed between two steps",
    "save": "a task is killed while the chief writes a checkpoint",
    "two": "two tasks are killed at once",
    "supervisor": "the supervisor is killed, and started again by hand",
    "preempt": "SIGTERM to all tasks, started again by hand",
    "stop": "a task is stopped (SIGSTOP) for good",
    "pause": f"a task is stopped for {PAUSE_SECONDS} seconds",
    "pause_all": f"all tasks are stopped for {PAUSE_SECONDS} seconds",
    "damage": "a byte of the newest checkpoint changes; the chief is killed",
    "full": "the disk is full for the chief for a while, then it is killed",
    "read": "a task is killed; each file of a checkpoint fails to open twice",
    "unreadable": "files fail to open until the run has ended with one line",
    "newer": "the newest checkpoint is of a later release until the run has "
    "ended with one line",
    "readonly": "the folder is read-only for two saves; the chief is killed",
    "clock": "the clock of the system jumps by an hour; the chief is killed "
    "two saves later",
    "link": "the link of a machine is cut until the supervisor has lost its "
    "task",
    "start": "the same while tasks start again",
}


def table(ledger):
    """Returns the page; the file beside it has each fault."""
    done = [job for job in ledger["jobs"] if job["completed"]]
    struck = [fault["kind"] for job in done for fault in job["faults"]]
    kinds = [
        f"| `{kind}` | {text} | {struck.count(kind)} |"
        for kind, text in MEANING.items()
    ]
    rows = [
        _row(strategy, jobs)
        for strategy in TASKS
        if (jobs := [job for job in done if job["strategy"] == strategy])
    ]
    notes = [f"- {text}" for text in ledger.get("notes", [])]
    return "\n".join(
        [
            "# Faults survived",
            "",
            "A job with `--checkpoint_dir` and `--max_restarts` goes on after "
            "these faults, by itself or when it is started again. A "
            "synchronous job ends with the weights of a run without faults, "
            "bit for bit. A job with parameter servers does all of its steps.",
            "",
            "## How to run it",
            "",
            "`make soak` trains jobs, breaks them while they run, and compares "
            "their ends. `make soak FAULTS=100 SEED=3` strikes more faults, in "
            "another order. It writes this page and [soak.json](soak.json), "
            "which has each fault.",
            "",
            "## What was measured",
            "",
            f"**{last_line(ledger)}.** {_of_which_sources(ledger)}",
            "",
            "### By kind of fault",
            "",
            "| kind | what happens | struck |",
            "|---|---|---|",
            *kinds,
            "",
            "### By job",
            "",
            "| job | faults | right ends | half-written checkpoints left | "
            "steps done again | cold start, s (median) | fault to new step, s "
            "(median) | ratio of medians | worst ratio |",
            "|---|---|---|---|---|---|---|---|---|",
            *rows,
            "",
            "- A right end: all steps are done, and all weights have the bits "
            "of a run without faults. With parameter servers only the steps "
            "are compared.",
            "- Seconds run from the fault to the first step that had not been "
            "done before, and from the start of the launcher to the first "
            "step. There was no pause between restarts, and the machine had "
            "other work.",
            "- Machines are network namespaces, reached by ssh.",
            *notes,
            "",
        ]
    )


def _of_which_sources(ledger):
    stated = tables.stated(ledger)
    if "sources" not in ledger:
        return stated
    return f"{stated} Of these: {last_line(ledger, ledger['sources'])}."


def _row(strategy, jobs):
    """Returns the line of the jobs of one strategy."""
    faults = [fault for job in jobs for fault in job["faults"]]
    cold = statistics.median(job["cold_start_seconds"] for job in jobs)
    again = statistics.median(fault["seconds"] for fault in faults)
    worst = max(
        fault["seconds"] / job["cold_start_seconds"]
        for job in jobs
        for fault in job["faults"]
    )
    same = sum(len(job["faults"]) for job in jobs if job["right"])
    lost = sum(job["lost_steps"] for job in jobs)
    return (
        f"| {strategy} | {len(faults)} | {same} | "
        f"{sum(fault['torn'] for fault in faults)} | {lost} | {cold:.1f} | "
        f"{again:.1f} | {again / cold:.2f} | {worst:.2f} |"
    )


def last_line(ledger, sources=None):
    faults, completed, right = totals(ledger, sources)
    return f"{faults} faults, {completed} completed, {right} right"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=2)
    arguments = parser.parse_args()
    ledger = read(arguments.seed)
    sources = tables.SOAK.digest()
    if ledger.get("sources") != sources:
        # Other sources may end with other bits.
        ledger["controls"] = {}
    while (have := totals(ledger, sources)[0]) < arguments.faults:
        count = min(FAULTS_OF_A_JOB, arguments.faults - have)
        known = {job["job"] for job in ledger["jobs"]}
        index = next(i for i in itertools.count() if i not in known)
        strike(ledger, index, count)
    write(ledger)
    print(last_line(ledger, sources))
    faults, completed, right = totals(ledger, sources)
    sys.exit(0 if faults == completed == right else 1)


if __name__ == "__main__":
    main()

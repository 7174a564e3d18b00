"""The columns of workers: real processes, one cluster for many rows."""

import json
import os
import subprocess
import tempfile
import time

import numpy as np

from tests import clusters
from tests.conformance import judge
from tests.conformance.harness import Outcome, differences
from tests.conformance.ledger import Cell
from tests.conformance.rows import ROWS
from tests.conformance.worker import outcome_file

# What rows see in files, which the chief alone writes.
OF_THE_CHIEF = ("csv ", "file ", "events ", "summaries ", "training_metadata")
# Without a new outcome for so long a cluster hangs; the first takes longer.
PATIENCE_SECONDS = 300
# Rows of one cluster: what it has found is kept when it ends.
ROWS_OF_A_CLUSTER = 100
# The column of one machine that refusals are compared with.
ONE_MACHINE = "mirrored_x3"


def run(ledger, column, names, num_workers, balance=None):
    """Runs the rows that the ledger lacks, and notes their cells.

    Rows that crashed on one machine come last: each costs a cluster.
    """
    names = [name for name in names if not ledger.has(name, column)]
    names.sort(key=lambda name: _crashed(ledger, name))
    while names:
        part, later = names[:ROWS_OF_A_CLUSTER], names[ROWS_OF_A_CLUSTER:]
        for name in list(part):
            if judge.reference(ROWS[name]).kind != "ran":
                ledger.note(name, column, judge.left_out(ROWS[name]))
                part.remove(name)
        with tempfile.TemporaryDirectory() as folder:
            done, ended = _cluster(part, folder, num_workers, balance)
            said = None
            for name, outcomes in zip(part, done, strict=False):
                cell = _cell(name, column, outcomes)
                if _is_stale(cell, said, ledger.cell(name, ONE_MACHINE)):
                    note = f"refused for the row before: {cell.note}"
                    cell = Cell("CRASH", np.inf, note)
                else:
                    said = cell.note
                ledger.note(name, column, cell)
        if len(done) < len(part) and not _crashes(done):
            name = part[len(done)]
            ledger.note(name, column, Cell("CRASH", np.inf, ended))
            done = [*done, None]
        names = part[len(done) :] + later


def _is_stale(cell, said, elsewhere):
    """Whether a refusal is that of an earlier row, kept by the process."""
    if cell.verdict != "refused" or cell.note != said:
        return False
    return elsewhere is None or elsewhere.note != said


def _crashed(ledger, name):
    found = ledger.cell(name, ONE_MACHINE)
    return found is not None and found.verdict == "CRASH"


def _crashes(done):
    return bool(done) and any(o.kind == "crashed" for o in done[-1])


def _cell(name, column, outcomes):
    """Judges the first worker's outcome, if the others agree."""
    row = ROWS[name]
    crashed = [o for o in outcomes if o.kind == "crashed"]
    if crashed:
        return judge.verdict(row, column, crashed[0])
    first = outcomes[0]
    for other in outcomes[1:]:
        if other.kind != first.kind:
            said = first.message or other.message
            note = f"one worker {first.kind}, another {other.kind}: {said}"
            return Cell("CRASH", np.inf, note)
        apart = {
            label: value
            for label, value in differences(other, first).items()
            if value and not label.startswith(OF_THE_CHIEF)
        }
        if first.kind == "ran" and apart:
            note = f"workers differ in {', '.join(list(apart)[:3])}"
            return Cell("SILENT", max(apart.values()), note)
    return judge.verdict(row, column, first)


def _cluster(names, folder, num_workers, balance):
    """Runs rows in one cluster, as far as it goes.

    Returns:
        The outcomes of all workers for each row that was done, and how the
        cluster ended.
    """
    path = os.path.join(folder, "rows.json")
    with open(path, "w") as file:
        json.dump(names, file)
    log = os.path.join(folder, "log")
    with open(log, "w") as output:
        process = subprocess.Popen(
            [
                *(clusters.PYTHON, "-m", "mgpu_tf", "launch"),
                f"--num_workers={num_workers}",
                *("--startup_seconds=0", "--"),
                *(clusters.PYTHON, "-m", "tests.conformance.worker"),
                *(f"--folder={folder}", f"--rows={path}"),
                *([f"--balance={balance}"] if balance else []),
            ],
            env=clusters.environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        ended = _watch(process, folder)
    done = []
    for number in range(len(names)):
        paths = [outcome_file(folder, number, w) for w in range(num_workers)]
        there = [path for path in paths if os.path.exists(path)]
        outcomes = [Outcome.load(path) for path in there]
        if len(there) < num_workers and not _crashes([outcomes]):
            break
        done.append(outcomes)
    if not done:
        with open(log) as file:
            ended += " " + " ".join(file.read()[-400:].split())
    return done, ended


def _watch(process, folder):
    """Waits until a cluster has ended, or ends it where it hangs."""
    seen, since = -1, time.monotonic()
    while process.poll() is None:
        time.sleep(1.0)
        found = len(os.listdir(folder))
        if found != seen:
            seen, since = found, time.monotonic()
        if time.monotonic() - since > PATIENCE_SECONDS:
            process.terminate()
            process.wait(60)
            return f"no worker went on for {PATIENCE_SECONDS} seconds"
    return f"the cluster ended with status {process.returncode}"

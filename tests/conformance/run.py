"""Every row in every column, and the table of it.

    python -m tests.conformance.run [--only=PATTERN] [--columns=a,b] [--keep]

(or: make conformance)

Verdicts:

    equal       what Keras alone leaves, within 1e-9 in float64
    refused     a ConfigurationError of one line
    documented  it differs where docs/guarantees.md says so, or the package
                has warned of it by name
    SILENT      it differs, and nobody said so
    CRASH       another exception, where Keras runs

Results are kept in docs/conformance.json as they come, so that a run that
was stopped goes on; a change of the package, of the rows or of the versions
starts anew. With --keep only cells that are neither equal nor refused nor
documented are run again. At the end docs/conformance.md is written.
Hardware: any; on 2 CPU cores about 40 minutes. Exits with status 1 where a
cell is SILENT or CRASH.
"""

import argparse
import re
import sys

import mgpu_tf
from mgpu_tf.runtime import quiet_import
from tests.conformance.ledger import Ledger

LOCAL = ("one_device", "mirrored_x2", "mirrored_x3")
WORKERS = "2_workers"
COLUMNS = (*LOCAL, WORKERS)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="a pattern of `group: row`")
    parser.add_argument("--columns", default=",".join(COLUMNS))
    parser.add_argument("--keep", action="store_true")
    arguments = parser.parse_args()
    columns = arguments.columns.split(",")
    quiet_import.import_tensorflow()
    strategies = local_strategies()
    from tests.conformance import judge, rows, table

    names = [
        row.name
        for row in rows.ROWS.values()
        if re.search(arguments.only, f"{row.group}: {row.name}")
    ]
    ledger = Ledger.open(keep=arguments.keep)
    for name in names:
        for column in columns:
            if column in LOCAL and not ledger.has(name, column):
                ledger.begin(name, column)
                cell = judge.cell(rows.ROWS[name], column, strategies[column])
                ledger.note(name, column, cell)
    if WORKERS in columns:
        from tests.conformance import workers

        workers.run(ledger, WORKERS, names)
    table.write(ledger, COLUMNS)
    red = ledger.red()
    print(f"{ledger.size()} cells, {len(red)} silent or crashed")
    return 1 if red else 0


def local_strategies():
    """The strategies of this process, one of them after the other."""
    return {
        "mirrored_x3": mgpu_tf.create_mirrored_strategy(num_virtual_devices=3),
        "mirrored_x2": mgpu_tf.create_mirrored_strategy(num_virtual_devices=2),
        "one_device": mgpu_tf.create_one_device_strategy("CPU:0"),
    }


if __name__ == "__main__":
    sys.exit(main())

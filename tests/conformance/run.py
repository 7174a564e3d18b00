"""Every row in every column, and the table of it.

    python -m tests.conformance.run [--only=PATTERN] [--columns=a,b] [--keep]
        [--ledger=FILE]

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
documented are run again. At the end docs/conformance.md is written; with
--ledger another file is kept, and its table is written beside it. There are
more columns than docs/conformance.md has: one_device, mirrored_x2, 2_workers,
fsdp_x3, tensor_x2, pipeline_x2, data_2_pipeline_2, tensor_2_pipeline_2,
mirrored_x3_in_parts, which has `step_parts`, fsdp_x3_ring and
fsdp_2_tensor_2_ring, whose replicas exchange by collectives, mirrored_x3_idle
and 3_workers_idle, whose second replica has no row in any batch. Hardware:
any; on 2 CPU cores three hours. Exits with status 1 where a cell is SILENT or
CRASH.
"""

import argparse
import pathlib
import re
import sys

import mgpu_tf
from mgpu_tf.runtime import quiet_import
from tests.columns import ONE, parts
from tests.conformance.ledger import FILE, Ledger

COLUMNS = ("mirrored_x3", "3_workers")
# Options of each `Trainer` of a column.
OPTIONS = {"mirrored_x3_in_parts": {"step_parts": 2}}
NUM_WORKERS = {"2_workers": 2, "3_workers": 3, "3_workers_idle": 3}
# The share of the second one is smaller than a row of any batch.
IDLE = "1000,1,1000"
BALANCE = {"3_workers_idle": IDLE}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="a pattern of `group: row`")
    parser.add_argument("--columns", default=",".join(COLUMNS))
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--ledger", type=pathlib.Path, default=FILE)
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
    ledger = Ledger.open(arguments.keep, arguments.ledger)
    for name in names:
        for column in columns:
            if column in strategies and not ledger.has(name, column):
                ledger.begin(name, column)
                row, options = rows.ROWS[name], OPTIONS.get(column)
                cell = judge.cell(row, column, strategies[column], options)
                ledger.note(name, column, cell)
    for column in columns:
        if column in NUM_WORKERS:
            from tests.conformance import workers

            workers.run(
                *(ledger, column, names, NUM_WORKERS[column]),
                BALANCE.get(column),
            )
    if arguments.ledger == FILE:
        table.write(ledger, COLUMNS)
    else:
        file = arguments.ledger.with_suffix(".md").resolve()
        table.write(ledger, columns, file)
    red = ledger.red()
    print(f"{ledger.size()} cells, {len(red)} silent or crashed")
    return 1 if red else 0


def local_strategies():
    """The strategies of this process, one of them after the other."""
    # The first one splits the device, for the largest mesh.
    mgpu_tf.create_mirrored_strategy(**parts(4))
    return {
        "mirrored_x3": mgpu_tf.create_mirrored_strategy(**parts(3)),
        "mirrored_x3_idle": mgpu_tf.create_mirrored_strategy(
            **parts(3), balance=IDLE
        ),
        "mirrored_x2": mgpu_tf.create_mirrored_strategy(**parts(2)),
        # Of the small weights of rows the large ones are split.
        "fsdp_x3": mgpu_tf.create_model_parallel_strategy(
            fsdp=3, **parts(3), smallest_split=4
        ),
        # As GPUs and processes do, they exchange by collectives.
        "fsdp_x3_ring": mgpu_tf.create_model_parallel_strategy(
            fsdp=3,
            **parts(3),
            smallest_split=4,
            communication="ring",
        ),
        "fsdp_2_tensor_2_ring": mgpu_tf.create_model_parallel_strategy(
            fsdp=2,
            tensor=2,
            **parts(4),
            smallest_split=4,
            communication="ring",
        ),
        "tensor_x2": mgpu_tf.create_model_parallel_strategy(
            tensor=2, **parts(2), smallest_split=4
        ),
        "pipeline_x2": mgpu_tf.create_model_parallel_strategy(
            pipeline=2, micro_batches=3, **parts(2)
        ),
        "data_2_pipeline_2": mgpu_tf.create_model_parallel_strategy(
            data=2, pipeline=2, micro_batches=2, **parts(4)
        ),
        "tensor_2_pipeline_2": mgpu_tf.create_model_parallel_strategy(
            tensor=2,
            pipeline=2,
            micro_batches=2,
            **parts(4),
            smallest_split=4,
        ),
        "mirrored_x3_in_parts": mgpu_tf.create_mirrored_strategy(**parts(3)),
        "one_device": mgpu_tf.create_one_device_strategy(ONE),
    }


if __name__ == "__main__":
    sys.exit(main())

"""The whole matrix: every row on every column, and the table of it.

    python -m tests.parity.run [--keep] [--only=ROW,ROW]   (or: make parity)

Results are kept in docs/parity.json as they come, so that a run that was
stopped goes on; a change of the package, of the cases or of the versions
starts anew. With --keep the cells that held stay as they are and only the
others are measured again. With --only all cells of these rows are measured
again, and the others stay as they are. At the end docs/parity.md and the
README's table are written.
Hardware: any; on 2 CPU cores up to two hours. Exits with status 1 where a
row does not hold.
"""

import argparse
import datetime
import importlib.metadata
import json
import pathlib
import sys
import tempfile

import mgpu_tf
from mgpu_tf.runtime import quiet_import
from tests import clusters, tables

ROOT = pathlib.Path(clusters.ROOT)
LEDGER = tables.PARITY.results
TABLE = ROOT / "docs" / "parity.md"
README = ROOT / "README.md"
MARKS = ("<!-- parity: begin -->", "<!-- parity: end -->")

MACHINE = (
    "one_device",
    "mirrored_x2",
    "mirrored_x3",
    "mirrored_x4",
    "central_storage_x2",
    "fsdp_x3",
    "data_3",
    "data_2_fsdp_2",
    "zero1_x2",
    "tensor_x3",
    "data_2_tensor_2",
    "fsdp_2_tensor_2",
    "pipeline_x2",
    "data_2_pipeline_2",
    "fsdp_3_pipeline_2",
    "tensor_2_pipeline_2",
    "data_2_tensor_2_pipeline_2",
)
# Processes, devices of each, and a mesh over the devices of all of them.
CLUSTERS = {
    "2_workers": (2, 1, ""),
    "3_workers": (3, 1, ""),
    "2_workers_x2": (2, 2, ""),
    "2_workers_fsdp_2": (2, 1, "1,2,weights"),
    "2_workers_zero1": (2, 1, "1,2,optimizer"),
    "2_workers_x2_fsdp_4": (2, 2, "1,4,weights"),
    "2_workers_x2_data_2_fsdp_2": (2, 2, "2,2,gradients"),
    "3_workers_fsdp_3": (3, 1, "1,3,gradients"),
    "2_workers_x2_tensor_4": (2, 2, "1,1,weights,4"),
    "2_workers_x2_fsdp_2_tensor_2": (2, 2, "1,2,weights,2"),
    "2_workers_pipeline_2": (2, 1, "1,1,weights,1,2"),
}
# What runs where weights are split over the devices of all workers.
SPLIT_ROWS = [
    *(
        f"{optimizer}_{clipping}"
        for optimizer in ("sgd", "momentum", "adam")
        for clipping in ("clipnorm", "global_clipnorm", "clipvalue")
    ),
    "sgd",
    "momentum",
    "adam",
    "even",
    "last_batch_of_1",
    "last_batch_of_3",
    "last_batch_of_5",
    "accumulation_3_uneven",
    "accumulation_clipped",
    "ema_accumulation",
    "ema_overwrite",
    "loss_scale_overflow",
    "constraint",
    "batch_norm_synchronized",
    "batch_norm",
    "dropout",
    "mask",
    "auc",
    "nadam",
    "two_optimizers",
    "mixed_float16",
    "mixed_bfloat16",
    "embedding_adam",
    "embedding_lazy_adam",
    "embedding_global_clipnorm",
    "embedding_accumulation",
    "own_compute_loss",
    "own_train_step",
    "own_train_step_clipped",
]
# As in one process: refused by name.
SPLIT_REFUSED = {
    ("2_workers_x2_fsdp_2_tensor_2", "embedding_lazy_adam"),
    ("2_workers_pipeline_2", "loss_scale_overflow"),
    ("2_workers_pipeline_2", "batch_norm_synchronized"),
    ("2_workers_pipeline_2", "own_compute_loss"),
    ("2_workers_pipeline_2", "own_train_step"),
    ("2_workers_pipeline_2", "own_train_step_clipped"),
}
# What the README shows of them.
SHOWN = (
    "one_device",
    "mirrored_x3",
    "central_storage_x2",
    "2_workers",
    "3_workers",
    "fsdp_x3",
    "tensor_x3",
    "pipeline_x2",
)
FLOAT32 = "mirrored_x2_float32"
CLUSTER_FLOAT32 = "2_workers_float32"
COLUMNS = (*MACHINE, *CLUSTERS, FLOAT32, CLUSTER_FLOAT32)

# Rows that go through one cluster; what is done when it stops is kept.
CHUNK = 16

GROUPS = {
    "SGD, momentum, Nesterov, Adam, AdamW, Nadam, Lamb, LARS, Lion, "
    "Muon, MultiOptimizer, schedules": (
        "sgd momentum nesterov adam adamw nadam lamb lars lars_nesterov lion "
        "muon two_optimizers schedule"
    ),
    "clipnorm, global_clipnorm, clipvalue": (
        "sgd_clipnorm sgd_global_clipnorm sgd_clipvalue momentum_clipnorm "
        "momentum_global_clipnorm momentum_clipvalue adam_clipnorm "
        "adam_global_clipnorm adam_clipvalue"
    ),
    "embeddings: Adam, RMSprop, Adagrad, clipping, accumulation, scaling": (
        "embedding_adam embedding_rmsprop embedding_adagrad "
        "embedding_clipnorm embedding_global_clipnorm "
        "embedding_accumulation embedding_scaled"
    ),
    "gradient accumulation, EMA, both": (
        "accumulation_2 accumulation_3_uneven accumulation_clipped ema "
        "ema_overwrite ema_accumulation"
    ),
    "loss scaling, with an overflow on one replica": (
        "loss_scale_overflow loss_scale_factor"
    ),
    "uneven last batch, replicas without an example": (
        "last_batch_of_1 last_batch_of_2 last_batch_of_3 last_batch_of_4 "
        "last_batch_of_5 even add_loss_empty_replica "
        "batch_norm_synchronized_empty"
    ),
    "regularizers, constraints, `add_loss`, own `compute_loss`": (
        "constraint activity_regularizer own_compute_loss"
    ),
    "sample weights, class weights, masks, reductions": (
        "sample_weight weighted_mean class_weight sum mask mask_weighted_mean"
    ),
    "metrics: AUC, F1, MeanIoU, Precision, top-k": "auc f1 topk scores_of_1797",
    "synchronized BatchNormalization": "batch_norm_synchronized",
    "dict inputs, several outputs, subclassed, convolution, "
    "`steps_per_execution`, `jit_compile`": (
        "dict_inputs_two_outputs subclassed convolution "
        "steps_per_execution_1 steps_per_execution_8 jit_compile "
        "jit_compile_communicating"
    ),
    "own `train_step`, with clipping": (
        "own_train_step own_train_step_clipped"
    ),
    "dropout, augmentation in the model": "dropout augmentation",
    "mixed_float16, mixed_bfloat16": "mixed_bfloat16 mixed_float16",
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--only", default="", help="rows, with commas")
    arguments = parser.parse_args()
    quiet_import.import_tensorflow()
    from tests import columns
    from tests.parity import cases

    strategies = columns.strategies()
    rows = arguments.only.split(",") if arguments.only else list(cases.CASES)
    if unknown := set(rows) - set(cases.CASES):
        parser.error(f"no such row: {', '.join(sorted(unknown))}")
    ledger = _ledger(arguments.keep, rows if arguments.only else ())
    for name in rows:
        for column in MACHINE:
            _once(
                ledger,
                column,
                name,
                lambda c, n: _local(c, strategies[c], n),
            )
        if _judged_by_noise(name):
            _once(ledger, FLOAT32, name, lambda c, n: _float32(strategies, n))
    for column, layout in CLUSTERS.items():
        names = [
            name
            for name in rows
            if not layout[2] or name in SPLIT_ROWS
            if (column, name) not in SPLIT_REFUSED
        ]
        _cluster(ledger, column, layout, names, strategies)
    quiet_names = [name for name in rows if _judged_by_noise(name)]
    _cluster(
        *(ledger, CLUSTER_FLOAT32, (2, 1, ""), quiet_names, strategies),
        floatx="float32",
    )
    _write_tables(ledger)
    cells = [cell for row in ledger["rows"].values() for cell in row.values()]
    red = sum(not cell["holds"] for cell in cells)
    print(f"{len(cells)} cells, {len(cells) - red} hold, {red} do not")
    return 1 if red else 0


def _judged_by_noise(name):
    """Whether a row is run in float32 as well, against the noise there."""
    from tests.parity import cases

    case = cases.CASES[name]
    # 1e290 and a scale of 2**100 are made for float64.
    return (
        case.promise == "same"
        and case.floatx == "float64"
        and name != "loss_scale_overflow"
    )


def _ledger(keep, again):
    """Reads what an earlier run has left, if it was of the same sources.

    Args:
        keep: Whether cells that held are kept whatever has changed.
        again: Names of the rows to measure again, where only they are; the
            cells of the others are kept.
    """
    head = {
        "sources": tables.PARITY.digest(),
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("tensorflow", "keras", "numpy")
        },
    }
    if LEDGER.exists():
        ledger = json.loads(LEDGER.read_text())
        if {name: ledger[name] for name in head} == head:
            return ledger
        if (keep or again) and ledger["versions"] == head["versions"]:
            kept = {
                name: {
                    c: cell
                    for c, cell in row.items()
                    if cell["holds"] or not keep
                }
                for name, row in ledger["rows"].items()
                if name not in again
            }
            return head | {"date": ledger["date"], "kept": True, "rows": kept}
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return head | {"date": today, "rows": {}}


def _record(ledger, column, name, holds, difference, note=""):
    cell = {"holds": bool(holds), "difference": difference}
    if note:
        cell["note"] = note
    ledger["rows"].setdefault(name, {})[column] = cell
    LEDGER.write_text(json.dumps(ledger, indent=1) + "\n")
    state = "holds" if holds else "DOES NOT HOLD"
    print(f"{column} {name}: {difference:.1e} {note} {state}", flush=True)


def _once(ledger, column, name, measure):
    if column not in ledger["rows"].get(name, {}):
        _record(ledger, column, name, *measure(column, name))


def _local(column, strategy, name):
    from tests.parity import cases, judge

    case = cases.CASES[name]
    cases.set_floatx(case.floatx)
    try:
        result = cases.run(case, strategy)
    except mgpu_tf.ConfigurationError as error:
        expected = judge.REFUSED.get((column, name), "\n")
        return expected in str(error), 0.0, "refused"
    finally:
        cases.set_floatx("float32")
    return judge.verdict(name, result)


def _float32(strategies, name, result=None):
    """SGD within 1e-5, the others within 5 times the noise of one device."""
    from tests.parity import cases, judge

    cases.set_floatx("float32")
    case = cases.CASES[name]
    reference = cases.run_stock(case)
    if result is None:
        result = cases.run(case, strategies["mirrored_x2"])
    difference = result.largest_difference(reference)
    curve = result.loss_difference(reference)
    allowed = judge.FLOAT32
    if difference > allowed:
        noise = cases.run_permuted(case, strategies["one_device"])
        allowed = max(allowed, 5 * noise.largest_difference(reference))
    return difference <= allowed and curve <= judge.FLOAT32, max(
        difference, curve
    )


def _cluster(ledger, column, layout, names, strategies, floatx=""):
    from tests.parity import cases, judge, worker

    missing = [n for n in names if column not in ledger["rows"].get(n, {})]
    for start in range(0, len(missing), CHUNK):
        chunk = missing[start : start + CHUNK]
        with tempfile.TemporaryDirectory() as folder:
            hashes = clusters.run_parity_cases(
                *layout[:2], chunk, folder, floatx, layout[2]
            )
            for name in chunk:
                result = cases.Result.load(worker.result_file(folder, name))
                if floatx:
                    found = _float32(strategies, name, result)
                else:
                    found = judge.verdict(name, result, hashes[name])
                _record(ledger, column, name, *found)


def _write_tables(ledger):
    from tests.parity import cases

    versions = ", ".join(f"{n} {v}" for n, v in ledger["versions"].items())
    head = (
        f"Measured on {ledger['date']} with {versions}, by `make parity`, on "
        "parts of a CPU and processes of one machine."
    )
    lines = [
        "# The parity matrix",
        "",
        f"{head} {tables.stated(ledger)}",
        "",
        "Each cell is the largest difference from Keras's own `fit` on one "
        "device after 3 epochs: of any weight or optimizer variable, and "
        "relative of any loss, score or prediction. Rows are run in float64 "
        "and held to 1e-9; `topk` in float32, to 1e-5; the mixed policies to "
        "2e-2. The last two columns are in float32: losses within 1e-5, and "
        "weights within 1e-5 or 5 times the noise of one device. *Agree* "
        "rows promise only that all workers end with the same weights. A "
        "blank cell was not measured.",
        "",
        "| row | promise | " + " | ".join(COLUMNS) + " |",
        "|---|---|" + "---|" * len(COLUMNS),
    ]
    for name, case in cases.CASES.items():
        row = ledger["rows"].get(name, {})
        cells = " | ".join(_cell(row.get(column)) for column in COLUMNS)
        lines.append(f"| {name} | {case.promise} | {cells} |")
    TABLE.write_text("\n".join(lines) + "\n")

    lines = [
        head,
        "",
        "| float64, largest difference from one device | "
        + " | ".join(SHOWN)
        + " |",
        "|---|" + "---|" * len(SHOWN),
    ]
    for title, names in GROUPS.items():
        worst = [
            _worst([ledger["rows"][n].get(column) for n in names.split()])
            for column in SHOWN
        ]
        lines.append(f"| {title} | " + " | ".join(worst) + " |")
    text = README.read_text()
    before, rest = text.split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    table = "\n".join(lines)
    README.write_text(f"{before}{MARKS[0]}\n{table}\n{MARKS[1]}{after}")


def _cell(cell):
    if cell is None:
        return ""
    if cell.get("note"):
        return cell["note"]
    mark = "" if cell["holds"] else " **fails**"
    return f"{cell['difference']:.0e}{mark}"


def _worst(cells):
    measured = [c for c in cells if c and not c.get("note")]
    if any(not cell["holds"] for cell in cells if cell):
        return "**fails**"
    refused = len([c for c in cells if c and c.get("note")])
    note = f" ({refused} refused)" if refused else ""
    if not measured:
        return "refused"
    return f"{max(cell['difference'] for cell in measured):.0e}{note}"


if __name__ == "__main__":
    sys.exit(main())

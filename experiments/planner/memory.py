"""The planner's memory against the allocator's peak: 35 cases of 14 models.

    python -m experiments.planner.memory --output_dir=docs

Each case trains five steps in a process of its own (about 20 s of one core),
and notes the most that TensorFlow's CPU allocator held in a step, less what it
held before the model was built. Devices are parts of one CPU with one
allocator, so that the sum over devices is compared. With `fsdp` each is a
process with an allocator of its own, and the median over processes counts. A
step runs operations in another order each time, so the largest of four steps is
taken, without the first. What was measured is kept in the output and not
measured again; the table is then made in about a minute, in which the models
are traced.

The corrections (`mgpu_tf/planner/memory/scratch.py`) are fitted anew for each
model on the cases of the others, and it is predicted with those.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from mgpu_tf.planner.layout import Layout, layout_of
from mgpu_tf.planner.memory.per_device import (
    PROCESS_BYTES,
    MemoryEstimate,
    memory_of,
)
from mgpu_tf.planner.memory.scratch import FITTED, wasted_bytes
from mgpu_tf.planner.operations.graph import Graph

CASES = (
    ("wide_mlp", 256, "adam", "float32", "one_device", 1),
    ("plain_cnn", 128, "adam", "float32", "one_device", 1),
    ("encoder", 64, "sgd", "float32", "one_device", 1),
    ("language_model", 16, "adam", "float32", "one_device", 1),
    ("vision_transformer", 64, "momentum", "float32", "one_device", 1),
    ("unet", 32, "adam", "float32", "one_device", 1),
    ("autoencoder", 64, "adam", "float32", "one_device", 1),
    ("recurrent", 64, "adam", "float32", "one_device", 1),
    ("mobilenet", 32, "momentum", "float32", "one_device", 1),
    ("resnet50", 16, "sgd", "float32", "one_device", 1),
    ("efficientnet", 32, "adam", "float32", "one_device", 1),
    ("densenet", 32, "sgd", "float32", "one_device", 1),
    ("encoder", 64, "adam", "float32", "mirrored", 2),
    ("plain_cnn", 128, "adam", "float32", "mirrored", 2),
    ("wide_mlp", 512, "adam", "float32", "mirrored", 2),
    ("wide_mlp", 256, "adam", "float32", "fsdp", 2),
    ("encoder", 64, "adam", "float32", "fsdp", 2),
    ("deep_mlp", 64, "adam", "float32", "fsdp", 2),
    ("deep_mlp", 64, "adam", "float32", "fsdp", 3),
    ("deep_mlp", 64, "adam", "float32", "fsdp", 4),
    ("wide_mlp", 384, "adam", "float32", "fsdp", 3),
    ("wide_mlp", 512, "adam", "float32", "fsdp", 4),
    ("encoder", 96, "adam", "float32", "fsdp", 3),
    ("encoder", 64, "adam", "float32", "tensor", 2),
    ("encoder", 64, "adam", "float32", "pipeline", 2),
    ("unet", 32, "sgd", "float32", "mirrored", 2),
    ("language_model", 16, "adam", "float32", "fsdp", 4),
    ("wide_mlp", 512, "adam", "float32", "tensor", 2),
    ("wide_mlp", 1024, "sgd", "float32", "pipeline", 4),
    ("encoder", 64, "adam", "mixed_bfloat16", "one_device", 1),
    ("unet", 16, "sgd", "mixed_bfloat16", "one_device", 1),
    ("language_model", 16, "adam", "float32", "tensor", 2),
    ("blocks", 16, "adam", "float32", "one_device", 1),
    ("blocks", 16, "adam", "float32", "tensor", 2),
    ("blocks", 16, "adam", "float32", "sequence", 2),
)
MICRO_BATCHES = 4
_SLOTS = {"sgd": 0.0, "momentum": 4.0, "adam": 8.0}
_STEPS = 5
_NONE = dict.fromkeys(FITTED, 0.0)

# The values that are tried for each correction.
_TRIED: dict[str, tuple[float, ...]] = {
    "convolution": (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75),
    "stored one_device": (0.0, 0.03, 0.06, 0.1),
    "stored mirrored": (0.0, 0.1, 0.2, 0.3, 0.4),
    "stored fsdp": (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3),
    "stored model_parallel": (0.0, 0.1, 0.2, 0.3, 0.4),
    "passes one_device": (0.0, 0.03, 0.06),
    "passes mirrored": (0.0, 0.05, 0.1, 0.15),
    "passes fsdp": (0.0, 0.05, 0.1, 0.2, 0.3),
    "passes tensor": (0.0, 0.1, 0.2, 0.3, 0.4),
    "passes pipeline": (0.0, 0.1, 0.2, 0.3),
}


def layout(kind: str, devices: int) -> Layout:
    """Returns the layout of a case."""
    if kind in ("tensor", "sequence"):
        return layout_of(
            "model_parallel",
            devices,
            tensor_parallel=devices,
            sequence_parallel=kind == "sequence",
        )
    if kind == "pipeline":
        return layout_of(
            "model_parallel",
            devices,
            pipeline_parallel=devices,
            micro_batches=MICRO_BATCHES,
        )
    return layout_of(kind, devices)


def measure(case: tuple[Any, ...]) -> dict[str, Any]:
    """Trains a case, in this process; returns the peaks of its steps."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras
    import tensorflow as tf

    import mgpu_tf
    from experiments.planner import models

    name, batch, optimizer, precision, kind, devices = case
    options = layout(kind, devices).strategy_options
    if devices > 1 and kind != "fsdp":
        options["num_virtual_devices"] = devices
    strategy = mgpu_tf.create_strategy(
        layout(kind, devices).strategy, **options
    )

    def used(what: str) -> int:
        return int(tf.config.experimental.get_memory_info("CPU:0")[what])

    x, y = models.batch(name, batch)
    keras.backend.clear_session()
    before = used("current")
    trainer = mgpu_tf.Trainer(
        lambda: models.build(name, optimizer, precision),
        strategy,
        seed=0,
        steps_per_execution=1,
    )
    peaks: list[int] = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            tf.config.experimental.reset_memory_stats("CPU:0")

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            peaks.append(used("peak") - before)

    trainer.fit(
        x,
        y,
        batch_size=batch,
        steps_per_epoch=_STEPS,
        verbose=0,
        callbacks=[Watch()],
        shuffle=False,
    )
    return {"case": list(case), "peaks": peaks}


def measured(path: str) -> list[dict[str, Any]]:
    """Returns what was measured, and measures what is missing."""
    known = {}
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            known = {tuple(r["case"]): r for r in json.load(file)["cases"]}
    found = []
    for case in CASES:
        row = known.get(case)
        if row is None:
            row = in_processes(case)
        found.append({"case": row["case"], "peaks": row["peaks"]})
    return found


def in_processes(case: tuple[Any, ...]) -> dict[str, Any]:
    """Measures a case in a process, with `fsdp` in one for each device."""
    python = [sys.executable, "-m"]
    command = [*python, __spec__.name, "--one", json.dumps(case)]
    if case[4] == "fsdp":
        count = f"--num_workers={case[5]}"
        command = [*python, "mgpu_tf", "launch", count, "--", *command]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    rows = [
        json.loads(line[line.index("{") :])
        for line in done.stdout.splitlines()
        if '"peaks"' in line
    ]
    rows.sort(key=lambda row: max(row["peaks"][1:]))
    return rows[len(rows) // 2]


@dataclasses.dataclass(frozen=True)
class Row:
    """A case with its graph and its peak.

    Attributes:
        case: The case.
        graph: Its model.
        peak: What was measured, in bytes.
        found: Estimates without waste of the allocator, by the correction of
            convolutions.
    """

    case: Any
    graph: Graph
    peak: int
    found: dict[float, MemoryEstimate] = dataclasses.field(default_factory=dict)

    def estimate(self, fitted: Mapping[str, float]) -> float:
        """Returns the predicted bytes of what shares an allocator."""
        _, batch, optimizer, _, kind, devices = self.case
        plan = layout(kind, devices)
        scratch = fitted["convolution"]
        if scratch not in self.found:
            slots = [_SLOTS[optimizer]] * len(self.graph.slots)
            self.found[scratch] = memory_of(
                dataclasses.replace(self.graph, slots=slots),
                plan,
                batch,
                fitted=_NONE | {"convolution": scratch},
            )
        found = self.found[scratch]
        used = sum(
            device.count
            * (device.total + wasted_bytes(device.by_kind, plan, fitted))
            for device in found.devices
        )
        alone = devices if kind == "fsdp" else 1
        return used / alone + found.host - PROCESS_BYTES

    def error(self, fitted: Mapping[str, float]) -> float:
        """Returns the error as a part of the peak."""
        return self.estimate(fitted) / self.peak - 1


def fit(rows: list[Row]) -> dict[str, float]:
    """Fits the corrections to rows."""
    found = dict(_NONE)

    def error(tried: dict[str, float]) -> float:
        return sum(abs(row.error(tried)) ** 1.5 for row in rows)

    for _ in range(4):
        for name, values in _TRIED.items():
            found[name] = min(
                values, key=lambda v, name=name: error({**found, name: v})
            )
    return found


def graphs() -> dict[tuple[str, str], Graph]:
    """Traces the models, by name and precision."""
    from experiments.planner import models
    from mgpu_tf.planner.operations.tracing import trace

    return {
        (name, precision): trace(
            lambda name=name, precision=precision: models.build(
                name, "adam", precision
            )
        )
        for name, precision in sorted({(case[0], case[3]) for case in CASES})
    }


def table(
    cases: list[dict[str, Any]], traced: dict[tuple[str, str], Graph]
) -> dict[str, Any]:
    """Returns all rows, each predicted without its model."""
    every = [
        Row(
            each["case"],
            traced[each["case"][0], each["case"][3]],
            max(each["peaks"][1:]),
        )
        for each in cases
    ]
    without = {
        name: fit([row for row in every if row.case[0] != name])
        for name in {row.case[0] for row in every}
    }
    rows = [
        {
            "case": row.case,
            "predicted_bytes": round(row.estimate(without[row.case[0]])),
            "measured_bytes": row.peak,
            "error": round(row.error(without[row.case[0]]), 4),
            "uncorrected_error": round(row.error(_NONE), 4),
        }
        for row in every
    ]
    errors = sorted(abs(row["error"]) for row in rows)
    return {
        "summary": {
            "cases": len(rows),
            "models": len(without),
            "median_error": round(statistics.median(errors), 4),
            "worst_error": errors[-1],
        },
        "rows": rows,
        "fitted_on_all": fit(every),
        "cases": cases,
    }


def markdown(value: dict[str, Any]) -> str:
    """Returns the table as Markdown."""
    told = value["summary"]
    lines = [
        "# Memory, predicted and measured",
        "",
        "Made by `python -m experiments.planner.memory`: the most that "
        "TensorFlow's CPU allocator held in a step, and what the planner "
        "predicts: of all devices of one process, and with `fsdp` of one of "
        "several processes. Corrections are fitted on the other models.",
        "",
        f"{told['cases']} cases of {told['models']} models: median error "
        f"{told['median_error']:.1%}, worst {told['worst_error']:.1%}.",
        "",
        "| model | batch | optimizer | precision | layout | predicted MB | "
        "measured MB | error | without corrections |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in value["rows"]:
        name, batch, optimizer, precision, kind, devices = row["case"]
        lines.append(
            f"| {name} | {batch} | {optimizer} | {precision} | {kind} "
            f"{devices} | {row['predicted_bytes'] / 1e6:,.1f} | "
            f"{row['measured_bytes'] / 1e6:,.1f} | {row['error']:+.1%} | "
            f"{row['uncorrected_error']:+.1%} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures what is missing, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", default="docs")
    parser.add_argument("--one", help="Measure one case, and print it.")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(tuple(json.loads(arguments.one)))))
        return
    path = os.path.join(arguments.output_dir, "planner_memory.json")
    value = table(measured(path), graphs())
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
    path = os.path.join(arguments.output_dir, "planner_memory.md")
    with open(path, "w", encoding="utf-8") as file:
        file.write(markdown(value))
    print(json.dumps(value["summary"]))


if __name__ == "__main__":
    main()

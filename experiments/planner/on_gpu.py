"""What the planner predicts of one GPU, beside what is measured there.

    python -m experiments.planner.on_gpu --device=h100-80gb --output_dir=docs

Each case trains in a process of its own, not compiled by XLA: two epochs to
warm up, then one of which the seconds and the peak of TensorFlow's GPU
allocator count. Nothing is fitted on them. Hardware: one GPU of the table of
devices; half a minute a case.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any

CASES = (
    ("wide_mlp", 1024, "adam", "float32"),
    ("plain_cnn", 1024, "adam", "float32"),
    ("encoder", 256, "adam", "float32"),
    ("encoder", 256, "adam", "mixed_bfloat16"),
    ("language_model", 128, "adam", "float32"),
    ("vision_transformer", 256, "momentum", "float32"),
    ("unet", 128, "adam", "float32"),
    ("recurrent", 256, "adam", "float32"),
    ("resnet50", 256, "sgd", "float32"),
    ("resnet50", 256, "sgd", "mixed_bfloat16"),
    ("densenet", 128, "sgd", "float32"),
)
STEPS = 40


def measure(case: tuple[str, int, str, str]) -> dict[str, Any]:
    """Trains a case in this process; returns its seconds and its peak."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import mgpu_tf

    strategy = mgpu_tf.create_one_device_strategy(0)
    import keras
    import tensorflow as tf

    from experiments.planner import models

    name, batch, optimizer, precision = case
    trainer = mgpu_tf.Trainer(
        lambda: models.build(name, optimizer, precision), strategy, seed=0
    )
    x, y = models.batch(name, batch)
    rows = tf.data.Dataset.from_tensors((x, y)).repeat(STEPS)
    seconds: list[float] = []

    class Clock(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            tf.config.experimental.reset_memory_stats("GPU:0")
            self._began = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            float((logs or {})["loss"])  # Waits for the steps.
            seconds.append(time.perf_counter() - self._began)

    trainer.fit(rows, epochs=3, verbose=0, callbacks=[Clock()])
    peak = tf.config.experimental.get_memory_info("GPU:0")["peak"]
    return {"seconds": seconds[-1] / STEPS, "bytes": int(peak)}


def predicted(case: tuple[str, int, str, str], device: str) -> dict[str, Any]:
    """Returns what the planner says of a case on one device."""
    from experiments.planner import models
    from mgpu_tf.planner.devices import DEVICES
    from mgpu_tf.planner.layout import layout_of
    from mgpu_tf.planner.memory.per_device import memory_of
    from mgpu_tf.planner.operations.tracing import trace
    from mgpu_tf.planner.speed.step_time import Machines, step_time

    name, batch, optimizer, precision = case
    graph = trace(lambda: models.build(name, optimizer, precision))
    layout = layout_of("one_device", 1)
    machines = Machines(DEVICES[device], precision=precision)
    return {
        "seconds": step_time(graph, layout, batch, machines).seconds,
        "bytes": int(memory_of(graph, layout, batch).largest.total),
    }


def markdown(found: dict[str, Any]) -> str:
    """Returns the page of the figures."""
    lines = [
        "# One GPU, predicted and measured",
        "",
        "Made by `python -m experiments.planner.on_gpu` on "
        f"{found['machine']}, {found['date']}. A step of "
        "`create_one_device_strategy`, not compiled by XLA, and the peak of "
        "TensorFlow's GPU allocator. Nothing is fitted on these rows.",
        "",
    ]
    for what in ("bytes", "seconds"):
        errors = sorted(abs(row["error"][what]) for row in found["rows"])
        word = {"bytes": "Memory", "seconds": "Time"}[what]
        lines.append(
            f"{word}: median error {statistics.median(errors):.0%}, worst "
            f"{errors[-1]:.0%}."
        )
    lines += [
        "",
        "| model | batch | optimizer | precision | predicted MB | measured MB "
        "| error | predicted ms | measured ms | error |",
        "|---" * 10 + "|",
    ]
    for row in found["rows"]:
        cells = [str(part) for part in row["case"]]
        for what, scale, digits in (("bytes", 1e6, 0), ("seconds", 1e-3, 1)):
            cells += [
                f"{row[side][what] / scale:,.{digits}f}"
                for side in ("predicted", "measured")
            ]
            cells.append(f"{row['error'][what]:+.0%}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="h100-80gb")
    parser.add_argument("--output_dir", default="runs/planner_gpu")
    parser.add_argument("--measured", help="predict again; measure nothing")
    parser.add_argument("--one", help="measure a case, in this process")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(json.loads(arguments.one))))
        return
    folder = pathlib.Path(arguments.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any]
    if arguments.measured:
        found = json.loads(pathlib.Path(arguments.measured).read_text())
    else:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        named = subprocess.run(query, capture_output=True, text=True).stdout
        found = {
            "machine": f"one {named.splitlines()[0]}",
            "device": arguments.device,
            "date": time.strftime("%Y-%m-%d"),
            "rows": [],
        }
        for case in CASES:
            command = [sys.executable, "-m", __spec__.name]
            done = subprocess.run(
                [*command, "--one", json.dumps(case)],
                check=False,
                capture_output=True,
                text=True,
            )
            if done.returncode:
                print(case, done.stderr[-2000:], flush=True)
                continue
            row = json.loads(done.stdout.splitlines()[-1])
            found["rows"].append({"case": list(case), "measured": row})
            print(case, row, flush=True)
            (folder / "planner_gpu.json").write_text(json.dumps(found))
    for row in found["rows"]:
        row["predicted"] = predicted(tuple(row["case"]), found["device"])
        row["error"] = {
            what: row["predicted"][what] / row["measured"][what] - 1
            for what in ("bytes", "seconds")
        }
    text = json.dumps(found, indent=1) + "\n"
    (folder / "planner_gpu.json").write_text(text)
    (folder / "planner_gpu.md").write_text(markdown(found))


if __name__ == "__main__":
    main()

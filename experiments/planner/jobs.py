"""The planned best layout against the measured best, for jobs on two machines.

    python -m experiments.planner.jobs --output_dir=docs

Two machines of one core each are joined by a link of a limited rate. For each
rate `mgpu-tf calibrate` measures them. Each job is planned with what was
measured; then every layout that the plan compares trains, and the median step
counts. Needs root and a quiet machine; half an hour on two cores. What was
measured is kept in the output and not measured again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import tempfile
from typing import Any, NamedTuple

from experiments.planner import machines as on_machines
from mgpu_tf.planner.choice.plans import plan
from mgpu_tf.planner.layout import Layout
from mgpu_tf.planner.machine.calibration import VARIABLE, Calibration
from mgpu_tf.planner.speed.step_time import Machines


class Job(NamedTuple):
    """A training on two machines.

    Attributes:
        model: One of `experiments.planner.models`.
        optimizer: One of theirs.
        rows: The global batch size.
        rate: Of the link of each machine.
    """

    model: str
    optimizer: str
    rows: int
    rate: str

    def __str__(self) -> str:
        return ", ".join(map(str, self))


JOBS = (
    Job("language_model", "adam", 16, "50mbit"),
    Job("wide_mlp", "sgd", 256, "50mbit"),
    Job("autoencoder", "adam", 64, "100mbit"),
    Job("plain_cnn", "adam", 128, "200mbit"),
    Job("wide_mlp", "sgd", 64, "200mbit"),
    Job("encoder", "adam", 128, "1gbit"),
    Job("wide_mlp", "adam", 64, "1gbit"),
)
LAYOUTS = {
    str(layout): layout
    for layout in (
        Layout(),
        Layout(data=2),
        Layout(fsdp=2),
        Layout(fsdp=2, shard="optimizer"),
        Layout(tensor=2),
    )
}
# What comes within that of the best counts as the best.
CLOSE = 0.1


def worker(job: Job, layout: Layout) -> None:
    """Trains in this process, and prints the seconds of its steps."""
    import mgpu_tf
    from experiments.planner import models

    name = layout.strategy
    if name == "mirrored":
        name = "multi_worker_mirrored"
    on_machines.time_steps(
        lambda: models.build(job.model, job.optimizer),
        mgpu_tf.create_strategy(name, **layout.strategy_options),
        *models.batch(job.model, job.rows),
        job.rows,
    )


def measure(job: Job) -> dict[str, float]:
    """Returns the median seconds of a step in each layout."""
    found = {}
    for name, layout in LAYOUTS.items():
        command = ["-m", "experiments.planner.jobs", f"--job={json.dumps(job)}"]
        text = on_machines.run(
            [*command, f"--layout={name}"], layout.devices, job.rate
        )
        found[name] = on_machines.median_seconds(text)
    return found


def calibrated(rate: str) -> Calibration:
    """Returns what `mgpu-tf calibrate` measures of two machines.

    Args:
        rate: Of the link of each.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "calibration.json")
        on_machines.run(
            ["-m", "mgpu_tf", "calibrate"], 2, rate, {VARIABLE: path}
        )
        return Calibration.read(path)


def machines(calibration: dict[str, Any]) -> Machines:
    """Returns two machines of a calibration."""
    found = Calibration.from_dict(calibration)
    assert found.link is not None
    return Machines(found.device, 1, 2, found.link)


def predict(job: Job, machines: Machines) -> dict[str, float]:
    """Returns the predicted seconds of layouts, the planned best first."""
    from experiments.planner import models

    found = plan(
        lambda: models.build(job.model, job.optimizer),
        job.rows,
        machines,
        data=models.batch(job.model, job.rows),
    )
    return {
        str(each.layout): each.time.seconds
        for each in found.candidates
        if str(each.layout) in LAYOUTS
    }


def row(
    job: Job, predicted: dict[str, float], seconds: dict[str, float]
) -> dict[str, Any]:
    """Returns a job's row: what was planned, and what was best.

    Args:
        job: The job.
        predicted: By layout, the planned best first.
        seconds: By layout, as measured.
    """
    planned = next(iter(predicted))
    best = min(seconds, key=lambda name: seconds[name])
    return {
        "job": job._asdict(),
        "planned": planned,
        "best": best,
        "behind": seconds[planned] / seconds[best] - 1,
        "predicted": predicted,
        "seconds": seconds,
    }


def markdown(value: dict[str, Any]) -> str:
    """Returns the page of a table."""
    rows = value["rows"]
    right = sum(each["behind"] <= CLOSE for each in rows)
    lines = [
        "# The planned layout, and the best one",
        "",
        "Made by `python -m experiments.planner.jobs` on "
        f"{value['processor']}: two machines of one core each, with links of a "
        "limited rate, which `mgpu-tf calibrate` has measured. Milliseconds of "
        "a step as measured, and as predicted in parentheses.",
        "",
        f"In {right} of {len(rows)} jobs the planned layout is the fastest or "
        f"within {CLOSE:.0%} of it. "
        f"{len({each['best'] for each in rows})} different layouts are the "
        "fastest of a job.",
        "",
        "| job | planned | fastest | behind | " + " | ".join(LAYOUTS) + " |",
        "|" + "---|" * (4 + len(LAYOUTS)),
    ]
    for each in rows:
        cells = [
            f"{each['seconds'][name] * 1e3:,.0f} "
            f"({each['predicted'][name] * 1e3:,.0f})"
            for name in LAYOUTS
        ]
        lines.append(
            f"| {Job(**each['job'])} | {each['planned']} | {each['best']} | "
            f"{each['behind']:.0%} | {' | '.join(cells)} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Plans and measures all jobs, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", default="runs")
    parser.add_argument("--job", help="Train this job here, and print times.")
    parser.add_argument("--layout", choices=LAYOUTS, help="In this layout.")
    given = parser.parse_args()
    if given.job:
        worker(Job(*json.loads(given.job)), LAYOUTS[given.layout])
        return
    folder = pathlib.Path(given.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "planner_jobs.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    found = known.get("calibrations", {})
    for rate in {job.rate for job in JOBS} - set(found):
        found[rate] = dataclasses.asdict(calibrated(rate))
    seconds = {Job(**r["job"]): r["seconds"] for r in known.get("rows", ())}
    rows = []
    for job in JOBS:
        # The plan is made before anything is measured.
        predicted = predict(job, machines(found[job.rate]))
        print(job, predicted, flush=True)
        rows.append(row(job, predicted, seconds.get(job) or measure(job)))
        print(rows[-1], flush=True)
    value = {
        "processor": known.get("processor", on_machines.processor()),
        "calibrations": found,
        "rows": rows,
    }
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    (folder / "planner_jobs.md").write_text(markdown(value), encoding="utf-8")


if __name__ == "__main__":
    main()

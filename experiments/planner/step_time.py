"""The planner's step time on real clusters of slow links. Needs root, quiet.

    python -m experiments.planner.step_time --output_dir=docs

Each of four models trains on one machine of one core, and on 2 and 3 of them
at each of three rates of links. The median step counts. About 30 s for each of
28 runs on two cores. Three machines share two cores, so two of them compute
half as fast; the prediction knows that. What was measured is kept in the
output and not measured again.

Three constants stand for the machine: what of the rate of products models
reach, what of a link's rate sums reach, and how much of a sum hides behind
the backward pass. For each model and rate they are fitted on the runs of the
other models at the other rates; then the run is predicted.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import statistics
from typing import Any

from experiments.planner import machines as on_machines
from mgpu_tf.planner.devices import DEVICES, Device, Efficiencies, link
from mgpu_tf.planner.layout import Layout
from mgpu_tf.planner.operations.costs import step_operations
from mgpu_tf.planner.operations.graph import Graph
from mgpu_tf.planner.speed.step_time import Machines, step_time

# Widths of the hidden layers: 0.1, 1, 5 and 20 million parameters.
MODELS = {"0.1M": (256, 2), "1M": (512, 4), "5M": (1024, 5), "20M": (2048, 5)}
RATES = ("50mbit", "100mbit", "200mbit")
WORKERS = (2, 3)
ROWS = 64


def build(name: str) -> Any:
    """Returns a compiled perceptron."""
    import keras

    width, depth = MODELS[name]
    inputs = keras.Input((256,))
    hidden = inputs
    for _ in range(depth):
        hidden = keras.layers.Dense(width, activation="relu")(hidden)
    model = keras.Model(inputs, keras.layers.Dense(10)(hidden))
    model.compile(
        keras.optimizers.SGD(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def worker(name: str) -> None:
    """Trains in this process, and prints the seconds of its steps."""
    import numpy as np

    import mgpu_tf

    several = "TF_CONFIG" in os.environ
    workers = 1
    if several:
        workers = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
    rows = ROWS * workers
    on_machines.time_steps(
        lambda: build(name),
        mgpu_tf.create_strategy(
            "multi_worker_mirrored" if several else "one_device"
        ),
        np.random.default_rng(0).random((rows, 256), dtype="float32"),
        np.zeros(rows, "int32"),
        rows,
    )


def measure(name: str, workers: int, rate: str | None) -> float:
    """Returns the median seconds of a step.

    Args:
        name: One of `MODELS`.
        workers: How many.
        rate: Of the link of each; None for one worker.
    """
    command = ["-m", "experiments.planner.step_time", "--worker", name]
    return on_machines.median_seconds(on_machines.run(command, workers, rate))


@dataclasses.dataclass(frozen=True)
class Run:
    """A measured run.

    Attributes:
        model: One of `MODELS`.
        workers: How many.
        rate: Of the link; None for one worker.
        seconds: Of a step.
    """

    model: str
    workers: int
    rate: str | None
    seconds: float


def predicted(run: Run, graph: Graph, device: Device) -> float:
    """Returns the predicted seconds of a step."""
    machines = Machines(
        device,
        1,
        run.workers,
        link(run.rate) if run.rate else link("25gbe"),
        sharing=on_machines.sharing(run.workers),
    )
    layout = Layout(run.workers)
    return step_time(graph, layout, ROWS * run.workers, machines).seconds


def fit(runs: list[Run], graphs: dict[str, Graph]) -> Device:
    """Returns the device whose constants fit runs best."""
    alone = [run for run in runs if run.workers == 1]
    rate = statistics.median(
        step_operations(graphs[run.model], ROWS) / run.seconds for run in alone
    )
    best, found = float("inf"), DEVICES["cpu"]
    for products, reached, overlap in itertools.product(
        (0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0),
        (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0),
        (0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
    ):
        good = Efficiencies(
            products=products, memory=1.0, link=reached, overlap=overlap
        )
        device = dataclasses.replace(
            DEVICES["cpu"], rates={"float32": rate}, efficiencies=good
        )
        error = sum(
            abs(predicted(run, graphs[run.model], device) / run.seconds - 1)
            for run in runs
        )
        if error < best:
            best, found = error, device
    return found


def table(runs: list[Run], graphs: dict[str, Graph]) -> dict[str, Any]:
    """Returns all runs of clusters, each predicted from other ones."""
    rows = []
    for run in runs:
        if run.workers == 1:
            continue
        others = [
            other
            for other in runs
            if other.model != run.model and other.rate != run.rate
        ]
        found = predicted(run, graphs[run.model], fit(others, graphs))
        rows.append(
            dataclasses.asdict(run)
            | {"predicted": found, "error": found / run.seconds - 1}
        )
    errors = sorted(abs(row["error"]) for row in rows)
    return {
        "alone": {run.model: run.seconds for run in runs if run.workers == 1},
        "median_error": statistics.median(errors),
        "worst_error": errors[-1],
        "rows": rows,
    }


def measured(known: dict[str, Any]) -> list[Run]:
    """Returns all runs, and measures those that a table does not have.

    Args:
        known: A table.
    """
    found = {
        (row["model"], row["workers"], row["rate"]): row["seconds"]
        for row in known.get("rows", ())
    }
    found |= {(k, 1, None): v for k, v in known.get("alone", {}).items()}
    runs = []
    for name in MODELS:
        for workers, rate in [(1, None), *itertools.product(WORKERS, RATES)]:
            case = name, workers, rate
            seconds = found[case] if case in found else measure(*case)
            runs.append(Run(*case, seconds))
            print(runs[-1], flush=True)
    return runs


def markdown(value: dict[str, Any]) -> str:
    """Returns the page of a table."""
    lines = [
        "# Step time, predicted and measured",
        "",
        "Made by `python -m experiments.planner.step_time` on "
        f"{value['processor']}: workers on machines of one core each, with "
        "links of a limited rate. Each row is predicted with constants that "
        "were fitted on the runs of other models at other rates.",
        "",
        f"{len(value['rows'])} runs: median error "
        f"{value['median_error']:.1%}, worst {value['worst_error']:.1%}.",
        "",
        "| parameters | workers | link | predicted ms | measured ms | error |",
        "|---|---|---|---|---|---|",
    ]
    for row in value["rows"]:
        lines.append(
            f"| {row['model']} | {row['workers']} | {row['rate']} | "
            f"{row['predicted'] * 1e3:,.0f} | {row['seconds'] * 1e3:,.0f} | "
            f"{row['error']:+.1%} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures, predicts, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", default="runs")
    parser.add_argument("--worker", help="Train a model here, and print times.")
    given = parser.parse_args()
    if given.worker:
        worker(given.worker)
        return
    from mgpu_tf.planner.operations.tracing import trace

    folder = pathlib.Path(given.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "planner_time.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    runs = measured(known)
    graphs = {name: trace(lambda name=name: build(name)) for name in MODELS}
    value = table(runs, graphs)
    value["processor"] = known.get("processor", on_machines.processor())
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    (folder / "planner_time.md").write_text(markdown(value), encoding="utf-8")
    print({k: v for k, v in value.items() if k.endswith("error")})


if __name__ == "__main__":
    main()

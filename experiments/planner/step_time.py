"""The planner's step time on real clusters of slow links. Needs root, quiet.

    python -m experiments.planner.step_time --output=runs/step_time.json

Workers are processes in network namespaces of their own, whose links are
limited to a rate, as on two or three machines. Each model trains alone and on
2 and 3 workers at each rate, `_STEPS` steps after `_WARM` of warming up; the
median step counts. About 40 s for each of 28 runs on two cores.

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
import statistics
import subprocess
import sys
import time
from typing import Any

from mgpu_tf.planner.costs import step_operations
from mgpu_tf.planner.devices import DEVICES, Device, Efficiencies, link
from mgpu_tf.planner.graph import Graph
from mgpu_tf.planner.layout import Layout
from mgpu_tf.planner.step_time import Machines, step_time

# Widths of the hidden layers: 0.1, 1, 5 and 20 million parameters.
MODELS = {"0.1M": (256, 2), "1M": (512, 4), "5M": (1024, 5), "20M": (2048, 5)}
RATES = ("50mbit", "100mbit", "200mbit")
WORKERS = (2, 3)
ROWS = 64
_STEPS, _WARM = 12, 4
_PORT = 12345


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
    import keras
    import numpy as np

    import mgpu_tf

    alone = "TF_CONFIG" not in os.environ
    workers = 1 if alone else len(_cluster()["cluster"]["worker"])
    strategy = mgpu_tf.create_strategy(
        "one_device" if alone else "multi_worker_mirrored"
    )
    trainer = mgpu_tf.Trainer(
        lambda: build(name), strategy, steps_per_execution=1
    )
    seconds: list[float] = []

    class Clock(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.begin = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seconds.append(time.perf_counter() - self.begin)

    rows = ROWS * workers
    trainer.fit(
        np.random.default_rng(0).random((rows, 256), dtype="float32"),
        np.zeros(rows, "int32"),
        batch_size=rows,
        steps_per_epoch=_STEPS + _WARM,
        verbose=0,
        shuffle=False,
        callbacks=[Clock()],
    )
    print(json.dumps(seconds[_WARM:]))


def _cluster() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(os.environ["TF_CONFIG"])
    return found


def _command(name: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "experiments.planner.step_time",
        "--worker",
        name,
    ]


def measure(name: str, workers: int, rate: str | None) -> float:
    """Returns the median seconds of a step.

    Args:
        name: One of `MODELS`.
        workers: How many.
        rate: Of the link of each; None for one worker.
    """
    if workers == 1:
        done = subprocess.run(
            _command(name), check=True, capture_output=True, text=True
        )
        return statistics.median(json.loads(done.stdout.splitlines()[-1]))
    from tests.network import Network

    hosts = [f"n{index}" for index in range(workers)]
    with Network(hosts) as network:
        processes = []
        for host in hosts:
            network.limit(host, rate)
        addresses = [f"{network.address(host)}:{_PORT}" for host in hosts]
        for index, host in enumerate(hosts):
            config = {
                "cluster": {"worker": addresses},
                "task": {"type": "worker", "index": index},
            }
            processes.append(
                network.popen(
                    host,
                    _command(name),
                    env=os.environ | {"TF_CONFIG": json.dumps(config)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        outputs = [process.communicate(timeout=900) for process in processes]
        if processes[0].returncode:
            raise RuntimeError(outputs[0][1][-2000:])
        return statistics.median(json.loads(outputs[0][0].splitlines()[-1]))


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
        "median_error": statistics.median(errors),
        "worst_error": errors[-1],
        "rows": rows,
    }


def main() -> None:
    """Measures, predicts, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="step_time.json")
    parser.add_argument("--worker", help="Train a model here, and print times.")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rates", default=",".join(RATES))
    parser.add_argument("--workers", default=",".join(map(str, WORKERS)))
    given = parser.parse_args()
    if given.worker:
        worker(given.worker)
        return
    from mgpu_tf.planner.tracing import trace

    names = given.models.split(",")
    runs = []
    for name in names:
        runs.append(Run(name, 1, None, measure(name, 1, None)))
        for workers, rate in itertools.product(
            map(int, given.workers.split(",")), given.rates.split(",")
        ):
            seconds = measure(name, workers, rate)
            runs.append(Run(name, workers, rate, seconds))
            print(runs[-1], flush=True)
    graphs = {name: trace(lambda name=name: build(name)) for name in names}
    value = table(runs, graphs) if len(names) > 1 else {"rows": []}
    value["runs"] = [dataclasses.asdict(run) for run in runs]
    with open(given.output, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
    print({k: v for k, v in value.items() if k.endswith("error")})


if __name__ == "__main__":
    main()

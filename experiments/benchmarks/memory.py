"""Whether some device of a synchronous run holds more than its peers.

    mgpu-tf launch --num_workers=2 -- python -m experiments.benchmarks.memory \
        '{"strategy": "multi_worker_mirrored", "folder": "."}'

Parts of a CPU have one allocator between them, so what is counted there is
the bytes of variables by the device that holds them: weights, moving
statistics, optimizer, metrics. Between processes it is what each held at its
most: tensors, as TensorFlow's allocator counts them, and memory, as the
system does. A ratio is the least of a run over the greatest; 1 is balance.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping

from experiments.benchmarks.runner import Failed, Rates
from experiments.benchmarks.starts import python, task
from experiments.benchmarks.table import Ratio

_STEPS = 20
_WORKERS = 2


@dataclasses.dataclass(frozen=True)
class Balance:
    """A run whose devices or processes are compared.

    Attributes:
        name: Of the benchmark.
        options: Of the run; see `main`.
        held: What of a run is compared: "variables", "tensors", "resident".
        aim: What the least over the greatest must reach.
        unit: Of the values.
    """

    name: str
    options: dict
    held: str
    aim: float
    unit: str = "MB"

    @property
    def ratios(self) -> tuple[Ratio, ...]:
        """Returns the value of the table."""
        return (Ratio("least", "greatest", self.aim),)

    def measure(self, rounds: int) -> Rates:
        """Trains so often; returns the least and the greatest of each run.

        Raises:
            Failed: A process failed.
        """
        held: dict[str, list[float]] = {"least": [], "greatest": []}
        for _ in range(rounds):
            values = [bytes_ / 1e6 for bytes_ in self._run()]
            held["least"].append(min(values))
            held["greatest"].append(max(values))
        return Rates(held, {}, {})

    def _run(self) -> list[float]:
        with tempfile.TemporaryDirectory() as folder:
            options = json.dumps(self.options | {"folder": folder})
            launcher: tuple[str, ...] = ()
            count = self.options.get("workers", 1)
            if count > 1:
                launch = ("launch", f"--num_workers={count}", "--")
                launcher = ("-m", "mgpu_tf", *launch, sys.executable)
            python([*launcher, "-m", "experiments.benchmarks.memory", options])
            told = []
            for entry in os.scandir(folder):
                with open(entry.path, encoding="utf-8") as file:
                    told.append(json.load(file)[self.held])
        if len(told) != count:
            raise Failed(f"{self.name}: {len(told)} of {count} ended.")
        return told if count > 1 else list(told[0].values())


def bytes_by_device(strategy, variables: Iterable) -> dict[str, int]:
    """Counts the bytes of Keras variables by the device that holds them.

    Args:
        strategy: In whose scope they were made.
        variables: Each counts once.

    Returns:
        For each device of this process, the bytes.
    """
    found: dict[str, int] = collections.Counter()
    for variable in {id(one): one for one in variables}.values():
        for part in strategy.experimental_local_results(variable.value):
            found[part.device] += part.shape.num_elements() * part.dtype.size
    return dict(found)


def variables_of(model) -> list:
    """Returns weights, statistics, optimizer and metrics of a model."""
    metrics = [v for metric in model.metrics for v in metric.variables]
    return [*model.variables, *model.optimizer.variables, *metrics]


def _peak_resident_bytes() -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        (kilobytes,) = re.findall(r"VmHWM:\s+(\d+) kB", file.read())
    return int(kilobytes) * 1024


def _train(options: Mapping) -> dict:
    """Trains; returns what this process held."""
    import tensorflow as tf

    import mgpu_tf
    from experiments.benchmarks.contestants import datasets, tensorflow_model
    from experiments.benchmarks.jobs import JOBS

    job, count = JOBS[options["job"]], options.get("workers", 1)
    strategy = mgpu_tf.create_strategy(
        options["strategy"], num_virtual_devices=options.get("replicas")
    )
    trainer = mgpu_tf.Trainer(lambda: tensorflow_model.build(job), strategy)
    data = datasets.of_all(job, count)
    trainer.fit(data, steps_per_epoch=_STEPS, verbose=0)
    return {
        "variables": bytes_by_device(strategy, variables_of(trainer.model)),
        "tensors": tf.config.experimental.get_memory_info("CPU:0")["peak"],
        "resident": _peak_resident_bytes(),
    }


def main() -> None:
    options = json.loads(sys.argv[1])
    path = os.path.join(options["folder"], f"{task()[0]}.json")
    told = _train(options)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(told, file)


def _mirrored(job: str, replicas: int) -> Balance:
    options = {"job": job, "strategy": "mirrored", "replicas": replicas}
    name = f"memory/{job}_mirrored_x{replicas}_variables"
    return Balance(name, options, "variables", 1.0)


def _workers(job: str, held: str) -> Balance:
    options = {
        "job": job,
        "strategy": "multi_worker_mirrored",
        "workers": _WORKERS,
    }
    name = f"memory/{job}_{_WORKERS}_workers_{held}"
    return Balance(name, options, held, 0.9)


BALANCES = (
    _mirrored("cnn", 2),
    _mirrored("cnn", 4),
    _mirrored("mlp", 4),
    _workers("mlp", "tensors"),
    _workers("mlp", "resident"),
)

if __name__ == "__main__":
    main()

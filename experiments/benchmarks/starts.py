"""How long it takes to start: imports, `--help`, launch to first step.

Every measurement is one new process, or one new group of them, that runs to
its end before the next begins. Contestants take turns, round after round,
after a round that is dropped because it reads the files for the first time.
Rates are starts per second, so that more is better as everywhere.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

from experiments.benchmarks import results
from experiments.benchmarks.runner import (
    ROOT,
    START_SECONDS,
    Contestant,
    Failed,
    Rates,
    check_losses,
)
from experiments.benchmarks.table import Ratio

_WORKERS = 2
_JOB = "tiny"
_HERE = "experiments.benchmarks"
_MODULES = f"{_HERE}.contestants"
_CLUSTER = {"strategy": "multi_worker_mirrored"}

# The second of a pair adds to the first within one process, so that what
# else the machine does meets both.
_IMPORTS = """
import json, time
marks = [time.perf_counter()]
import tensorflow
marks.append(time.perf_counter())
import mgpu_tf
marks.append(time.perf_counter())
import keras
marks.append(time.perf_counter())
mgpu_tf.Trainer
marks.append(time.perf_counter())
passed = [b - a for a, b in zip(marks, marks[1:])]
print(json.dumps({
    "tensorflow": passed[0],
    "mgpu_tf": passed[0] + passed[1],
    "tensorflow_keras": passed[0] + passed[2],
    "mgpu_tf_trainer": sum(passed),
}))
"""

_TORCHRUN = ("-m", "torch.distributed.run")
_HELP = {
    "python": ("-c", "pass"),
    "mgpu_tf_launch": ("-m", "mgpu_tf", "launch", "--help"),
    "mgpu_tf_train": ("-m", "mgpu_tf", "train", "--help"),
    "torchrun": (*_TORCHRUN, "--help"),
}

# How each starts two processes of a command of Python.
_LAUNCHERS: dict[str, tuple[str, ...]] = {
    "mgpu_tf": (
        *("-m", "mgpu_tf", "launch", f"--num_workers={_WORKERS}"),
        *("--", sys.executable),
    ),
    "torchrun": (
        *_TORCHRUN,
        *("--standalone", f"--nproc-per-node={_WORKERS}"),
    ),
    "bare_script": ("-m", f"{_HERE}.bare_launch", str(_WORKERS)),
}
_TRAINED = {
    "mgpu_tf": Contestant("mgpu_tf", f"{_MODULES}.trainer", _CLUSTER),
    "torchrun": Contestant("torchrun", f"{_MODULES}.torch_ddp"),
    "bare_script": Contestant(
        "bare_script", f"{_MODULES}.tensorflow_loop", _CLUSTER
    ),
}


@dataclasses.dataclass(frozen=True)
class Times:
    """What one measurement gave.

    Attributes:
        seconds: By contestant.
        losses: Of the first step, where there was one.
    """

    seconds: Mapping[str, float]
    losses: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Start:
    """Something that starts.

    Attributes:
        name: Of the benchmark.
        ratios: The values of the table.
        measures: Each starts processes once; they take turns.
        unit: Of the rates.
    """

    name: str
    ratios: tuple[Ratio, ...]
    measures: tuple[Callable[[], Times], ...]
    unit: str = results.STARTS

    def measure(self, rounds: int) -> Rates:
        """Measures in alternation.

        Args:
            rounds: Alternations, after one that is dropped.

        Returns:
            Starts per second, one of each contestant for each round.

        Raises:
            Failed: A process failed, or two trained different jobs.
        """
        result = Rates({}, {}, {})
        for turn in range(rounds + 1):
            shift = turn % len(self.measures)
            for once in self.measures[shift:] + self.measures[:shift]:
                times = once()
                result.losses.update(times.losses)
                if turn:
                    for name, seconds in times.seconds.items():
                        rates = result.rates.setdefault(name, [])
                        rates.append(1.0 / seconds)
        check_losses(list(_TRAINED.values()), result.losses)
        return result


def imports() -> Times:
    """Times the imports in one process."""
    return Times(json.loads(python(["-c", _IMPORTS]).splitlines()[-1]))


def help_of(name: str) -> Times:
    """Times a process that prints its help and ends."""
    started = time.monotonic()
    python(_HELP[name])
    return Times({name: time.monotonic() - started})


def first_step(name: str) -> Times:
    """Times from the launch to the first step of the last process."""
    trained = _TRAINED[name]
    with tempfile.TemporaryDirectory() as folder:
        what = {
            "module": trained.module,
            "options": trained.options,
            "job": _JOB,
            "folder": folder,
        }
        script = ["-m", f"{_HERE}.first_step", json.dumps(what)]
        started = time.monotonic()
        python([*_LAUNCHERS[name], *script])
        told = []
        for entry in os.scandir(folder):
            with open(entry.path, encoding="utf-8") as file:
                told.append(json.load(file))
    if len(told) != _WORKERS:
        raise Failed(f"{name}: {len(told)} of {_WORKERS} made a step.")
    seconds = max(entry["monotonic"] for entry in told) - started
    loss = sum(entry["loss"] for entry in told) / len(told)
    return Times({name: seconds}, {name: loss})


def python(arguments: Sequence[str]) -> str:
    """Runs Python with arguments to its end; returns its output.

    Raises:
        Failed: It ended with an error.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    environment |= {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": ROOT}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no output"]
        errors = [line for line in lines if "Error" in line]
        raise Failed(f"{' '.join(arguments)[:80]}: {(errors or lines)[-1]}")
    return done.stdout


def task() -> tuple[int, int]:
    """Returns the index of this process and how many its launcher started."""
    if "TF_CONFIG" in os.environ:
        config = json.loads(os.environ["TF_CONFIG"])
        return config["task"]["index"], len(config["cluster"]["worker"])
    environment = os.environ
    return int(environment.get("RANK", 0)), int(
        environment.get("WORLD_SIZE", 1)
    )


def _each(
    measure: Callable[[str], Times], names: Mapping[str, object]
) -> tuple[Callable[[], Times], ...]:
    return tuple(lambda name=name: measure(name) for name in names)


STARTS = (
    Start(
        "start/import",
        (
            Ratio("mgpu_tf", "tensorflow", 0.99),
            Ratio("mgpu_tf_trainer", "tensorflow_keras"),
        ),
        (imports,),
    ),
    Start(
        "start/help",
        (
            Ratio("mgpu_tf_launch", "torchrun"),
            Ratio("mgpu_tf_train", "torchrun"),
            Ratio("mgpu_tf_launch", "python"),
        ),
        _each(help_of, _HELP),
    ),
    Start(
        "start/first_step_of_2",
        (Ratio("mgpu_tf", "torchrun"), Ratio("mgpu_tf", "bare_script")),
        _each(first_step, _LAUNCHERS),
    ),
)

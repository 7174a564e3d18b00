"""Workers on machines of one core each, joined by slow links. Needs root.

    text = run(["-m", "experiments.planner.jobs", "--worker=..."], 2, "100mbit")

Each worker is a Python process with a core of its own and a network namespace
of its own, whose link is limited to a rate. Where there are more workers than
cores, some of them share one.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

_PORT = 12345
_STEPS, _WARM = 8, 3
_LIMIT_SECONDS = 900


def sharing(workers: int) -> int:
    """Returns how many workers share the core that most of them share."""
    return -(-workers // (os.cpu_count() or 1))


def run(
    arguments: Sequence[str],
    workers: int = 1,
    rate: str | None = None,
    variables: dict[str, str] | None = None,
) -> str:
    """Returns what the first of some workers prints.

    Args:
        arguments: Those of Python.
        workers: How many.
        rate: Of the link of each, such as "100mbit"; None for one worker.
        variables: Variables of their environment.

    Raises:
        RuntimeError: The first worker failed.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    environment |= variables or {}
    if workers == 1:
        done = subprocess.run(
            _on_core(0, arguments),
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=_LIMIT_SECONDS,
        )
        return _printed(done.returncode, done.stdout, done.stderr)
    from tests.network import Network

    hosts = [f"n{index}" for index in range(workers)]
    with Network(hosts) as network:
        addresses = [f"{network.address(host)}:{_PORT}" for host in hosts]
        processes = []
        for index, host in enumerate(hosts):
            network.limit(host, rate)
            config = {
                "cluster": {"worker": addresses},
                "task": {"type": "worker", "index": index},
            }
            processes.append(
                network.popen(
                    host,
                    _on_core(index, arguments),
                    env=environment | {"TF_CONFIG": json.dumps(config)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL if index else subprocess.PIPE,
                    text=True,
                )
            )
        try:
            out, errors = processes[0].communicate(timeout=_LIMIT_SECONDS)
            return _printed(processes[0].returncode, out, errors)
        finally:
            for host in hosts:
                network.kill(host)
            for process in processes:
                process.wait()


def _on_core(index: int, arguments: Sequence[str]) -> list[str]:
    core = index % (os.cpu_count() or 1)
    return ["taskset", "-c", str(core), sys.executable, *arguments]


def _printed(status: int, out: str, errors: str) -> str:
    if status:
        raise RuntimeError(errors[-2000:])
    return out


def time_steps(
    build: Callable[[], Any],
    strategy: Any,
    x: Any,
    y: Any,
    rows: int,
) -> None:
    """Trains in this process, and prints the seconds of its steps.

    Args:
        build: Returns a compiled model.
        strategy: A strategy.
        x: The inputs of a step.
        y: The targets of a step.
        rows: The global batch size.
    """
    import keras

    import mgpu_tf

    seconds: list[float] = []

    class Clock(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.begin = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seconds.append(time.perf_counter() - self.begin)

    mgpu_tf.Trainer(build, strategy, steps_per_execution=1).fit(
        x,
        y,
        batch_size=rows,
        steps_per_epoch=_STEPS + _WARM,
        verbose=0,
        shuffle=False,
        callbacks=[Clock()],
    )
    print(json.dumps(seconds[_WARM:]))


def median_seconds(text: str) -> float:
    """Returns the median of the seconds that `time_steps` has printed."""
    return statistics.median(json.loads(text.splitlines()[-1]))


def processor() -> str:
    """Returns the name of the processor, and how many cores it has here."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        name = next(
            (
                line.split(":", 1)[1].strip()
                for line in file
                if "model name" in line
            ),
            "a processor without a name",
        )
    return f"{os.cpu_count()} cores of {name}"

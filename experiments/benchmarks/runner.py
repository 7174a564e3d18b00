"""Runs the contestants of a benchmark in alternation.

All contestants of a benchmark are started, trained to the same step and held
to the same loss. Then each in turn makes one burst of steps while the others
wait, round after round, so that what else the machine does meets all alike. A
ratio is taken within a round; the median over rounds is what is told.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

ROOT = os.path.dirname(
    os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
)

# Guards against a hang, not a measure of speed.
START_SECONDS = 600.0
BURST_SECONDS = 240.0


class Failed(RuntimeError):
    """A contestant did not answer, or answered with an error."""


@dataclasses.dataclass(frozen=True)
class Contestant:
    """Who takes part in a benchmark and how.

    Attributes:
        name: In the results.
        module: Of its `create(place)`; see `worker`.
        options: The module's own settings.
        workers: Processes that train together.
        copies: Processes that train alone at the same time, each as one
            worker does with its part of the batch. The mean of their rates
            is the rate of all, which no group of workers can beat.
        environment: Variables for its processes.
        same_job: Whether its loss must be that of the others.
        tolerance: By what part the loss may differ.
    """

    name: str
    module: str
    options: dict = dataclasses.field(default_factory=dict)
    workers: int = 1
    copies: int = 1
    environment: dict = dataclasses.field(default_factory=dict)
    same_job: bool = True
    tolerance: float = 2e-3


class Processes:
    """The running processes of one contestant.

    Args:
        contestant: Whose.
        job: A key of `jobs.JOBS`.
        check_steps: Steps to the comparison of losses.
        pinned: Whether process i stays on core i.
        log_folder: Gets the output of the processes.
    """

    def __init__(
        self,
        contestant: Contestant,
        job: str,
        check_steps: int,
        *,
        pinned: bool,
        log_folder: str,
    ) -> None:
        self.contestant = contestant
        self._children: list[subprocess.Popen] = []
        self._answers: list[_Lines] = []
        count = max(contestant.workers, contestant.copies)
        cores = sorted(os.sched_getaffinity(0))
        ports = _free_ports(count)
        for index in range(count):
            read, write = os.pipe()
            place = {
                "module": contestant.module,
                "job": job,
                "index": index if contestant.workers > 1 else 0,
                "workers": contestant.workers,
                "options": contestant.options,
                "check_steps": check_steps,
                "answers": write,
                "threads": 1 if pinned else None,
                "core": (
                    cores[index % len(cores)]
                    if pinned and count <= len(cores)
                    else None
                ),
            }
            log = os.path.join(log_folder, f"{contestant.name}.{index}.log")
            with open(log, "wb") as output:
                child = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "experiments.benchmarks.worker",
                        json.dumps(place),
                    ],
                    cwd=ROOT,
                    env=self._environment(index, ports, pinned),
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[write],
                )
            os.close(write)
            self._children.append(child)
            self._answers.append(_Lines(read, child, contestant.name))

    def _environment(
        self, index: int, ports: list[int], pinned: bool
    ) -> dict[str, str]:
        values = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
        values |= {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONUNBUFFERED": "1"}
        values["PYTHONPATH"] = ROOT
        if pinned:
            values |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        workers = self.contestant.workers
        if workers > 1:
            addresses = [f"127.0.0.1:{port}" for port in ports]
            values["TF_CONFIG"] = json.dumps(
                {
                    "cluster": {"worker": addresses},
                    "task": {"type": "worker", "index": index},
                }
            )
            values |= {
                "RANK": str(index),
                "LOCAL_RANK": str(index),
                "WORLD_SIZE": str(workers),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(ports[0]),
            }
        return values | self.contestant.environment

    def loss(self) -> float:
        """Waits for the check; returns the mean loss over its processes."""
        answers = [lines.next(START_SECONDS) for lines in self._answers]
        return sum(answer["loss"] for answer in answers) / len(answers)

    def burst(self, steps: int) -> float:
        """Makes steps on all processes.

        Returns:
            Steps/s: of the group, which is as fast as its slowest worker, or
            the mean of those that train alone.
        """
        for child in self._children:
            child.stdin.write(f"{steps}\n".encode())
            child.stdin.flush()
        answers = [lines.next(BURST_SECONDS) for lines in self._answers]
        rates = [answer["steps"] / answer["seconds"] for answer in answers]
        alone = self.contestant.copies > 1
        return sum(rates) / len(rates) if alone else min(rates)

    def end(self) -> None:
        """Ends the processes."""
        for child, lines in zip(self._children, self._answers, strict=True):
            child.stdin.close()
            child.send_signal(signal.SIGKILL)
            child.wait()
            lines.close()


class _Lines:
    """JSON lines from a pipe, with a time limit."""

    def __init__(
        self, descriptor: int, child: subprocess.Popen, name: str
    ) -> None:
        self._descriptor = descriptor
        self._child = child
        self._name = name
        self._rest = b""

    def next(self, limit_seconds: float) -> dict:
        deadline = time.monotonic() + limit_seconds
        while b"\n" not in self._rest:
            left = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._descriptor], [], [], left)
            if not ready:
                raise Failed(f"no answer in {limit_seconds:.0f} seconds")
            data = os.read(self._descriptor, 65536)
            if not data:
                code = self._child.wait()
                raise Failed(f"ended with exit code {code}")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer

    def close(self) -> None:
        os.close(self._descriptor)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for held in sockets:
        held.bind(("127.0.0.1", 0))
    ports = [held.getsockname()[1] for held in sockets]
    for held in sockets:
        held.close()
    return ports


@dataclasses.dataclass
class Rates:
    """What the contestants of a benchmark did.

    Attributes:
        rates: Steps per second of each, one for each round.
        losses: After the same first steps.
        failed: Why a contestant is not in the rates.
    """

    rates: dict[str, list[float]]
    losses: dict[str, float]
    failed: dict[str, str]


def alternate(
    contestants: Sequence[Contestant],
    job: str,
    *,
    check_steps: int,
    burst_seconds: float,
    rounds: int,
    log_folder: str,
    pinned: bool = False,
    multiple: int = 1,
) -> Rates:
    """Measures contestants in alternation.

    Args:
        contestants: Who; the first same-job contestant gives the loss.
        job: A key of `jobs.JOBS`.
        check_steps: Steps that all make alike before their losses are
            compared.
        burst_seconds: About how long a burst is to take.
        rounds: Alternations.
        log_folder: Gets the output of the processes.
        pinned: Whether process i of a contestant stays on core i.
        multiple: Bursts are a multiple of so many steps.

    Returns:
        The rates and losses.

    Raises:
        Failed: Two contestants did not train the same job.
    """
    result = Rates({}, {}, {})
    running: list[Processes] = []
    try:
        for contestant in contestants:
            running.append(
                Processes(
                    contestant,
                    job,
                    check_steps,
                    pinned=pinned,
                    log_folder=log_folder,
                )
            )
        for processes in list(running):
            name = processes.contestant.name
            try:
                result.losses[name] = processes.loss()
            except Failed as error:
                result.failed[name] = str(error)
                running.remove(processes)
                processes.end()
        check_losses(contestants, result.losses)
        bursts = {}
        for processes in running:
            name = processes.contestant.name
            rate = processes.burst(2 * multiple)
            wanted = int(rate * burst_seconds) // multiple * multiple
            bursts[name] = max(multiple, wanted)
            result.rates[name] = []
        for turn in range(rounds):
            # The order turns, so that nobody always follows the same one.
            shift = turn % len(running)
            for processes in running[shift:] + running[:shift]:
                name = processes.contestant.name
                result.rates[name].append(processes.burst(bursts[name]))
    finally:
        for processes in running:
            processes.end()
    return result


def check_losses(
    contestants: Sequence[Contestant], losses: dict[str, float]
) -> None:
    """Refuses contestants that did not train the same job.

    Raises:
        Failed: A loss differs from the first by more than allowed.
    """
    alike = [c for c in contestants if c.same_job and c.name in losses]
    for contestant in alike[1:]:
        expected, found = losses[alike[0].name], losses[contestant.name]
        if not abs(found - expected) <= contestant.tolerance * abs(expected):
            raise Failed(
                "All contestants must reach the same loss. Received: "
                f"{contestant.name} {found:.6f}, {alike[0].name} "
                f"{expected:.6f}."
            )

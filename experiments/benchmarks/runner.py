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
        num_ps: Parameter servers. With any there is a coordinator as well,
            which alone answers; workers and servers only serve.
        environment: Variables for its processes.
        same_job: Whether its loss must be that of the others.
        tolerance: By what part the loss may differ.
        inside: Another contestant, in whose processes it runs. `options` are
            then arguments of its bursts, and its loss is the other's.
    """

    name: str
    module: str
    options: dict = dataclasses.field(default_factory=dict)
    workers: int = 1
    copies: int = 1
    num_ps: int = 0
    environment: dict = dataclasses.field(default_factory=dict)
    same_job: bool = True
    tolerance: float = 2e-3
    inside: str | None = None

    @property
    def tasks(self) -> list[tuple[str, int]]:
        """Returns type and index of each process."""
        count = max(self.workers, self.copies)
        workers = [("worker", index) for index in range(count)]
        servers = [("ps", index) for index in range(self.num_ps)]
        return [("chief", 0), *workers, *servers] if servers else workers


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
        tasks = contestant.tasks
        cores = sorted(os.sched_getaffinity(0))
        ports = dict(zip(tasks, _free_ports(len(tasks)), strict=True))
        # What a coordinator hands out is a whole batch for one worker.
        sharing = 1 if contestant.num_ps else contestant.workers
        for task in tasks:
            task_type, index = task
            read, write = os.pipe()
            place = {
                "module": contestant.module,
                "job": job,
                "index": index if sharing > 1 else 0,
                "workers": sharing,
                "options": contestant.options,
                "check_steps": check_steps,
                "answers": write,
                "threads": 1 if pinned else None,
                "core": (
                    cores[index % len(cores)]
                    if pinned and len(tasks) <= len(cores)
                    else None
                ),
            }
            log = os.path.join(
                log_folder, f"{contestant.name}.{task_type}.{index}.log"
            )
            with open(log, "wb") as output:
                child = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "experiments.benchmarks.worker",
                        json.dumps(place),
                    ],
                    cwd=ROOT,
                    env=self._environment(task, ports, pinned),
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[write],
                )
            os.close(write)
            self._children.append(child)
            if contestant.num_ps and task_type != "chief":
                os.close(read)
            else:
                self._answers.append(_Lines(read, child))

    def _environment(
        self,
        task: tuple[str, int],
        ports: dict[tuple[str, int], int],
        pinned: bool,
    ) -> dict[str, str]:
        values = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
        values |= {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONUNBUFFERED": "1"}
        values["PYTHONPATH"] = ROOT
        if pinned:
            values |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        workers, num_ps = self.contestant.workers, self.contestant.num_ps
        task_type, index = task
        if workers > 1 or num_ps:
            cluster: dict[str, list[str]] = {}
            for (kind, _), port in ports.items():
                cluster.setdefault(kind, []).append(f"127.0.0.1:{port}")
            values["TF_CONFIG"] = json.dumps(
                {
                    "cluster": cluster,
                    "task": {"type": task_type, "index": index},
                }
            )
            values |= {
                "RANK": str(index),
                "LOCAL_RANK": str(index),
                "WORLD_SIZE": str(workers),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(ports["worker", 0]),
            }
        return values | self.contestant.environment

    def loss(self) -> float:
        """Waits for the check; returns the mean loss over its processes."""
        answers = [lines.next(START_SECONDS) for lines in self._answers]
        return sum(answer["loss"] for answer in answers) / len(answers)

    def burst(self, steps: int, options: dict) -> float:
        """Makes steps on all processes that answer.

        Args:
            steps: How many.
            options: Further arguments of a burst.

        Returns:
            Steps/s: of the group, which is as fast as its slowest worker, or
            the mean of those that train alone.
        """
        for lines in self._answers:
            lines.ask({"steps": steps, **options})
        answers = [lines.next(BURST_SECONDS) for lines in self._answers]
        rates = [answer["steps"] / answer["seconds"] for answer in answers]
        alone = self.contestant.copies > 1
        return sum(rates) / len(rates) if alone else min(rates)

    def end(self) -> None:
        """Ends the processes."""
        for child in self._children:
            child.stdin.close()
            child.send_signal(signal.SIGKILL)
            child.wait()
        for lines in self._answers:
            lines.close()


class _Lines:
    """What a process that answers is asked, and its JSON lines."""

    def __init__(self, descriptor: int, child: subprocess.Popen) -> None:
        self._descriptor = descriptor
        self._child = child
        self._rest = b""

    def ask(self, wish: dict) -> None:
        self._child.stdin.write((json.dumps(wish) + "\n").encode())
        self._child.stdin.flush()

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
        multiple: Bursts are a multiple of this number of steps.

    Returns:
        The rates and losses.

    Raises:
        Failed: Two contestants did not train the same job.
    """
    result = Rates({}, {}, {})
    running: dict[str, Processes] = {}
    try:
        for contestant in contestants:
            if contestant.inside is None:
                running[contestant.name] = Processes(
                    contestant,
                    job,
                    check_steps,
                    pinned=pinned,
                    log_folder=log_folder,
                )
        for name, processes in list(running.items()):
            try:
                result.losses[name] = processes.loss()
            except Failed as error:
                result.failed[name] = str(error)
                del running[name]
                processes.end()
        check_losses(contestants, result.losses)
        turns = []
        for contestant in contestants:
            processes = running.get(contestant.inside or contestant.name)
            if processes is not None:
                turns.append(_Turn(contestant, processes))
        for turn in turns:
            turn.settle(multiple, burst_seconds)
            result.rates[turn.contestant.name] = []
            if turn.contestant.inside is not None:
                loss = result.losses[turn.contestant.inside]
                result.losses[turn.contestant.name] = loss
        for round_ in range(rounds):
            # The order turns, so that nobody always follows the same one.
            shift = round_ % len(turns)
            for turn in turns[shift:] + turns[:shift]:
                result.rates[turn.contestant.name].append(turn.take())
    finally:
        for processes in running.values():
            processes.end()
    return result


class _Turn:
    """The bursts of one contestant.

    Args:
        contestant: Whose.
        processes: That make them.
    """

    def __init__(self, contestant: Contestant, processes: Processes) -> None:
        self.contestant = contestant
        self._processes = processes
        inside = contestant.inside is not None
        self._options = contestant.options if inside else {}
        self._steps = 0

    def settle(self, multiple: int, seconds: float) -> None:
        """Finds how many steps take about so long."""
        self._steps = 2 * multiple
        wanted = int(self.take() * seconds) // multiple * multiple
        self._steps = max(multiple, wanted)

    def take(self) -> float:
        """Makes a burst; returns steps/s."""
        return self._processes.burst(self._steps, self._options)


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

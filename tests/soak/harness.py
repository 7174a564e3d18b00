"""Running a job under the supervisor, and killing parts of it."""

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import time

from tests import clusters

# The job, `tests.soak.job`.
EPOCHS = 5
STEPS_PER_EPOCH = 32
SAVE_EVERY_STEPS = 5
TOTAL_STEPS = EPOCHS * STEPS_PER_EPOCH

WORKERS = {
    "mirrored": 1,
    "2_workers": 2,
    "3_workers": 3,
    "2_workers_fsdp": 2,
    "2_workers_tensor": 2,
    "data_2_tensor_2": 1,
    "data_2_pipeline_2": 1,
}

# What is killed, and when: a task between two steps; a task while a
# checkpoint is written; the supervisor; or all are told to end by SIGTERM; or a
# task is stopped, for good or for PAUSE_SECONDS.
KINDS = ("step", "save", "supervisor", "preempt", "stop", "pause")
STALL_SECONDS = 50
PAUSE_SECONDS = 20

_RESULT = re.compile(
    r"^RESULT (?P<sha>\w{64}) (?P<step>\d+) (?P<restarts>\d+)"
    r" (?P<lost_steps>\d+) (?P<lost_seconds>[\d.]+)$",
    re.MULTILINE,
)


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault: of what kind, in which worker, after which step."""

    kind: str
    worker: int
    step: int


@dataclasses.dataclass(frozen=True)
class Struck:
    """What a fault did.

    Attributes:
        at_step: The last step that was noted before it.
        torn: Whether it left a checkpoint half-written.
        seconds: From the fault to the first step that was new.
    """

    at_step: int
    torn: bool
    seconds: float


@dataclasses.dataclass(frozen=True)
class Result:
    """How a job ended."""

    sha: str
    step: int
    restarts: int
    lost_steps: int
    lost_seconds: float
    cold_start_seconds: float
    struck: list[Struck]


class Job:
    """One job in a folder of its own.

    Args:
        strategy: A name in `WORKERS`.
        folder: An empty folder.
    """

    def __init__(self, strategy, folder):
        self._strategy = strategy
        self._workers = WORKERS[strategy]
        self._checkpoints = os.path.join(folder, "checkpoints")
        self._logs = os.path.join(folder, "logs")
        self._output = os.path.join(folder, "output.txt")
        self._supervisor = None

    def run(self, faults=()):
        """Runs the job to its end, through all faults."""
        started = time.time()
        self._start()
        try:
            self._until(lambda: self._progress()[0] > 0)
            cold_start_seconds = time.time() - started
            struck = [self._strike(fault) for fault in faults]
            code = self._supervisor.wait(clusters.LIMIT_SECONDS)
            assert code == 0, self._told()
        finally:
            self._supervisor.kill()
            self._supervisor.wait()
        results = [self._result(index) for index in range(self._workers)]
        assert len({found["sha"] for found in results}) == 1, results
        chief = results[0]
        return Result(
            sha=chief["sha"],
            step=int(chief["step"]),
            restarts=int(chief["restarts"]),
            lost_steps=int(chief["lost_steps"]),
            lost_seconds=float(chief["lost_seconds"]),
            cold_start_seconds=cold_start_seconds,
            struck=struck,
        )

    def _start(self):
        with open(self._output, "ab") as output:
            self._supervisor = subprocess.Popen(
                [
                    clusters.PYTHON,
                    "-m",
                    "mgpu_tf",
                    "launch",
                    f"--num_workers={self._workers}",
                    "--startup_seconds=0",
                    "--max_restarts=99",
                    f"--stall_timeout_seconds={STALL_SECONDS}",
                    "--backoff_seconds=0",
                    "--grace_seconds=300",
                    f"--log_dir={self._logs}",
                    "--",
                    clusters.PYTHON,
                    "-m",
                    "tests.soak.job",
                    self._checkpoints,
                    self._strategy,
                ],
                cwd=clusters.ROOT,
                env=clusters.environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _strike(self, fault):
        began = self._progress()[1]
        self._until(lambda: self._progress()[0] >= fault.step)
        if fault.kind == "save":
            self._until(self._writing, pause=0.0)
        pids = [self._pid(index) for index in range(self._workers)]
        if fault.kind == "supervisor":
            self._supervisor.kill()
        elif fault.kind == "preempt":
            self._supervisor.terminate()
        elif fault.kind in ("stop", "pause"):
            os.kill(pids[fault.worker], signal.SIGSTOP)
        else:
            os.kill(pids[fault.worker], signal.SIGKILL)
        struck = time.time()
        at_step, _ = self._progress()
        if fault.kind in ("supervisor", "preempt"):
            code = self._supervisor.wait(clusters.LIMIT_SECONDS)
            assert code == (75 if fault.kind == "preempt" else -9), self._told()
            self._until(lambda: not any(map(_runs, pids)), watch=False)
            at_step, _ = self._progress()
            torn = self._writing()
            self._start()
        elif fault.kind == "pause":
            time.sleep(PAUSE_SECONDS)
            at_step, torn = self._progress()[0], self._writing()
            os.kill(pids[fault.worker], signal.SIGCONT)
        else:
            self._until(lambda: not _runs(pids[fault.worker]))
            torn = self._writing()

        def goes_on():
            step, now_began = self._progress()
            again = now_began > began or fault.kind == "pause"
            return again and step > at_step

        self._until(goes_on)
        return Struck(at_step, torn, time.time() - struck)

    def _until(self, condition, pause=0.002, watch=True):
        deadline = time.monotonic() + clusters.LIMIT_SECONDS
        while not condition():
            assert time.monotonic() < deadline, self._told()
            ended = watch and self._supervisor.poll() is not None
            assert not ended or condition(), self._told()
            time.sleep(pause)

    def _progress(self):
        """The last step that the chief has noted, and when it had begun."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            path = os.path.join(self._checkpoints, "progress")
            with open(path, encoding="ascii") as file:
                step, _, began, _ = file.read().split()
            return int(step), float(began)
        return 0, 0.0

    def _writing(self):
        with contextlib.suppress(FileNotFoundError):
            names = os.listdir(self._checkpoints)
            return any(name.startswith(".unfinished") for name in names)
        return False

    def _log(self, index):
        path = os.path.join(self._logs, f"worker-{index}.log")
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()

    def _pid(self, index):
        return int(
            re.findall(r"^--- process (\d+)", self._log(index), re.M)[-1]
        )

    def _result(self, index):
        return list(_RESULT.finditer(self._log(index)))[-1]

    def _told(self):
        with open(self._output, encoding="utf-8", errors="replace") as file:
            return file.read()[-6000:]


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def faults_of(generator, strategy, count):
    """Draws faults, one in each part of a run.

    Args:
        generator: A `random.Random`.
        strategy: A name in `WORKERS`.
        count: How many.

    Returns:
        The faults, by step.
    """
    part = (TOTAL_STEPS - 2 * SAVE_EVERY_STEPS) / count
    return [
        Fault(
            kind=generator.choices(KINDS, weights=(5, 3, 1, 1, 1, 1))[0],
            worker=generator.randrange(WORKERS[strategy]),
            step=int(part * (index + generator.uniform(0.2, 0.9))),
        )
        for index in range(count)
    ]

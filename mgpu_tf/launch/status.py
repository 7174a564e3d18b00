"""What the tasks of a running job do, for who looks from outside.

    status.write(log_dir, beats, restarts=1)      # by the supervisor
    print(status.text(log_dir))                   # by `mgpu-tf status`

The supervisor leaves a small file in its `log_dir` that says where the
heartbeats of its tasks are. They are read, and nothing is asked of the tasks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterator, Mapping

from mgpu_tf.cluster import heartbeat
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.folders import own_only

FILE = "job.json"


@dataclasses.dataclass(frozen=True)
class TaskStatus:
    """A task of a job.

    Attributes:
        name: Such as "worker 1".
        pid: Its process.
        step: Its global step.
        phase: What it does.
        seconds: How long it has done that.
        steps_per_second: Over its last entries; None where that is unknown.
    """

    name: str
    pid: int
    step: int
    phase: str
    seconds: float
    steps_per_second: float | None


@dataclasses.dataclass(frozen=True)
class JobStatus:
    """A job.

    Attributes:
        supervisor: The process that watches the tasks.
        is_running: Whether that process is there.
        restarts: How often tasks were started again.
        tasks: Those that have a heartbeat.
    """

    supervisor: int
    is_running: bool
    restarts: int
    tasks: list[TaskStatus]


def write(log_dir: str, beats: Mapping[str, str], restarts: int) -> None:
    """Leaves a note in the folder of the logs; a full disk changes nothing.

    Args:
        log_dir: The folder.
        beats: Where the heartbeat of each task is read, by its name.
        restarts: How often tasks were started again.
    """
    record = {
        "supervisor": os.getpid(),
        "beats": dict(beats),
        "restarts": restarts,
    }
    path = os.path.join(log_dir, FILE)
    with contextlib.suppress(OSError):
        with open(f"{path}.new", "w", opener=own_only) as file:
            json.dump(record, file)
        os.replace(f"{path}.new", path)


def read(log_dir: str) -> JobStatus:
    """Returns what a job does now.

    Args:
        log_dir: The `--log_dir` of the job.

    Raises:
        ConfigurationError: No job has that folder.
    """
    try:
        with open(os.path.join(log_dir, FILE), encoding="utf-8") as file:
            record = json.load(file)
        supervisor, beats = int(record["supervisor"]), dict(record["beats"])
        restarts = int(record["restarts"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            "status takes the log_dir of a job. Received: "
            f"{log_dir!r} ({type(error).__name__} for {FILE}). Start the job "
            "with --log_dir, and give that folder."
        ) from None
    return JobStatus(
        supervisor, _runs(supervisor), restarts, list(_tasks(beats))
    )


def text(log_dir: str) -> str:
    """Returns the status of a job as a table.

    Args:
        log_dir: The `--log_dir` of the job.
    """
    job = read(log_dir)
    state = "runs" if job.is_running else "has ended"
    head = f"the job {state}; restarts: {job.restarts}"
    rows = [("task", "step", "steps/s", "phase", "for")]
    rows += [
        (
            task.name,
            # A server counts no steps.
            "" if task.phase == heartbeat.SERVE else str(task.step),
            ""
            if task.steps_per_second is None
            else f"{task.steps_per_second:.3g}",
            task.phase,
            f"{task.seconds:.0f} s",
        )
        for task in job.tasks
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True))
        for row in rows
    ]
    return "\n".join([head, *(line.rstrip() for line in lines)])


def _tasks(beats: Mapping[str, str]) -> Iterator[TaskStatus]:
    for name, path in sorted(beats.items()):
        # The file goes with the supervisor.
        with contextlib.suppress(OSError), open(path, "rb") as file:
            beat = heartbeat.read(file.fileno())
            if beat is not None:
                yield _task(name, beat)


def _task(name: str, beat: heartbeat.Beat) -> TaskStatus:
    first, last = beat.entries[0], beat.last
    steps, seconds = last.step - first.step, last.moment - first.moment
    return TaskStatus(
        name,
        beat.pid,
        last.step,
        last.phase,
        max(0.0, time.time() - last.moment),
        steps / seconds if steps > 0 and seconds > 0 else None,
    )


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

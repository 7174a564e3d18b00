"""Where the tasks of a job run: on this machine, or on others.

    machines = ThisMachine(job)
    with machines.addresses(job.roles) as addresses:
        for cluster in job.clusters(addresses):
            task = machines.start(cluster, variables, output)

`ssh` and `ray` have those of other machines. The supervisor in `local` is the
same for all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from mgpu_tf.cluster import ports
from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.cluster.roles import Roles
from mgpu_tf.errors import ClusterError
from mgpu_tf.launch import gpus, noise
from mgpu_tf.launch.job import LaunchJob
from mgpu_tf.launch.processes.process import LocalTask, Task
from mgpu_tf.launch.processes.spares import Spares


class NoRoom(ClusterError):
    """The machines have no room for the tasks of a job."""


class Interrupted(Exception):
    """A signal came while the tasks were being placed."""


class Machines(Protocol):
    """Where the tasks of a job run, and how one is started there.

    Attributes:
        launcher: The command of `mgpu-tf` that speaks of them.
        here: Whether their heartbeats can be read on this machine.
        spares: Processes that wait to be tasks, None for none.
    """

    launcher: str
    here: bool
    spares: Spares | None

    def room(self, most: int) -> int:
        """Returns for how many workers there are machines now.

        Until the next call, tasks are placed on these.

        Args:
            most: The most that are wanted.
        """

    def addresses(
        self, roles: Roles, going: Callable[[], bool]
    ) -> contextlib.AbstractContextManager[Sequence[str]]:
        """Returns `host:port` of each task, for as long as an attempt.

        Args:
            roles: The tasks.
            going: Whether the job is still wanted, for who has to wait.

        Raises:
            NoRoom: There is no room for the tasks.
            Interrupted: The job is not wanted any more.
        """

    def start(
        self, cluster: ClusterConfig, variables: dict[str, str], output: Output
    ) -> Task:
        """Starts a task.

        Args:
            cluster: The cluster as the task sees it.
            variables: Environment variables for the task.
            output: Where its output belongs.
        """


@dataclasses.dataclass(frozen=True)
class Output:
    """Where the output of a task belongs.

    Attributes:
        raw: Whether it writes to this process's output directly.
        log_path: A file that gets it as well, None for none.
        on_closed: Called when this process's output was closed.
    """

    raw: bool
    log_path: str | None
    on_closed: Callable[[], None]


class ThisMachine:
    """Tasks are processes of this machine.

    Args:
        job: The command and its tasks.

    Raises:
        ConfigurationError: The job has spares, and its command is no Python
            script or module.
    """

    launcher = "launch"
    here = True

    def __init__(self, job: LaunchJob) -> None:
        self._command = job.command
        # They import before they receive the environment of their task.
        first = noise.kept() if job.log_dir is not None else {}
        self.spares = (
            Spares(job.command, job.spares, first) if job.spares else None
        )

    def room(self, most: int) -> int:
        """Returns the most that are wanted: this machine is there."""
        return most

    @contextlib.contextmanager
    def addresses(
        self, roles: Roles, going: Callable[[], bool]
    ) -> Iterator[Sequence[str]]:
        """Reserves a port for each task."""
        del going
        with ports.reserved(roles.num_tasks) as numbers:
            yield [f"127.0.0.1:{number}" for number in numbers]

    def start(
        self, cluster: ClusterConfig, variables: dict[str, str], output: Output
    ) -> Task:
        """Starts a process, or hands the task to one that waits."""
        variables = gpus.share(cluster, os.environ) | variables
        environment = os.environ | variables
        environment.setdefault("PYTHONUNBUFFERED", "1")
        return LocalTask(
            cluster.task_name,
            self._command,
            environment,
            raw=output.raw,
            log_path=output.log_path,
            on_output_closed=output.on_closed,
            process=self.spares.take(variables) if self.spares else None,
        )

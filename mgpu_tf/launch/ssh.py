"""The tasks of a job on machines without a scheduler, started by ssh.

    code = launch(["python", "train.py"], ["host0", "host1"])

Each task is kept by a process on its machine (`keeper`), which ssh starts. The
supervisor is that of this machine: its tasks are the clients of ssh, so a
failure, a restart and Ctrl-C work as they do for local processes. ssh must
reach each machine without a password. The command runs there in the folder
that this process is in.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.cluster.environments.place import DEFAULT_PORT
from mgpu_tf.cluster.roles import Roles
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.launch import keeper
from mgpu_tf.launch.hosts import places
from mgpu_tf.launch.job import LaunchJob, check_command
from mgpu_tf.launch.local import supervise
from mgpu_tf.launch.machines import Output
from mgpu_tf.launch.processes.process import LocalTask, Task
from mgpu_tf.launch.processes.spares import Spares

# No question that nobody answers; a dead connection is noticed.
_OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=30"),
    *("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3"),
)
# A machine that is there answers sooner.
_ASK_SECONDS = 15.0


def launch(
    command: Sequence[str],
    hosts: Sequence[str],
    *,
    num_workers: int | None = None,
    port: int = DEFAULT_PORT,
    ssh_command: str = "ssh",
    **options: Any,
) -> int:
    """Runs a command as a cluster of processes on other machines.

    Args:
        command: The program and its arguments.
        hosts: The names or addresses of the machines, as they know each
            other. Tasks are dealt out to them in turn.
        num_workers: How many processes of task type `worker`; default: one
            on each machine.
        port: The first port of tasks on each machine.
        ssh_command: The program, with options of the user.
        **options: The other fields of `LaunchJob`.

    Returns:
        As `mgpu_tf.launch.local.launch`; 255 where ssh itself failed.

    Raises:
        ConfigurationError: There is no ssh here, or a value is out of range.
    """
    job = LaunchJob(
        tuple(command),
        len(hosts) if num_workers is None else num_workers,
        **options,
    )
    return supervise(job, SshMachines(job, hosts, port, ssh_command))


class SshMachines:
    """Machines that ssh reaches.

    Args:
        job: The command and its tasks.
        hosts: The machines.
        port: The first port of tasks on each machine.
        ssh_command: The program, with options of the user.

    Raises:
        ConfigurationError: A host is no name, or there is no ssh here.
    """

    launcher = "launch"
    here = False
    spares: Spares | None = None

    def __init__(
        self,
        job: LaunchJob,
        hosts: Sequence[str],
        port: int = DEFAULT_PORT,
        ssh_command: str = "ssh",
    ) -> None:
        check_command(job.command)
        places(job.num_tasks, hosts, port)  # Refuses what is no host.
        try:
            self._program = shlex.split(ssh_command)
        except ValueError as error:
            raise ConfigurationError(
                "ssh_command must be words as a shell takes them. Received: "
                f"ssh_command={ssh_command!r} ({error})."
            ) from None
        if not self._program or shutil.which(self._program[0]) is None:
            raise ConfigurationError(
                "--ssh needs the program ssh. Received: "
                f"ssh_command={ssh_command!r}, which is not on this machine. "
                "Install it (Debian: openssh-client), or use --print."
            )
        self._command = job.command
        self._hosts, self._port = list(hosts), port
        self._slots: list[tuple[str, int]] | None = None

    def room(self, most: int) -> int:
        """Asks all machines at once whether they are there."""
        slots = places(most, self._hosts, self._port)
        there = set(self._answering(list(dict.fromkeys(h for h, _ in slots))))
        self._slots = [slot for slot in slots if slot[0] in there]
        return len(self._slots)

    def _answering(self, hosts: Sequence[str]) -> list[str]:
        asked = [
            subprocess.Popen(
                [*self._program, *_OPTIONS, "--", host, "true"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for host in hosts
        ]
        end = time.monotonic() + _ASK_SECONDS
        answering = []
        for host, client in zip(hosts, asked, strict=True):
            try:
                status = client.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                client.kill()
                status = client.wait()
            if status == 0:
                answering.append(host)
        return answering

    @contextlib.contextmanager
    def addresses(
        self, roles: Roles, going: Callable[[], bool]
    ) -> Iterator[Sequence[str]]:
        """Deals out the tasks to the machines."""
        del going
        dealt = self._slots or places(roles.num_tasks, self._hosts, self._port)
        dealt = dealt[: roles.num_tasks]
        yield [f"{host}:{number}" for host, number in dealt]

    def start(
        self, cluster: ClusterConfig, variables: dict[str, str], output: Output
    ) -> Task:
        """Starts a task on the machine of its address."""
        host = cluster.address.rpartition(":")[0].strip("[]")
        line = f"exec python3 -c {shlex.quote(keeper.CODE)}"
        return SshTask(
            cluster.task_name,
            [*self._program, *_OPTIONS, "--", host, line],
            os.environ,
            raw=output.raw,
            log_path=output.log_path,
            on_output_closed=output.on_closed,
            first_input=keeper.request(
                self._command,
                {"PYTHONUNBUFFERED": "1"} | variables,
                os.getcwd(),
            ),
        )


class SshTask(LocalTask):
    """A client of ssh, and the task that it keeps on another machine."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        threading.Thread(target=self._say_alive, daemon=True).start()

    def cause(self) -> str:
        """Returns in words what ended the task."""
        cause = super().cause()
        return f"{cause} (ssh failed)" if self.returncode == 255 else cause

    def signal(self, number: int) -> None:
        """Sends a signal to the task on its machine.

        SIGKILL ends the connection as well: its end is what kills a task
        whose keeper does not answer.
        """
        self._send(keeper.signal_line(number))
        if number == signal.SIGKILL:
            self.wait(1.0)
            super().signal(number)

    def _say_alive(self) -> None:
        while self.alive:
            self._send(keeper.ALIVE)
            self.wait(keeper.ALIVE_SECONDS)

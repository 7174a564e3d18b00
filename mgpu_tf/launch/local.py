"""The local supervisor: N processes of one script, as a cluster.

    code = launch(["python", "train.py", "--epochs=5"], num_workers=2)

Each process gets a `TF_CONFIG` of its own. Their output comes line by line
with the task in front. When one fails the rest are ended and its exit code is
returned; Ctrl-C and SIGTERM reach all of them. A task that does not open its
port within the start-up limit is named, since TensorFlow itself would wait
for it for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO

from mgpu_tf.cluster import TF_CONFIG, ClusterConfig
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.launch import ports

STARTUP_SECONDS = 300.0
GRACE_SECONDS = 10.0
_POLL_SECONDS = 0.2
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

# What progress bars write to redraw a line; only the last drawing is kept.
_REDRAWN = re.compile(rb"^.*[\r\b]+(?=[^\r\b\n])")
_COLOUR = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


def launch(
    command: Sequence[str],
    num_workers: int,
    *,
    startup_seconds: float = STARTUP_SECONDS,
    chief_has_terminal: bool = False,
) -> int:
    """Runs a command as a cluster of processes on this machine.

    Args:
        command: The program and its arguments.
        num_workers: How many processes, all of task type `worker`.
        startup_seconds: How long each may take until it serves its port; 0
            for no limit.
        chief_has_terminal: Whether worker 0 writes to this process's output
            directly, so that its progress bar moves.

    Returns:
        0 when all succeeded; else the exit code of the first that failed,
        128 + signal for one ended by a signal, 1 for a start-up limit.

    Raises:
        ConfigurationError: The program does not exist, or a number is out
            of range.
    """
    if num_workers < 1:
        raise ConfigurationError(
            f"num_workers must be 1 or more. Received: {num_workers}."
        )
    if not startup_seconds >= 0:
        raise ConfigurationError(
            "startup_seconds must be 0 or more, 0 for no limit. Received: "
            f"{startup_seconds}."
        )
    with ports.ReservedPorts(num_workers) as reserved:
        addresses = tuple(f"127.0.0.1:{port}" for port in reserved.numbers)
        supervisor = _Supervisor(startup_seconds)
        with supervisor:
            for index in range(num_workers):
                cluster = ClusterConfig(
                    task_type="worker", task_index=index, worker=addresses
                )
                supervisor.start(
                    command, cluster, raw=chief_has_terminal and index == 0
                )
            return supervisor.wait()


@dataclasses.dataclass
class _Task:
    name: str
    port: int
    process: subprocess.Popen[bytes]
    reader: threading.Thread | None
    ready: bool = False
    ended: bool = False

    @property
    def alive(self) -> bool:
        return self.process.poll() is None


class _Supervisor:
    """Starts tasks, watches them, and ends them all."""

    def __init__(self, startup_seconds: float) -> None:
        self._startup_seconds = startup_seconds
        self._tasks: list[_Task] = []
        self._exits: queue.Queue[_Task] = queue.Queue()
        self._signal = 0
        self._handlers: dict[int, object] = {}

    def __enter__(self) -> _Supervisor:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._handlers[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._end_all()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def start(
        self, command: Sequence[str], cluster: ClusterConfig, *, raw: bool
    ) -> None:
        """Starts one task; `raw` leaves its output as it is."""
        environment = os.environ | ports.ENVIRONMENT
        environment[TF_CONFIG] = cluster.to_json()
        environment.setdefault("PYTHONUNBUFFERED", "1")
        output = None if raw else subprocess.PIPE
        try:
            process = subprocess.Popen(
                list(command),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if raw else subprocess.STDOUT,
                # Not in the terminal's group: Ctrl-C comes through here.
                start_new_session=True,
                preexec_fn=_die_with_parent(os.getpid()),
            )
        except OSError as error:
            raise ConfigurationError(
                "The command must be a program that can be started. "
                f"Received: {command[0]!r} ({error.strerror})."
            ) from None
        name = cluster.task_name
        reader = None
        if process.stdout is not None:
            reader = threading.Thread(
                target=_copy_lines,
                args=(process.stdout, name, self._output_closed),
                daemon=True,
            )
            reader.start()
        port = int(cluster.address.rpartition(":")[2])
        task = _Task(name, port, process, reader)
        self._tasks.append(task)
        threading.Thread(
            target=self._report_exit, args=(task,), daemon=True
        ).start()

    def wait(self) -> int:
        """Waits for the end of all tasks, or the failure of one."""
        started = time.monotonic()
        running = len(self._tasks)
        while running:
            try:
                task = self._exits.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                task = None
            if self._signal:
                return self._interrupted()
            if task is not None:
                running -= 1
                task.ready = True
                code = _exit_code(task.process.returncode)
                if code:
                    return self._failed(task, code)
                task.ended = True
            missing = self._missing(time.monotonic() - started)
            if missing:
                return self._not_started(missing)
        self._join_readers()
        return 0

    def _missing(self, seconds: float) -> list[_Task]:
        """Returns the tasks that are late to serve their port."""
        waiting = [task for task in self._tasks if not task.ready]
        for task in waiting:
            task.ready = ports.is_listening(task.port)
        if not self._startup_seconds or seconds < self._startup_seconds:
            return []
        return [task for task in waiting if not task.ready]

    def _interrupted(self) -> int:
        number = self._signal
        name = signal.Signals(number).name
        _say(f"{name} received, ending {len(self._tasks)} tasks")
        self._end_all(number if number in _SIGNALS else signal.SIGTERM)
        return 128 + number

    def _failed(self, task: _Task, code: int) -> int:
        others = [t for t in self._tasks if t.alive]
        self._end_all()
        cause = f"exit code {code}"
        if task.process.returncode < 0:
            cause = _signal_name(-task.process.returncode)
        ended = f"; ended {_names(others)}" if others else ""
        _say(f"{task.name} failed with {cause}{ended}")
        return code

    def _not_started(self, missing: list[_Task]) -> int:
        self._end_all()
        _say(
            f"{_names(missing)} did not start within "
            f"{self._startup_seconds:.0f} seconds: no server on port "
            f"{', '.join(str(task.port) for task in missing)}. Look at the "
            "output above, or raise --startup_seconds"
        )
        return 1

    def _end_all(self, number: int = signal.SIGTERM) -> None:
        """Ends what still runs: by the signal, after a while by SIGKILL.

        A task that failed is included, for it may have left children.
        """
        tasks = [task for task in self._tasks if not task.ended]
        for task in tasks:
            _signal_group(task.process, number)
        deadline = time.monotonic() + GRACE_SECONDS
        for task in tasks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                task.process.wait(max(0.0, deadline - time.monotonic()))
            if task.reader is not None:  # Its children may still write.
                task.reader.join(max(0.0, deadline - time.monotonic()))
        for task in tasks:
            _signal_group(task.process, signal.SIGKILL)
            task.process.wait()
            task.ended = True
        self._join_readers()

    def _join_readers(self) -> None:
        for task in self._tasks:
            if task.reader is not None:
                task.reader.join(timeout=5)

    def _report_exit(self, task: _Task) -> None:
        task.process.wait()
        self._exits.put(task)

    def _note(self, number: int, frame: object) -> None:
        del frame
        self._signal = number

    def _output_closed(self) -> None:
        self._signal = self._signal or signal.SIGPIPE


def _copy_lines(
    stream: IO[bytes], name: str, on_closed: Callable[[], None]
) -> None:
    """Copies whole lines to this process's output, the task in front."""
    prefix = f"[{name}] ".encode()
    with stream:
        for line in stream:
            line = _COLOUR.sub(b"", line)
            line = _REDRAWN.sub(b"", line.rstrip(b"\r\n\b"))
            try:
                sys.stdout.buffer.write(prefix + line + b"\n")
                sys.stdout.buffer.flush()
            except BrokenPipeError:
                # As in `mgpu-tf launch ... | head`. What follows goes
                # nowhere, so that no task waits for a reader.
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, sys.stdout.fileno())
                os.close(null)
                on_closed()


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _exit_code(returncode: int) -> int:
    return 128 - returncode if returncode < 0 else returncode


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # A real-time signal.
        return f"signal {number}"


def _names(tasks: list[_Task]) -> str:
    return ", ".join(task.name for task in tasks)


def _say(text: str) -> None:
    print(f"mgpu-tf launch: {text}.", file=sys.stderr, flush=True)


def _die_with_parent(parent: int) -> Callable[[], None] | None:
    """Makes Linux end a child whose supervisor was killed."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)

    def before_exec() -> None:
        libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)

    return before_exec

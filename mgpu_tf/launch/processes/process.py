"""One process of a cluster: its start, its output, and what ended it."""

from __future__ import annotations

import abc
import collections
import contextlib
import ctypes
import datetime
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import IO

from mgpu_tf.cluster import ports
from mgpu_tf.errors import PREEMPTED, ConfigurationError, WorkerError
from mgpu_tf.folders import own_only
from mgpu_tf.launch import noise

# How Python prints the error of a worker that another one has failed.
_OF_ANOTHER = f"{WorkerError.__name__}: "
TAIL_LINES = 20

# What progress bars write to redraw a line; only the last drawing is kept.
_REDRAWN = re.compile(rb"^.*[\r\b]+(?=[^\r\b\n])")
_TRACEBACK = b"Traceback (most recent call last):"
_COLOUR = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")

# Where Linux counts the processes that it killed for want of memory.
_OOM_COUNTERS = (
    "/sys/fs/cgroup/memory.events",
    "/sys/fs/cgroup/memory/memory.oom_control",
    "/proc/vmstat",
)


class Task(abc.ABC):
    """A process of a cluster, wherever it runs, and what it prints.

    Args:
        name: Such as "worker 1".
        log_path: A file that gets its output as well, None for none.
        on_output_closed: Called when this process's output was closed.

    Attributes:
        name: As given.
        address: `host:port` where it will serve, "" for nowhere.
        group: Its process group on this machine, 0 where it has none here.
        started: When it was started, by the supervisor's clock.
        ready: Whether it has been seen to serve, or has ended.
        ended: Whether it and all that it started are known to be gone.
        stopped: Whether the user ends it: a traceback, and what it prints
            after one, is then for its log file alone.
    """

    group = 0

    def __init__(
        self,
        name: str,
        log_path: str | None,
        on_output_closed: Callable[[], None],
    ) -> None:
        self.name = name
        self.address = ""
        self.started = 0.0
        self.ready = False
        self.ended = False
        self.stopped = False
        self._log_path = log_path
        self._on_output_closed = on_output_closed
        self._tail: collections.deque[bytes] = collections.deque(
            maxlen=TAIL_LINES
        )
        self._reader: threading.Thread | None = None

    @property
    @abc.abstractmethod
    def returncode(self) -> int | None:
        """How it ended, as `subprocess` says it; None while it runs."""

    @abc.abstractmethod
    def wait(self, seconds: float | None = None) -> None:
        """Waits for its end.

        Args:
            seconds: At most so long; None for as long as it takes.
        """

    @abc.abstractmethod
    def signal(self, number: int) -> None:
        """Sends a signal to the process and all in its group."""

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self.returncode is None

    def serves(self) -> bool:
        """Whether somebody answers at its address."""
        return ports.answers(self.address)

    @property
    def may_restart(self) -> bool:
        """Whether it can be started again alone, on its own address."""
        return True

    @property
    def exit_code(self) -> int:
        """The exit code, 128 + signal for a process that a signal ended."""
        code = self.returncode or 0
        return 128 - code if code < 0 else code

    def cause(self) -> str:
        """Returns in words what ended the process, another one among it."""
        code = self.returncode or 0
        if code == PREEMPTED:
            return f"exit code {code} (preempted)"
        if code < 0:
            return _signal_name(-code)
        for line in reversed(self.tail()):
            _, is_error, another = line.rstrip().partition(_OF_ANOTHER)
            if is_error and code:
                return f"exit code {code} (since {another})"
        return f"exit code {code}"

    def tail(self) -> list[str]:
        """Returns the last lines of its output; none where it was raw."""
        return [line.decode(errors="replace") for line in list(self._tail)]

    def wait_for_output(self, seconds: float) -> None:
        """Waits until all output is copied; children may still write."""
        if self._reader is not None:
            self._reader.join(max(0.0, seconds))

    def _copy(self, lines: Iterable[bytes], label: str) -> None:
        """Copies whole lines in a thread, until there are no more.

        Args:
            lines: What the process prints.
            label: What the log calls the process.
        """
        self._reader = threading.Thread(
            target=self._copy_lines, args=(lines, label), daemon=True
        )
        self._reader.start()

    def _copy_lines(self, lines: Iterable[bytes], label: str) -> None:
        """Copies whole lines to this process's output, the task in front."""
        prefix = f"[{self.name}] ".encode()
        quiet, lines_of_tensorflow = not noise.is_wanted(), noise.Noise()
        shown = True
        with _Log(self._log_path, label) as log:
            for line in lines:
                line = _COLOUR.sub(b"", line)
                line = _REDRAWN.sub(b"", line.rstrip(b"\r\n\b"))
                unseen = noise.log_only(line)
                log.write((line if unseen is None else unseen) + b"\n")
                if unseen is not None or (
                    quiet and lines_of_tensorflow.has(line)
                ):
                    continue
                if self.stopped and line.startswith(_TRACEBACK):
                    shown = False
                if not shown:
                    continue
                self._tail.append(line)
                try:
                    _write(prefix + line + b"\n")
                except BrokenPipeError:
                    # As in `mgpu-tf launch ... | head`. What follows goes
                    # nowhere, so that no task waits for a reader.
                    null = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(null, sys.stdout.fileno())
                    os.close(null)
                    self._on_output_closed()


class LocalTask(Task):
    """A process of this machine, in a session of its own.

    Args:
        name: Such as "worker 1".
        command: The program and its arguments.
        environment: All of its environment.
        raw: Whether it writes to this process's output directly.
        log_path: A file that gets its output as well, None for none.
        on_output_closed: Called when this process's output was closed.
        first_input: What it reads from its input first; None gives it no input.
        process: A process that runs the command already; None starts one.

    Raises:
        ConfigurationError: The program cannot be started.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        raw: bool,
        log_path: str | None,
        on_output_closed: Callable[[], None],
        first_input: bytes | None = None,
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        super().__init__(name, log_path, on_output_closed)
        self._oom_kills = oom_kills()
        self.process = process or start_process(
            command, environment, has_input=first_input is not None, raw=raw
        )
        self.group = self.process.pid
        if first_input is not None:
            self._send(first_input)
        if self.process.stdout is not None:
            label = f"process {self.process.pid}"
            self._copy(_lines(self.process.stdout), label)

    @property
    def returncode(self) -> int | None:
        """How it ended, as `subprocess` says it; None while it runs."""
        return self.process.poll()

    def wait(self, seconds: float | None = None) -> None:
        """Waits for its end, no longer than `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)

    def cause(self) -> str:
        """Returns in words what ended the process."""
        cause = super().cause()
        killed = self.process.returncode == -signal.SIGKILL
        if killed and oom_kills() > self._oom_kills:
            return f"{cause} (out of memory: the system killed a process)"
        return cause

    def signal(self, number: int) -> None:
        """Sends a signal to the process and all in its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def _send(self, text: bytes) -> None:
        """Writes to the input of the process; it may have ended."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError, ValueError):
                self.process.stdin.write(text)
                self.process.stdin.flush()


def start_process(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    has_input: bool,
    raw: bool,
) -> subprocess.Popen[bytes]:
    """Starts a process in a session of its own, which ends with this one.

    Args:
        command: The program and its arguments.
        environment: All of its environment.
        has_input: Whether its input is a pipe; else it has none.
        raw: Whether it writes to this process's output directly; else its
            output and its errors are one pipe.

    Raises:
        ConfigurationError: The program cannot be started.
    """
    try:
        return subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.PIPE if has_input else subprocess.DEVNULL,
            stdout=None if raw else subprocess.PIPE,
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


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    with stream:
        yield from stream


def _write(line: bytes) -> None:
    """Writes to this process's output, which has no bytes in a notebook."""
    stream = getattr(sys.stdout, "buffer", None)
    if stream is None:
        sys.stdout.write(line.decode(errors="replace"))
        sys.stdout.flush()
        return
    stream.write(line)
    stream.flush()


def oom_kills(paths: Sequence[str] = _OOM_COUNTERS) -> int:
    """Returns how many processes were killed for want of memory so far.

    Args:
        paths: Files of lines "oom_kill N"; the first that has one counts.

    Returns:
        The count of this control group or machine, 0 where nothing tells.
    """
    for path in paths:
        with (
            contextlib.suppress(OSError, ValueError),
            open(path, encoding="ascii") as file,
        ):
            for line in file:
                words = line.split()
                if len(words) == 2 and words[0] == "oom_kill":
                    return int(words[1])
    return 0


class _Log:
    """A log file. What it cannot take is lost, and a line says so once.

    Args:
        path: The file, None for none.
        label: What the log calls the process whose output follows.
    """

    def __init__(self, path: str | None, label: str) -> None:
        self._path, self._label = path, label
        self._file: IO[bytes] | None = None
        self._warned = False

    def __enter__(self) -> _Log:
        if self._path is not None:
            now = datetime.datetime.now().isoformat(sep=" ", timespec="seconds")
            try:
                self._file = open(self._path, "ab", 0, opener=own_only)
            except OSError as error:
                self._warn(error)
            self.write(f"--- {self._label}, started {now}\n".encode())
        return self

    def write(self, data: bytes) -> None:
        """Writes to the file, where that works."""
        if self._file is None:
            return
        try:
            self._file.write(data)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            print(
                f"mgpu-tf launch: {self._path} cannot be written "
                f"({error.strerror}); the job goes on.",
                file=sys.stderr,
                flush=True,
            )

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # A real-time signal.
        return f"signal {number}"


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

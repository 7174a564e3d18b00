"""One process of a cluster: its start, its output, and what ended it."""

from __future__ import annotations

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
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from mgpu_tf.errors import PREEMPTED, ConfigurationError

TAIL_LINES = 20

# What progress bars write to redraw a line; only the last drawing is kept.
_REDRAWN = re.compile(rb"^.*[\r\b]+(?=[^\r\b\n])")
_COLOUR = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")

# Where Linux counts the processes that it killed for want of memory.
_OOM_COUNTERS = (
    "/sys/fs/cgroup/memory.events",
    "/sys/fs/cgroup/memory/memory.oom_control",
    "/proc/vmstat",
)


class Task:
    """A process in a session of its own.

    Args:
        name: Such as "worker 1".
        command: The program and its arguments.
        environment: All of its environment.
        raw: Whether it writes to this process's output directly.
        log_path: A file that gets its output as well, None for none.
        on_output_closed: Called when this process's output was closed.

    Attributes:
        name: As given.
        port: Where it will serve, 0 for nowhere.
        started: When it was started, by the supervisor's clock.
        ready: Whether it has been seen to serve, or has ended.
        ended: Whether it and all that it started are known to be gone.

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
    ) -> None:
        self.name = name
        self.port = 0
        self.started = 0.0
        self.ready = False
        self.ended = False
        self._tail: collections.deque[bytes] = collections.deque(
            maxlen=TAIL_LINES
        )
        self._oom_kills = oom_kills()
        try:
            self.process = subprocess.Popen(
                list(command),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
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
        self._reader: threading.Thread | None = None
        if self.process.stdout is not None:
            self._reader = threading.Thread(
                target=self._copy_lines,
                args=(self.process.stdout, log_path, on_output_closed),
                daemon=True,
            )
            self._reader.start()

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self.process.poll() is None

    @property
    def exit_code(self) -> int:
        """The exit code, 128 + signal for a process that a signal ended."""
        code = self.process.returncode
        return 128 - code if code < 0 else code

    def cause(self) -> str:
        """Returns in words what ended the process."""
        code = self.process.returncode
        if code == PREEMPTED:
            return f"exit code {code} (preempted)"
        if code >= 0:
            return f"exit code {code}"
        name = _signal_name(-code)
        if -code == signal.SIGKILL and oom_kills() > self._oom_kills:
            return f"{name} (out of memory: the system killed a process)"
        return name

    def tail(self) -> list[str]:
        """Returns the last lines of its output; none where it was raw."""
        return [line.decode(errors="replace") for line in list(self._tail)]

    def signal(self, number: int) -> None:
        """Sends a signal to the process and all in its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def wait_for_output(self, seconds: float) -> None:
        """Waits until all output is copied; children may still write."""
        if self._reader is not None:
            self._reader.join(max(0.0, seconds))

    def _copy_lines(
        self,
        stream: IO[bytes],
        log_path: str | None,
        on_closed: Callable[[], None],
    ) -> None:
        """Copies whole lines to this process's output, the task in front."""
        prefix = f"[{self.name}] ".encode()
        with stream, _Log(log_path, self.process.pid) as log:
            for line in stream:
                line = _COLOUR.sub(b"", line)
                line = _REDRAWN.sub(b"", line.rstrip(b"\r\n\b"))
                self._tail.append(line)
                log.write(line + b"\n")
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
    """A log file. What it cannot take is lost, and told once.

    Args:
        path: The file, None for none.
        pid: The process whose output follows.
    """

    def __init__(self, path: str | None, pid: int) -> None:
        self._path, self._pid = path, pid
        self._file: IO[bytes] | None = None
        self._told = False

    def __enter__(self) -> _Log:
        if self._path is not None:
            now = datetime.datetime.now().isoformat(sep=" ", timespec="seconds")
            try:
                self._file = open(self._path, "ab", 0, opener=_own)
            except OSError as error:
                self._tell(error)
            self.write(f"--- process {self._pid}, started {now}\n".encode())
        return self

    def write(self, data: bytes) -> None:
        """Writes to the file, where that works."""
        if self._file is None:
            return
        try:
            self._file.write(data)
        except OSError as error:
            self._tell(error)

    def _tell(self, error: OSError) -> None:
        if not self._told:
            self._told = True
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


def _own(path: str, flags: int) -> int:
    """Opens a file that only this user may read."""
    return os.open(path, flags, 0o600)


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

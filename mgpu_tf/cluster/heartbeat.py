"""Where a task is, for those who watch it; without TensorFlow.

    heartbeat.begin("worker 1")
    heartbeat.count(120)                    # the global step
    with heartbeat.at(STEP):
        ...
    heartbeat.checked(120, digest)          # replicas were compared
    board = Board()                         # of who watches
    board.path                              # for the task, in FILE
    board.read().last.phase

A task writes its step and its phase into a board: a small file that is in
memory only and has no name in a folder. So no cleaner of old files takes it
away, and it is there as long as one process has it open: who watches sees
what the task did last, after its end too. One entry takes about a
microsecond. A thread writes each second that the process runs. SIGUSR1 writes
the Python stacks of all threads to stderr, also where Python itself is stuck.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import faulthandler
import fcntl
import logging
import mmap
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping

# The path of the board that a supervisor reads, for a task of its own.
FILE = "MGPU_TF_BEAT"
STACKS = signal.SIGUSR1

# Phases. In those of TOGETHER a task may wait for others.
SCRIPT, SERVE, START, COLLECTIVE = "script", "serve", "start-up", "collective"
STEP, EVALUATE, PREDICT = "step", "evaluate", "predict"
CALLBACKS, SAVE, AGREE = "callbacks", "save", "agreement"
TOGETHER = (STEP, EVALUATE, PREDICT, COLLECTIVE, AGREE, START)

ENTRIES = 64
CHECKS = 8
_ALIVE_SECONDS = 1.0
_MAGIC = b"MGPUBT02"
# Magic, process, count of checksums, of entries, of signs of life, and since
# when a batch is read.
_HEADER = struct.Struct("<8sIIQQd")
_CHECKED = (12, "<I")
# The last three are written by several threads, each at its own place.
_COUNT, _ALIVE, _READING = (16, "<Q"), (24, "<Q"), (32, "<d")
# Time, step, whether for the first time, phase.
_ENTRY = struct.Struct("<dqB47s")
# Time, step, digest.
_CHECK = struct.Struct("<dqQ")
_CHECKS_AT = _HEADER.size + ENTRIES * _ENTRY.size
_BYTES = _CHECKS_AT + CHECKS * _CHECK.size


@dataclasses.dataclass(frozen=True)
class Entry:
    """What a task began to do.

    Attributes:
        moment: When, on the clock of `time.time`.
        step: The global step by then.
        phase: What it is called.
        is_first: Whether the process did it for the first time.
    """

    moment: float
    step: int
    phase: str
    is_first: bool


@dataclasses.dataclass(frozen=True)
class Check:
    """A comparison of the replicas.

    Attributes:
        moment: When, on the clock of `time.time`.
        step: The global step.
        digest: Of what this task holds, 64 bits; the same on all tasks.
    """

    moment: float
    step: int
    digest: int


@dataclasses.dataclass(frozen=True)
class Beat:
    """What the file of a task says.

    Attributes:
        pid: The process.
        count: How many entries it has made.
        alive: How often it has said that it runs.
        reading_since: When Python code began to make a batch that is not yet
            made, on the clock of `time.time`; 0 for none.
        entries: The last entries, the newest last; at least one.
        checks: The last comparisons of replicas, the newest last.
    """

    pid: int
    count: int
    alive: int
    reading_since: float
    entries: tuple[Entry, ...]
    checks: tuple[Check, ...] = ()

    @property
    def last(self) -> Entry:
        """The newest entry."""
        return self.entries[-1]


class Board:
    """The file of a task, as those see it who watch.

    Attributes:
        descriptor: Of the file; open until `close`.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("mgpu_tf-heartbeat")

    @property
    def path(self) -> str:
        """Where a process of the same user opens it, while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def read(self) -> Beat | None:
        """Returns the heartbeat of the task; None where there is none."""
        return read(self.descriptor)

    def close(self) -> None:
        """Leaves the file to the task."""
        os.close(self.descriptor)


class _Taken(Exception):
    """Another process writes to this board."""


class _Writer:
    """The board of this process.

    Args:
        path: The board, to which nobody writes yet.

    Raises:
        OSError: It cannot be opened.
        _Taken: Another process writes there.
    """

    def __init__(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_size:
                raise _Taken
            os.ftruncate(descriptor, _BYTES)
            self._map = mmap.mmap(descriptor, _BYTES)
        finally:
            # The map keeps the file open, and the lock with it.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)
        self._known: set[str] = set()
        self._alive = 0
        self._reading: list[float] = []
        self._count = self._checked = 0
        self.step, self.phase = 0, ""
        _HEADER.pack_into(self._map, 0, _MAGIC, os.getpid(), 0, 0, 0, 0.0)
        self.put(START)
        threading.Thread(target=self._live, daemon=True).start()

    def put(self, phase: str) -> None:
        """Makes an entry."""
        self.phase = phase
        is_first = phase not in self._known
        self._known.add(phase)
        place = _HEADER.size + self._count % ENTRIES * _ENTRY.size
        entry = (time.time(), self.step, is_first, phase.encode()[:47])
        _ENTRY.pack_into(self._map, place, *entry)
        self._count += 1
        self._write(_COUNT, self._count)

    def checked(self, step: int, digest: int) -> None:
        """Notes a comparison of replicas."""
        place = _CHECKS_AT + self._checked % CHECKS * _CHECK.size
        _CHECK.pack_into(self._map, place, time.time(), step, digest)
        self._checked += 1
        self._write(_CHECKED, self._checked)

    def read(self, since: float) -> None:
        """Notes that a batch is being made, from some time on."""
        self._reading.append(since)
        self._write(_READING, min(self._reading, default=0.0))

    def was_read(self, since: float) -> None:
        """Notes that it is made."""
        self._reading.remove(since)
        self._write(_READING, min(self._reading, default=0.0))

    def _write(self, place: tuple[int, str], value: float) -> None:
        struct.pack_into(place[1], self._map, place[0], value)

    def _live(self) -> None:
        while True:
            time.sleep(_ALIVE_SECONDS)
            self._alive += 1
            self._write(_ALIVE, self._alive)


_here: _Writer | None = None


def _forget() -> None:
    """A forked process is not the task."""
    global _here
    _here = None


os.register_at_fork(after_in_child=_forget)


def begin(board: Board | None = None) -> None:
    """Begins to write where this process is; a second call changes nothing.

    Args:
        board: Where, if no supervisor has made a board for this process.
            None: nowhere then.
    """
    global _here
    path = os.environ.get(FILE) or (board.path if board else "")
    if _here is not None or not path:
        return
    try:
        _here = _Writer(path)
    except _Taken:
        return  # By the task that has started this process.
    except OSError as error:
        logging.getLogger("mgpu_tf").warning(
            "no supervisor sees whether this task goes on: %s cannot be "
            "written (%s)",
            path,
            error.strerror,
        )
        return
    with contextlib.suppress(ValueError, AttributeError, OSError):
        # A notebook may have no stderr.
        stderr = sys.__stderr__.fileno()  # type: ignore[union-attr]
        faulthandler.register(STACKS, stderr, all_threads=True)


def has_begun() -> bool:
    """Returns whether this process writes where it is."""
    return _here is not None


def count(step: int) -> None:
    """Writes the global step."""
    if _here is not None:
        _here.step = step


def mark(phase: str) -> None:
    """Writes that something begins, and what came before has ended."""
    if _here is not None:
        _here.put(phase)


def checked(step: int, digest: int) -> None:
    """Tells what a comparison of replicas found here.

    Args:
        step: The global step.
        digest: Of what this task holds, 64 bits.
    """
    if _here is not None:
        _here.checked(step, digest)


@contextlib.contextmanager
def at(phase: str) -> Iterator[None]:
    """Tells that the block is run; what came before goes on after it."""
    if _here is None:
        yield
        return
    before = _here.phase
    _here.put(phase)
    try:
        yield
    finally:
        _here.put(before)


@contextlib.contextmanager
def call(name: str) -> Iterator[None]:
    """Tells that the script has called something; the script goes on after."""
    if _here is None:
        yield
        return
    before = _here.phase
    _here.put(f"call of {name}")
    try:
        yield
    finally:
        _here.put(SCRIPT if before == START else before)


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Tells that Python code makes a batch in the block; on any thread."""
    if _here is None:
        yield
        return
    since = time.time()
    _here.read(since)
    try:
        yield
    finally:
        _here.was_read(since)


def recorded(beats: Mapping[str, Beat]) -> str:
    """Returns the last entries of tasks as lines, the newest last.

    Args:
        beats: The last heartbeat of each task, by its name.
    """
    lines = []
    for name, beat in beats.items():
        for entry in beat.entries:
            moment = datetime.datetime.fromtimestamp(entry.moment)
            text = moment.isoformat(sep=" ", timespec="milliseconds")
            first = ", for the first time" if entry.is_first else ""
            lines.append(
                f"{text} {name} step {entry.step} {entry.phase}{first}\n"
            )
        for check in beat.checks:
            moment = datetime.datetime.fromtimestamp(check.moment)
            text = moment.isoformat(sep=" ", timespec="milliseconds")
            lines.append(
                f"{text} {name} step {check.step} checksum "
                f"{check.digest:016x}\n"
            )
        if beat.reading_since:
            moment = datetime.datetime.fromtimestamp(beat.reading_since)
            text = moment.isoformat(sep=" ", timespec="milliseconds")
            lines.append(f"{text} {name} Python code makes a batch\n")
    return "".join(sorted(lines))


def read(descriptor: int) -> Beat | None:
    """Returns the heartbeat of a task; None where there is none.

    Args:
        descriptor: Of its board.
    """
    data = os.pread(descriptor, _BYTES, 0)
    if len(data) < _BYTES:
        return None
    magic, pid, checked, count, alive, reading = _HEADER.unpack_from(data)
    if magic != _MAGIC or not count:
        return None
    entries = []
    for index in range(max(0, count - ENTRIES), count):
        place = _HEADER.size + index % ENTRIES * _ENTRY.size
        moment, step, is_first, phase = _ENTRY.unpack_from(data, place)
        text = phase.rstrip(b"\0").decode(errors="replace")
        entries.append(Entry(moment, step, text, bool(is_first)))
    checks = [
        Check(
            *_CHECK.unpack_from(data, _CHECKS_AT + index % CHECKS * _CHECK.size)
        )
        for index in range(max(0, checked - CHECKS), checked)
    ]
    return Beat(pid, count, alive, reading, tuple(entries), tuple(checks))

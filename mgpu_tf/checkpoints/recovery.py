"""What failures have cost a run: restarts, steps done again, time.

The chief notes each boundary between executions in a small file. A run that
begins again reads there how far the one before had come.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import socket
import time
import uuid
import weakref
from typing import Any

from mgpu_tf.checkpoints import storage
from mgpu_tf.checkpoints.reading import patiently
from mgpu_tf.checkpoints.storage.interface import Claim, Notes
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.folders import NotRegularError, is_address
from mgpu_tf.reports.report import known

_PROGRESS = "progress"
_TOTALS = "recovery.json"
_OWNER = "owner"
_RUN = "run"
_RUN_NAME = re.compile("[0-9a-f]{12}")
# How late a shared file system may show a file.
SEEN_SECONDS = 60.0

_log = logging.getLogger("mgpu_tf")


@dataclasses.dataclass(frozen=True)
class Recovery:
    """What failures have cost so far.

    Attributes:
        restarts: How often the run was begun again.
        lost_steps: Steps that were done and had to be done again.
        lost_seconds: Time from the moment that a checkpoint holds to the
            moment at which the run went on from it.
        lost_workers: How often an asynchronous run lost a worker, whose work
            others did, before it was begun again last.
    """

    restarts: int = 0
    lost_steps: int = 0
    lost_seconds: float = 0.0
    lost_workers: int = 0


class SupersededError(ConfigurationError):
    """Another run has taken the folder of checkpoints."""


class Owner:
    """Who may write to a folder of checkpoints: the run that came last.

    Args:
        folder: An existing folder.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._path = os.path.join(folder, _OWNER)
        who = f"process {os.getpid()} on {socket.gethostname()}"
        self._mine = f"{uuid.uuid4().hex} {who}\n"
        self._checked = 0.0
        self._taken = self._lost = False
        self._claim: Claim | None = None
        self._lock: weakref.finalize | None = None

    @property
    def shown(self) -> str:
        """Returns how the file of the owner begins, "" before `take`."""
        return self._mine.partition(" ")[0] if self._taken else ""

    def take(self) -> None:
        """Makes this run the owner.

        Raises:
            OSError: The folder cannot be written.
        """
        self.release()
        self._claim = storage.of(self._path).claim(self._path, self._mine)
        # Released with this object at the latest, and with the process.
        self._lock = weakref.finalize(self, self._claim.release)
        self._taken = True

    def release(self) -> None:
        """Notes that this run deletes nothing more for now."""
        if self._lock is not None:
            self._lock()
            self._lock = self._claim = None

    def check(self, every_seconds: float = 0.0, *, wait: bool = True) -> bool:
        """Checks that no other run has come since.

        Args:
            every_seconds: Looks only where the last look is as long ago.
            wait: Whether to wait for a network. Otherwise what was seen a
                few seconds ago will do.

        Returns:
            Whether this run is known to own the folder. It is not where that
            cannot be read for a moment.

        Raises:
            SupersededError: Another run has come.
        """
        now = time.monotonic()
        if not self._taken or now - self._checked < every_seconds:
            return self._taken
        self._checked = now
        try:
            if self._claim is not None:
                text = self._claim.seen(wait=wait)
            else:
                text = storage.of(self._path).text(self._path).decode()
        except FileNotFoundError:
            # No other run has come.
            if not self._lost:
                self._lost = True
                _log.warning(
                    "%s is no longer the folder of checkpoints with which the "
                    "run began: it was emptied, moved or unmounted. What was "
                    "saved before is not there; the run goes on, and saves "
                    "there from now on",
                    self._folder,
                )
            with contextlib.suppress(OSError):
                self.take()
                self._lost = False
                return True
            return False
        except (OSError, ValueError):
            return False  # Of a file system that is away for a moment.
        if text != self._mine:
            raise SupersededError(
                "A checkpoint_dir belongs to the run that began last. "
                f"Received: {self._folder!r}, which "
                f"{text.partition(' ')[2].strip() or 'another run'} has taken. "
                "This run writes nothing more there and ends; give each run "
                "its own folder."
            )
        return True


def living_owner(folder: str) -> str:
    """Returns which process owns a folder and lives, "" for none.

    On file systems without locks none is found. On object storage this takes
    a while where there is one, or one was killed.
    """
    with contextlib.suppress(FileNotFoundError, NotRegularError, ValueError):
        text = storage.of(folder).living(os.path.join(folder, _OWNER))
        return text.partition(" ")[2].strip()
    return ""


def not_seen(folder: str, shown: str, seconds: float = SEEN_SECONDS) -> str:
    """Returns why a process cannot write to the folder of another's run.

    Args:
        folder: Where checkpoints are kept.
        shown: How the file of the owner begins.
        seconds: How long to look for it: a file system that machines share
            may show it late.

    Returns:
        What is wrong, "" for nothing.
    """
    end = time.monotonic() + seconds
    kept, path = storage.of(folder), os.path.join(folder, _OWNER)
    while True:
        with contextlib.suppress(OSError, ValueError):
            if kept.text(path).decode().startswith(shown):
                break
        if time.monotonic() > end:
            return "does not see"
        time.sleep(0.1)
    return "" if kept.is_writable(folder) else "cannot write to"


def run_of(folder: str) -> str:
    """Returns the name of the run of a folder; made where there is none.

    A copy of the folder elsewhere is another run.

    Args:
        folder: Where checkpoints are kept; this process writes there.

    Raises:
        OSError: It cannot be written.
    """
    path = os.path.join(folder, _RUN)
    place = folder if is_address(folder) else os.path.realpath(folder)
    kept = storage.of(folder)

    def read() -> str:
        return kept.text(path).decode()

    # One that cannot be read for a moment has a name all the same.
    with contextlib.suppress(FileNotFoundError, NotRegularError, ValueError):
        name, _, where = patiently(path, read).partition(" ")
        if where == place and _RUN_NAME.fullmatch(name):
            return name
    name = uuid.uuid4().hex[:12]
    kept.put(path, f"{name} {place}".encode())
    return name


class Progress:
    """How far a run has come, for whoever begins it again.

    Args:
        folder: An existing folder; the run's alone.
        since: When this process began, on the clock of `time.time`.

    Attributes:
        since: When the run began; where it had ended and goes on, when it
            went on.
        restarted: Whether a process before this one did not come to its end.
    """

    def __init__(self, folder: str, since: float) -> None:
        self._folder = folder
        self.since = since
        self.restarted = False
        self._began = time.time()
        self._notes: Notes | None = None
        self._warned = False

    def note(self, step: int, lost_workers: int = 0) -> None:
        """Notes that a step is done; a write of 68 bytes."""
        try:
            self._note(step, lost_workers)
        except OSError as error:
            self._warn(error)

    def _note(self, step: int, lost_workers: int) -> None:
        if self._notes is None:
            path = os.path.join(self._folder, _PROGRESS)
            self._notes = storage.of(path).notes(path)
        moments = f"{self._began:18.6f} {self.since:18.6f}"
        text = f"{step:20d} {lost_workers:8d} {moments}\n"
        self._notes.write_at(0, text.encode())

    def _warn(self, error: OSError) -> None:
        """Warns once that the progress cannot be noted; the run goes on."""
        if not self._warned:
            self._warned = True
            _log.warning(
                "the progress cannot be noted in checkpoint_dir (%s); the run "
                "goes on",
                error.strerror,
            )

    def begin(self, step: int, saved_at: float | None) -> Recovery:
        """Reads what the process before has left, adds up what was lost.

        Args:
            step: The global step at which the run goes on.
            saved_at: The time at which that step was reached first, None
                where there is no checkpoint.

        Returns:
            What failures have cost so far.
        """
        before = self._read()
        totals = Recovery(**self._totals())
        if before is None:
            return totals
        last_step, lost_workers, began, self.since = before
        self.restarted = True
        # What was lost before that process began, it has counted itself.
        lost_since = max(saved_at or 0.0, began)
        totals = Recovery(
            restarts=totals.restarts + 1,
            lost_steps=totals.lost_steps + max(0, last_step - step),
            lost_seconds=totals.lost_seconds
            + max(0.0, time.time() - lost_since),
            lost_workers=totals.lost_workers + lost_workers,
        )
        path = os.path.join(self._folder, _TOTALS)
        try:
            text = json.dumps(dataclasses.asdict(totals))
            storage.of(path).put(path, text.encode())
        except OSError as error:
            self._warn(error)
        self.note(step)
        return totals

    def end(self) -> None:
        """Forgets the progress: what comes next is no restart."""
        if self._notes is not None:
            self._notes.close()
            self._notes = None
        with contextlib.suppress(OSError):
            path = os.path.join(self._folder, _PROGRESS)
            storage.of(path).remove_notes(path)

    def _read(self) -> tuple[int, int, float, float] | None:
        try:
            path = os.path.join(self._folder, _PROGRESS)
            text = storage.of(path).read_notes(path).decode("ascii")
            step, lost_workers, began, since = text.split()
            return int(step), int(lost_workers), float(began), float(since)
        except (OSError, ValueError):
            return None

    def _totals(self) -> dict[str, Any]:
        try:
            path = os.path.join(self._folder, _TOTALS)
            values = json.loads(storage.of(path).text(path))
        except (OSError, ValueError):
            return {}
        return known(Recovery, values)

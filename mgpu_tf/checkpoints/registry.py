"""What has become of the checkpoints of a run, and why: the file `registry`.

    registry = Registry("run/checkpoints")
    registry.note("saved", 120, "every 40 steps")
    registry.note("deleted", 0, "older than the 3 newest")
    read("run/checkpoints")[-1].why

A line of JSON for each event, the newest last. Only the run that owns the
folder writes there. The run needs none of it but one thing: what was once found
to be damaged is not deleted, whatever it looks like later. This module does
not import TensorFlow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import time
from collections.abc import Callable
from typing import Any

from mgpu_tf.checkpoints import storage

FILE = "registry"

# What can become of a checkpoint, and of a run.
SAVED = "saved"
DELETED = "deleted"
DAMAGED = "damaged"
MOVED = "moved aside"
RESUMED = "resumed"
BEGAN = "began"

# About 120 bytes a line. What is older goes when a run begins.
_MOST_LINES = 20_000

_log = logging.getLogger("mgpu_tf")


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that has become of a checkpoint.

    Attributes:
        at: The time, in seconds since 1970.
        what: One of the words above.
        step: The global step of the checkpoint.
        why: In a few words.
    """

    at: float
    what: str
    step: int
    why: str


class Registry:
    """Writes down what becomes of the checkpoints of a folder.

    Args:
        folder: The folder, which the run owns.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._path = os.path.join(folder, FILE)
        self._warned = False

    @functools.cached_property
    def damaged(self) -> dict[int, str]:
        """The steps whose checkpoints were found damaged, and how.

        A step that was saved again later is not among them.
        """
        found: dict[int, str] = {}
        for event in read(self._folder):
            _count_in(found, event)
        return found

    def note(self, what: str, step: int, why: str) -> None:
        """Adds an event; a run goes on without, and says so once."""
        event = Event(round(time.time(), 3), what, step, why)
        _count_in(self.damaged, event)
        line = json.dumps(dataclasses.asdict(event)) + "\n"
        try:
            storage.of(self._path).append(self._path, line.encode())
        except OSError as error:
            if not self._warned:
                self._warned = True
                _log.warning(
                    "what becomes of checkpoints cannot be noted in "
                    "checkpoint_dir (%s); the run goes on",
                    error.strerror,
                )

    def shorten(self) -> None:
        """Drops the oldest lines where there are very many."""
        with contextlib.suppress(OSError):
            kept = storage.of(self._path)
            lines = kept.text(self._path).splitlines(keepends=True)
            if len(lines) > _MOST_LINES:
                kept.put(self._path, b"".join(lines[-_MOST_LINES // 2 :]))


def read(folder: str) -> list[Event]:
    """Returns the events of a folder, the newest last.

    Lines that are torn are left out; there is none where nothing was noted.
    """
    events = []
    with contextlib.suppress(OSError):
        text = storage.of(folder).text(os.path.join(folder, FILE))
        for line in text.split(b"\n"):
            with contextlib.suppress(ValueError, TypeError):
                event = Event(**json.loads(line))
                if isinstance(event.step, int):
                    events.append(event)
    return events


def of_last_run(
    folder: str, moment: Callable[[float], float]
) -> list[dict[str, Any]]:
    """Returns what a report has of the newest run: no deletions.

    Args:
        folder: The `checkpoint_dir`.
        moment: Returns the seconds since the run began of a time.

    Returns:
        Its events, with `at` in seconds since the run began.
    """
    events = read(folder)
    first = max(
        (n for n, event in enumerate(events) if event.what == BEGAN), default=0
    )
    return [
        dataclasses.asdict(event) | {"at": round(moment(event.at), 3)}
        for event in events[first:]
        if event.what != DELETED
    ]


def _count_in(damaged: dict[int, str], event: Event) -> None:
    if event.what == DAMAGED:
        damaged[event.step] = event.why
    elif event.what in (SAVED, MOVED):
        damaged.pop(event.step, None)

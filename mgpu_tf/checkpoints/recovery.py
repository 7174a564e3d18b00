"""What failures have cost a run: restarts, steps done again, time.

The chief notes each boundary between executions in a small file. A run that
begins again reads there how far the one before had come.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from typing import Any

from mgpu_tf.reports.report import known

_PROGRESS = "progress"
_TOTALS = "recovery.json"


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
        self._descriptor: int | None = None

    def note(self, step: int, lost_workers: int = 0) -> None:
        """Notes that a step is done; a write of 68 bytes."""
        if self._descriptor is None:
            path = os.path.join(self._folder, _PROGRESS)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        moments = f"{self._began:18.6f} {self.since:18.6f}"
        text = f"{step:20d} {lost_workers:8d} {moments}\n"
        os.pwrite(self._descriptor, text.encode(), 0)

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
        with open(path + ".tmp", "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(totals), file)
        os.replace(path + ".tmp", path)
        self.note(step)
        return totals

    def end(self) -> None:
        """Forgets the progress: what comes next is no restart."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(self._folder, _PROGRESS))

    def _read(self) -> tuple[int, int, float, float] | None:
        try:
            path = os.path.join(self._folder, _PROGRESS)
            with open(path, encoding="ascii") as file:
                step, lost_workers, began, since = file.read().split()
            return int(step), int(lost_workers), float(began), float(since)
        except (FileNotFoundError, ValueError):
            return None

    def _totals(self) -> dict[str, Any]:
        try:
            path = os.path.join(self._folder, _TOTALS)
            with open(path, encoding="utf-8") as file:
                values = json.load(file)
        except (FileNotFoundError, ValueError):
            return {}
        return known(Recovery, values)

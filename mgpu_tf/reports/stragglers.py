"""Workers that are slower than the others, and at what.

    found = slow_workers([{"input": 0.001, "compute": 0.02}, ...], step=0.08)
    print(found[0])       # worker 1 is slow: ...

All workers of a synchronous strategy take as long for a step as the slowest.
So the time of a step does not show who is slow. The time for a worker's own
rows does: to get them, and to compute their gradients.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from mgpu_tf.reports.distribution import Distribution

# A worker is slow from these limits on, against the median of the others.
_TIMES = 1.5
_PART_OF_STEP = 0.2
_SECONDS = 0.005
# Executions that must have been timed in an epoch.
_FEWEST = 5

INPUT, COMPUTE, STEP = "input", "compute", "step"
SECTIONS = (INPUT, COMPUTE)
_WORDS = {INPUT: "to get its rows", COMPUTE: "to compute its gradients"}

Sections = Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Slow:
    """A worker that was found slow.

    Attributes:
        worker: Index of the worker.
        section: "input" or "compute".
        epoch: Number of the epoch in which it was found, from 1.
        seconds: What the section took in a step.
        others: The median of the others.
        best: What it took on this worker in its best epoch.
    """

    worker: int
    section: str
    epoch: int
    seconds: float
    others: float
    best: float

    def __str__(self) -> str:
        text = (
            f"worker {self.worker} is slow: in epoch {self.epoch} a step took "
            f"{1e3 * self.seconds:.3g} ms {_WORDS[self.section]}, and "
            f"{1e3 * self.others:.3g} ms on the others"
        )
        if self.seconds > _TIMES * self.best:
            text += f"; in its best epoch it took {1e3 * self.best:.3g} ms"
        return text


class SectionTimes:
    """The times of this worker, epoch by epoch, and of all epochs.

    Attributes:
        best: The least time of each section in an epoch so far.
    """

    def __init__(self) -> None:
        self._timed: list[tuple[float, float]] = []
        self._steps: list[float] = []
        self._every = {STEP: Distribution(), COMPUTE: Distribution()}
        self.best: dict[str, float] = {}

    def note(
        self, sections: tuple[float, float] | None, seconds: float, steps: int
    ) -> None:
        """Notes an execution.

        Args:
            sections: The seconds of each section in one of its steps, where
                they are measured.
            seconds: What a step took in all.
            steps: How many steps it had.
        """
        self._every[STEP].note(seconds, steps)
        if sections is not None:
            self._every[COMPUTE].note(sections[1], steps)
            self._timed.append(sections)
            self._steps.append(seconds)

    def as_json(self) -> dict[str, Any]:
        """Returns the distributions of "step" and "compute" in all epochs."""
        return {name: every.as_json() for name, every in self._every.items()}

    def epoch(self) -> dict[str, float] | None:
        """Returns the medians of an epoch that ends, and forgets its times.

        The result has the whole step as "step", and each section with its
        best, such as "best input". None where too little was timed.
        """
        timed, steps = self._timed, self._steps
        self._timed, self._steps = [], []
        if len(timed) < _FEWEST:
            return None
        now = {
            name: statistics.median(times)
            for name, times in zip(
                SECTIONS, zip(*timed, strict=True), strict=True
            )
        }
        for name, seconds in now.items():
            self.best[name] = min(seconds, self.best.get(name, seconds))
        best = {f"best {name}": value for name, value in self.best.items()}
        return {**now, **best, STEP: statistics.median(steps)}


def slow_workers(
    times: Sequence[Sections | None], epoch: int = 1
) -> list[Slow]:
    """Returns the workers that the others wait for.

    Args:
        times: Of each worker, from `SectionTimes.epoch`.
        epoch: Number of the epoch, from 1.

    Returns:
        A worker for a section whose time is above 1.5 times the median of the
        others, by a fifth of a step and by 5 ms.
    """
    known = [one for one in times if one is not None]
    if len(known) < 2 or len(known) < len(times):
        return []
    step = statistics.median(one[STEP] for one in known)
    found = []
    for section in SECTIONS:
        for worker, mine in enumerate(known):
            others = statistics.median(
                one[section] for one in known if one is not mine
            )
            least = max(_SECONDS, _PART_OF_STEP * step)
            seconds = mine[section]
            if seconds > _TIMES * others and seconds - others > least:
                best = mine[f"best {section}"]
                found.append(
                    Slow(worker, section, epoch, seconds, others, best)
                )
    return found

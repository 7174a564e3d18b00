"""The process of a contestant: builds, trains to the check, then bursts.

Started by `runner` with one JSON argument, a `Place`. It answers on the file
descriptor that the place names, one JSON object a line: first
`{"loss": ...}`, the mean loss of the steps that all contestants make alike,
then `{"steps", "seconds"}` for each object on standard input, which holds the
`steps` to make and, for some contestants, options.
Standard output is the contestant's own, so that its progress bar is drawn.
The workers and servers of a coordinator do not come back from `create(place)`.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import traceback
from typing import Protocol


@dataclasses.dataclass(frozen=True)
class Place:
    """What one process of a contestant is told.

    Attributes:
        module: Its `create(place)` returns a `Contestant`.
        job: A key of `jobs.JOBS`.
        index: Of this process.
        workers: How many processes share a step.
        options: The contestant's own settings.
        check_steps: Steps to the comparison of losses.
        answers: File descriptor for answers.
        core: The core to stay on, None for all.
        threads: For computing, None for what the framework chooses.
    """

    module: str
    job: str
    index: int
    workers: int
    options: dict
    check_steps: int
    answers: int
    core: int | None
    threads: int | None


class Contestant(Protocol):
    """What `create(place)` of a contestant's module returns."""

    def check(self, steps: int) -> float:
        """Makes the first steps; returns their mean loss on this worker."""

    def burst(self, steps: int) -> tuple[int, float]:
        """Makes about that many steps; returns how many, and the seconds."""


def main() -> None:
    place = Place(**json.loads(sys.argv[1]))
    if place.core is not None:
        os.sched_setaffinity(0, {place.core})
    answers = os.fdopen(place.answers, "w", buffering=1)

    def answer(**values) -> None:
        answers.write(json.dumps(values) + "\n")

    try:
        module = importlib.import_module(place.module)
        contestant = module.create(place)
        answer(loss=contestant.check(place.check_steps))
        for line in sys.stdin:
            steps, seconds = contestant.burst(**json.loads(line))
            answer(steps=steps, seconds=seconds)
    except ModuleNotFoundError as error:
        traceback.print_exc()
        answer(error=f"the package {error.name} is missing: .[peers] has it")
    except Exception as error:
        traceback.print_exc()
        text = (str(error).strip().splitlines() or [""])[0]
        answer(error=f"{type(error).__name__}: {text}"[:300])
    # Collectives of peers that are gone must not hold up the end.
    os._exit(0)


if __name__ == "__main__":
    main()

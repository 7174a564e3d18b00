"""A trace of some steps, and where they went.

    profiler = Profiler(start=100, steps=20, folder="runs/a/profile")
    trainer = mgpu_tf.Trainer(build_model, strategy, profiler=profiler)
    trainer.fit(x, y)
    print(profiler.summary())
    # pip install xprof; xprof --logdir runs/a/profile

The summary says how long operations of each part ran, on any thread. Parts
overlap, so that together they can take longer than a step. The time of a step
in which no operation ran is waiting: on several workers mostly for the
reduction.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import tensorflow as tf

from mgpu_tf.reports.profile_file import length_of_union, newest_profile

# Name scopes of the engine, in the order of a step.
PARTS = ("forward_backward", "reduce", "apply")


class Profiler:
    """Traces the steps from `start` on.

    Args:
        start: Steps to be done before, so that tracing is over.
        steps: How many to trace.
        folder: Gets what xprof opens; None on workers that do not
            trace but have to take the same steps together.

    Attributes:
        folder: The same.
    """

    def __init__(self, start: int, steps: int, folder: str | None) -> None:
        self._start = start
        self._end = start + steps
        self.folder = folder
        self._running = False
        self._traced_steps = 0
        self._wall = 0.0
        self._input = 0.0

    def room(self, done: int, wanted: int) -> int:
        """Returns how many steps may be taken at once.

        Args:
            done: Steps done.
            wanted: Steps wanted.
        """
        for boundary in (self._start, self._end):
            if done < boundary:
                return min(wanted, boundary - done)
        return wanted

    @contextlib.contextmanager
    def around(self, done: int) -> Iterator[None]:
        """Traces the execution in the block where it is time to.

        Args:
            done: Steps done before it.
        """
        if self.folder is None or not self._start <= done < self._end:
            yield
            return
        if not self._running:
            tf.profiler.experimental.start(self.folder)
            self._running = True
        started = time.perf_counter()
        try:
            yield
        finally:
            self._wall += time.perf_counter() - started

    def note(self, done: int, steps: int, input_seconds: float) -> None:
        """Notes an execution, and ends the trace after the last.

        Args:
            done: Steps done, this execution included.
            steps: Steps of this execution.
            input_seconds: What it waited for data.
        """
        if not self._running:
            return
        self._traced_steps += steps
        self._input += input_seconds
        if done >= self._end:
            self.close()

    @property
    def steps(self) -> int:
        """The steps that were traced here."""
        return self._traced_steps

    @property
    def seconds(self) -> float:
        """What the traced steps took in all."""
        return self._wall

    def close(self) -> None:
        """Ends the trace, where one is under way."""
        if self._running:
            self._running = False
            tf.profiler.experimental.stop()

    def summary(self) -> str:
        """Returns where a traced step went, in milliseconds."""
        if not self._traced_steps:
            return (
                f"profile: steps {self._start} to {self._end} were not reached"
            )
        busy, union = _busy_seconds(str(self.folder))
        per_step = 1e3 / self._traced_steps
        parts = [f"input {self._input * per_step:.2f}"]
        parts += [
            f"{part.replace('_', '+')} {busy[part] * per_step:.2f}"
            for part in PARTS
        ]
        waiting = max(0.0, self._wall - self._input - union)
        parts.append(f"host and waiting {waiting * per_step:.2f}")
        return (
            f"profile of {self._traced_steps} steps, "
            f"{self._wall * per_step:.2f} ms each, of parts that overlap: "
            f"{', '.join(parts)}; to see them: pip install xprof; "
            f"xprof --logdir {self.folder}"
        )


def _busy_seconds(folder: str) -> tuple[dict[str, float], float]:
    """Returns the seconds in which operations ran, of each part and of any."""
    space = newest_profile(folder)
    spans: dict[str, list[tuple[int, int]]] = {part: [] for part in PARTS}
    for plane in space.planes:
        parts = {
            key: next((p for p in PARTS if f"/{p}/" in value.name), None)
            for key, value in plane.event_metadata.items()
        }
        for line in plane.lines:
            for event in line.events:
                part = parts.get(event.metadata_id)
                if part is None:
                    continue
                begin = line.timestamp_ns * 1000 + event.offset_ps
                spans[part].append((begin, begin + event.duration_ps))
    busy = {part: length_of_union(spans[part]) / 1e12 for part in PARTS}
    every = [span for part in PARTS for span in spans[part]]
    return busy, length_of_union(every) / 1e12

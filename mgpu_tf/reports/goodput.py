"""Where the time of a run went: useful steps, and everything else.

    meter = Meter()
    meter.execution(seconds=0.5, steps=100, input_seconds=0.1, traced=False)
    with meter.phase("evaluate"):
        ...
    print(meter.goodput())     # 40% of 10.0 s: step 4.0, start 5.0, ...

Goodput is the time of useful steps over the time since the run began. A run
that goes on from a checkpoint also goes on from the times in it: what a process
did after it, and the pause until the next began, were for nothing.

References: the goodput of MaxText's and Google Cloud's ML Goodput
measurement; the rest is listed by cause.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

from mgpu_tf.reports.time_line import TimeLine

# Calls that measure how long a step takes.
_RATES = 1000
# Faults that are kept, the newest.
_FAULTS = 100

# When a process that had waited got its task.
BEGAN = "MGPU_TF_BEGAN"


@dataclasses.dataclass(frozen=True)
class Goodput:
    """The seconds of a run, by what they were spent on.

    Attributes:
        wall_seconds: Since its first process began.
        start_seconds: Until the first step was asked for: imports, the
            cluster, the model, the data, a checkpoint that was read.
        compile_seconds: Tracing and compiling of steps.
        input_seconds: Steps that waited for data; 0 where operations are
            made to repeat, which lets none of them look at a clock.
        evaluate_seconds: Evaluations, between epochs and after them.
        save_seconds: Steps that waited for a checkpoint to be copied.
        restart_seconds: From a checkpoint to the beginning of the process
            that went on from it: work that was lost, and the pause.
        step_seconds: Steps, less what they waited for.
        other_seconds: The rest: callbacks, the progress bar, the end.
    """

    wall_seconds: float = 0.0
    start_seconds: float = 0.0
    compile_seconds: float = 0.0
    input_seconds: float = 0.0
    evaluate_seconds: float = 0.0
    save_seconds: float = 0.0
    restart_seconds: float = 0.0
    step_seconds: float = 0.0
    other_seconds: float = 0.0

    @property
    def share(self) -> float:
        """Useful step time over wall time, 0 to 1."""
        return self.step_seconds / self.wall_seconds

    def __str__(self) -> str:
        parts = [
            f"{name} {getattr(self, f'{name}_seconds'):.1f}"
            for name in (
                "step",
                "start",
                "compile",
                "input",
                "evaluate",
                "save",
                "restart",
                "other",
            )
        ]
        return f"{self.share:.0%} of {self.wall_seconds:.1f} s: " + ", ".join(
            parts
        )


class Meter:
    """Adds up the time of a run, as a process sees it.

    Args:
        began: When the process began, on the clock of `time.time`; as the
            system says by default.

    Attributes:
        began: The same; later where the process went back to a checkpoint.
    """

    def __init__(self, began: float | None = None) -> None:
        self.began = process_began() if began is None else began
        self._before: Goodput | None = None
        # Of what a checkpoint holds, with the pause after it.
        self._line_before = TimeLine()
        # The clock where a process went on, and the run's seconds till there.
        self._origins = [(self.began, 0.0)]
        self._faults: list[tuple[float, str]] = []
        self._clear()

    def _clear(self) -> None:
        self._first: float | None = None
        self._plain = 0.0
        self._traced: list[_Traced] = []
        self._line = TimeLine()
        self._rates: collections.deque[float]
        self._rates = collections.deque(maxlen=_RATES)
        self._input = 0.0
        self._phases: dict[str, float] = {}
        self._early = 0.0

    def resume(
        self,
        before: Goodput,
        since: float,
        *,
        restarted: bool,
        saved: dict[str, Any] | None = None,
    ) -> None:
        """Goes on from what a checkpoint holds.

        Args:
            before: Where the time had gone when it was made.
            since: When that was, on the clock of `time.time`.
            restarted: Whether a process had failed, so that the time since
                was for nothing. Otherwise the run had ended, and the time
                since is none of its time.
            saved: What `as_json` returned when it was made.
        """
        again = self._first is not None or self._before is not None
        if again and not restarted:
            return
        if again or self.began < since:
            # This process, or a trainer in it, has done more than is kept.
            self._clear()
            self.began = time.time()
        gap = max(0.0, self.began - since) if restarted else 0.0
        self._before = dataclasses.replace(
            before,
            wall_seconds=before.wall_seconds + gap,
            restart_seconds=before.restart_seconds + gap,
        )
        spent, saved = before.wall_seconds, saved or {}
        self._line_before = TimeLine(**saved.get("line", {}))
        self._line_before.add(spent, spent + gap, {"restart": gap})
        self._origins = [
            (began, after)
            for began, after in saved.get("origins", [(since - spent, 0.0)])
        ]
        if not restarted:
            self._origins.append((self.began, spent))
        found = [(at, text) for at, text in saved.get("faults", ())]
        found += [fault for fault in self._faults if fault not in found]
        self._faults = found[-_FAULTS:]

    def execution(
        self, seconds: float, steps: int, input_seconds: float, traced: bool
    ) -> None:
        """Notes some steps that have just been done.

        Args:
            seconds: What the call took.
            steps: Steps in it.
            input_seconds: What of it waited for data.
            traced: Whether the call traced or compiled.
        """
        end = time.time() - self.began
        begin = end - seconds
        if self._first is None:
            self._first = self.began + begin
            self._early = sum(self._phases.values())
            self._line.fill("start", begin)
        busy = seconds - input_seconds
        if traced:
            self._traced.append(_Traced(busy, steps, begin, end))
        else:
            self._plain += busy
            parts = {"input": input_seconds, "step": busy}
            self._line.add(begin, end, parts)
            if steps:
                self._rates.append(busy / steps)
        self._input += input_seconds

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Notes how long the block, "evaluate" or "save", takes."""
        started = time.perf_counter()
        try:
            yield
        finally:
            passed = time.perf_counter() - started
            self._phases[name] = self._phases.get(name, 0.0) + passed
            end = time.time() - self.began
            self._line.add(end - passed, end, {name: passed})

    def fault(self, text: str) -> None:
        """Notes that something went wrong just now."""
        self._faults = [*self._faults, (time.time(), text)][-_FAULTS:]

    def goodput(self) -> Goodput:
        """Returns where the time of the run has gone until now."""
        now = time.time()
        phases = sum(self._phases.values())
        if self._first is None:
            start = now - self.began - phases
        else:
            start = self._first - self.began - self._early
        useful = sum(self._useful(one) for one in self._traced)
        compiling = sum(one.busy for one in self._traced) - useful
        step = self._plain + useful
        known = start + compiling + self._input + phases + step
        mine = Goodput(
            wall_seconds=now - self.began,
            start_seconds=start,
            compile_seconds=compiling,
            input_seconds=self._input,
            evaluate_seconds=self._phases.get("evaluate", 0.0),
            save_seconds=self._phases.get("save", 0.0),
            step_seconds=step,
            other_seconds=max(0.0, now - self.began - known),
        )
        return mine if self._before is None else _sum(self._before, mine)

    def _useful(self, traced: _Traced) -> float:
        """Returns what the steps of a call that traced took.

        They were as fast as the others, or, where there were no others, are
        not separable.
        """
        usual = statistics.median(self._rates) if self._rates else 0.0
        return min(traced.busy, traced.steps * usual)

    def time_line(self) -> TimeLine:
        """Returns what each stretch of the run's time went to until now.

        The kinds are those of `Goodput`, and so are their sums.
        """
        now = time.time() - self.began
        line = TimeLine(self._line.width, self._line.bins)
        for one in self._traced:
            step = self._useful(one)
            input_seconds = one.end - one.begin - one.busy
            parts = {"compile": one.busy - step, "input": input_seconds}
            line.add(one.begin, one.end, {**parts, "step": step})
        line.fill("start" if self._first is None else "other", now)
        if self._before is None:
            return line
        whole = TimeLine(self._line_before.width, self._line_before.bins)
        whole.join(line, self._before.wall_seconds)
        return whole

    def moment(self, at: float) -> float:
        """Returns when something was, in seconds since the run began.

        Args:
            at: On the clock of `time.time`.
        """
        after = 0.0
        for number, (began, before) in enumerate(self._origins):
            if not number or at >= began:
                after = before + max(0.0, at - began)
        return after

    @property
    def faults(self) -> list[tuple[float, str]]:
        """When something went wrong, in seconds since the run began."""
        return [(self.moment(at), text) for at, text in self._faults]

    def as_json(self) -> dict[str, Any]:
        """Returns what `resume` goes on from, for JSON."""
        return {
            "line": self.time_line().as_json(),
            "origins": self._origins,
            "faults": self._faults,
        }


@dataclasses.dataclass(frozen=True)
class _Traced:
    """A call that traced or compiled.

    Attributes:
        busy: Its seconds, less what it waited for data.
        steps: Steps in it.
        begin: When it began, in seconds since this process began.
        end: When it ended.
    """

    busy: float
    steps: int
    begin: float
    end: float


def _sum(one: Goodput, other: Goodput) -> Goodput:
    fields = [field.name for field in dataclasses.fields(Goodput)]
    return Goodput(**{f: getattr(one, f) + getattr(other, f) for f in fields})


def process_began() -> float:
    """Returns when this process began, as `time.time` counts.

    Where the system does not say, as other than Linux, it is now. A process
    that has waited for its task began when it got the task.
    """
    try:
        with open("/proc/self/stat", encoding="ascii") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        with open("/proc/uptime", encoding="ascii") as file:
            uptime = float(file.read().split()[0])
    except (OSError, ValueError, IndexError):
        return time.time()
    began = time.time() - (uptime - ticks / os.sysconf("SC_CLK_TCK"))
    # Its children have the variable as well.
    return max(began, float(os.environ.get(BEGAN, began)))

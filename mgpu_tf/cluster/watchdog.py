"""Finds tasks that do not go on, and says which of them is late.

    watch = Watch(WatchOptions())
    stall = watch.look({"worker 0": beat, "worker 1": beat}, time.monotonic())
    if stall is not None:
        print(stall.text)

A supervisor looks at all tasks of a job. A task that somebody else has started
(Slurm, Kubernetes, a person) has a child process that looks at this one task:

    python -m mgpu_tf.cluster.watchdog BOARD STALL FIRST < TF_CONFIG

It ends with its input, and so with the task.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

from mgpu_tf.cluster import heartbeat
from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.cluster.heartbeat import Beat
from mgpu_tf.cluster.ports import answers
from mgpu_tf.cluster.waiting import missing_tasks
from mgpu_tf.options import WatchOptions

# The exit status of a job that did not go on, as `timeout` has it.
STALLED = 124
LOOK_SECONDS = 1.0
# After how long a wait the other tasks are asked whether they are there.
_ASK_SECONDS = 15.0
# After how long a wait a task asks whether it is cut off. TensorFlow ends the
# others after as long, but reaches no task that is cut off.
_CUT_OFF_SECONDS = 45.0
# How long the first task takes at most to take a connection.
_ANSWER_SECONDS = 5.0
# A process that has not run for so long is not merely busy.
_FROZEN_SECONDS = 5.0
# How long Python's stacks take to be written.
STACKS_SECONDS = 3.0

# Its pipe is open as long as this process lives.
_child: subprocess.Popen[str] | None = None


@dataclasses.dataclass(frozen=True)
class Stall:
    """A job that does not go on.

    Attributes:
        late: The names of the tasks that the others wait for; all tasks,
            where none is behind the others.
        text: One sentence without a full stop: who is late and at what.
    """

    late: tuple[str, ...]
    text: str


@dataclasses.dataclass
class _Seen:
    """A task as it was seen last, and when it went on last."""

    beat: Beat
    went_on: float
    lived: float


class Watch:
    """Sees which tasks go on.

    Args:
        options: The limits.
    """

    def __init__(self, options: WatchOptions) -> None:
        self._options = options
        self._seen: dict[str, _Seen] = {}
        self._looked: float | None = None

    def look(self, beats: Mapping[str, Beat], now: float) -> Stall | None:
        """Returns who is late, if a task has not gone on for too long.

        Args:
            beats: What each task that runs tells.
            now: By a clock that only goes forward.
        """
        self._take(beats, now)
        over = [
            name
            for name, seen in self._seen.items()
            if 0 < self._limit(seen) <= now - self._since(seen)
        ]
        if not over:
            return None
        waited = max(now - self._since(self._seen[name]) for name in over)
        late = self._late(now)
        # The one that is over the limit may be what the others wait for.
        names = late or over
        others = [name for name in self._seen if name not in names]
        text = f"no progress for {waited:.0f} seconds. "
        if late:
            text += "Late: "
        elif len(self._seen) > 1:
            text += "No task is behind the others: "
        text += self._states_of(names, now)
        if others:
            text += f". The others: {self._states_of(others, now)}"
        return Stall(tuple(names), text)

    def _take(self, beats: Mapping[str, Beat], now: float) -> None:
        gap = 0.0 if self._looked is None else now - self._looked
        # This process was stopped, and the tasks perhaps with it.
        excused = gap if gap > 5 * LOOK_SECONDS else 0.0
        self._looked = now
        before, self._seen = self._seen, {}
        for name, beat in beats.items():
            seen = before.get(name)
            if seen is None or seen.beat.pid != beat.pid:
                self._seen[name] = _Seen(beat, now, now)
                continue
            went_on, lived = seen.went_on + excused, seen.lived + excused
            if beat.count != seen.beat.count:
                went_on = now
            if beat.alive != seen.beat.alive:
                lived = now
            self._seen[name] = _Seen(beat, went_on, lived)

    def _limit(self, seen: _Seen) -> float:
        entry = seen.beat.last
        if entry.phase == heartbeat.SCRIPT:
            return 0.0
        if entry.is_first and entry.phase != heartbeat.SERVE:
            return self._options.first_step_seconds
        return self._options.stall_timeout_seconds

    def _since(self, seen: _Seen) -> float:
        is_server = seen.beat.last.phase == heartbeat.SERVE
        return seen.lived if is_server else seen.went_on

    def _late(self, now: float) -> list[str]:
        """Returns the tasks that the others wait for, none if none is."""
        seen = self._seen
        stopped = [name for name in seen if is_stopped(seen[name].beat.pid)]
        frozen = [
            name for name in seen if now - seen[name].lived >= _FROZEN_SECONDS
        ]
        reading = [name for name in seen if seen[name].beat.reading_since]
        trains = {
            name: one.beat.last
            for name, one in seen.items()
            if one.beat.last.phase != heartbeat.SERVE
        }
        apart = [
            name
            for name, entry in trains.items()
            if entry.phase not in heartbeat.TOGETHER
        ]
        behind: list[str] = []
        if trains:
            least = min(entry.step for entry in trains.values())
            behind = [n for n, entry in trains.items() if entry.step == least]
        for names in (stopped, frozen, reading, apart, behind):
            if names and (len(names) < len(seen) or names is stopped):
                return names
        return []

    def _states_of(self, names: list[str], now: float) -> str:
        return ", ".join(self._state_of(name, now) for name in names)

    def _state_of(self, name: str, now: float) -> str:
        """Says where a task is, such as `worker 1 (step 12, in save)`."""
        seen = self._seen[name]
        entry = seen.beat.last
        words = [f"step {entry.step}", f"in {entry.phase}"]
        if entry.phase == heartbeat.SERVE:
            words = ["serves"]
        if is_stopped(seen.beat.pid):
            words.append("stopped by a signal")
        elif now - seen.lived >= _FROZEN_SECONDS:
            words.append("frozen")
        if seen.beat.reading_since:
            words.append("Python code makes a batch")
        return f"{name} ({', '.join(words)})"


def is_stopped(pid: int) -> bool:
    """Returns whether a process is stopped, as by SIGSTOP or a debugger."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


def leader(cluster: ClusterConfig) -> str:
    """Returns the address of the task that tells the others of failures."""
    return (*cluster.chief, *cluster.worker)[0]


def is_cut_off(cluster: ClusterConfig) -> bool:
    """Returns whether a task that steps with others cannot reach the first.

    A coordinator waits for its parameter servers, and is never cut off.
    """
    first = leader(cluster)
    if cluster.ps or cluster.address == first:
        return False
    return not answers(first, _ANSWER_SECONDS)


def end(pid: int) -> None:
    """Kills a process, also one that is stopped."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def end_with_stacks(pids: list[int]) -> None:
    """Has processes write their Python stacks, then kills them.

    Args:
        pids: Processes that have begun a heartbeat.
    """
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, heartbeat.STACKS)
            os.kill(pid, signal.SIGCONT)
    time.sleep(STACKS_SECONDS)
    for pid in pids:
        end(pid)


def begin(
    cluster: ClusterConfig | None, options: WatchOptions | None = None
) -> None:
    """Has this task report where it is, and be ended if it does not go on.

    A later call changes nothing.

    Args:
        cluster: The cluster. Without one a supervisor watches, or a child
            process if a limit is not the default.
        options: The limits, where no supervisor has its own. Default: those
            of the environment.
    """
    global _child
    options = options or WatchOptions.from_environment()
    if heartbeat.has_begun():
        return
    # A process that is alone is watched where somebody has set a limit.
    wanted = cluster is not None or options != WatchOptions()
    if not (wanted and options.watches) or heartbeat.FILE in os.environ:
        heartbeat.begin()
        return
    cluster = cluster or ClusterConfig("worker", 0, worker=("localhost:1",))
    board = heartbeat.Board()
    heartbeat.begin(board)
    packages = os.path.dirname(
        os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    )
    given = os.environ.get("PYTHONPATH")
    _child = subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", "mgpu_tf.cluster.watchdog"),
            str(board.descriptor),
            str(options.stall_timeout_seconds),
            str(options.first_step_seconds),
        ],
        # The end of this process closes the pipe.
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in (packages, given) if p),
        },
        start_new_session=True,
        pass_fds=(board.descriptor,),
        text=True,
    )
    board.close()
    assert _child.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        _child.stdin.write(cluster.to_json() + "\n")
        _child.stdin.flush()


def _watch(board: int, options: WatchOptions) -> None:
    """Watches one task until it ends. In the child process."""
    cluster = ClusterConfig.from_json(sys.stdin.readline())
    name, watch = cluster.task_name, Watch(options)
    parent, was_stopped = os.getppid(), 0.0
    entries, since, ask_at, look_at, lost = 0, 0.0, 0.0, 0.0, 0
    while not select.select([sys.stdin], [], [], LOOK_SECONDS)[0]:
        if os.getppid() != parent:
            break  # A process that the task has forked holds the pipe.
        beat = heartbeat.read(board)
        if beat is None:
            continue
        now = time.monotonic()
        if beat.count != entries or beat.last.phase not in heartbeat.TOGETHER:
            entries, since, ask_at = beat.count, now, now + _ASK_SECONDS
            look_at, lost = now + _CUT_OFF_SECONDS, 0
        elif now >= ask_at and beat.last.phase != heartbeat.START:
            ask_at = now + 2 * (ask_at - since)
            missing = missing_tasks(cluster)
            if missing:
                _say(
                    f"{name} waits for {', '.join(missing)} (since "
                    f"{now - since:.0f} s)"
                )
        if now >= look_at and beat.last.phase != heartbeat.START:
            look_at = now + _ASK_SECONDS
            lost = lost + 1 if is_cut_off(cluster) else 0
            if lost == 2:
                _say(
                    f"{name} was cut off: in {now - since:.0f} s it could not "
                    f"reach {leader(cluster)}, and no step ended. It is ended; "
                    "start all tasks again where they reach each other"
                )
                end(beat.pid)
                break
        if is_stopped(beat.pid):
            was_stopped += LOOK_SECONDS
        elif was_stopped:
            _say(f"{name} was stopped by a signal for {was_stopped:.0f} s")
            was_stopped = 0.0
        stall = watch.look({name: beat}, time.monotonic())
        if stall is not None:
            _say(f"{stall.text}. Its Python stacks follow; it is ended")
            end_with_stacks([beat.pid])
            break


def _say(text: str) -> None:
    print(f"mgpu_tf: {text}.", file=sys.stderr, flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        _watch(
            int(sys.argv[1]),
            WatchOptions(float(sys.argv[2]), float(sys.argv[3])),
        )

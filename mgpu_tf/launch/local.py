"""The local supervisor: N processes of one script, as a cluster.

    code = launch(["python", "train.py", "--epochs=5"], num_workers=2)

Each process gets a `TF_CONFIG` of its own. Their output comes line by line
with the task in front. When one fails, a `RestartPolicy` says what is started
again; without one the rest are ended and its exit code is returned. Ctrl-C
and SIGTERM reach all of them. A task that does not open its port within the
start-up limit is named, since TensorFlow itself would wait for it for ever.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from mgpu_tf.cluster import heartbeat, watchdog
from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.errors import PREEMPTED, ConfigurationError
from mgpu_tf.folders import make_folder, own_only
from mgpu_tf.launch import isolation, status
from mgpu_tf.launch.elastic import LOOK_SECONDS, Room
from mgpu_tf.launch.guard import Guard
from mgpu_tf.launch.job import EVALUATOR, REPLAY, LaunchJob
from mgpu_tf.launch.machines import (
    Interrupted,
    Machines,
    NoRoom,
    Output,
    ThisMachine,
)
from mgpu_tf.launch.policy import SETTLED_SECONDS
from mgpu_tf.launch.processes.process import Task

# More are a slip of the hand, and would end the machine before the job.
MOST_TASKS = 1000

_POLL_SECONDS = 0.2
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def launch(
    command: Sequence[str],
    num_workers: int,
    *,
    isolate: str = "off",
    needs: str = "",
    **options: Any,
) -> int:
    """Runs a command as a cluster of processes on this machine.

    Args:
        command: The program and its arguments.
        num_workers: How many processes of task type `worker`.
        isolate: Whether the tasks get a network of their own: `auto`, `on`
            or `off`. See `isolation.isolated`.
        needs: What the job needs a network for, "" for nothing known.
        **options: The other fields of `LaunchJob`.

    Returns:
        0 when all succeeded; else the exit code of the first that failed,
        128 + signal for one ended by a signal, 1 for a start-up limit, 124
        where tasks made no progress for too long, 75 where tasks were asked to
        end and had time to save.

    Raises:
        ConfigurationError: The program does not exist, or a number is out
            of range.
    """
    job = LaunchJob(tuple(command), num_workers, **options)
    if job.num_tasks > MOST_TASKS:
        raise ConfigurationError(
            f"One machine starts at most {MOST_TASKS} processes of a job. "
            f"Received: {job.num_tasks}. Ask for fewer workers."
        )
    if job.alone:
        isolate = "off"  # It opens no port.
    failures: list[Task] = []
    with isolation.isolated(isolate, needs) as alone:
        code = supervise(job, ThisMachine(job), failures.append)
    if alone and isolate == "auto" and code:
        isolation.explain_failure(
            line for task in failures for line in task.tail()
        )
    return code


def supervise(
    job: LaunchJob,
    machines: Machines,
    on_failure: Callable[[Task], None] | None = None,
) -> int:
    """Runs a job to its end on machines of any kind.

    Args:
        job: The command and its tasks.
        machines: Where the tasks run.
        on_failure: Called with each task that failed, when all have ended.

    Returns:
        As `launch`.

    Raises:
        ConfigurationError: The command cannot be started there, or no
            process can wait there.
    """
    if job.spares and machines.spares is None:
        raise ConfigurationError(
            "spares go with processes of this machine. Received: "
            f"spares={job.spares} on others. Leave spares out."
        )
    if REPLAY in os.environ and not machines.here:
        raise ConfigurationError(
            "A replay runs on this machine, which others would not know of. "
            "Received: a launcher of other machines. Run mgpu-tf replay on one "
            "of them."
        )
    if job.log_dir is not None:
        make_folder("log_dir", job.log_dir, mode=0o700)
    with Guard() as guard, _Supervisor(job, guard, machines) as supervisor:
        supervisor.on_failure = on_failure
        return supervisor.run()


@dataclasses.dataclass(frozen=True)
class _End:
    """How an attempt ended.

    Attributes:
        code: The exit code.
        failed: The task that failed first, None where all is well.
        no_room: Whether the machines that are left had no room for it.
        room: For how many workers there is room now, where it ended to go on
            with more of them.
    """

    code: int
    failed: Task | None = None
    no_room: bool = False
    room: int = 0


class _Supervisor:
    """Starts tasks, watches them, starts them again, and ends them all."""

    def __init__(
        self, job: LaunchJob, guard: Guard, machines: Machines
    ) -> None:
        self._job = job
        self._guard = guard
        self._machines = machines
        self.on_failure: Callable[[Task], None] | None = None
        self._tasks: list[Task] = []
        self._clusters: dict[str, ClusterConfig] = {}
        self._exits: queue.Queue[Task] = queue.Queue()
        self._restarts = 0
        self._signal = 0
        self._handlers: dict[int, object] = {}
        self._boards: dict[str, heartbeat.Board] = {}
        self._watch = watchdog.Watch(job.watch)
        self._look_at = 0.0
        self._stopped: set[str] = set()
        # The most workers that the job may have, which is lowered where it
        # fails on all of them.
        self._most = job.policy.max_workers or job.num_workers
        self._room = Room(lambda: machines.room(self._most))
        self._grows = True

    def __enter__(self) -> _Supervisor:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._handlers[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._end_all()
        if self._machines.spares is not None:
            self._machines.spares.close()
        for board in self._boards.values():
            board.close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def run(self) -> int:
        """Runs the job, again where the policy says so."""
        num_workers, policy = self._job.num_workers, self._job.policy
        budget, early = policy.max_restarts, 0
        if policy.elastic:
            num_workers = min(num_workers, self._there(num_workers))
            if not num_workers:
                return self._not_there()
        while True:
            started = time.monotonic()
            end = self._attempt(num_workers)
            if end.room:
                num_workers = end.room
                self._restarts += 1
                continue
            if self._signal or (end.failed is None and not end.no_room):
                return end.code
            if policy.elastic:
                there = self._there(num_workers)
                if not there:
                    return self._not_there()
                if there < num_workers:
                    # Machines are gone: that is no fault of the job.
                    num_workers, budget = there, budget + 1
                    end = dataclasses.replace(end, no_room=False)
            if end.no_room:
                budget = 0
            elif policy.unit == "task":
                # Those of single tasks count as well.
                budget = max(0, policy.max_restarts - self._restarts)
            short = time.monotonic() - started < SETTLED_SECONDS
            early = early + 1 if short else 0
            if not budget and policy.may_shrink(num_workers):
                num_workers -= 1
                self._most = num_workers
                budget = policy.max_restarts + 1
                self._say(f"going on with {num_workers} workers")
            if not budget:
                return self._give_up(end)
            budget -= 1
            if not self._pause(policy.pause_seconds(early)):
                return self._interrupted()

    def _there(self, num_workers: int) -> int:
        """Waits for machines for enough workers.

        Returns:
            For how many there are, 0 where they do not come in time.
        """
        least = self._job.policy.min_workers or 1
        limit = self._job.startup_seconds or math.inf
        began, said = time.monotonic(), False
        while not self._signal:
            there = self._machines.room(self._most)
            if there >= least:
                if there < num_workers:
                    self._say(f"going on with {there} workers")
                return there
            if time.monotonic() - began > limit:
                break
            if not said:
                said = True
                self._say(
                    f"there are machines for {there} workers; waiting for "
                    f"{least}"
                )
            self._sleep(LOOK_SECONDS)
        return 0

    def _not_there(self) -> int:
        if self._signal:
            return self._interrupted()
        self._say("gave up: too few machines are there")
        return 1

    def _grown(self, started: float) -> _End | None:
        """Ends the tasks where there is room for more of them.

        They save first, so no step is done again.
        """
        now, workers = time.monotonic(), len(self._tasks)
        if not self._job.policy.elastic or workers >= self._most:
            return None
        if not self._grows or now - started < SETTLED_SECONDS:
            return None
        room = self._room.more_than(workers, now)
        if not room:
            return None
        self._say(f"there are machines for {room} workers; the tasks save")
        self._end_all(signal.SIGTERM)
        if PREEMPTED not in {task.returncode for task in self._tasks}:
            # Else it would begin at its first step each time.
            self._grows = False
            self._say("the tasks have not saved; the job does not grow again")
        return _End(PREEMPTED, room=room)

    def _attempt(self, num_workers: int) -> _End:
        """Runs all tasks to their end, or to the failure of one."""
        self._tasks, self._exits = [], queue.Queue()
        job = dataclasses.replace(self._job, num_workers=num_workers)
        try:
            with self._machines.addresses(job.roles, self._going) as addresses:
                for cluster in job.clusters(addresses):
                    self._start(cluster)
                try:
                    return self._wait()
                finally:
                    self._end_all()
        except Interrupted:
            return _End(self._interrupted())
        except NoRoom as error:
            if not self._restarts:
                raise
            self._say(str(error).rstrip("."))
            return _End(1, no_room=True)

    def _going(self) -> bool:
        return not self._signal

    def _start(self, cluster: ClusterConfig) -> None:
        options, name = self._job, cluster.task_name
        variables = options.environment(cluster, self._restarts)
        if self._machines.here:
            # Of the task itself, and not of the one before it.
            if name in self._boards:
                self._boards[name].close()
            self._boards[name] = heartbeat.Board()
            variables[heartbeat.FILE] = self._boards[name].path
        if options.log_dir is not None:
            paths = {n: board.path for n, board in self._boards.items()}
            status.write(options.log_dir, paths, self._restarts)
        # The others may have waited for the one before.
        self._watch = watchdog.Watch(options.watch)
        log_path = None
        if options.log_dir is not None:
            file = f"{name.replace(' ', '-')}.log"
            log_path = os.path.join(options.log_dir, file)
        raw = options.shows_progress and cluster.is_chief
        task = self._machines.start(
            cluster,
            variables,
            Output(raw, log_path, self._output_closed),
        )
        if task.group:
            self._guard.watch(task.group)
        self._clusters[name] = cluster
        if options.alone or cluster.task_type == "evaluator":
            task.ready = True  # It serves no port.
        else:
            task.address = cluster.address
        task.started = time.monotonic()
        self._tasks.append(task)
        threading.Thread(
            target=self._report_exit, args=(task, self._exits), daemon=True
        ).start()

    def _wait(self) -> _End:
        running, started = len(self._tasks), time.monotonic()
        self._room.forget()
        while running:
            try:
                task = self._exits.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                task = None
            if self._signal:
                return _End(self._interrupted())
            if task is not None and not task.ended:
                running -= 1
                task.ready = True
                if not task.exit_code:
                    task.ended = True
                    self._release(task)
                    if task.name == "chief 0":
                        self._end_servers()
                        running = sum(not t.ended for t in self._tasks)
                elif self._restart_alone(task):
                    running += 1
                else:
                    return self._failed(task)
            missing = self._missing(time.monotonic())
            if missing:
                return self._not_started(missing)
            ended = self._stalled(time.monotonic()) or self._grown(started)
            if ended is not None:
                return ended
        self._join_readers()
        return _End(0)

    def _end_servers(self) -> None:
        """Ends all but the evaluator, which ends by itself."""
        self._end(
            [t for t in self._tasks if t.name != EVALUATOR and not t.ended],
            signal.SIGTERM,
        )

    def _restart_alone(self, task: Task) -> bool:
        """Starts one dead task again where the policy says so."""
        policy = self._job.policy
        if policy.unit != "task" or self._restarts >= policy.max_restarts:
            return False
        if not task.may_restart:
            return False
        self._restarts += 1
        self._say(
            f"{task.name} failed with {task.cause()}; restart "
            f"{self._restarts} of {policy.max_restarts}"
        )
        self._end([task], signal.SIGKILL)
        self._tasks.remove(task)
        if self._sleep(policy.backoff_seconds):
            self._start(self._clusters[task.name])
        return True

    def _missing(self, now: float) -> list[Task]:
        """Returns the tasks that are late to serve their port.

        Tasks start one after the other: with the first that is late come
        those that will be in a moment.
        """
        limit = self._job.startup_seconds
        waiting = [task for task in self._tasks if not task.ready]
        for task in waiting:
            task.ready = task.serves()
        waited = {
            task.name: now - task.started for task in waiting if not task.ready
        }
        if not limit or max(waited.values(), default=0.0) < limit:
            return []
        return [t for t in waiting if waited.get(t.name, 0.0) > 0.9 * limit]

    def _beats_of(self, tasks: list[Task]) -> dict[str, heartbeat.Beat]:
        return {
            task.name: beat
            for task in tasks
            if task.name in self._boards
            and (beat := self._boards[task.name].read())
        }

    def _report_stopped(self, beats: dict[str, heartbeat.Beat]) -> None:
        """Says once that a task is stopped, and that it goes on again."""
        stopped = {n for n, b in beats.items() if watchdog.is_stopped(b.pid)}
        for name in sorted(stopped - self._stopped):
            self._say(f"{name} is stopped by a signal; the others wait for it")
        for name in sorted(self._stopped & set(beats) - stopped):
            self._say(f"{name} is no longer stopped")
        self._stopped = stopped

    def _keep_spares(
        self, beats: dict[str, heartbeat.Beat], now: float
    ) -> None:
        """Starts spares when the tasks need the machine less: in training."""
        spares = self._machines.spares
        latest = max((task.started for task in self._tasks), default=now)
        settled = now - latest > SETTLED_SECONDS
        steps = any(beat.last.step for beat in beats.values())
        if spares is not None and (settled or steps):
            spares.keep()

    def _record(self) -> None:
        """Writes what each task did last beside the logs."""
        folder, beats = self._job.log_dir, self._beats_of(self._tasks)
        if folder is None or not beats:
            return
        path = os.path.join(folder, f"last-steps-{self._restarts}.txt")
        with (
            contextlib.suppress(OSError),
            open(path, "w", opener=own_only) as file,
        ):
            file.write(heartbeat.recorded(beats))
            self._say(f"what each task did last is in {path}")

    def _stalled(self, now: float) -> _End | None:
        """Ends tasks that make no progress; None where all go on.

        Where tasks are started again alone, only those end that are late.
        """
        if now < self._look_at:
            return None
        self._look_at = now + watchdog.LOOK_SECONDS
        beats = self._beats_of(
            [task for task in self._tasks if not task.ended and task.alive]
        )
        self._report_stopped(beats)
        self._keep_spares(beats, now)
        stall = self._watch.look(beats, now)
        if stall is None:
            return None
        policy = self._job.policy
        alone = policy.unit == "task" and policy.max_restarts > self._restarts
        self._say(
            f"{stall.text}. {'The late' if alone else 'All'} tasks are ended; "
            "their Python stacks come first"
        )
        self._record()
        ends = stall.late if alone else tuple(beats)
        watchdog.end_with_stacks([beats[name].pid for name in ends])
        if alone:
            return None
        self._end_all(signal.SIGKILL)
        late = [task for task in self._tasks if task.name in stall.late]
        return _End(watchdog.STALLED, late[0])

    def _failed(self, task: Task) -> _End:
        others = [t for t in self._tasks if t.alive]
        done = [t for t in self._tasks if t.returncode == 0]
        self._record()
        again = self._job.policy.restarts
        # The workers of a job that begins again have nothing left to do.
        self._end_all(signal.SIGKILL if again else signal.SIGTERM)
        ended = f"; ended {_names(others)}" if others else ""
        if done:
            # Others may have waited for them.
            ended += f"; {_names(done)} had ended with exit code 0 before"
        self._say(f"{task.name} failed with {task.cause()}{ended}")
        if self.on_failure is not None:
            self.on_failure(task)
        return _End(task.exit_code, task)

    def _not_started(self, missing: list[Task]) -> _End:
        self._end_all()
        self._say(
            f"{_names(missing)} did not start within "
            f"{self._job.startup_seconds:.0f} seconds: no server on port "
            f"{', '.join(map(_port, missing))}. Look at the "
            "output above, or raise --startup_seconds"
        )
        return _End(1, missing[0])

    def _pause(self, seconds: float) -> bool:
        """Waits before a restart; False where a signal came instead."""
        self._restarts += 1
        self._say(f"restart {self._restarts} in {seconds:.1f} seconds")
        return self._sleep(seconds)

    def _sleep(self, seconds: float) -> bool:
        """Waits; returns False at once where a signal has come."""
        deadline = time.monotonic() + seconds
        while not self._signal and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _POLL_SECONDS))
        return not self._signal

    def _give_up(self, end: _End) -> int:
        task, policy = end.failed, self._job.policy
        if task is not None and policy.restarts:
            lines = "".join(f"\n    {line}" for line in task.tail())
            last = f". Its last lines:{lines}\n" if lines else ""
            self._say(
                f"gave up after {self._restarts} restarts: {task.name} "
                f"failed with {task.cause()}{last}"
            )
        return end.code

    def _interrupted(self) -> int:
        number = self._signal
        name = signal.Signals(number).name
        self._say(f"{name} received, ending {len(self._tasks)} tasks")
        for task in self._tasks:
            task.stopped = number == signal.SIGINT
        ending = number if number in _SIGNALS else signal.SIGTERM
        until = time.monotonic() + self._job.grace_seconds
        # A coordinator saves what servers hold, and waits for its workers.
        coordinators = [
            t for t in self._tasks if t.name == "chief 0" and not t.ended
        ]
        self._end(coordinators, ending, until)
        self._end_all(ending, until)
        codes = {task.returncode for task in self._tasks}
        if number == signal.SIGTERM and PREEMPTED in codes:
            self._say("preempted: the tasks have saved their state")
            return PREEMPTED
        return 128 + number

    def _end_all(
        self, number: int = signal.SIGTERM, until: float | None = None
    ) -> None:
        """Ends what still runs.

        A task that failed is included, for it may have left children.
        """
        running = [task for task in self._tasks if not task.ended]
        self._end(running, number, until)
        self._join_readers()

    def _end(
        self, tasks: list[Task], number: int, until: float | None = None
    ) -> None:
        """Ends tasks: by the signal, after a while by SIGKILL.

        Args:
            tasks: Which.
            number: The signal.
            until: When that is; the grace time from now by default.
        """
        for task in tasks:
            task.signal(number)
        latest = time.monotonic() + self._job.grace_seconds
        deadline = latest if until is None else until
        for task in tasks:
            task.wait(max(0.0, deadline - time.monotonic()))
            task.wait_for_output(deadline - time.monotonic())
        for task in tasks:
            task.signal(signal.SIGKILL)
            task.wait()
            task.ended = True
            self._release(task)

    def _release(self, task: Task) -> None:
        if task.group:
            self._guard.release(task.group)

    def _join_readers(self) -> None:
        for task in self._tasks:
            task.wait_for_output(5.0)

    def _say(self, text: str) -> None:
        end = "" if text.endswith("\n") else ".\n"
        line = f"mgpu-tf {self._machines.launcher}: {text}"
        print(line, end=end, file=sys.stderr, flush=True)

    def _report_exit(self, task: Task, exits: queue.Queue[Task]) -> None:
        task.wait()
        exits.put(task)

    def _note(self, number: int, frame: object) -> None:
        del frame
        self._signal = number

    def _output_closed(self) -> None:
        self._signal = self._signal or signal.SIGPIPE


def _names(tasks: list[Task]) -> str:
    return ", ".join(task.name for task in tasks)


def _port(task: Task) -> str:
    return task.address.rpartition(":")[2]

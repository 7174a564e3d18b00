"""When a run saves its state, in the background, and where it resumes.

The step thread hands the state to the system between two executions; a thread
of its own brings it to the disk (`writer`). Each worker writes a part, and so
they agree on when: a worker whose clock or whose SIGTERM asks for a save says
so in the next execution, which sums what all workers say.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from mgpu_tf.checkpoints import keeping, registry, step_losses, storage, store
from mgpu_tf.checkpoints.interval import Interval
from mgpu_tf.checkpoints.manifest import DamagedError
from mgpu_tf.checkpoints.reading import Stored
from mgpu_tf.checkpoints.recovery import (
    SEEN_SECONDS,
    Owner,
    Progress,
    Recovery,
    not_seen,
    run_of,
)
from mgpu_tf.checkpoints.saving.local import KEPT, Local
from mgpu_tf.checkpoints.saving.writer import (
    Variables,
    Writer,
    read_state,
    reason_of,
)
from mgpu_tf.cluster import heartbeat
from mgpu_tf.engine.step.base import NO_VOTES, Votes
from mgpu_tf.errors import CheckpointError, ConfigurationError, Preempted
from mgpu_tf.folders import keep_private
from mgpu_tf.mesh import Piece
from mgpu_tf.options import SaveOptions
from mgpu_tf.reports.goodput import Goodput, Meter
from mgpu_tf.reports.report import known
from mgpu_tf.strategies.peers import Peers

_log = logging.getLogger("mgpu_tf")

State = dict[str, Any]
Found = tuple[State, Variables]


class Saver:
    """Saves nothing; what a `fit` without checkpoints has.

    Attributes:
        recovery: What failures have cost the run so far.
        saves: How many states were saved.
    """

    def __init__(self) -> None:
        self.recovery = Recovery()
        self.saves = 0

    def find(self) -> Found | None:
        """Returns the state to go on from, None for the beginning."""
        return None

    def room(self, step: int, wanted: int) -> int:
        """Returns how many of the wanted steps may run before a save."""
        del step
        return wanted

    def votes(self) -> Votes:
        """Returns what this worker asks for."""
        return NO_VOTES

    def boundary(
        self, step: int, votes: Votes, *, epoch_ends: bool = False
    ) -> None:
        """Saves between two executions where it is time to.

        Args:
            step: The global step.
            votes: What the workers have asked for, equal on all.
            epoch_ends: Whether the position is the end of an epoch, its
                evaluation and callbacks done.

        Raises:
            Preempted: The workers got SIGTERM, and have saved.
        """

    def begin(self) -> None:
        """Saves the beginning of a run that has no checkpoint."""

    def record(self, first: int, losses: Sequence[float]) -> None:
        """Keeps the losses of steps, the first of which has this number."""

    def finish(self) -> None:
        """Saves the end of the run, and waits until it is on the disk.

        Raises:
            CheckpointError: The disk has no room for it, or fails.
        """

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Takes SIGTERM as the wish to save and end, while in the block."""
        yield


class CheckpointSaver(Saver):
    """Saves the state of one `fit`, and finds the one to go on from.

    Args:
        options: Where and when.
        peers: The workers, who have to agree.
        is_chief: Whether this process decides, and writes the manifest.
        capture: Returns the state at this moment: the step, what JSON can
            hold, and what this worker writes of the variables.
        meter: Knows where the time of the run has gone; goes on with it.
        lost_workers: Returns how many workers were lost so far.
        local: Takes most of the saves, where there is a folder for them.
        validates: Whether the logs of some epochs have those of a validation.
    """

    def __init__(
        self,
        options: SaveOptions,
        peers: Peers,
        *,
        is_chief: bool,
        capture: Callable[[], tuple[int, State, Iterable[Piece]]],
        meter: Meter,
        lost_workers: Callable[[], int] = lambda: 0,
        local: Local | None = None,
        validates: bool = False,
    ) -> None:
        super().__init__()
        if options.private:
            keep_private()
        self._options = options
        self._peers = peers
        self._is_chief = is_chief
        self._capture, self._lost_workers = capture, lost_workers
        self._meter = meter
        self._progress: Progress | None = None
        self._thread: threading.Thread | None = None
        self._writer: Writer
        self._local = local
        # Saves to the folder of each machine since the last to the shared one.
        self._local_saves = 0
        self._failed: Exception | None = None
        # The step of the newest checkpoint, as far as this worker knows.
        self._newest_step: int | None = None
        self._best = _best(options)
        self._validates = validates
        # Whether the logs are known to have the metric of the best.
        self._monitored = self._best is None
        self._for_good = keeping.ForGood()
        self._wanted = keeping.Wanted(options.keep_if)
        self._scores: Mapping[str, float] = {}
        self._owner = Owner(options.folder)
        self._last_save = time.monotonic()
        self._interval = Interval(options.mean_hours_between_failures)
        self._due_at = math.inf
        self._saved = False
        self._preempted = False

    def find(self) -> Found | None:
        """Returns the state to go on from, None for the beginning.

        Raises:
            ConfigurationError: `resume` asks for what is not there, or a
                worker does not see the folder.
        """
        folder, resume = self._options.folder, self._options.resume
        if self._is_chief:
            storage.of(folder).make("checkpoint_dir", folder)
            self._take(folder)
        self._meet(folder)
        stored = self._newest_of_both(folder)
        if stored is None and not self._options.restart_from_nothing:
            self._refuse_to_lose(folder)
        if stored is None and resume == "always":
            raise ConfigurationError(
                "resume='always' needs a usable checkpoint. Received: "
                f"checkpoint_dir={folder!r} without one. Use resume='auto'."
            )
        if stored is not None and resume == "never":
            raise ConfigurationError(
                "resume='never' needs a checkpoint_dir without checkpoints. "
                f"Received: {folder!r} with one of step {stored.step}. Use "
                "another folder, or resume='auto'."
            )
        found = None
        if stored is not None:
            found = read_state(stored), Variables(stored)
            self._saved = True
            self._newest_step = stored.step
            self._local_saves = found[0].get("local_saves", 0)
            self._keep_as(found[0])
        if self._local is not None:
            self._local.goes_on_from(-1 if stored is None else stored.step)
        if self._is_chief:
            step = 0 if stored is None else stored.step
            self._begin(step, {} if found is None else found[0])
            noted = self._writer.registry
            noted.shorten()
            if stored is None:
                noted.note(registry.BEGAN, 0, "there was nothing to go on from")
            else:
                noted.note(registry.RESUMED, step, f"from {stored.path}")
        return found

    def _keep_as(self, state: State) -> None:
        """Goes on with what the run before has kept; warns of another rule.

        Raises:
            ConfigurationError: Its logs have no such metric.
        """
        self._check_monitor(state.get(keeping.SCORES, {}))
        self._for_good = keeping.for_good_of(state)
        before = keeping.best_of(state)
        if self._is_chief and before not in (None, self._best):
            _log.warning(
                "the run before has kept its best checkpoints by %s (%s); the "
                "next save deletes those that this run does not keep",
                before.monitor,
                before.mode,
            )

    def _check_monitor(self, scores: Mapping[str, float]) -> None:
        """Refuses, on all workers, a metric that the logs do not have.

        Args:
            scores: The logs of an epoch; empty within one.

        Raises:
            ConfigurationError: It is not among them, and will not be.
        """
        if self._monitored:
            return
        assert self._best is not None
        name, wrong = self._best.monitor, ""
        validated = any(each.startswith("val_") for each in scores)
        comes = name.startswith("val_") and self._validates and not validated
        if scores and name not in scores and not comes:
            wrong = (
                "monitor names a metric in the logs of an epoch. Received: "
                f"monitor={name!r}, where they have: "
                f"{', '.join(sorted(scores))}. Write one of them; those of a "
                "validation need validation_data."
            )
        found = self._peers.of_all([wrong, name in scores])[0]
        if found[0]:
            raise ConfigurationError(found[0])
        self._monitored = found[1]

    def _refuse_to_lose(self, folder: str) -> None:
        """Refuses, on all workers, to begin anew beside damaged checkpoints.

        Raises:
            ConfigurationError: There are some.
        """
        wrong = ""
        if self._is_chief:
            try:
                store.refuse_to_lose("checkpoint_dir", folder)
            except ConfigurationError as error:
                wrong = str(error)
        wrong = str(self._peers.of_all(wrong)[0])
        if wrong:
            raise ConfigurationError(wrong)

    def _meet(self, folder: str) -> None:
        """Checks that all workers see the folder, and makes the writer.

        Raises:
            ConfigurationError: A worker does not.
        """
        peers = self._peers
        shown = str(peers.of_all(self._owner.shown)[0])
        wrong = not_seen(folder, shown) if shown else ""
        for worker, problem in enumerate(peers.of_all(wrong)):
            if problem:
                raise ConfigurationError(
                    "checkpoint_dir must be a folder that every worker sees "
                    f"and can write to. Received: {folder!r}, which worker "
                    f"{worker} {problem}. Use a folder that all machines mount."
                )
        token, in_memory = peers.token(), self._options.snapshot_in == "memory"
        self._writer = Writer(
            folder,
            token,
            peers.worker,
            peers.num_workers,
            in_memory=in_memory,
            check=self._owner.check,
        )
        if self._local is not None:
            run = self._run_of(folder) if self._is_chief else ""
            run = str(peers.of_all(run)[0])
            self._local.open(run, token, in_memory=in_memory)

    def _run_of(self, folder: str) -> str:
        try:
            return run_of(folder)
        except OSError as error:
            raise _unwritable(folder, error) from None

    def _newest_of_both(self, folder: str) -> Stored | None:
        """Returns the newest checkpoint, of each machine or of all."""
        if self._local is None:
            return self._newest(folder)
        newest = -1
        if self._is_chief:
            every = store.newest_first(folder)
            newest = next((each.step for each in every if each.whole), -1)
        newest = self._peers.of_first(newest)
        found = self._local.newest(above=newest)
        if found is not None:
            return found
        shared = self._newest(folder)
        step = -1 if shared is None else shared.step
        if step < newest:
            # One that had looked whole was broken.
            return self._local.newest(above=step) or shared
        return shared

    def _newest(self, folder: str) -> Stored | None:
        """Returns the newest checkpoint that is whole.

        To check it, each worker reads some of its files to their end. Only
        what is damaged is passed by.

        Raises:
            CheckpointError: One that may be newer is of a later release, or
                cannot be read.
        """
        below = sys.maxsize
        while True:
            step = self._candidate(folder, below) if self._is_chief else -1
            step = self._peers.of_first(step)
            if step < 0:
                return None
            stored, wrong = self._checked(folder, step)
            problems = [text for text in self._peers.of_all(wrong) if text]
            if not problems and stored is not None:
                if self._is_chief:
                    _log.info("resumed at step %d from %s", step, stored.path)
                return stored
            if self._is_chief:
                self._refuse(step, problems[0])
            below = step

    def _candidate(self, folder: str, below: int) -> int:
        for entry in store.newest_first(folder, below=below):
            if entry.whole:
                return entry.step
            self._refuse(entry.step, entry.problem)
        return -1

    def _refuse(self, step: int, problem: str) -> None:
        """Passes a checkpoint by that is damaged, and lets nobody delete it."""
        _log.warning("refused a damaged checkpoint, which stays: %s", problem)
        noted = self._writer.registry
        if noted.damaged.get(step) != problem:
            noted.note(registry.DAMAGED, step, problem)

    def _checked(self, folder: str, step: int) -> tuple[Stored | None, str]:
        """Returns a checkpoint, and what is wrong with this worker's share."""
        end = time.monotonic() + SEEN_SECONDS
        while step not in (paths := store.paths(folder)):
            # A file system that machines share may show it late.
            if time.monotonic() < end:
                time.sleep(0.1)
                continue
            raise ConfigurationError(
                "checkpoint_dir must be a folder that every worker sees. "
                f"Received: {self._options.folder!r}, where the chief has a "
                f"checkpoint of step {step} and this worker has none."
            )
        try:
            stored = Stored(paths[step])
            stored.check(self._peers.worker, self._peers.num_workers)
        except DamagedError as error:
            return None, str(error)
        return stored, ""

    def _take(self, folder: str) -> None:
        """Ends the writing of an earlier run that may still be there."""
        try:
            self._owner.take()
        except OSError as error:
            # A full disk is reported when a checkpoint cannot be written.
            if error.errno != errno.ENOSPC:
                raise _unwritable(folder, error) from None
        try:
            store.recover(folder)
        except OSError as error:
            raise _unwritable(folder, error) from None

    def _begin(self, step: int, state: State) -> None:
        """Goes on with what the processes before knew of time and failures."""
        saved_at = state.get("saved_at")
        progress = Progress(self._options.folder, self._meter.began)
        self._progress = progress
        self.recovery = progress.begin(step, saved_at)
        if progress.restarted or saved_at is not None:
            since = saved_at or 0.0
            if progress.restarted:
                since = max(since, progress.since)
            before = Goodput(**known(Goodput, state.get("goodput", {})))
            self._meter.resume(
                before,
                since,
                restarted=progress.restarted,
                saved=state.get("time_line"),
            )

    def room(self, step: int, wanted: int) -> int:
        """Returns how many of the wanted steps may run before a save."""
        every = self._options.save_every_steps
        if every is None:
            return wanted
        self._due_at = step - step % every + every
        return min(wanted, self._due_at - step)

    def votes(self) -> Votes:
        """Returns what this worker asks for."""
        every = self._every_seconds()
        due = (
            every is not None
            and self._is_chief
            and time.monotonic() - self._last_save >= every
            and not self._writing
        )
        return Votes(save=due, end=self._preempted)

    def _every_seconds(self) -> float | None:
        """Returns the seconds from a save to the next; None for no limit."""
        if self._options.save_every is None:
            return self._options.save_every_seconds
        hours = self._meter.goodput().wall_seconds / 3600
        return self._interval.seconds(hours, self.recovery.restarts)

    def begin(self) -> None:
        """Saves the beginning of a run that has no checkpoint."""
        if not self._saved:
            self._save("the beginning")

    def record(self, first: int, losses: Sequence[float]) -> None:
        """Keeps the losses of steps, for a replay."""
        if self._is_chief:
            # The run does not need them.
            with contextlib.suppress(OSError):
                step_losses.write(self._options.folder, first, losses)

    def boundary(
        self, step: int, votes: Votes, *, epoch_ends: bool = False
    ) -> None:
        """Saves between two executions where it is time to; as above."""
        self._saved = False
        if self._progress is not None:
            self._owner.check(every_seconds=1.0, wait=False)
            self._progress.note(step, self._lost_workers())
        options = self._options
        by_epoch = (
            options.save_every_steps is None
            and options.save_every_seconds is None
            and options.save_every is None
        )
        is_best = epoch_ends and self._best is not None
        due = votes.save or votes.end
        # Later where an update of several steps had to end first.
        due |= step >= self._due_at
        if due or (by_epoch and epoch_ends) or is_best:
            self._save(self._why(votes, step), shared=votes.end or is_best)
        if votes.end:
            self._flush()
            self._peers.any(False)
            raise Preempted
        if is_best:
            self._check_monitor(self._scores)

    def finish(self) -> None:
        """Saves the end of the run, and waits until it is on the disk."""
        if not self._saved or self._local_saves:
            self._save("the end of the run", shared=True)
        self._flush()
        self._peers.any(False)
        if self._progress is not None:
            self._owner.check()
            self._progress.end()
        self._owner.release()
        if self._local is not None:
            self._local.end()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Takes SIGTERM as the wish to save and end, while in the block."""
        main = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGTERM) if main else None
        if main:
            signal.signal(signal.SIGTERM, self._note)
        try:
            yield
        finally:
            if main:
                signal.signal(signal.SIGTERM, before)
            if self._thread is not None:
                self._writer.end_soon()
                self._thread.join()
                self._writer.close()
                if self._local is not None:
                    self._local.writer.close()

    def _note(self, number: int, frame: object) -> None:
        del number, frame
        self._preempted = True

    @property
    def _writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _why(self, votes: Votes, step: int) -> str:
        """Returns why a save is due, for the registry."""
        options = self._options
        if votes.end:
            return "SIGTERM"
        if step >= self._due_at:
            return f"every {options.save_every_steps} steps"
        if votes.save and options.save_every is not None:
            return f"save_every={options.save_every}"
        if votes.save:
            return f"every {options.save_every_seconds:g} seconds"
        return "the end of an epoch"

    def _save(self, why: str, *, shared: bool = False) -> None:
        """Takes the state, and has it brought to the disk in the background.

        Args:
            why: Why it is due.
            shared: Whether to the folder that all see, and no other.
        """
        began = time.perf_counter()
        self._local_saves += 1
        if (
            self._local is None
            or self._local_saves >= self._options.shared_every
        ):
            shared = True
        with self._meter.phase("save"), heartbeat.at(heartbeat.SAVE):
            if self._thread is not None:
                self._thread.join()
            step, state, pieces = self._capture()
            state["saved_at"] = time.time()
            goodput, options = self._meter.goodput(), self._options
            state["goodput"] = dataclasses.asdict(goodput)
            state["time_line"] = self._meter.as_json()
            self._scores = state.get(keeping.SCORES, {})
            before, so_far = -1, self._for_good
            if shared:
                so_far = so_far.after(
                    step,
                    goodput.wall_seconds,
                    options.keep_every_steps,
                    options.keep_every_hours,
                    self._wanted.why(step, self._scores)
                    if self._is_chief
                    else "",
                )
            state[keeping.KEEPING] = keeping.as_state(
                options.keep_checkpoints, self._best, so_far
            )
            if shared or self._local is None:
                self._local_saves = 0
                writer, keep = self._writer, options.keep_checkpoints
            else:
                writer, keep = self._local.writer, KEPT
                state["local_saves"] = self._local_saves
                state, pieces, before = self._local.taken(state)
            writer.begin(step, pieces)
        self._interval.note(time.perf_counter() - began)
        self._thread = threading.Thread(
            target=self._finish, args=(writer, step, state, keep, before, why)
        )
        self._thread.start()
        self._last_save = time.monotonic()
        self._saved = True
        self.saves += 1

    def _finish(
        self,
        writer: Writer,
        step: int,
        state: State,
        keep: int,
        before: int,
        why: str,
    ) -> None:
        try:
            best = self._best if writer is self._writer else None
            writer.finish(state, keep, before, why, best)
            self._for_good = keeping.for_good_of(state)
            self._failed, self._newest_step = None, step
        except Exception as error:
            # Logged now, and raised by the thread that trains at the end.
            self._failed = error
            _log.warning(
                "checkpoint_dir=%r: the checkpoint of step %d was not written "
                "(%s); %s",
                *(self._options.folder, step, self._reason(error), self._left),
            )

    def _reason(self, error: Exception) -> str:
        if isinstance(error, FileNotFoundError) and not self._is_chief:
            return "its folder is gone, as when worker 0 has given it up"
        return reason_of(error)

    @property
    def _left(self) -> str:
        """What stays to go on from, after a save that has failed."""
        if not self._is_chief:
            return "worker 0 knows which stays usable"
        if self._newest_step is None:
            return "there is no other"
        return f"that of step {self._newest_step} stays usable"

    def _flush(self) -> None:
        with self._meter.phase("save"), heartbeat.at(heartbeat.SAVE):
            if self._thread is not None:
                self._thread.join()
            storage.of(self._options.folder).settle()
        if isinstance(self._failed, OSError):
            raise CheckpointError(
                "A run ends with a checkpoint of its last step. Received: "
                f"checkpoint_dir={self._options.folder!r}, where it was not "
                f"written ({self._reason(self._failed)}); {self._left}. Make "
                "room there, or catch mgpu_tf.CheckpointError and save the "
                "model elsewhere."
            ) from None
        if self._failed is not None:
            raise self._failed


def _best(options: SaveOptions) -> keeping.Best | None:
    if options.monitor is None:
        return None
    mode = options.monitor_mode or "min"
    return keeping.Best(options.keep_best, options.monitor, mode)


def _unwritable(folder: str, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        "checkpoint_dir must be a folder that can be made and written. "
        f"Received: checkpoint_dir={folder!r} ({error.strerror}). Give "
        "another path."
    )

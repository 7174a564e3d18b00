"""When a run saves its state, in the background, and where it resumes.

The step thread copies the state between two executions; a thread of its own
writes it. All workers take part in the copy, since some of the state is
spread over them, and so they agree on when: a worker whose clock or whose
SIGTERM asks for a save says so in the next execution, which sums what all
workers say.
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
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from mgpu_tf.checkpoints import store
from mgpu_tf.checkpoints.callback_state import with_arrays, without_arrays
from mgpu_tf.checkpoints.recovery import Owner, Progress, Recovery
from mgpu_tf.cluster import heartbeat
from mgpu_tf.engine.base import NO_VOTES, Votes
from mgpu_tf.errors import ConfigurationError, Preempted
from mgpu_tf.folders import keep_private, make_folder
from mgpu_tf.options import SaveOptions
from mgpu_tf.reports.goodput import Goodput, Meter
from mgpu_tf.reports.report import known
from mgpu_tf.strategies.peers import Peers

_log = logging.getLogger("mgpu_tf")

State = dict[str, Any]
Arrays = dict[str, np.ndarray]


class Saver:
    """Saves nothing; what a `fit` without checkpoints has.

    Attributes:
        recovery: What failures have cost the run so far.
        saves: How many states were saved.
    """

    def __init__(self) -> None:
        self.recovery = Recovery()
        self.saves = 0

    def find(self) -> tuple[State, Arrays] | None:
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
            Preempted: The workers were told to end, and have saved.
        """

    def finish(self) -> None:
        """Saves the end of the run, and waits until it is on the disk.

        Raises:
            OSError: It could not be written.
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
        is_chief: Whether this process writes.
        capture: Returns the state at this moment; called on all workers,
            with whether this one keeps it.
        meter: Knows where the time of the run has gone; goes on with it.
        lost_workers: Returns how many workers were lost so far.
    """

    def __init__(
        self,
        options: SaveOptions,
        peers: Peers,
        *,
        is_chief: bool,
        capture: Callable[[bool], tuple[int, State, Arrays]],
        meter: Meter,
        lost_workers: Callable[[], int] = lambda: 0,
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
        self._writer: threading.Thread | None = None
        self._failed: Exception | None = None
        self._owner = Owner(options.folder)
        self._last_save = time.monotonic()
        self._due_at = math.inf
        self._saved = False
        self._preempted = False

    def find(self) -> tuple[State, Arrays] | None:
        """Returns the state to go on from, None for the beginning.

        Raises:
            ConfigurationError: `resume` asks for what is not there.
        """
        folder, resume = self._options.folder, self._options.resume
        step = -1
        if self._is_chief:
            make_folder("checkpoint_dir", folder, writes=False)
            self._take(folder)
            entry = store.newest(folder, _warn_of_broken)
            step = -1 if entry is None else entry.step
        step = self._peers.of_first(step)
        if step < 0 and resume == "always":
            raise ConfigurationError(
                "resume='always' needs a usable checkpoint. Received: "
                f"checkpoint_dir={folder!r} without one. Use resume='auto'."
            )
        if step >= 0 and resume == "never":
            raise ConfigurationError(
                "resume='never' needs a checkpoint_dir without checkpoints. "
                f"Received: {folder!r} with one of step {step}. Use another "
                "folder, or resume='auto'."
            )
        found = None if step < 0 else self._read(step)
        if self._is_chief:
            self._begin(max(step, 0), {} if found is None else found[0])
        return found

    def _take(self, folder: str) -> None:
        """Ends the writing of an earlier run that may still be there."""
        try:
            self._owner.take()
        except OSError as error:
            if error.errno == errno.ENOSPC:
                return  # It is told when a checkpoint cannot be written.
            raise ConfigurationError(
                "checkpoint_dir must be a folder that can be made and "
                f"written. Received: checkpoint_dir={folder!r} "
                f"({error.strerror})."
            ) from None

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
            self._meter.resume(before, since, restarted=progress.restarted)

    def _read(self, step: int) -> tuple[State, Arrays]:
        names = {
            entry.step: entry.path
            for entry in store.entries(self._options.folder, thorough=False)
        }
        if step not in names:
            raise ConfigurationError(
                "checkpoint_dir must be a folder that every worker sees. "
                f"Received: {self._options.folder!r}, where the chief has a "
                f"checkpoint of step {step} and this worker has none."
            )
        found = read_state(names[step])
        if self._is_chief:
            _log.info("resumed at step %d from %s", step, names[step])
        self._saved = True
        return found

    def room(self, step: int, wanted: int) -> int:
        """Returns how many of the wanted steps may run before a save."""
        every = self._options.save_every_steps
        if every is None:
            return wanted
        self._due_at = step - step % every + every
        return min(wanted, self._due_at - step)

    def votes(self) -> Votes:
        """Returns what this worker asks for."""
        every = self._options.save_every_seconds
        due = (
            every is not None
            and self._is_chief
            and time.monotonic() - self._last_save >= every
            and not self._writing
        )
        return Votes(save=due, end=self._preempted)

    def boundary(
        self, step: int, votes: Votes, *, epoch_ends: bool = False
    ) -> None:
        """Saves between two executions where it is time to; as above."""
        self._saved = False
        if self._progress is not None:
            self._owner.check(every_seconds=1.0)
            self._progress.note(step, self._lost_workers())
        options = self._options
        by_epoch = (
            options.save_every_steps is None
            and options.save_every_seconds is None
        )
        due = votes.save or votes.end
        # Later where an update of several steps had to end first.
        due |= step >= self._due_at
        if due or (by_epoch and epoch_ends):
            self._save()
        if votes.end:
            self._flush()
            self._peers.any(False)
            raise Preempted

    def finish(self) -> None:
        """Saves the end of the run, and waits until it is on the disk."""
        if not self._saved:
            self._save()
        self._flush()
        self._peers.any(False)
        if self._progress is not None:
            self._owner.check()
            self._progress.end()

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
            if self._writer is not None:
                self._writer.join()

    def _note(self, number: int, frame: object) -> None:
        del number, frame
        self._preempted = True

    @property
    def _writing(self) -> bool:
        return self._writer is not None and self._writer.is_alive()

    def _save(self) -> None:
        """Copies the state, and has it written in the background."""
        with self._meter.phase("save"), heartbeat.at(heartbeat.SAVE):
            if self._writer is not None:
                self._writer.join()
            step, state, arrays = self._capture(self._is_chief)
        if self._is_chief:
            state["saved_at"] = time.time()
            state["goodput"] = dataclasses.asdict(self._meter.goodput())
            self._writer = threading.Thread(
                target=self._write, args=(step, state, arrays)
            )
            self._writer.start()
        self._last_save = time.monotonic()
        self._saved = True
        self.saves += 1

    def _write(self, step: int, state: State, arrays: Arrays) -> None:
        options = self._options
        try:
            write_state(
                options.folder,
                step,
                state,
                arrays,
                options.keep_checkpoints,
                self._owner.check,
            )
            self._failed = None
        except Exception as error:
            # Told now, and raised by the thread that trains at the end.
            self._failed = error
            reason = getattr(error, "strerror", None) or repr(error)
            _log.warning(
                "the checkpoint of step %d was not written (%s); the one "
                "before stays usable",
                step,
                reason,
            )

    def _flush(self) -> None:
        with self._meter.phase("save"), heartbeat.at(heartbeat.SAVE):
            if self._writer is not None:
                self._writer.join()
        if self._failed is not None:
            raise self._failed


def write_state(
    folder: str,
    step: int,
    state: State,
    arrays: Arrays,
    keep: int,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Writes a checkpoint, and deletes all but the newest.

    Args:
        folder: Where checkpoints are kept.
        step: The global step.
        state: The state of the run, with arrays anywhere in it.
        arrays: The variables by name.
        keep: How many checkpoints to keep.
        check: Raises where this run may no longer write there.

    Raises:
        OSError: The disk is full or the folder cannot be written.
    """
    every = {f"variables/{name}": array for name, array in arrays.items()}

    def keep_apart(array: np.ndarray) -> str:
        name = f"callbacks/{len(every):05d}"
        every[name] = array
        return name

    state = without_arrays(state, keep_apart)
    stored = {name: _to_stored(array) for name, array in every.items()}
    check()
    store.write(folder, step, state, stored)
    check()
    store.prune(folder, keep)


def read_state(path: str) -> tuple[State, Arrays]:
    """Reads a checkpoint.

    Args:
        path: Its folder.

    Returns:
        The state of the run, and the variables by name.

    Raises:
        CheckpointError: It is broken.
    """
    state, stored = store.read(path)
    arrays = {name: _from_stored(array) for name, array in stored.items()}
    return with_arrays(state, arrays), {
        name.removeprefix("variables/"): array
        for name, array in arrays.items()
        if name.startswith("variables/")
    }


def _warn_of_broken(entry: store.Entry) -> None:
    _log.warning("refused a broken checkpoint: %s", entry.problem)


def _to_stored(array: np.ndarray) -> store.Array:
    """Returns an array as little-endian bytes."""
    shape, name = array.shape, array.dtype.name
    flat = np.ascontiguousarray(array).reshape(-1)
    if sys.byteorder == "big":
        flat = flat.byteswap()
    return store.Array(name, shape, flat.view(np.uint8).data)


def _from_stored(array: store.Array) -> np.ndarray:
    dtype = np.dtype(tf.as_dtype(array.dtype).as_numpy_dtype)
    flat = np.frombuffer(array.data, np.uint8).view(dtype)
    if sys.byteorder == "big":
        flat = flat.byteswap()
    return flat.reshape(array.shape)

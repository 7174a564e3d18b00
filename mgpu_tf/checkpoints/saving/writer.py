"""One process's share in writing the checkpoints of a run.

    writer = Writer("run/checkpoints", token, process=0, processes=2)
    writer.begin(step, snapshot.pieces())     # the state may change from here
    writer.finish(state, keep=3)              # on a thread of its own

`begin` hands the bytes to the system, one part of a variable after another, so
that the process holds no copy of its state. `finish` waits for the disk. Each
process then says that its part is there. The first one waits for the others,
writes the manifest, and gives the checkpoint its name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from mgpu_tf.checkpoints import parts, registry, storage, store
from mgpu_tf.checkpoints.callback_state import with_arrays, without_arrays
from mgpu_tf.checkpoints.keeping import Best
from mgpu_tf.checkpoints.reading import Stored
from mgpu_tf.checkpoints.registry import Registry
from mgpu_tf.errors import CheckpointError, ConfigurationError
from mgpu_tf.mesh import Piece, Region
from mgpu_tf.strategies import messages

State = dict[str, Any]

_log = logging.getLogger("mgpu_tf")

_VARIABLES = "variables/"
# How long the first process waits for the parts of the others, which is less
# than the watchdog does, and how long where the run has failed meanwhile.
WAIT_SECONDS = 300.0
_ENDING_SECONDS = 10.0


class Writer:
    """Writes the part of one process, and on the first all the rest.

    Args:
        folder: Where checkpoints are kept; every process must see it.
        token: A word that all processes of the run share, and no other run.
        process: The number of this process.
        processes: How many there are.
        in_memory: Whether `begin` copies the pieces and leaves the writing
            to `finish`.
        check: Returns whether this run is known to own the folder, and so
            may delete there; raises where another one does. With
            `wait=False` it waits for no network.

    Attributes:
        written: The step of the last checkpoint that is whole, -1 for none.
            Known on the first process.
        registry: What becomes of checkpoints; the first process writes it.
    """

    def __init__(
        self,
        folder: str,
        token: str,
        process: int = 0,
        processes: int = 1,
        *,
        in_memory: bool = False,
        check: Callable[..., bool] = lambda **_: True,
    ) -> None:
        self._folder, self._token = folder, token
        self._process, self._processes = process, processes
        self._in_memory = in_memory
        self._check = check
        self._ending = threading.Event()
        self.registry = Registry(folder)
        # However many there are, a save does not read them all.
        self._for_good: dict[int, store.Entry] = {}
        self.written = -1
        self._step = self._save = 0
        self._part: parts.Part | None = None
        self._left: list[Piece] = []
        self._failed: Exception | None = None

    def begin(self, step: int, pieces: Iterable[Piece]) -> None:
        """Takes what the state is now; raises nothing, `finish` does.

        Args:
            step: The global step.
            pieces: What this process writes of the variables.
        """
        self._step, self._left = step, []
        self._save += 1
        self._part = self._failed = None
        try:
            self._check(wait=False)
            self._part = parts.Part(
                self._folder,
                step,
                self._token,
                self._process,
                save=self._save,
                at_once=not self._in_memory,
            )
            for piece in pieces:
                if self._in_memory:
                    self._left.append(piece.held())
                else:
                    self._add(piece)
        except Exception as error:
            self._failed = error

    def finish(
        self,
        state: Mapping[str, Any],
        keep: int,
        before: int = -1,
        why: str = "",
        best: Best | None = None,
    ) -> None:
        """Waits for the storage; on the first process, for all of them.

        Args:
            state: The state of the run, with arrays anywhere in it. The first
                process writes it.
            keep: How many checkpoints to keep.
            before: The step of one that is kept beside them.
            why: Why it is saved, for the registry.
            best: Which of the best are kept too.

        Raises:
            OSError: The disk is full or the folder cannot be written.
            CheckpointError: Another process could not write its part.
            ConfigurationError: The part of another process is not seen here.
        """
        try:
            self._finish(state, why)
        except BaseException as error:
            self._give_up(reason_of(error))
            raise
        finally:
            self._left = []
            if self._part is not None:
                self._part.close()
        if self._process == 0:
            self._prune(keep, before, best)

    def _prune(self, keep: int, before: int, best: Best | None) -> None:
        """Deletes older checkpoints; what fails is done at the next save."""
        self._for_good.pop(self._step, None)
        try:
            if self._check():
                store.prune(
                    *(self._folder, keep, self._token, before),
                    self.registry,
                    best,
                    known=self._for_good,
                )
        except (OSError, CheckpointError) as error:
            _log.warning(
                "older checkpoints were not deleted (%s); the next save does "
                "so",
                reason_of(error),
            )

    def _give_up(self, reason: str) -> None:
        """Leaves nothing of this part but why it does not come."""
        if self._process == 0:
            parts.abandon(self._folder, self._step, self._token)
            return
        if self._part is not None:
            # The note of it needs a place on a disk that may be full.
            self._part.drop()
        parts.refuse(
            *(self._folder, self._step, self._token, self._process),
            reason,
            self._save,
        )
        # Nothing can be left in a folder that is read-only here.
        with contextlib.suppress(tf.errors.OpError):
            messages.put(self._refusal(self._process), reason)

    def _reported(self, process: int) -> str | None:
        """Returns why the part of a process will not come, None if it may."""
        with contextlib.suppress(tf.errors.OpError):  # The cluster has failed.
            return messages.take(self._refusal(process), 1)
        return None

    def _refusal(self, process: int) -> str:
        """The name of the message that the part of a process will not come."""
        return f"mgpu_tf/save/{self._token}/{self._save}/{process}"

    def _finish(self, state: Mapping[str, Any], why: str) -> None:
        if self._failed is not None:
            raise self._failed
        assert self._part is not None
        if self._process == 0:
            # Of a save that another process was late to give up.
            kept = storage.of(self._folder)
            kept.abandon_earlier(self._folder, self._step, self._token)
        for piece in self._left:
            self._add(piece)
        if self._process:
            self._part.leave(self._part.end())
            return
        arrays: list[np.ndarray] = []

        def keep_apart(array: np.ndarray) -> str:
            arrays.append(array)
            return _callbacks(len(arrays) - 1)

        state = without_arrays(dict(state), keep_apart)
        for number, array in enumerate(arrays):
            self._part.add(piece_of(_callbacks(number), array))
        mine = self._part.end()
        others = [self._left_by(k) for k in range(1, self._processes)]
        self._check()
        parts.commit(
            self._folder, self._step, self._token, state, [mine, *others]
        )
        self.written = self._step
        self.registry.note(registry.SAVED, self._step, why)

    def close(self) -> None:
        """Deletes the files that another save would have written over."""
        if self._process == 0:
            kept = storage.of(self._folder)
            kept.forget_written_over(self._folder, self._token)

    def end_soon(self) -> None:
        """Waits no longer for processes that may have ended."""
        self._ending.set()

    def _add(self, piece: Piece) -> None:
        assert self._part is not None
        name = _VARIABLES + piece.name
        self._part.add(dataclasses.replace(piece, name=name))

    def _left_by(self, process: int) -> dict[str, Any]:
        """Waits for the part of another process."""
        began = time.monotonic()
        while True:
            found = parts.left(
                *(self._folder, self._step, self._token, process), self._save
            )
            if found is not None:
                return found
            reason = self._reported(process)
            if reason is not None:
                raise CheckpointError(f"process {process}: {reason}")
            limit = WAIT_SECONDS
            if self._ending.is_set():
                limit = _ENDING_SECONDS
            if time.monotonic() - began > limit:
                raise ConfigurationError(
                    "checkpoint_dir must be a folder that every worker sees. "
                    f"Received: {self._folder!r}, where worker 0 has not seen "
                    f"the part of worker {process} after {limit:.0f} seconds. "
                    "Use a folder that all machines mount."
                )
            time.sleep(storage.of(self._folder).look_seconds)


def reason_of(error: BaseException) -> str:
    """Returns why a checkpoint was not written, in a few words."""
    reason = getattr(error, "strerror", None)
    if isinstance(error, ValueError | CheckpointError):
        reason = str(error)
    return str(reason or repr(error))


def _callbacks(number: int) -> str:
    return f"callbacks/{number:05d}"


def piece_of(name: str, array: np.ndarray) -> Piece:
    """Returns a whole array as a piece."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if sys.byteorder == "big":
        flat = flat.byteswap()
    data = flat.view(np.uint8).data
    return Piece(
        name,
        array.dtype.name,
        array.dtype.itemsize,
        array.shape,
        Region(0, array.size),
        lambda: [data],
    )


class Variables:
    """The variables of a checkpoint, read by parts.

    Args:
        stored: The checkpoint.

    Attributes:
        arrays: Type and shape of each by its name.
    """

    def __init__(self, stored: Stored) -> None:
        self._stored = stored
        self.arrays = {
            name.removeprefix(_VARIABLES): (array.dtype, array.shape)
            for name, array in stored.arrays.items()
            if name.startswith(_VARIABLES)
        }

    def read(self, name: str, region: Region) -> np.ndarray:
        """Returns some elements of a variable, `[region.size]`.

        Raises:
            CheckpointError: They cannot be read.
        """
        dtype, _ = self.arrays[name]
        return _elements(self._stored.read(_VARIABLES + name, region), dtype)


def read_state(stored: Stored) -> State:
    """Returns the state of a run, with its arrays.

    Raises:
        CheckpointError: An array cannot be read.
    """
    arrays = {
        name: _elements(stored.read(name), array.dtype).reshape(array.shape)
        for name, array in stored.arrays.items()
        if not name.startswith(_VARIABLES)
    }
    return dict(with_arrays(stored.state, arrays))


def _elements(data: bytearray, dtype: str) -> np.ndarray:
    kind = np.dtype(tf.as_dtype(dtype).as_numpy_dtype)
    flat = np.frombuffer(data, np.uint8).view(kind)
    return flat.byteswap() if sys.byteorder == "big" else flat

"""What processes write of a checkpoint, and the name that makes it one.

    part = Part("run/checkpoints", step=120, token="t", process=0)
    part.add(piece)
    commit("run/checkpoints", 120, "t", state, [part.end()])

Each process writes a `Part`: its pieces of arrays, one after other. When the
parts of all processes are stored, one of them calls `commit`. Until then
there is no checkpoint of that name, so a kill or a full disk leaves the ones
before as they were. How that is done depends on the storage (`storage`).

Where a checkpoint that is not whole has the name of a new one, it is moved
aside. This module does not import TensorFlow, Keras or NumPy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mgpu_tf.checkpoints import registry, storage
from mgpu_tf.checkpoints.manifest import compose, parse
from mgpu_tf.checkpoints.reading import Stored, check_file, check_size
from mgpu_tf.checkpoints.registry import Registry
from mgpu_tf.checkpoints.storage.disk import DISK, open_file
from mgpu_tf.checkpoints.storage.interface import ASIDE, PREFIX, unfinished_path
from mgpu_tf.errors import CheckpointError
from mgpu_tf.mesh import Piece


class Part:
    """What one process writes of a checkpoint.

    Args:
        folder: Where checkpoints are kept; made where it is missing.
        step: The global step.
        token: A word that all processes of the run share, and no other run.
        process: The number of this process.
        save: The number of the save, the same in all processes.
        at_once: Whether `add` must not wait for a network. Otherwise it may.

    Raises:
        OSError: The folder cannot be written.
    """

    def __init__(
        self,
        folder: str,
        step: int,
        token: str = "0",
        process: int = 0,
        *,
        save: int = 0,
        at_once: bool = True,
    ) -> None:
        self._folder = folder
        self._step, self._token, self._save = step, token, save
        self._process = process
        self._file = storage.of(folder).part(
            folder, step, token, process, at_once=at_once
        )
        self._arrays: dict[str, dict[str, Any]] = {}
        self._bytes = 0

    def add(self, piece: Piece) -> None:
        """Writes a piece, as far as a memory that is not this process's.

        Raises:
            OSError: The disk is full.
        """
        entry = self._arrays.setdefault(
            piece.name,
            {
                "name": piece.name,
                "dtype": piece.dtype,
                "itemsize": piece.itemsize,
                "shape": list(piece.shape),
                "pieces": [],
            },
        )
        region = dataclasses.astuple(piece.region)
        entry["pieces"].append([self._process, self._bytes, *region])
        for chunk in piece.chunks():
            self._file.write(chunk)
            self._bytes += memoryview(chunk).nbytes

    def end(self) -> dict[str, Any]:
        """Brings all of it to the disk, or to another machine.

        Returns:
            What `commit` has to know of it.

        Raises:
            OSError: The disk is full.
        """
        checksum = self._file.end(self._bytes)
        return {
            "file": {
                "name": self._file.name,
                "bytes": self._bytes,
                "sha256": checksum,
            },
            "arrays": list(self._arrays.values()),
        }

    def leave(self, found: Mapping[str, Any]) -> None:
        """Leaves for another process what `end` has returned."""
        path = _note(self._folder, self._step, self._token, self._process)
        _leave(path, self._save, found)

    def close(self) -> None:
        """Closes the file, whatever became of it."""
        self._file.close()

    def drop(self) -> None:
        """Gives up, and leaves the disk what it had."""
        self._file.drop()


def refuse(
    folder: str,
    step: int,
    token: str,
    process: int,
    reason: str,
    save: int = 0,
) -> None:
    """Reports to the process that would commit that a part will not come.

    Args:
        folder: Where checkpoints are kept. Where it cannot be written, the
            other process sees nothing.
        step: The global step.
        token: As for `Part`.
        process: The number of this process.
        reason: Why.
        save: As for `Part`.
    """
    path = _note(folder, step, token, process)
    with contextlib.suppress(OSError):
        _leave(path, save, {"failed": reason})


def left(
    folder: str, step: int, token: str, process: int, save: int = 0
) -> dict[str, Any] | None:
    """Returns what another process has left of its part, None if nothing yet.

    Args:
        folder: Where checkpoints are kept.
        step: The global step.
        token: As for `Part`.
        process: The number of the other process.
        save: As for `Part`; what it has left of another save does not count.

    Raises:
        CheckpointError: The process could not write its part.
    """
    path = _note(folder, step, token, process)
    try:
        found = dict(json.loads(storage.of(folder).text(path)))
    except FileNotFoundError:
        return None
    if found.get("save") != save:
        return None
    if "failed" in found:
        raise CheckpointError(f"process {process}: {found['failed']}")
    return found


def commit(
    folder: str,
    step: int,
    token: str,
    state: Mapping[str, Any],
    parts: Iterable[Mapping[str, Any]],
) -> str:
    """Makes a checkpoint of parts; one of the same step is replaced.

    Args:
        folder: Where checkpoints are kept.
        step: The global step.
        token: As for `Part`.
        state: What JSON can hold.
        parts: What `Part.end` has returned in each process, in the order of
            the processes.

    Returns:
        The path of the checkpoint.

    Raises:
        CheckpointError: The file of a process is not seen from here.
        OSError: The disk is full or the folder cannot be written.
    """
    path = os.path.join(folder, f"{PREFIX}{step:010d}")
    kept = storage.of(folder)
    place = kept.place(folder, step, token)
    files = [dict(part["file"]) for part in parts]
    arrays: dict[str, dict[str, Any]] = {}
    for part in parts:
        for array in part["arrays"]:
            known = arrays.setdefault(array["name"], array | {"pieces": []})
            known["pieces"] = known["pieces"] + array["pieces"]
    text = compose(step, files, arrays.values(), state)
    for number, file in enumerate(parse(os.path.basename(path), text).files):
        check_size(place, file)
        kept.remove(_note(folder, step, token, number))
    _name(folder, place, path, text)
    return path


def write(
    folder: str,
    step: int,
    state: Mapping[str, Any],
    pieces: Iterable[Piece],
    token: str = "0",
) -> str:
    """Writes a checkpoint that one process has all of.

    Args:
        folder: Where checkpoints are kept; made where it is missing.
        step: The global step; a checkpoint of the same step is replaced.
        state: What JSON can hold.
        pieces: Together, the arrays.
        token: As for `Part`.

    Returns:
        The path of the checkpoint.

    Raises:
        OSError: The disk is full or the folder cannot be written; nothing
            of this checkpoint is left then.
    """
    try:
        part = Part(folder, step, token)
        with contextlib.closing(part):
            for piece in pieces:
                part.add(piece)
            found = part.end()
        return commit(folder, step, token, state, [found])
    except BaseException:
        abandon(folder, step, token)
        raise


def write_copy(
    folder: str, step: int, token: str, stream: Iterator[bytes]
) -> Stored:
    """Writes a checkpoint that was read elsewhere.

    Args:
        folder: Where checkpoints are kept, on a disk of this machine; made
            where it is missing.
        step: The global step; a checkpoint of the same step is replaced.
        token: As for `Part`.
        stream: From `Stored.stream`.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: It did not come whole.
        OSError: The disk is full or the folder cannot be written; nothing
            of this checkpoint is left then.
    """
    place = DISK.place(folder, step, token)
    path = os.path.join(folder, f"{PREFIX}{step:010d}")
    try:
        os.makedirs(place, exist_ok=True)
        text = next(stream, b"")
        for file in parse(os.path.basename(path), text).files:
            left = file.bytes
            with open_file(os.path.join(place, file.name), "wb") as opened:
                while left and (chunk := next(stream, b"")):
                    left -= opened.write(chunk)
                opened.flush()
                os.fsync(opened.fileno())
            check_file(place, file)
        _name(folder, place, path, text)
    except BaseException:
        abandon(folder, step, token)
        raise
    return Stored(path)


def abandon(folder: str, step: int, token: str) -> None:
    """Deletes what was written of a checkpoint that is not committed."""
    storage.of(folder).abandon(folder, step, token)


def _leave(path: str, save: int, found: Mapping[str, Any]) -> None:
    storage.of(path).put(path, json.dumps({"save": save, **found}).encode())


def _note(folder: str, step: int, token: str, process: int) -> str:
    place = unfinished_path(folder, step, token)
    return os.path.join(place, f"arrays-{process}.json")


def _name(folder: str, place: str, path: str, text: bytes) -> None:
    """Gives a checkpoint whose bytes are all written its name."""
    kept = storage.of(folder)
    kept.seal(place, text)
    if kept.exists(path) and not _is_whole(path):
        _move_aside(folder, path, text)
    kept.finish(place, path, text)


def _is_whole(path: str) -> bool:
    """Whether all bytes of a checkpoint are known to be those written."""
    try:
        Stored(path).check()
    except CheckpointError:
        return False
    return True


def _move_aside(folder: str, path: str, text: bytes) -> None:
    """Gives what is not whole another name, which nothing else has."""
    kept, name = storage.of(folder), os.path.basename(path)
    for number in itertools.count(1):
        other = f"{ASIDE}{name}-{number}"
        if not kept.exists(os.path.join(folder, other)):
            break
    new = {file.name for file in parse(name, text).files}
    kept.move_aside(path, os.path.join(folder, other), new)
    step = int(name.removeprefix(PREFIX))
    Registry(folder).note(registry.MOVED, step, f"to {other}")

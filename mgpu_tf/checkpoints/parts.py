"""What processes write of a checkpoint, and the name that makes it one.

    part = Part("run/checkpoints", step=120, token="t", process=0)
    part.add(piece)
    commit("run/checkpoints", 120, "t", state, [part.end()])

Each process writes a `Part`: its pieces of arrays, one after other. When the
parts of all processes are on the disk, one of them calls `commit`. Until then
the checkpoint has another name, so a kill or a full disk leaves the ones
before as they were.

A run writes over the files of the checkpoint that it would delete next
(`store.prune`). The system has memory for them already, and so takes a part of
the time that new files take. Who reads a checkpoint locks its files meanwhile,
and a file that is locked, or has another name elsewhere, is not written over.
Where a checkpoint that is not whole has the name of a new one, it is moved
aside. This module does not import TensorFlow, Keras or NumPy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any

from mgpu_tf.checkpoints import registry
from mgpu_tf.checkpoints.manifest import MANIFEST, compose, parse
from mgpu_tf.checkpoints.reading import Stored, check_file, check_size
from mgpu_tf.checkpoints.registry import Registry
from mgpu_tf.errors import CheckpointError
from mgpu_tf.folders import not_through_links
from mgpu_tf.mesh import Piece

PREFIX = "step-"
UNFINISHED = ".unfinished-"
REPLACED = f"{UNFINISHED}replaced-"
ASIDE = "damaged-"

_SPARE = "spare"
_CHUNK_BYTES = 1 << 22


class Part:
    """What one process writes of a checkpoint.

    Args:
        folder: Where checkpoints are kept; made where it is missing.
        step: The global step.
        token: A word that all processes of the run share, and no other run.
        process: The number of this process.

    Raises:
        OSError: The folder cannot be written.
    """

    def __init__(
        self, folder: str, step: int, token: str = "0", process: int = 0
    ) -> None:
        self._folder = unfinished(folder, step, token)
        os.makedirs(self._folder, exist_ok=True)
        self._process = process
        self._name = f"arrays-{process}.bin"
        self._path = os.path.join(self._folder, self._name)
        self._file = _spared(folder, token, self._path) or _open(
            self._path, "wb"
        )
        self._arrays: dict[str, dict[str, Any]] = {}
        self._bytes = 0

    def add(self, piece: Piece) -> None:
        """Writes a piece, as far as the system's own memory.

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
        """Brings all of it to the disk.

        Returns:
            What `commit` has to know of it.

        Raises:
            OSError: The disk is full.
        """
        with self._file as file:
            file.flush()
            file.truncate(self._bytes)
            os.fsync(file.fileno())
        digest = hashlib.sha256()
        with _open(self._path, "rb") as written:
            while chunk := written.read(_CHUNK_BYTES):
                digest.update(chunk)
        return {
            "file": {
                "name": self._name,
                "bytes": self._bytes,
                "sha256": digest.hexdigest(),
            },
            "arrays": list(self._arrays.values()),
        }

    def leave(self, found: Mapping[str, Any]) -> None:
        """Leaves for another process what `end` has returned."""
        _leave(self._folder, self._process, found)

    def close(self) -> None:
        """Closes the file, whatever became of it."""
        with contextlib.suppress(OSError):
            self._file.close()

    def drop(self) -> None:
        """Gives up, and leaves the disk what it had."""
        self.close()
        with contextlib.suppress(OSError):
            os.truncate(self._path, 0)


def refuse(
    folder: str, step: int, token: str, process: int, reason: str
) -> None:
    """Tells the process that would commit that a part will not come.

    Args:
        folder: Where checkpoints are kept. Where it cannot be written, the
            other process has to wait.
        step: The global step.
        token: As for `Part`.
        process: The number of this process.
        reason: Why.
    """
    place = unfinished(folder, step, token)
    with contextlib.suppress(OSError):
        os.makedirs(place, exist_ok=True)
        _leave(place, process, {"failed": reason})


def left(
    folder: str, step: int, token: str, process: int
) -> dict[str, Any] | None:
    """Returns what another process has left of its part, None if nothing yet.

    Args:
        folder: Where checkpoints are kept.
        step: The global step.
        token: As for `Part`.
        process: The number of the other process.

    Raises:
        CheckpointError: The process could not write its part.
    """
    try:
        path = _note(unfinished(folder, step, token), process)
        with _open(path, "rb") as file:
            found = dict(json.load(file))
    except FileNotFoundError:
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
    place = unfinished(folder, step, token)
    files = [dict(part["file"]) for part in parts]
    arrays: dict[str, dict[str, Any]] = {}
    for part in parts:
        for array in part["arrays"]:
            known = arrays.setdefault(array["name"], array | {"pieces": []})
            known["pieces"] = known["pieces"] + array["pieces"]
    text = compose(step, files, arrays.values(), state)
    for number, file in enumerate(parse(os.path.basename(path), text).files):
        check_size(place, file)
        with contextlib.suppress(FileNotFoundError):
            os.remove(_note(place, number))
    _write_synced(os.path.join(place, MANIFEST), text)
    _name(folder, place, path)
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
        folder: Where checkpoints are kept; made where it is missing.
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
    place = unfinished(folder, step, token)
    path = os.path.join(folder, f"{PREFIX}{step:010d}")
    try:
        os.makedirs(place, exist_ok=True)
        text = next(stream, b"")
        for file in parse(os.path.basename(path), text).files:
            left = file.bytes
            with _open(os.path.join(place, file.name), "wb") as opened:
                while left and (chunk := next(stream, b"")):
                    left -= opened.write(chunk)
                opened.flush()
                os.fsync(opened.fileno())
            check_file(place, file)
        _write_synced(os.path.join(place, MANIFEST), text)
        _name(folder, place, path)
    except BaseException:
        abandon(folder, step, token)
        raise
    return Stored(path)


def abandon(folder: str, step: int, token: str) -> None:
    """Deletes what was written of a checkpoint that is not committed."""
    shutil.rmtree(unfinished(folder, step, token), ignore_errors=True)


def abandon_earlier(folder: str, step: int, token: str) -> None:
    """Deletes what a run has written of earlier steps and never committed."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            number = name.removeprefix(UNFINISHED + PREFIX).split("-")[0]
            if (
                name.startswith(UNFINISHED + PREFIX)
                and name.endswith(f"-{token}")
                and number.isdecimal()
                and int(number) < step
            ):
                path = os.path.join(folder, name)
                shutil.rmtree(path, ignore_errors=True)


def abandon_spare(folder: str, token: str) -> None:
    """Deletes the files that a run would write over next."""
    shutil.rmtree(spare(folder, token), ignore_errors=True)


def unfinished(folder: str, step: int, token: str) -> str:
    """Returns the path of a checkpoint that is being written."""
    return os.path.join(folder, f"{UNFINISHED}{PREFIX}{step:010d}-{token}")


def _open(path: str, mode: str) -> IO[bytes]:
    """Opens a file of a checkpoint, which is no link to another file."""
    return open(path, mode, opener=not_through_links)


def spare(folder: str, token: str) -> str:
    """Returns the path of files that a run would write over next."""
    return os.path.join(folder, f"{UNFINISHED}{_SPARE}-{token}")


def _spared(folder: str, token: str, path: str) -> IO[bytes] | None:
    """Opens a file of a deleted checkpoint, to be written over at a path.

    Returns:
        None where there is none, where it is read, or where it is the same
        file as another that somebody has linked to it.
    """
    found = os.path.join(spare(folder, token), os.path.basename(path))
    try:
        os.rename(found, path)
    except OSError:
        return None
    try:
        file = _open(path, "r+b")
    except OSError:
        os.unlink(path)
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        alone = os.fstat(file.fileno()).st_nlink == 1
    except OSError:
        alone = False
    if not alone:
        file.close()
        os.unlink(path)
        return None
    return file


def _leave(place: str, process: int, found: Mapping[str, Any]) -> None:
    path = _note(place, process)
    _write_synced(path + ".new", json.dumps(found).encode())
    os.rename(path + ".new", path)


def _note(folder: str, process: int) -> str:
    return os.path.join(folder, f"arrays-{process}.json")


def _write_synced(path: str, data: bytes) -> None:
    with _open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _name(folder: str, place: str, path: str) -> None:
    """Gives a checkpoint whose bytes are all written its name.

    A kill between the two renames leaves the one before under its other name
    only: `recover` gives it back.
    """
    _sync(place)
    replaced = None
    if os.path.lexists(path):
        replaced = os.path.join(folder, REPLACED + os.path.basename(path))
        if _is_whole(path):
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(path, replaced)
        else:
            replaced = None
            _move_aside(folder, path)
    os.rename(place, path)
    _sync(folder)
    if replaced:
        shutil.rmtree(replaced, ignore_errors=True)


def _is_whole(path: str) -> bool:
    """Whether all bytes of a checkpoint are known to be those written."""
    try:
        Stored(path).check()
    except CheckpointError:
        return False
    return True


def _move_aside(folder: str, path: str) -> None:
    """Gives what is not whole another name, which nothing else has."""
    name = os.path.basename(path)
    for number in itertools.count(1):
        other = f"{ASIDE}{name}-{number}"
        if not os.path.lexists(os.path.join(folder, other)):
            break
    os.rename(path, os.path.join(folder, other))
    step = int(name.removeprefix(PREFIX))
    Registry(folder).note(registry.MOVED, step, f"to {other}")


def _sync(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

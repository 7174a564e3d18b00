"""A folder of checkpoints: written whole or not at all, checked when read.

    write("run/checkpoints", step=120, state={"epoch": 3}, pieces=pieces)
    entry = newest("run/checkpoints")       # passes by what is damaged
    stored = Stored(entry.path)             # see `reading`

    run/checkpoints/step-0000000120/manifest.json   what it holds, checksums
                                    arrays-0.bin    what process 0 has written
                                    arrays-1.bin    what process 1 has written

Each process writes a `Part`: its pieces of arrays, one after other. When the
parts of all processes are on the disk, one of them calls `commit`. Until then
the checkpoint has another name, so a kill or a full disk leaves the ones
before as they were.

A run writes over the files of the checkpoint that it would delete next
(`prune`). The system has memory for them already, and so takes a part of the
time that new files take. Who reads a checkpoint locks its files meanwhile, and
a file that is locked, or has another name elsewhere, is not written over.

Only what is known to be whole is deleted or written over. What is damaged, of
a later release, or not readable stays; where a new checkpoint needs its name,
it gets the name `damaged-step-...`. This module does not import TensorFlow,
Keras or NumPy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import glob
import hashlib
import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO, Any

from mgpu_tf.checkpoints import registry
from mgpu_tf.checkpoints.manifest import (
    MANIFEST,
    DamagedError,
    Manifest,
    compose,
    parse,
)
from mgpu_tf.checkpoints.reading import (
    Stored,
    check_file,
    check_size,
    patiently,
    read_manifest,
)
from mgpu_tf.checkpoints.registry import Registry
from mgpu_tf.errors import CheckpointError, ConfigurationError
from mgpu_tf.folders import not_through_links
from mgpu_tf.mesh import Piece

# In the folders of processes in a `local_checkpoint_dir`.
LOCAL_OWNER = "owner"

_PREFIX = "step-"
_NAME = re.compile(r"step-(\d{10,18})", re.ASCII)
_UNFINISHED = ".unfinished-"
_REPLACED = f"{_UNFINISHED}replaced-"
_ASIDE = "damaged-"
_SPARE = "spare"
_CHUNK_BYTES = 1 << 22


@dataclasses.dataclass(frozen=True)
class Entry:
    """A checkpoint in a folder: whole, or damaged.

    Attributes:
        path: Its folder.
        step: The global step that it holds.
        problem: Why it is damaged, "" where it is whole.
        manifest: What it says of itself; None where that is damaged.
    """

    path: str
    step: int
    problem: str
    manifest: Manifest | None

    @property
    def name(self) -> str:
        """The name of its folder."""
        return os.path.basename(self.path)

    @property
    def bytes(self) -> int:
        """How large its arrays are."""
        return self.manifest.bytes if self.manifest else 0

    @property
    def state(self) -> Mapping[str, Any]:
        """What JSON can hold; empty where that is damaged."""
        return self.manifest.state if self.manifest else {}

    @property
    def whole(self) -> bool:
        """Whether a run can go on from it."""
        return not self.problem

    def describe(self) -> str:
        """Returns one line: what it holds, or what is wrong with it."""
        if self.problem:
            return f"BROKEN  {self.problem}"
        words = [f"ok      {self.name}", f"{self.bytes / 1e6:.1f} MB"]
        # A state that no release has written is not described.
        with contextlib.suppress(KeyError, TypeError, ValueError, *_TIMES):
            words += _described(self.state)
        return ", ".join(words)


# Of a moment that no calendar has.
_TIMES = (OverflowError, OSError)


def _described(state: Mapping[str, Any]) -> list[str]:
    words = []
    if "position" in state:
        position = state["position"]
        words.append(f"epoch {position['epoch']} step {position['step']}")
    if "num_replicas" in state:
        words.append(f"{state['num_replicas']} replicas")
    if "part" in state:
        part = state["part"]
        words.append(f"part of worker {part['worker']} of {part['of']}")
    if "saved_at" in state:
        moment = datetime.datetime.fromtimestamp(state["saved_at"])
        words.append(moment.isoformat(sep=" ", timespec="seconds"))
    return words


@dataclasses.dataclass(frozen=True)
class Unknown:
    """A checkpoint of which nobody can tell here whether it is whole.

    Attributes:
        path: Its folder.
        step: The global step that it holds.
        problem: Why nobody can.
    """

    path: str
    step: int
    problem: str
    whole = False

    def describe(self) -> str:
        """Returns one line that says why."""
        return f"UNKNOWN {self.problem}"


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
    path = os.path.join(folder, f"{_PREFIX}{step:010d}")
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
    path = os.path.join(folder, f"{_PREFIX}{step:010d}")
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


def recover(folder: str) -> None:
    """Gives back its name to a checkpoint that was about to be replaced.

    A process was killed then, and the one that takes its place was not whole
    under any name. Nobody may be writing there.

    Raises:
        OSError: The folder cannot be written.
        UnreadableError: It cannot be read.
    """
    for name in _listed(folder):
        path = os.path.join(folder, name.removeprefix(_REPLACED))
        if name.startswith(_REPLACED) and not os.path.lexists(path):
            os.rename(os.path.join(folder, name), path)


def remove_after(folder: str, step: int) -> None:
    """Deletes the whole checkpoints of later steps."""
    damaged = Registry(folder).damaged
    for entry in survey(folder):
        if entry.step > step and entry.whole and entry.step not in damaged:
            shutil.rmtree(entry.path, ignore_errors=True)


def folders(path: str) -> list[str]:
    """Returns the folders of checkpoints of a `local_checkpoint_dir`.

    Args:
        path: Such a folder, the folder of a run in it, or any other.

    Returns:
        Those of the processes in it; the folder itself where it is another.
    """
    for below in ("*", os.path.join("*", "*")):
        pattern = os.path.join(glob.escape(path), below, LOCAL_OWNER)
        if found := sorted(glob.glob(pattern)):
            return [os.path.dirname(each) for each in found]
    return [path]


def abandon(folder: str, step: int, token: str) -> None:
    """Deletes what was written of a checkpoint that is not committed."""
    shutil.rmtree(unfinished(folder, step, token), ignore_errors=True)


def abandon_earlier(folder: str, step: int, token: str) -> None:
    """Deletes what a run has written of earlier steps and never committed."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            number = name.removeprefix(_UNFINISHED + _PREFIX).split("-")[0]
            if (
                name.startswith(_UNFINISHED + _PREFIX)
                and name.endswith(f"-{token}")
                and number.isdecimal()
                and int(number) < step
            ):
                path = os.path.join(folder, name)
                shutil.rmtree(path, ignore_errors=True)


def abandon_spare(folder: str, token: str) -> None:
    """Deletes the files that a run would write over next."""
    shutil.rmtree(_spare(folder, token), ignore_errors=True)


def unfinished(folder: str, step: int, token: str) -> str:
    """Returns the path of a checkpoint that is being written."""
    return os.path.join(folder, f"{_UNFINISHED}{_PREFIX}{step:010d}-{token}")


def paths(folder: str) -> dict[int, str]:
    """Returns the paths of the checkpoints of a folder by their steps.

    Args:
        folder: Where checkpoints are kept; it may be missing.

    Returns:
        The newest last; those that were never finished are left out.

    Raises:
        UnreadableError: The folder cannot be read.
    """
    found = {
        int(match[1]): os.path.join(folder, match[0])
        for match in map(_NAME.fullmatch, _listed(folder))
        if match
    }
    return dict(sorted(found.items()))


def newest_first(
    folder: str, *, thorough: bool = False, below: int = sys.maxsize
) -> Iterator[Entry]:
    """Yields the checkpoints of a folder, looking at each when it is asked for.

    Args:
        folder: Where checkpoints are kept; it may be missing.
        thorough: Whether all bytes are read to check them; otherwise only
            manifests and sizes.
        below: Only earlier steps.

    Yields:
        Whole and damaged ones.

    Raises:
        NewerFormatError: The next one is of a later release.
        UnreadableError: The next one cannot be read, whole or not.
    """
    for step, path in reversed(paths(folder).items()):
        if step < below:
            yield _entry(path, step, thorough)


def entries(folder: str, *, thorough: bool = True) -> list[Entry]:
    """Returns the checkpoints of a folder, the newest last.

    Args:
        folder: As for `newest_first`.
        thorough: As for `newest_first`.

    Raises:
        NewerFormatError: One of them is of a later release.
        UnreadableError: One of them cannot be read, whole or not.
    """
    return list(newest_first(folder, thorough=thorough))[::-1]


def survey(folder: str, *, thorough: bool = False) -> list[Entry | Unknown]:
    """Returns all checkpoints of a folder, the newest last.

    For who shows them, or deletes what is whole; a run that goes on from one
    asks `newest_first`.

    Args:
        folder: As for `newest_first`.
        thorough: As for `newest_first`.

    Raises:
        UnreadableError: The folder cannot be read.
    """
    found: list[Entry | Unknown] = []
    for step, path in paths(folder).items():
        try:
            found.append(_entry(path, step, thorough))
        except CheckpointError as error:
            found.append(Unknown(path, step, str(error)))
    return found


def aside(folder: str) -> list[str]:
    """Returns the names of what was moved aside for a checkpoint."""
    return [name for name in _listed(folder) if name.startswith(_ASIDE)]


def newest(
    folder: str, on_broken: Callable[[Entry], None] | None = None
) -> Entry | None:
    """Returns the newest checkpoint that is whole.

    Args:
        folder: Where checkpoints are kept.
        on_broken: Called with each newer one that is damaged.

    Returns:
        The checkpoint, None where there is none.

    Raises:
        NewerFormatError: One that may be newer is of a later release.
        UnreadableError: One that may be newer cannot be read.
    """
    for known in newest_first(folder):
        entry = known
        if known.whole:
            entry = _entry(known.path, known.step, thorough=True)
        if entry.whole:
            return entry
        if on_broken is not None:
            on_broken(entry)
    return None


def refuse_to_lose(argument: str, folder: str) -> None:
    """Refuses to begin anew where there are checkpoints, none of them usable.

    Args:
        argument: The name of the argument that the folder came from.
        folder: Where checkpoints are kept, none of which was found whole.

    Raises:
        ConfigurationError: There are checkpoints.
    """
    every = list(newest_first(folder))
    if every:
        problem = every[0].problem or f"{every[0].name} is not whole"
        raise ConfigurationError(
            "A run begins at the first step only in a folder without "
            f"checkpoints. Received: {argument}={folder!r} with "
            f"{len(every)}, all of them damaged; the newest: {problem}. "
            "Repair one, give another folder, or set restart_from_nothing: "
            "what is there stays."
        )


def prune(
    folder: str,
    keep: int,
    token: str | None = None,
    beside: int = -1,
    noted: Registry | None = None,
) -> list[str]:
    """Deletes all but the newest checkpoints that are whole.

    What a killed process has left unfinished goes too. What is damaged, or
    was found to be damaged once, or cannot be judged here, stays.

    Args:
        folder: Where checkpoints are kept. Nobody else may be writing there.
        keep: How many to keep, 1 or more.
        token: The word of the run that is writing there, if there is one.
            What is unfinished of it stays, and one checkpoint becomes the
            files that it writes over next.
        beside: The step of one that is kept beside the newest.
        noted: The registry of the folder.

    Returns:
        The names of what was deleted.

    Raises:
        OSError: The folder cannot be written.
        UnreadableError: The folder cannot be read.
    """
    recover(folder)
    noted = noted or Registry(folder)
    whole = [
        entry
        for entry in survey(folder)
        if entry.whole and entry.step not in noted.damaged
    ]
    gone = [entry for entry in whole[:-keep] if entry.step != beside]
    doomed = [entry.path for entry in gone]
    if token and doomed:
        abandon_spare(folder, token)
        with contextlib.suppress(OSError):
            os.rename(doomed[-1], _spare(folder, token))
    doomed += [
        os.path.join(folder, name)
        for name in _listed(folder)
        if name.startswith(_UNFINISHED)
        and not (token and name.endswith(f"-{token}"))
    ]
    for path in doomed:
        shutil.rmtree(path, ignore_errors=True)
    for entry in gone:
        why = f"older than the newest {keep}"
        noted.note(registry.DELETED, entry.step, why)
    return [os.path.basename(path) for path in doomed]


def _listed(folder: str) -> list[str]:
    """Returns the names in a folder, none where it is missing."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return sorted(patiently(repr(folder), lambda: os.listdir(folder)))
    return []


def _open(path: str, mode: str) -> IO[bytes]:
    """Opens a file of a checkpoint, which is no link to another file."""
    return open(path, mode, opener=not_through_links)


def _spare(folder: str, token: str) -> str:
    return os.path.join(folder, f"{_UNFINISHED}{_SPARE}-{token}")


def _spared(folder: str, token: str, path: str) -> IO[bytes] | None:
    """Opens a file of a deleted checkpoint, to be written over at a path.

    Returns:
        None where there is none, where it is read, or where it is the same
        file as another that somebody has linked to it.
    """
    found = os.path.join(_spare(folder, token), os.path.basename(path))
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
        replaced = os.path.join(folder, _REPLACED + os.path.basename(path))
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
        other = f"{_ASIDE}{name}-{number}"
        if not os.path.lexists(os.path.join(folder, other)):
            break
    os.rename(path, os.path.join(folder, other))
    step = int(name.removeprefix(_PREFIX))
    Registry(folder).note(registry.MOVED, step, f"to {other}")


def _sync(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _entry(path: str, step: int, thorough: bool) -> Entry:
    manifest: Manifest | None = None
    try:
        manifest = read_manifest(path)
        if manifest.step != step:
            raise DamagedError(
                f"{os.path.basename(path)}: was renamed, it is of step "
                f"{manifest.step}"
            )
        for file in manifest.files:
            (check_file if thorough else check_size)(path, file)
    except DamagedError as error:
        return Entry(path, step, str(error), manifest)
    return Entry(path, step, "", manifest)

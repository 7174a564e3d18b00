"""A folder of checkpoints: written whole or not at all, checked when read.

    write("run/checkpoints", step=120, state={"epoch": 3}, pieces=pieces)
    entry = newest("run/checkpoints")       # skips what is broken
    stored = Stored(entry.path)
    stored.state, stored.arrays             # what it holds
    stored.read("weights", region)          # the bytes of a part of an array

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
a file that is locked, or has another name elsewhere, is not written over. This
module does not import TensorFlow, Keras or NumPy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import fcntl
import glob
import hashlib
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO, Any

from mgpu_tf.folders import not_through_links
from mgpu_tf.mesh import Piece, Region

FORMAT = 2
# Of format 1, one file had all arrays, each whole.
READABLE = (1, 2)
MANIFEST = "manifest.json"
ARRAYS = "arrays.bin"

# In the folders of processes in a `local_checkpoint_dir`.
LOCAL_OWNER = "owner"

_PREFIX = "step-"
_UNFINISHED = ".unfinished-"
_REPLACED = f"{_UNFINISHED}replaced-"
_SPARE = "spare"
_CHUNK_BYTES = 1 << 22


class CheckpointError(ValueError):
    """A checkpoint is broken; the message names it and says how."""


@dataclasses.dataclass(frozen=True)
class Array:
    """An array of a checkpoint.

    Attributes:
        dtype: Name of the type, such as "float32".
        shape: Its shape.
    """

    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A checkpoint in a folder.

    Attributes:
        path: Its folder.
        step: The global step that it holds.
        problem: What is wrong with it, "" for nothing.
        manifest: What it says of itself; empty where that cannot be read.
    """

    path: str
    step: int
    problem: str
    manifest: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of its folder."""
        return os.path.basename(self.path)

    @property
    def bytes(self) -> int:
        """How large its arrays are."""
        return int(self.manifest.get("bytes", 0))

    def describe(self) -> str:
        """Returns one line: what it holds, or what is wrong with it."""
        if self.problem:
            return f"BROKEN  {self.problem}"
        state = self.manifest["state"]
        words = [f"ok      {self.name}", f"{self.bytes / 1e6:.1f} MB"]
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
        return ", ".join(words)


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
    body = {
        "format": FORMAT,
        "step": step,
        "bytes": sum(file["bytes"] for file in files),
        "files": files,
        "arrays": list(arrays.values()),
        "state": dict(state),
    }
    for number, file in enumerate(files):
        _check_size(place, file)
        with contextlib.suppress(FileNotFoundError):
            os.remove(_note(place, number))
    _write_manifest(place, body)
    _sync(place)
    replaced = _replace(place, path)
    _sync(folder)
    if replaced:
        shutil.rmtree(replaced, ignore_errors=True)
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
        body = _manifest(os.path.basename(path), text)
        for file in _files(body):
            left, name = file["bytes"], file["name"]
            if name != os.path.basename(name):
                raise CheckpointError(f"{name!r} is no name of a file")
            with _open(os.path.join(place, file["name"]), "wb") as opened:
                while left and (chunk := next(stream, b"")):
                    left -= opened.write(chunk)
                opened.flush()
                os.fsync(opened.fileno())
            _check_file(place, file)
        _write_synced(os.path.join(place, MANIFEST), text)
        _sync(place)
        replaced = _replace(place, path)
        _sync(folder)
    except BaseException:
        abandon(folder, step, token)
        raise
    if replaced:
        shutil.rmtree(replaced, ignore_errors=True)
    return Stored(path)


def recover(folder: str) -> None:
    """Gives back its name to a checkpoint that was about to be replaced.

    A process was killed then, and the one that takes its place was not whole
    under any name. Nobody may be writing there.
    """
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            path = os.path.join(folder, name.removeprefix(_REPLACED))
            if name.startswith(_REPLACED) and not os.path.lexists(path):
                os.rename(os.path.join(folder, name), path)


def remove_after(folder: str, step: int) -> None:
    """Deletes the checkpoints of later steps."""
    for entry in entries(folder, thorough=False):
        if entry.step > step:
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


class Stored:
    """A checkpoint that is read by parts.

    Args:
        path: Its folder.

    Attributes:
        path: Its folder.
        step: The global step.
        state: What JSON can hold.
        arrays: The arrays by name.

    Raises:
        CheckpointError: It is broken.
    """

    def __init__(self, path: str) -> None:
        manifest = _read_manifest(path)
        self.path = path
        self.step = int(manifest["step"])
        self._files = _files(manifest)
        self._entries = {
            entry["name"]: entry for entry in map(_whole, manifest["arrays"])
        }
        for file in self._files:
            _check_size(path, file)
        self.state: dict[str, Any] = manifest["state"]
        self.arrays = {
            name: Array(entry["dtype"], tuple(entry["shape"]))
            for name, entry in self._entries.items()
        }

    def check(self, place: int = 0, of: int = 1) -> None:
        """Reads files whole, and compares their checksums.

        Args:
            place: The number of this process.
            of: The number of processes that share the work.

        Raises:
            CheckpointError: A file was changed.
        """
        for file in self._files[place::of]:
            _check_file(self.path, file)

    def stream(self) -> Iterator[bytes]:
        """Yields the bytes of all of it, for `write_copy` elsewhere.

        Raises:
            CheckpointError: A file cannot be read.
        """
        with _open(os.path.join(self.path, MANIFEST), "rb") as manifest:
            yield manifest.read()
        for number, _ in enumerate(self._files):
            with self._opened(number) as file:
                while chunk := file.read(_CHUNK_BYTES):
                    yield chunk

    def read(self, name: str, region: Region | None = None) -> bytearray:
        """Reads elements of an array.

        Args:
            name: The name of the array.
            region: Which elements; all by default.

        Returns:
            Their little-endian bytes, in the order of the region.

        Raises:
            CheckpointError: They cannot be read, or are not all there.
        """
        entry = self._entries[name]
        size = int(entry["itemsize"])
        region = region or Region(0, math.prod(entry["shape"]))
        data, filled = bytearray(region.size * size), 0
        view = memoryview(data)
        for number, offset, *numbers in entry["pieces"]:
            runs = region.overlaps(Region(*numbers))
            first = next(runs, None)
            if first is None:
                continue
            with self._opened(number) as file:
                for here, there, length in itertools.chain([first], runs):
                    file.seek(offset + there * size)
                    part = view[here * size : (here + length) * size]
                    filled += file.readinto(part)  # type: ignore[attr-defined]
        if filled != len(data):
            raise CheckpointError(
                f"{os.path.basename(self.path)}: {name} has {filled} bytes "
                f"of {len(data)}"
            )
        return data

    @contextlib.contextmanager
    def _opened(self, number: int) -> Iterator[IO[bytes]]:
        name = self._files[number]["name"]
        try:
            with _reading(os.path.join(self.path, name)) as file:
                yield file
        except OSError as error:
            raise _unreadable(self.path, name, error) from None


def entries(folder: str, *, thorough: bool = True) -> list[Entry]:
    """Returns the checkpoints of a folder, the newest last.

    Args:
        folder: Where checkpoints are kept; it may be missing.
        thorough: Whether all bytes are read to check them; otherwise only
            manifests and sizes.

    Returns:
        Usable and broken ones, those that were never finished left out.
    """
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = []
    for name in names:
        number = name.removeprefix(_PREFIX)
        if name.startswith(_PREFIX) and number.isdecimal():
            path = os.path.join(folder, name)
            found.append(_entry(path, int(number), thorough))
    return sorted(found, key=lambda entry: entry.step)


def newest(
    folder: str, on_broken: Callable[[Entry], None] | None = None
) -> Entry | None:
    """Returns the newest usable checkpoint.

    Args:
        folder: Where checkpoints are kept.
        on_broken: Called with each newer one that is broken.

    Returns:
        The checkpoint, None where there is none.
    """
    for known in reversed(entries(folder, thorough=False)):
        entry = known
        if not known.problem:
            entry = _entry(known.path, known.step, thorough=True)
        if not entry.problem:
            return entry
        if on_broken is not None:
            on_broken(entry)
    return None


def prune(
    folder: str, keep: int, token: str | None = None, beside: int = -1
) -> list[str]:
    """Deletes all but the newest checkpoints that are whole.

    Broken ones that are older than the newest whole one go too, and what a
    killed process has left unfinished.

    Args:
        folder: Where checkpoints are kept. Nobody else may be writing there.
        keep: How many to keep, 1 or more.
        token: The word of the run that is writing there, if there is one.
            What is unfinished of it stays, and one checkpoint becomes the
            files that it writes over next.
        beside: The step of one that is kept beside the newest.

    Returns:
        The names of what was deleted.
    """
    recover(folder)
    every = entries(folder, thorough=False)
    whole = [entry for entry in every if not entry.problem]
    kept = {entry.path for entry in whole[-keep:]}
    kept |= {entry.path for entry in whole if entry.step == beside}
    last = whole[-1].step if whole else -1
    gone = [e for e in every if e.path not in kept and e.step <= last]
    paths = [entry.path for entry in gone]
    spare = [entry.path for entry in gone if not entry.problem]
    if token and spare:
        abandon_spare(folder, token)
        with contextlib.suppress(OSError):
            os.rename(spare[-1], _spare(folder, token))
    with contextlib.suppress(FileNotFoundError):
        paths += [
            os.path.join(folder, name)
            for name in os.listdir(folder)
            if name.startswith(_UNFINISHED)
            and not (token and name.endswith(f"-{token}"))
        ]
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
    return [os.path.basename(path) for path in paths]


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


@contextlib.contextmanager
def _reading(path: str) -> Iterator[IO[bytes]]:
    """Opens a file that nobody writes over while it is read.

    Raises:
        OSError: It cannot be opened, or was deleted meanwhile.
    """
    with _open(path, "rb") as file:
        with contextlib.suppress(OSError):
            # Without locks, nobody writes over it.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not os.path.samestat(os.stat(path), os.fstat(file.fileno())):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        yield file


def _leave(place: str, process: int, found: Mapping[str, Any]) -> None:
    path = _note(place, process)
    _write_synced(path + ".new", json.dumps(found).encode())
    os.rename(path + ".new", path)


def _note(folder: str, process: int) -> str:
    return os.path.join(folder, f"arrays-{process}.json")


def _files(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the files of a checkpoint, with their sizes and checksums."""
    if manifest["format"] > 1:
        return list(manifest["files"])
    size, digest = manifest["bytes"], manifest["sha256"]
    return [{"name": ARRAYS, "bytes": size, "sha256": digest}]


def _whole(entry: dict[str, Any]) -> dict[str, Any]:
    """Returns an array of a manifest; of format 1, it is one piece."""
    if "pieces" in entry:
        return entry
    count = math.prod(entry["shape"])
    pieces = [[0, entry["offset"], *dataclasses.astuple(Region(0, count))]]
    itemsize = entry["bytes"] // max(count, 1)
    return entry | {"itemsize": itemsize, "pieces": pieces}


def _unreadable(path: str, name: str, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{os.path.basename(path)}: {name} cannot be read ({error.strerror})"
    )


def _write_manifest(folder: str, body: dict[str, Any]) -> None:
    text = json.dumps(body | {"manifest_sha256": _digest(body)})
    _write_synced(os.path.join(folder, MANIFEST), text.encode())


def _write_synced(path: str, data: bytes) -> None:
    with _open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _digest(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _replace(unfinished: str, path: str) -> str | None:
    """Renames to the final name; returns what stood there before.

    A kill between the two renames leaves `step-N` under its other name only:
    `recover` gives it back.
    """
    replaced = None
    if os.path.lexists(path):
        folder, name = os.path.split(path)
        replaced = os.path.join(folder, _REPLACED + name)
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(path, replaced)
    os.rename(unfinished, path)
    return replaced


def _sync(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _entry(path: str, step: int, thorough: bool) -> Entry:
    manifest: dict[str, Any] = {}
    try:
        manifest = _read_manifest(path)
        for file in _files(manifest):
            (_check_file if thorough else _check_size)(path, file)
    except CheckpointError as error:
        return Entry(path, step, str(error), manifest)
    return Entry(path, step, "", manifest)


def _read_manifest(path: str) -> dict[str, Any]:
    name = os.path.basename(path)
    if os.path.islink(path):
        raise CheckpointError(f"{name}: is a link, which is not followed")
    try:
        with _open(os.path.join(path, MANIFEST), "rb") as file:
            text = file.read()
    except OSError as error:
        raise _unreadable(path, MANIFEST, error) from None
    return _manifest(name, text)


def _manifest(name: str, text: bytes) -> dict[str, Any]:
    try:
        body = json.loads(text)
        digest = body.pop("manifest_sha256")
    except (ValueError, AttributeError, KeyError, TypeError):
        raise CheckpointError(f"{name}: {MANIFEST} is not whole") from None
    if digest != _digest(body):
        raise CheckpointError(f"{name}: {MANIFEST} was changed")
    if body["format"] not in READABLE:
        raise CheckpointError(
            f"{name}: format {body['format']}, this program reads "
            f"{' and '.join(map(str, READABLE))}"
        )
    return dict(body)


def _check_size(path: str, file: Mapping[str, Any]) -> None:
    name = file["name"]
    try:
        size = os.path.getsize(os.path.join(path, name))
    except OSError as error:
        raise _unreadable(path, name, error) from None
    if size != file["bytes"]:
        raise CheckpointError(
            f"{os.path.basename(path)}: {name} has {size} bytes of "
            f"{file['bytes']}"
        )


def _check_file(path: str, file: Mapping[str, Any]) -> None:
    """Reads all bytes of a file, and compares their checksum."""
    _check_size(path, file)
    name, digest = file["name"], hashlib.sha256()
    try:
        with _reading(os.path.join(path, name)) as opened:
            while chunk := opened.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise _unreadable(path, name, error) from None
    if digest.hexdigest() != file["sha256"]:
        raise CheckpointError(f"{os.path.basename(path)}: {name} was changed")

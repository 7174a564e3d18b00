"""Checkpoints in a folder of a file system: renames, syncs, locks.

A checkpoint is written in a folder of another name, synced, and renamed. A run
writes over the files of the checkpoint that it would delete next
(`keep_to_write_over`). The system has memory for them already, and so takes a
part of the time that new files take. Who reads a checkpoint locks its files
meanwhile, and a file that is locked, or has another name elsewhere, is not
written over. This module does not import TensorFlow, Keras or NumPy.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator
from typing import IO

from mgpu_tf.checkpoints.manifest import MANIFEST
from mgpu_tf.checkpoints.storage.interface import (
    REPLACED,
    UNFINISHED,
    Claim,
    Notes,
    PartFile,
    Storage,
    step_of_unfinished,
    unfinished_path,
)
from mgpu_tf.folders import (
    make_folder,
    not_through_links,
    regular_size,
)

_SPARE = "spare"
_CHUNK_BYTES = 1 << 22


class Disk(Storage):
    """The file systems of this machine."""

    look_seconds = 0.02

    def names(self, folder: str) -> list[str]:
        """As for any storage."""
        return os.listdir(folder)

    def is_folder(self, path: str) -> bool:
        """As for any storage."""
        return os.path.isdir(path)

    def exists(self, path: str) -> bool:
        """As for any storage."""
        return os.path.lexists(path)

    def is_link(self, path: str) -> bool:
        """As for any storage."""
        return stat.S_ISLNK(os.lstat(path).st_mode)

    def text(self, path: str, most: int = -1) -> bytes:
        """As for any storage."""
        with open_file(path, "rb") as file:
            return file.read(most)

    def size(self, path: str) -> int:
        """As for any storage."""
        return regular_size(path)

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[IO[bytes]]:
        """As for any storage."""
        with open_file(path, "rb") as file:
            with contextlib.suppress(OSError):
                # Without locks, nobody writes over it.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if not os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            yield file

    def put(self, path: str, data: bytes) -> None:
        """As for any storage; its folder is made where it is missing."""
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write_synced(path + ".new", data)
        os.rename(path + ".new", path)

    def append(self, path: str, data: bytes) -> None:
        """As for any storage."""
        with open(path, "ab", 0, opener=not_through_links) as file:
            file.write(data)

    def remove(self, path: str) -> None:
        """As for any storage."""
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)

    def notes(self, path: str) -> Notes:
        """As for any storage."""
        return _Notes(not_through_links(path, os.O_WRONLY | os.O_CREAT))

    def read_notes(self, path: str) -> bytes:
        """As for any storage."""
        return self.text(path)

    def remove_notes(self, path: str) -> None:
        """As for any storage."""
        self.remove(path)

    def settle(self) -> None:
        """As for any storage: they are."""

    def make(self, name: str, folder: str) -> None:
        """As for any storage."""
        make_folder(name, folder, writes=False)

    def is_writable(self, folder: str) -> bool:
        """As for any storage."""
        return os.access(folder, os.W_OK | os.X_OK)

    def claim(self, path: str, text: str) -> Claim:
        """As for any storage; holds a lock on the file of the owner."""
        unfinished = f"{path}.{os.getpid()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        descriptor = not_through_links(unfinished, flags)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(descriptor, text.encode())
            os.fsync(descriptor)
            os.replace(unfinished, path)
        except OSError:
            os.close(descriptor)
            raise
        return _Claim(path, descriptor)

    def living(self, path: str) -> str:
        """As for any storage; without locks none is found."""
        with open(path, encoding="utf-8", opener=not_through_links) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read() or " another process"
            except OSError:
                return ""
        return ""

    def part(
        self, folder: str, step: int, token: str, process: int, *, at_once: bool
    ) -> PartFile:
        """As for any storage; the system takes what is written at once."""
        del at_once
        place = self.place(folder, step, token)
        return _PartFile(place, folder, token, process)

    def place(self, folder: str, step: int, token: str) -> str:
        """As for any storage."""
        return unfinished_path(folder, step, token)

    def seal(self, place: str, text: bytes) -> None:
        """As for any storage."""
        write_synced(os.path.join(place, MANIFEST), text)
        _sync(place)

    def finish(self, place: str, path: str, text: bytes) -> None:
        """As for any storage.

        A kill between the two renames leaves the one before under its other
        name only: `recover` gives it back.
        """
        del text
        folder, name = os.path.split(path)
        replaced = None
        if os.path.lexists(path):
            replaced = os.path.join(folder, REPLACED + name)
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(path, replaced)
        os.rename(place, path)
        _sync(folder)
        if replaced:
            shutil.rmtree(replaced, ignore_errors=True)

    def move_aside(self, path: str, other: str, new: Collection[str]) -> None:
        """As for any storage."""
        del new
        os.rename(path, other)

    def abandon(self, folder: str, step: int, token: str) -> None:
        """As for any storage."""
        self.remove_all(self.place(folder, step, token))

    def abandon_earlier(self, folder: str, step: int, token: str) -> None:
        """As for any storage."""
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                of = step_of_unfinished(name, token)
                if of is not None and of < step:
                    self.remove_all(os.path.join(folder, name))

    def unfinished(self, folder: str, token: str | None) -> list[str]:
        """As for any storage."""
        return [
            os.path.join(folder, name)
            for name in sorted(os.listdir(folder))
            if name.startswith(UNFINISHED)
            and not (token and name.endswith(f"-{token}"))
        ]

    def recover(self, folder: str, names: Iterable[str]) -> None:
        """As for any storage."""
        for name in names:
            path = os.path.join(folder, name.removeprefix(REPLACED))
            if name.startswith(REPLACED) and not os.path.lexists(path):
                os.rename(os.path.join(folder, name), path)

    def keep_to_write_over(self, folder: str, path: str, token: str) -> None:
        """As for any storage."""
        self.forget_written_over(folder, token)
        with contextlib.suppress(OSError):
            os.rename(path, _spare(folder, token))

    def forget_written_over(self, folder: str, token: str) -> None:
        """As for any storage."""
        self.remove_all(_spare(folder, token))

    def remove_all(self, path: str) -> None:
        """As for any storage."""
        shutil.rmtree(path, ignore_errors=True)


DISK = Disk()


class _PartFile(PartFile):
    def __init__(
        self, place: str, folder: str, token: str, process: int
    ) -> None:
        os.makedirs(place, exist_ok=True)
        self.name = f"arrays-{process}.bin"
        self._path = os.path.join(place, self.name)
        self._file = _spared(folder, token, self._path) or open_file(
            self._path, "wb"
        )

    def write(self, chunk: bytes) -> object:
        return self._file.write(chunk)

    def end(self, size: int) -> str:
        with self._file as file:
            file.flush()
            file.truncate(size)
            os.fsync(file.fileno())
        digest = hashlib.sha256()
        with open_file(self._path, "rb") as written:
            while chunk := written.read(_CHUNK_BYTES):
                digest.update(chunk)
        return digest.hexdigest()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()

    def drop(self) -> None:
        self.close()
        with contextlib.suppress(OSError):
            os.truncate(self._path, 0)


class _Claim(Claim):
    def __init__(self, path: str, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor

    def seen(self, *, wait: bool) -> str:
        del wait
        return DISK.text(self._path).decode()

    def release(self) -> None:
        os.close(self._descriptor)


class _Notes(Notes):
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write_at(self, offset: int, data: bytes) -> None:
        os.pwrite(self._descriptor, data, offset)

    def close(self) -> None:
        os.close(self._descriptor)


def open_file(path: str, mode: str) -> IO[bytes]:
    """Opens a file of a checkpoint, which is no link to another file.

    Raises:
        NotRegularError: It is a link, a FIFO, a device or a folder.
        OSError: It cannot be opened.
    """
    return open(path, mode, opener=not_through_links)


def write_synced(path: str, data: bytes) -> None:
    """Writes a file, and waits until it is on the disk."""
    with open_file(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _spare(folder: str, token: str) -> str:
    """Returns the path of files that a run would write over next."""
    return os.path.join(folder, f"{UNFINISHED}{_SPARE}-{token}")


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
        file = open_file(path, "r+b")
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


def _sync(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Checkpoints on object storage: no rename, no lock, no append.

    s3://bucket/run/owner                                  who may write
                    owner.lease                            that it lives
                    step-0000000120/arrays-0-2f1c....bin   of process 0
                    step-0000000120/manifest.json          comes last

The file of a process has a name that no other save uses. A step is whole when
its manifest is there, which names the files. To replace a checkpoint is to put
another manifest. A step without one is unfinished: a process was killed there.

What is assumed: a put is there whole or not at all, and whoever reads or lists
after it sees it. Amazon S3, Google Cloud Storage and Azure promise this. All
requests go through fsspec. This module does not import TensorFlow, Keras or
NumPy.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import io
import os
import re
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import IO, Any

from mgpu_tf.checkpoints.manifest import MANIFEST, parse
from mgpu_tf.checkpoints.storage.interface import (
    PREFIX,
    UNFINISHED,
    Claim,
    Notes,
    PartFile,
    Storage,
    step_of_unfinished,
    unfinished_path,
)
from mgpu_tf.errors import CheckpointError, ConfigurationError, installing
from mgpu_tf.folders import NotRegularError

_STEP = re.compile(PREFIX + r"(\d{10,18})", re.ASCII)
# How often an owner shows that it lives, and for how long others look.
RENEW_SECONDS = 10.0
_LOOKS = 2.5
_LEASE = ".lease"
# Of notes, each block an object; how often they are put; how many are kept.
_BLOCK_BYTES = 1 << 16
_NOTE_SECONDS = 1.0
_MOST_BLOCKS = 4
# S3 takes 10,000 parts of an object: 320 GB for each process.
_UPLOAD_BYTES = 1 << 25
_READ_BYTES = 1 << 24
_CHUNK_BYTES = 1 << 22
# How long a run waits at its end for its notes.
_SETTLE_SECONDS = 30.0


def reached(path: str, name: str) -> Objects:
    """Returns the object storage of an address.

    Args:
        path: The address.
        name: The argument or flag that it came from.

    Raises:
        ConfigurationError: No package here reaches it.
    """
    scheme = path.partition("://")[0].lower()
    try:
        return _reached(scheme)
    except ImportError as error:
        raise ConfigurationError(
            f"{name} of {scheme}:// needs a package that reaches it. "
            f"Received: {path!r} ({str(error).splitlines()[0]:.100}). Run: "
            f"{installing('objects')}."
        ) from None
    except ValueError:
        raise ConfigurationError(
            f"{name} must be a path, or an address of object storage that "
            f"fsspec knows, such as s3:// or gs://. Received: {path!r}. Give "
            "such an address, or the path of a mount."
        ) from None


@functools.cache
def _reached(scheme: str) -> Objects:
    import fsspec

    if scheme in ("file", "local"):
        raise ValueError
    # What another worker has put is seen at once: nothing is cached.
    return Objects(fsspec.filesystem(scheme, use_listings_cache=False))


@contextlib.contextmanager
def _as_os_errors(path: str) -> Iterator[None]:
    """Turns what packages raise into an `OSError` with a reason of one line.

    None of them says which errors are of the network: so all are.
    """
    try:
        yield
    except NotRegularError:
        raise
    except FileNotFoundError:
        raise FileNotFoundError(
            errno.ENOENT, os.strerror(errno.ENOENT), path
        ) from None
    except Exception as error:
        text = getattr(error, "strerror", None) or str(error)
        reason = " ".join(text.split())[:160] or repr(error)
        code = getattr(error, "errno", None) or errno.EIO
        if code == errno.ENOENT:  # A name that resolves to no machine.
            code = errno.EIO
        raised = OSError(errno.EIO, reason, path)
        raised.errno = code
        raise raised from error


class Objects(Storage):
    """Object storage.

    Args:
        system: From fsspec.
    """

    look_seconds = 0.25

    def __init__(self, system: Any) -> None:
        self._system = system
        self._notes = _NotesThread(self)
        # One file of this machine, kept from save to save: the system has
        # memory for it already.
        self._spools: list[IO[bytes]] = []
        weakref.finalize(self, _close_all, self._spools)

    # What is there.

    def names(self, folder: str) -> list[str]:
        """As for any storage."""
        return [
            name
            for name, files in self._tree(folder).items()
            if not _STEP.fullmatch(name) or MANIFEST in files
        ]

    def _tree(self, folder: str) -> dict[str, list[str]]:
        """Returns the names of a folder, and what is below each.

        Raises:
            FileNotFoundError: Nothing is there.
        """
        import fsspec

        with _as_os_errors(folder):
            self._system.invalidate_cache()
            root = fsspec.core.strip_protocol(folder).rstrip("/") + "/"
            found = self._system.find(folder)
        tree: dict[str, list[str]] = {}
        for path in found:
            if path.startswith(root):
                first, _, rest = path[len(root) :].partition("/")
                tree.setdefault(first, []).append(rest)
        if not tree:
            raise FileNotFoundError(
                errno.ENOENT, os.strerror(errno.ENOENT), folder
            )
        return tree

    def is_folder(self, path: str) -> bool:
        """As for any storage: something is there."""
        with contextlib.suppress(FileNotFoundError):
            return bool(self._tree(path))
        return False

    def exists(self, path: str) -> bool:
        """As for any storage: its manifest is there, or it is moved aside."""
        with contextlib.suppress(FileNotFoundError):
            below = [name.split("/")[0] for name in self._files(path)]
            is_step = _STEP.fullmatch(os.path.basename(path))
            return MANIFEST in below if is_step else bool(below)
        return False

    def _files(self, path: str) -> list[str]:
        tree = self._tree(path)
        return [
            f"{name}/{rest}" if rest else name
            for name, rests in tree.items()
            for rest in rests
        ]

    def is_link(self, path: str) -> bool:
        """As for any storage: there are none."""
        return False

    def text(self, path: str, most: int = -1) -> bytes:
        """As for any storage."""
        # A range of an empty object is an error.
        part = {"start": 0, "end": most} if 0 <= most < self.size(path) else {}
        with _as_os_errors(path):
            return bytes(self._system.cat_file(path, **part))

    def size(self, path: str) -> int:
        """As for any storage."""
        with _as_os_errors(path):
            self._system.invalidate_cache()
            found = self._system.info(path)
            if found["type"] != "file":
                raise NotRegularError(
                    errno.EISDIR, os.strerror(errno.EISDIR), path
                )
            return int(found["size"])

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[IO[bytes]]:
        """As for any storage: an object is never written over in parts."""
        raw = _Ranges(self._system, path, self.size(path))
        with io.BufferedReader(raw, _READ_BYTES) as file:
            yield file

    # Small files.

    def put(self, path: str, data: bytes) -> None:
        """As for any storage."""
        with _as_os_errors(path):
            self._system.pipe_file(path, data)

    def append(self, path: str, data: bytes) -> None:
        """As for any storage: all of it is put again."""
        before = b""
        with contextlib.suppress(FileNotFoundError):
            before = self.text(path)
        self.put(path, before + data)

    def remove(self, path: str) -> None:
        """As for any storage."""
        with contextlib.suppress(FileNotFoundError), _as_os_errors(path):
            self._system.rm_file(path)

    def notes(self, path: str) -> Notes:
        """As for any storage; a kill loses the last seconds of them."""
        return _BlockNotes(self._notes, path)

    def read_notes(self, path: str) -> bytes:
        """As for any storage."""
        self.settle()
        data = bytearray()
        for number, block in self._blocks(path).items():
            data.extend(bytes(number * _BLOCK_BYTES - len(data)))
            data += self.text(block)
        return bytes(data)

    def remove_notes(self, path: str) -> None:
        """As for any storage."""
        with (
            self._notes.stopped(path),
            contextlib.suppress(FileNotFoundError),
        ):
            for block in self._blocks(path).values():
                self.remove(block)

    def _blocks(self, path: str) -> dict[int, str]:
        """Returns the objects of notes by their numbers."""
        folder, base = os.path.split(path)
        with _as_os_errors(folder):
            self._system.invalidate_cache()
            found = self._system.ls(folder, detail=False)
        names = [each.rstrip("/").rpartition("/")[2] for each in found]
        numbers = {
            name: name.removeprefix(f"{base}.")
            for name in names
            if name.startswith(f"{base}.")
        }
        blocks = {
            int(number): os.path.join(folder, name)
            for name, number in numbers.items()
            if number.isdecimal()
        }
        if not blocks:
            raise FileNotFoundError(
                errno.ENOENT, os.strerror(errno.ENOENT), path
            )
        return dict(sorted(blocks.items()))

    def settle(self) -> None:
        """As for any storage."""
        self._notes.settle()

    # The folder of a run.

    def make(self, name: str, folder: str) -> None:
        """As for any storage: an object is put there, and deleted."""
        try:
            self._probe(folder)
        except OSError as error:
            reason = error.strerror
            if isinstance(error, FileNotFoundError):
                reason = "there is no such bucket"
            raise ConfigurationError(
                f"{name} must be an address that can be written. Received: "
                f"{name}={folder!r} ({reason}). Make the bucket, or use "
                "credentials that may write and delete there."
            ) from None

    def is_writable(self, folder: str) -> bool:
        """As for any storage."""
        try:
            self._probe(folder)
        except OSError:
            return False
        return True

    def _probe(self, folder: str) -> None:
        path = os.path.join(folder, f"{UNFINISHED}seen-{uuid.uuid4().hex}")
        self.put(path, b"x")
        self.remove(path)

    def claim(self, path: str, text: str) -> Claim:
        """As for any storage; shows from time to time that it lives."""
        self._notes.forget()
        self.put(path, text.encode())
        return _Claim(self, path, text)

    def living(self, path: str) -> str:
        """As for any storage: looks whether its lease is renewed."""
        lease = path + _LEASE
        try:
            text, before = self.text(path).decode(), self.text(lease)
        except FileNotFoundError:
            return ""
        end = time.monotonic() + _LOOKS * RENEW_SECONDS
        while time.monotonic() < end:
            time.sleep(RENEW_SECONDS / 4)
            try:
                if self.text(lease) != before:
                    return text
            except FileNotFoundError:
                return ""
        return ""

    # A save.

    def part(
        self, folder: str, step: int, token: str, process: int, *, at_once: bool
    ) -> PartFile:
        """As for any storage; at once to a file of this machine."""
        name = f"arrays-{process}-{_mark(token)}{uuid.uuid4().hex[:8]}.bin"
        path = os.path.join(self.place(folder, step, token), name)
        if at_once:
            return _Spooled(self._system, path, self._spools)
        return _Upload(self._system, path)

    def place(self, folder: str, step: int, token: str) -> str:
        """As for any storage: that of its name."""
        del token
        return os.path.join(folder, f"{PREFIX}{step:010d}")

    def seal(self, place: str, text: bytes) -> None:
        """As for any storage: only `finish` puts the manifest."""

    def finish(self, place: str, path: str, text: bytes) -> None:
        """As for any storage."""
        del place
        self.put(os.path.join(path, MANIFEST), text)
        files = parse(os.path.basename(path), text).files
        with contextlib.suppress(OSError):
            for name in self._files(path):
                if name not in {MANIFEST, *(file.name for file in files)}:
                    self.remove(os.path.join(path, name))

    def move_aside(self, path: str, other: str, new: Collection[str]) -> None:
        """As for any storage: copied; the new manifest takes its place."""
        for name in self._files(path):
            if name not in new:
                with _as_os_errors(path):
                    self._system.cp_file(
                        os.path.join(path, name), os.path.join(other, name)
                    )

    def abandon(self, folder: str, step: int, token: str) -> None:
        """As for any storage."""
        path = self.place(folder, step, token)
        with contextlib.suppress(OSError, CheckpointError):
            files, named = self._files(path), set()
            if MANIFEST in files:  # Of a save before this one.
                text = self.text(os.path.join(path, MANIFEST))
                found = parse(os.path.basename(path), text).files
                named = {file.name for file in found}
            for name in files:
                if _mark(token) in name and name not in named:
                    self.remove(os.path.join(path, name))
        self.remove_all(unfinished_path(folder, step, token))

    def abandon_earlier(self, folder: str, step: int, token: str) -> None:
        """As for any storage."""
        with contextlib.suppress(OSError):
            for name, files in self._tree(folder).items():
                of = step_of_unfinished(name, token)
                if of is not None and of < step:
                    self.remove_all(os.path.join(folder, name))
                match = _STEP.fullmatch(name)
                if match and int(match[1]) < step and MANIFEST not in files:
                    self.abandon(folder, int(match[1]), token)

    # Deleting.

    def unfinished(self, folder: str, token: str | None) -> list[str]:
        """As for any storage: also steps without a manifest."""
        found = []
        for name, files in self._tree(folder).items():
            if name.startswith(UNFINISHED):
                mine = token and name.endswith(f"-{token}")
            elif _STEP.fullmatch(name) and MANIFEST not in files:
                mine = token and any(_mark(token) in file for file in files)
            else:
                continue
            if not mine:
                found.append(os.path.join(folder, name))
        return found

    def recover(self, folder: str, names: Iterable[str]) -> None:
        """As for any storage: nothing was renamed."""

    def keep_to_write_over(self, folder: str, path: str, token: str) -> None:
        """As for any storage: nothing is written over."""

    def forget_written_over(self, folder: str, token: str) -> None:
        """As for any storage: nothing is written over, apart from a spool."""
        _close_all(self._spools)

    def remove_all(self, path: str) -> None:
        """As for any storage: the manifest first."""
        with contextlib.suppress(OSError):
            names = [""]  # Of what is no folder.
            with contextlib.suppress(FileNotFoundError):
                names = self._files(path)
            for name in sorted(names, key=lambda name: name != MANIFEST):
                self.remove(os.path.join(path, name) if name else path)


def _close_all(files: list[IO[bytes]]) -> None:
    while files:
        files.pop().close()


def _mark(token: str) -> str:
    """Returns what the names of all files of a run have."""
    return hashlib.sha256(token.encode()).hexdigest()[:8]


class _Ranges(io.RawIOBase):
    """An object that is read by ranges of bytes."""

    def __init__(self, system: Any, path: str, size: int) -> None:
        self._system, self._path, self._size = system, path, size
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begin = {io.SEEK_CUR: self._place, io.SEEK_END: self._size}
        self._place = begin.get(whence, 0) + offset
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        wanted = min(len(view), _READ_BYTES, self._size - self._place)
        if wanted <= 0:
            return 0
        with _as_os_errors(self._path):
            data = self._system.cat_file(
                self._path, start=self._place, end=self._place + wanted
            )
        if len(data) != wanted:
            raise OSError(errno.EIO, "the storage gave too few bytes")
        view[:wanted] = data
        self._place += wanted
        return wanted


class _Upload(PartFile):
    """A file that is uploaded in parts while it is written."""

    def __init__(self, system: Any, path: str) -> None:
        self.name = os.path.basename(path)
        self._system, self._path = system, path
        self._digest = hashlib.sha256()
        self._file: Any = None
        self._done = False

    def write(self, chunk: bytes) -> object:
        with _as_os_errors(self._path):
            if self._file is None:
                self._file = self._system.open(
                    self._path, "wb", block_size=_UPLOAD_BYTES
                )
            for part in _cut(chunk):
                self._digest.update(part)
                self._file.write(part)
        return None

    def end(self, size: int) -> str:
        if self._file is None:
            self.write(b"")
        with _as_os_errors(self._path):
            self._file.close()
        self._done = True
        return self._digest.hexdigest()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None and not self._done:
            # To close it would make an object of what is there so far.
            with contextlib.suppress(Exception):
                file.discard()
            with contextlib.suppress(AttributeError):
                file.closed = True

    def drop(self) -> None:
        self.close()
        with contextlib.suppress(OSError), _as_os_errors(self._path):
            self._system.rm_file(self._path)


class _Spooled(PartFile):
    """A file that is uploaded when all of it is in one of this machine."""

    def __init__(self, system: Any, path: str, spools: list[IO[bytes]]) -> None:
        self.name = os.path.basename(path)
        self._upload = _Upload(system, path)
        self._spools = spools
        self._spool: IO[bytes] | None = (
            spools.pop() if spools else tempfile.TemporaryFile()  # noqa: SIM115
        )
        self._spool.seek(0)

    def write(self, chunk: bytes) -> object:
        assert self._spool is not None
        return self._spool.write(chunk)

    def end(self, size: int) -> str:
        assert self._spool is not None
        self._spool.truncate(size)
        self._spool.seek(0)
        while chunk := self._spool.read(_CHUNK_BYTES):
            self._upload.write(chunk)
        return self._upload.end(size)

    def close(self) -> None:
        spool, self._spool = self._spool, None
        if spool is not None and not self._spools:
            self._spools.append(spool)
        elif spool is not None:
            spool.close()
        self._upload.close()

    def drop(self) -> None:
        if self._spool is not None:
            self._spool.close()  # Its disk may be full.
            self._spool = None
        self._upload.drop()


def _cut(chunk: Any) -> Iterator[memoryview]:
    """Yields the parts of a chunk, none of them large."""
    view = memoryview(chunk).cast("B")
    for first in range(0, max(len(view), 1), _CHUNK_BYTES):
        yield view[first : first + _CHUNK_BYTES]


class _Claim(Claim):
    """Renews a lease, and looks who the owner is, on a thread of its own."""

    def __init__(self, objects: Objects, path: str, text: str) -> None:
        self._objects, self._path, self._mine = objects, path, text
        self._last: str | OSError = text
        self._ended = threading.Event()
        self._renew(0)
        self._thread = threading.Thread(
            target=self._live, name="mgpu_tf-lease", daemon=True
        )
        self._thread.start()

    def _renew(self, number: int) -> None:
        lease = f"{self._mine.partition(' ')[0]} {number}"
        self._objects.put(self._path + _LEASE, lease.encode())

    def _live(self) -> None:
        number = 0
        while not self._ended.wait(RENEW_SECONDS):
            number += 1
            try:
                self._last = self.seen(wait=True)
                if self._last == self._mine:
                    self._renew(number)
            except (OSError, ValueError) as error:
                self._last = OSError(*error.args)
                if isinstance(error, FileNotFoundError):
                    self._last = error

    def seen(self, *, wait: bool) -> str:
        if wait:
            return self._objects.text(self._path).decode()
        if isinstance(self._last, OSError):
            raise self._last
        return self._last

    def release(self) -> None:
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(RENEW_SECONDS)
        with contextlib.suppress(OSError, ValueError):
            if self.seen(wait=True) == self._mine:
                self._objects.remove(self._path + _LEASE)


class _BlockNotes(Notes):
    def __init__(self, thread: _NotesThread, path: str) -> None:
        self._thread, self._path = thread, path

    def write_at(self, offset: int, data: bytes) -> None:
        while data:
            number, place = divmod(offset, _BLOCK_BYTES)
            part = data[: _BLOCK_BYTES - place]
            self._thread.add(f"{self._path}.{number:08d}", place, part)
            offset, data = offset + len(part), data[len(part) :]

    def close(self) -> None:
        """Nothing is held here."""


class _NotesThread:
    """Puts what is noted, once in a second at most for each block.

    The first of a block is put at once: else a process that is killed within a
    second leaves nothing. A put that fails is tried again with the next one.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._condition = threading.Condition()
        self._wanted: dict[str, list[tuple[int, bytes]]] = {}
        self._blocks: dict[str, bytearray] = {}
        self._busy = self._hurry = self._first = False
        self._thread: threading.Thread | None = None

    def add(self, path: str, place: int, data: bytes) -> None:
        """Takes bytes for a place of a block."""
        with self._condition:
            self._wanted.setdefault(path, []).append((place, data))
            self._first |= path not in self._blocks
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, name="mgpu_tf-notes", daemon=True
                )
                self._thread.start()
            self._condition.notify_all()

    def settle(self, seconds: float = _SETTLE_SECONDS) -> None:
        """Waits until all is put, or cannot be."""
        with self._condition:
            self._hurry = True
            self._condition.notify_all()
            self._condition.wait_for(
                lambda: not (self._wanted or self._busy), seconds
            )
            self._hurry = False

    def forget(self) -> None:
        """Reads blocks again before it writes to them: others may have."""
        self.settle()
        with self._condition:
            self._blocks.clear()

    @contextlib.contextmanager
    def stopped(self, path: str) -> Iterator[None]:
        """Drops the blocks of a path; none is put while in the block."""
        with self._condition:
            self._condition.wait_for(lambda: not self._busy, _SETTLE_SECONDS)
            for blocks in (self._wanted, self._blocks):
                for name in [n for n in blocks if n.startswith(f"{path}.")]:
                    del blocks[name]
            yield

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: bool(self._wanted))
                wanted, self._wanted = self._wanted, {}
                self._busy, self._first = True, False
            self._put(wanted)
            with self._condition:
                self._busy = False
                self._condition.notify_all()
                self._condition.wait_for(
                    lambda: self._hurry or self._first, _NOTE_SECONDS
                )

    def _put(self, wanted: Mapping[str, list[tuple[int, bytes]]]) -> None:
        for path, parts in wanted.items():
            try:
                block = self._block(path)
                for place, data in parts:
                    block.extend(bytes(max(0, place - len(block))))
                    block[place : place + len(data)] = data
                self._objects.put(path, bytes(block))
            except OSError:
                # Not lost yet: it goes with what comes next.
                with self._condition:
                    if not self._hurry:
                        later = self._wanted.get(path, [])
                        self._wanted[path] = [*parts, *later]

    def _block(self, path: str) -> bytearray:
        if path not in self._blocks:
            block = bytearray()
            with contextlib.suppress(FileNotFoundError):
                block += self._objects.text(path)
            while len(self._blocks) >= _MOST_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[path] = block
        return self._blocks[path]

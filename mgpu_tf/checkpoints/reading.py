"""Reading a checkpoint: its bytes, or why they are not there.

    stored = Stored("run/checkpoints/step-0000000120")
    stored.state, stored.arrays             # what it holds
    stored.check()                          # all bytes are those written
    stored.read("weights", region)          # the bytes of a part of an array

There are three answers, and each is another exception, so that none can be
taken for another:

    DamagedError       it is not what was written: missing, short, changed
    NewerFormatError   a later release has written it
    UnreadableError    the storage fails: nothing is known

Only what is damaged is passed by. An error of the storage may pass, so it is
tried again for a few seconds. Nothing is opened that is no regular file. This
module does not import TensorFlow, Keras or NumPy.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from mgpu_tf.checkpoints import storage
from mgpu_tf.checkpoints.manifest import (
    MANIFEST,
    MOST_MANIFEST_BYTES,
    DamagedError,
    File,
    Manifest,
    StoredPiece,
    parse,
)
from mgpu_tf.errors import CheckpointError
from mgpu_tf.folders import NotRegularError
from mgpu_tf.mesh import Region

# The pauses between the tries to read what the storage does not give.
PAUSES_SECONDS = (0.1, 0.5, 2.0)

_CHUNK_BYTES = 1 << 22

Result = TypeVar("Result")


class UnreadableError(CheckpointError):
    """The storage does not give a checkpoint, which may be whole."""


@dataclasses.dataclass(frozen=True)
class Array:
    """An array of a checkpoint.

    Attributes:
        dtype: Name of the type, such as "float32".
        shape: Its shape.
    """

    dtype: str
    shape: tuple[int, ...]


def patiently(what: str, read: Callable[[], Result]) -> Result:
    """Reads something, again where the storage fails for a moment.

    Args:
        what: What is read, for the message.
        read: Does so from the beginning.

    Raises:
        FileNotFoundError: It is not there.
        NotRegularError: It is no regular file.
        UnreadableError: The storage goes on to fail.
    """
    for pause in (*PAUSES_SECONDS, None):
        try:
            return read()
        except (FileNotFoundError, NotADirectoryError, NotRegularError):
            raise
        except OSError as error:
            if pause is None:
                raise UnreadableError(
                    f"{what} cannot be read ({error.strerror or error}). It "
                    "may be whole, so nothing was changed. Begin the run "
                    "again when the storage answers."
                ) from None
            time.sleep(pause)
    raise AssertionError


def of_checkpoint(path: str, name: str, read: Callable[[], Result]) -> Result:
    """Reads a file of a checkpoint, which is damaged without it.

    Args:
        path: The folder of the checkpoint.
        name: The name of the file.
        read: Reads it from the beginning.

    Raises:
        DamagedError: It is missing, or no regular file.
        UnreadableError: The storage does not give it.
    """
    what = f"{os.path.basename(path)}: {name}"
    try:
        return patiently(what, read)
    except (FileNotFoundError, NotADirectoryError, NotRegularError) as error:
        raise DamagedError(
            f"{what} cannot be read ({error.strerror})"
        ) from None


def read_manifest(path: str) -> Manifest:
    """Returns what a checkpoint says of itself.

    Raises:
        DamagedError: That is not what was written.
        NewerFormatError: A later release has written it.
        UnreadableError: The storage does not give it.
    """
    return parse(os.path.basename(path), _manifest_text(path))


def check_size(path: str, file: File) -> None:
    """Compares the size of a file.

    Raises:
        DamagedError: It is missing, or of another size.
        UnreadableError: The storage does not say.
    """
    name = os.path.basename(path)
    size = of_checkpoint(
        path,
        file.name,
        lambda: storage.of(path).size(os.path.join(path, file.name)),
    )
    if size != file.bytes:
        raise DamagedError(
            f"{name}: {file.name} has {size} bytes of {file.bytes}"
        )


def check_file(path: str, file: File) -> None:
    """Reads all bytes of a file, and compares their checksum.

    Raises:
        DamagedError: The file is missing, or was changed.
        UnreadableError: The storage does not give it.
    """

    def checksum() -> str:
        digest = hashlib.sha256()
        with storage.of(path).reading(os.path.join(path, file.name)) as opened:
            while chunk := opened.read(_CHUNK_BYTES):
                digest.update(chunk)
        return digest.hexdigest()

    check_size(path, file)
    if of_checkpoint(path, file.name, checksum) != file.sha256:
        raise DamagedError(f"{os.path.basename(path)}: {file.name} was changed")


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
        DamagedError: It is not what was written.
        NewerFormatError: A later release has written it.
        UnreadableError: The storage does not give it.
    """

    def __init__(self, path: str) -> None:
        manifest = read_manifest(path)
        for file in manifest.files:
            check_size(path, file)
        self.path = path
        self._storage = storage.of(path)
        self.step = manifest.step
        self._files = manifest.files
        self._bytes = manifest.bytes
        self._entries = manifest.arrays
        self.state: Mapping[str, Any] = manifest.state
        self.arrays = {
            name: Array(entry.dtype, entry.shape)
            for name, entry in self._entries.items()
        }

    def check(self, place: int = 0, of: int = 1) -> None:
        """Reads files whole, and compares their checksums.

        Args:
            place: The number of this process.
            of: The number of processes that share the work.

        Raises:
            DamagedError: A file was changed.
            UnreadableError: The storage does not give it.
        """
        for file in self._files[place::of]:
            check_file(self.path, file)

    def stream(self) -> Iterator[bytes]:
        """Yields the bytes of all of it, to be written elsewhere.

        Raises:
            DamagedError: A file is missing.
            UnreadableError: The storage does not give it.
        """
        yield _manifest_text(self.path)
        for file in self._files:
            done = 0
            while chunk := self._bytes_of(file, done, _CHUNK_BYTES):
                yield chunk
                done += len(chunk)

    def _bytes_of(self, file: File, offset: int, most: int) -> bytes:
        def read() -> bytes:
            with self._storage.reading(
                os.path.join(self.path, file.name)
            ) as opened:
                opened.seek(offset)
                return opened.read(most)

        return of_checkpoint(self.path, file.name, read)

    def read(self, name: str, region: Region | None = None) -> bytearray:
        """Reads elements of an array.

        Args:
            name: The name of the array.
            region: Which elements; all by default.

        Returns:
            Their little-endian bytes, in the order of the region.

        Raises:
            DamagedError: They are not all there.
            UnreadableError: The storage does not give them.
        """
        entry = self._entries[name]
        size = entry.itemsize
        region = region or Region(0, math.prod(entry.shape))
        wanted, filled = region.size * size, 0
        # More than the files have is not there, and would not fit in memory.
        data = bytearray(wanted if wanted <= self._bytes else 0)
        view = memoryview(data)
        for piece in entry.pieces if data else ():
            if next(region.overlaps(piece.region), None) is None:
                continue
            filled += of_checkpoint(
                self.path,
                self._files[piece.file].name,
                functools.partial(self._fill, view, region, piece, size),
            )
        if filled != wanted:
            raise DamagedError(
                f"{os.path.basename(self.path)}: {name!r} is not all there"
            )
        return data

    def _fill(
        self, view: memoryview, region: Region, piece: StoredPiece, size: int
    ) -> int:
        """Reads what a piece has of a region; returns how many bytes."""
        filled = 0
        name = self._files[piece.file].name
        with self._storage.reading(os.path.join(self.path, name)) as file:
            for here, there, length in region.overlaps(piece.region):
                file.seek(piece.offset + there * size)
                part = view[here * size : (here + length) * size]
                filled += file.readinto(part)  # type: ignore[attr-defined]
        return filled


def _manifest_text(path: str) -> bytes:
    kept = storage.of(path)
    name = os.path.basename(path)
    if of_checkpoint(path, "its folder", lambda: kept.is_link(path)):
        raise DamagedError(f"{name}: is a link, which is not followed")
    return of_checkpoint(
        path,
        MANIFEST,
        lambda: kept.text(os.path.join(path, MANIFEST), MOST_MANIFEST_BYTES),
    )

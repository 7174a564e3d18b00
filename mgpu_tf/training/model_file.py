"""A `.keras` file that is written without a copy of the model in memory.

    streamed(model.save)("model.keras")

Keras writes such a file in memory where that has room for it, with the
optimizer's state three times the weights of Adam. It writes a folder variable
by variable; the file is a zip archive of the folder.

HDF5, which Keras writes weights with, ends the process where a file that it is
to close cannot be written, as on a full disk. So it writes to `_Weights`, which
takes all writes, and tells of the first that failed.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

from mgpu_tf.engine import keras_internals


def streamed(save: Callable[..., Any]) -> Callable[[str], None]:
    """Returns what saves as a method of a model does, through a folder.

    Args:
        save: `keras.Model.save`, or a method that writes files of another
            ending, which is called as it is.
    """

    def write(path: str) -> None:
        if not path.endswith(".keras"):
            with _whole_weights():
                save(path)
            return
        beside = os.path.dirname(path) or "."
        with tempfile.TemporaryDirectory(
            prefix=".unfinished-", dir=beside
        ) as folder:
            with _whole_weights():
                save(folder, zipped=False)
            _pack(folder, path)

    return write


@contextlib.contextmanager
def _whole_weights() -> Iterator[None]:
    """Raises OSError at the end where weights could not be written."""
    files: list[_Weights] = []

    def open_file(path: str) -> _Weights:
        files.append(_Weights(path))
        return files[-1]

    try:
        with keras_internals.weights_written_to(open_file):
            yield
    finally:
        for file in files:
            file.end()
    for file in files:
        file.check()


class _Weights(io.RawIOBase):
    """A file that takes all writes, for HDF5.

    After one that failed, it keeps what is written in memory, so that HDF5
    reads what it wrote. Keras asks before the weights of each layer, and stops.

    Args:
        path: The file.
    """

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self._place = self._size = 0
        self._error: OSError | None = None
        self._kept: list[tuple[int, bytes]] = []

    def check(self) -> None:
        """Raises the first error, if there was one."""
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """Closes the file; what is written later is lost."""
        self._try(os.close, self._descriptor)
        self._descriptor = -1

    def _try(self, do: Callable[..., int | None], *args: Any) -> int | None:
        if self._error is None and self._descriptor >= 0:
            try:
                return do(*args)
            except OSError as error:
                self._error = error
        return None

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._place}
        self._place = offset + base.get(whence, self._size)
        return self._place

    def truncate(self, size: int | None = None) -> int:
        self._size = self._place if size is None else size
        self._try(os.ftruncate, self._descriptor, self._size)
        return self._size

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            wrote = self._try(
                os.pwrite, self._descriptor, view[done:], self._place + done
            )
            if wrote is None:
                self._kept.append((self._place + done, bytes(view[done:])))
                break
            done += wrote
        self._place += len(view)
        self._size = max(self._size, self._place)
        return len(view)

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        start, end = self._place, min(self._place + len(view), self._size)
        count = max(end - start, 0)
        view[:count] = bytes(count)
        done = 0
        while self._descriptor >= 0 and done < count:
            read = os.preadv(self._descriptor, [view[done:count]], start + done)
            if not read:
                break
            done += read
        for place, data in self._kept:
            low, high = max(place, start), min(place + len(data), end)
            if low < high:
                view[low - start : high - start] = data[
                    low - place : high - place
                ]
        self._place += count
        return count


def _pack(folder: str, path: str) -> None:
    """Writes the files of a folder to an archive, without compression."""
    with zipfile.ZipFile(path, "w") as archive:
        for parent, _, names in sorted(os.walk(folder)):
            for name in sorted(names):
                file = os.path.join(parent, name)
                archive.write(file, os.path.relpath(file, folder))

"""TFRecord files whose records are read by their number.

    data = indexed_records("/data/train-*.tfrecord", parse)
    trainer.fit(data, batch_size=64)

A TFRecord file does not say where its records begin. An index file beside it
does, `train-0.tfrecord.index`: the size of the file and the time when it was
written last, then the first byte and the number of bytes of each record. It is
written when a file is first opened, and again when the file has changed. Of a
file with another time some records are compared; a record that is read is
compared in any case.

References:
    TensorFlow's format of records: a length of 8 bytes, its checksum of 4,
    the data, its checksum of 4; little endian.
"""

from __future__ import annotations

import dataclasses
import glob
import logging
import os
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

from mgpu_tf.datasets.open_files import OpenFiles
from mgpu_tf.datasets.random_access import RandomAccess
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.fields import checked
from mgpu_tf.folders import check_file, check_path, check_regular, open_regular

_LENGTH, _HEADER, _CHECKSUM = 8, 12, 4
# Records that are compared with an index of another time.
_COMPARED = 16

_log = logging.getLogger("mgpu_tf")


@checked
def indexed_records(
    pattern: str,
    parse: Callable[[Any], Any],
    threads: int | None = None,
) -> RandomAccess:
    """Reads TFRecord files by the number of a record.

    Each worker reads its own records. Checksums are not checked: a damaged
    byte within a record is read as it is. `records` checks them.

    Args:
        pattern: Local files without compression, such as
            `/data/train-*.tfrecord`. Index files are written beside them
            where the folder can be written, and kept in memory elsewhere.
        parse: From a record, a scalar string, to `x`, `(x, y)` or
            `(x, y, sample_weight)` of one example.
        threads: As for `RandomAccess`.

    Returns:
        What `Trainer.fit` takes.

    Raises:
        ConfigurationError: No file matches, or one has no such records.
    """
    return RandomAccess(RecordFiles(pattern), map=parse, threads=threads)


class RecordFiles:
    """The records of TFRecord files, as bytes.

    Args:
        pattern: As for `indexed_records`.

    Raises:
        ConfigurationError: No file matches, or one has no such records.
    """

    def __init__(self, pattern: str) -> None:
        paths = sorted(
            path
            for path in glob.glob(check_path("pattern", pattern))
            if not path.endswith(".index")
        )
        if not paths:
            raise ConfigurationError(
                "pattern must match one local file or more. Received: "
                f"pattern={pattern!r}, which matches none."
            )
        for path in paths:
            check_file("pattern", path)
        self._paths = paths
        # Of files without an index beside them.
        self._tables: dict[str, np.ndarray] = {}
        self._ends = np.cumsum([self._prepared(path) for path in paths])
        self._files = OpenFiles(self._opened, _File.close)

    def __len__(self) -> int:
        """Returns the number of records."""
        return int(self._ends[-1])

    def __getitem__(self, number: int) -> bytes:
        """Reads one record."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        file = int(np.searchsorted(self._ends, number, side="right"))
        path = self._paths[file]
        with self._files.opened(path) as opened:
            places = opened.places
            first = int(self._ends[file]) - len(places)
            start, size = map(int, places[number - first])
            begin = start - _HEADER
            read = os.pread(opened.descriptor, _HEADER + size, begin)
        if len(read) < _HEADER + size or _length(read) != size:
            raise ConfigurationError(
                "Files must not change while they are read. Received: "
                f"{path!r}, which has no record of {size} bytes at byte "
                f"{begin} any more. Delete {path + '.index'!r} and start again."
            )
        return read[_HEADER:]

    def _prepared(self, path: str) -> int:
        """Returns the number of records, and indexes them where needed."""
        table = _read_index(path)
        if table is None:
            table = _new_index(path)
            if not _written(path, table):
                self._tables[path] = table
        return len(table) - 1

    def _opened(self, path: str) -> _File:
        table = self._tables.get(path)
        if table is None:
            table = np.load(f"{path}.index", mmap_mode="r")
        return _File(os.open(path, os.O_RDONLY), table[1:])

    def __del__(self) -> None:
        if "_files" in self.__dict__:
            self._files.close()


@dataclasses.dataclass
class _File:
    """An open file.

    Attributes:
        descriptor: Its number.
        places: `[records, 2]`: the first byte and the number of bytes.
    """

    descriptor: int
    places: np.ndarray

    def close(self) -> None:
        """Closes it; a mapped index is closed where nobody has it any more."""
        os.close(self.descriptor)


def _read_index(path: str) -> np.ndarray | None:
    """Returns the index beside a file, None where it is not of that file."""
    state = os.stat(path)
    try:
        check_regular(f"{path}.index")
        table = np.load(f"{path}.index", mmap_mode="r")
    except (OSError, ValueError, EOFError, SyntaxError):
        return None  # No index yet, or no index at all.
    if not _is_whole(table, state.st_size):
        return None
    if table[0, 1] == state.st_mtime_ns or _agrees(path, table[1:]):
        return table
    return None


def _agrees(path: str, places: np.ndarray) -> bool:
    """Whether some records, the last among them, are where an index says."""
    if not len(places):
        return os.path.getsize(path) == 0
    end = sum(map(int, places[-1])) + _CHECKSUM
    some = np.linspace(0, len(places) - 1, _COMPARED, dtype=int)
    with open_regular(path, "rb") as file:
        for start, size in places[np.unique(some)].tolist():
            file.seek(start - _HEADER)
            if _length(file.read(_LENGTH)) != size:
                return False
    return end == os.path.getsize(path)


def _new_index(path: str) -> np.ndarray:
    state = os.stat(path)
    places = _scanned(path, state.st_size)
    return np.array([(state.st_size, state.st_mtime_ns), *places], np.int64)


def _written(path: str, table: np.ndarray) -> bool:
    """Writes an index beside a file; whether that could be done."""
    try:
        # Workers may write at the same time: each a whole file.
        with tempfile.NamedTemporaryFile(
            dir=os.path.dirname(path) or ".", suffix=".index", delete=False
        ) as file:
            np.save(file, table)
        os.replace(file.name, f"{path}.index")
    except OSError as error:
        _log.info("no index file beside %s: %s", path, error.strerror)
        return False
    return True


def _length(header: bytes) -> int:
    return int.from_bytes(header[:_LENGTH], "little")


def _is_whole(table: np.ndarray, size: int) -> bool:
    """Whether an index is one of a file of this size, as a scan makes it."""
    if table.ndim != 2 or table.shape[1] != 2 or table.dtype != np.int64:
        return False
    if not len(table) or table[0, 0] != size:
        return False
    places = table[1:]
    # One record after the other, from the first byte on.
    ends = np.cumsum(places[:, 1] + _HEADER + _CHECKSUM)
    bounds = np.concatenate([[0], ends])
    return bool(
        bounds[-1] == size
        and np.array_equal(places[:, 0] - _HEADER, bounds[:-1])
    )


def _scanned(path: str, size: int) -> list[tuple[int, int]]:
    places, start = [], 0
    with open_regular(path, "rb") as file:
        while start < size:
            file.seek(start)
            length = _length(file.read(_LENGTH))
            places.append((start + _HEADER, length))
            start += _HEADER + length + _CHECKSUM
    if start != size:
        raise ConfigurationError(
            "pattern must match whole TFRecord files without compression. "
            f"Received: {path!r}, whose records end at byte {start} of {size}."
        )
    return places

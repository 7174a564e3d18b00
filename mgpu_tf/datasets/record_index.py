"""TFRecord files whose records are read by their number.

    data = indexed_records("/data/train-*.tfrecord", parse)
    trainer.fit(data, batch_size=64)

A TFRecord file does not tell where its records begin. An index file beside it
does, `train-0.tfrecord.index`: the size of the file, then the first byte and
the number of bytes of each record. It is written when a file is first opened.

References:
    TensorFlow's format of records: a length of 8 bytes, its checksum of 4,
    the data, its checksum of 4; little endian.
"""

from __future__ import annotations

import functools
import glob
import logging
import os
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

from mgpu_tf.datasets.random_access import RandomAccess
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.fields import checked
from mgpu_tf.folders import check_file, check_path, check_regular, open_regular

_HEADER, _CHECKSUM = 12, 4

_log = logging.getLogger("mgpu_tf")


@checked
def indexed_records(
    pattern: str,
    parse: Callable[[Any], Any],
    threads: int | None = None,
) -> RandomAccess:
    """Reads TFRecord files by the number of a record.

    Each worker reads its own records. Checksums are not checked.

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
        self._places = [_places_of(path) for path in paths]
        self._ends = np.cumsum([len(places) for places in self._places])

    def __len__(self) -> int:
        """Returns the number of records."""
        return int(self._ends[-1])

    def __getitem__(self, number: int) -> bytes:
        """Reads one record."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        file = int(np.searchsorted(self._ends, number, side="right"))
        places = self._places[file]
        start, size = places[number - int(self._ends[file]) + len(places)]
        record = os.pread(self._descriptors[file], int(size), int(start))
        if len(record) != size:
            raise ConfigurationError(
                "TFRecord files must stay as they are while they are read. "
                f"Received: {self._paths[file]!r}, of whose record {number} "
                f"{len(record)} of {size} bytes are there."
            )
        return record

    @functools.cached_property
    def _descriptors(self) -> list[int]:
        return [os.open(path, os.O_RDONLY) for path in self._paths]

    def __del__(self) -> None:
        for descriptor in self.__dict__.get("_descriptors", []):
            os.close(descriptor)


def _places_of(path: str) -> np.ndarray:
    """Returns `[records, 2]`: the first byte and the number of bytes."""
    index, size = f"{path}.index", os.path.getsize(path)
    table = _known(index, size)
    if table is not None:
        return table
    table = np.array([(size, 0), *_scanned(path, size)], np.int64)
    try:
        # Workers may write at the same time: each a whole file.
        with tempfile.NamedTemporaryFile(
            dir=os.path.dirname(path) or ".", suffix=".index", delete=False
        ) as file:
            np.save(file, table)
        os.replace(file.name, index)
    except OSError as error:
        _log.info("no index file beside %s: %s", path, error.strerror)
    return table[1:]


def _known(index: str, size: int) -> np.ndarray | None:
    """Returns the places in an index file; None where it is not of the file.

    Args:
        index: The index file.
        size: Of the file with the records.
    """
    try:
        check_regular(index)
        table = np.load(index, mmap_mode="r")
    except (OSError, ValueError, EOFError, SyntaxError):
        return None
    if table.ndim != 2 or table.shape[1] != 2 or table.dtype != np.int64:
        return None
    if not len(table) or table[0, 0] != size:
        return None
    places = table[1:]
    # As a scan finds them: one after the other, from the first byte on.
    ends = np.cumsum(places[:, 1] + _HEADER + _CHECKSUM)
    bounds = np.concatenate([[0], ends])
    starts = places[:, 0] - _HEADER
    whole = bounds[-1] == size and np.array_equal(starts, bounds[:-1])
    return places if whole else None


def _scanned(path: str, size: int) -> list[tuple[int, int]]:
    places, start = [], 0
    with open_regular(path, "rb") as file:
        while start < size:
            file.seek(start)
            length = int.from_bytes(file.read(8), "little")
            places.append((start + _HEADER, length))
            start += _HEADER + length + _CHECKSUM
    if start != size:
        raise ConfigurationError(
            "pattern must match whole TFRecord files without compression. "
            f"Received: {path!r}, whose records end at byte {start} of {size}."
        )
    return places

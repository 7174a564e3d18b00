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

_HEADER, _CHECKSUM = 12, 4

_log = logging.getLogger("mgpu_tf")


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
            path for path in glob.glob(pattern) if not path.endswith(".index")
        )
        if not paths:
            raise ConfigurationError(
                "pattern must match one local file or more. Received: "
                f"pattern={pattern!r}, which matches none."
            )
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
        return os.pread(self._descriptors[file], int(size), int(start))

    @functools.cached_property
    def _descriptors(self) -> list[int]:
        return [os.open(path, os.O_RDONLY) for path in self._paths]

    def __del__(self) -> None:
        for descriptor in self.__dict__.get("_descriptors", []):
            os.close(descriptor)


def _places_of(path: str) -> np.ndarray:
    """Returns `[records, 2]`: the first byte and the number of bytes."""
    index, size = f"{path}.index", os.path.getsize(path)
    try:
        table = np.load(index, mmap_mode="r")
        if table.shape[1:] == (2,) and table[0, 0] == size:
            return table[1:]
    except (OSError, ValueError, IndexError):
        pass  # No index yet, or the index of another file.
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


def _scanned(path: str, size: int) -> list[tuple[int, int]]:
    places, start = [], 0
    with open(path, "rb") as file:
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

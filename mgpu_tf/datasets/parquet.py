"""Parquet files whose rows are read by their number.

    data = parquet("/data/train-*.parquet", map=parse)
    trainer.fit(data, batch_size=64)

A row group is what can be read of a Parquet file at once. The groups that were
read last are kept in memory, so a group is read again only where a shuffle
goes over more groups than fit.

References:
    The file format: https://parquet.apache.org/docs/file-format/
"""

from __future__ import annotations

import collections
import glob
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mgpu_tf.datasets.open_files import OpenFiles
from mgpu_tf.datasets.random_access import RandomAccess
from mgpu_tf.errors import ConfigurationError, check_integer, installing
from mgpu_tf.fields import checked
from mgpu_tf.folders import check_file, check_path


@checked
def parquet(
    pattern: str,
    map: Callable[..., Any] | None = None,
    *,
    columns: Sequence[str] | None = None,
    memory_bytes: int = 1_000_000_000,
) -> RandomAccess:
    """Reads Parquet files by the number of a row.

    Each worker reads the row groups that have its own rows. A shuffle takes
    rows from all groups, so it is fast where they fit into `memory_bytes`.
    Otherwise write the files with small row groups, or pass `shuffle=False`.

    Args:
        pattern: Local files, such as `/data/train-*.parquet`.
        map: As for `RandomAccess`, from a dict of the columns.
        columns: Which columns to read; all by default.
        memory_bytes: What the groups in memory may take. The last group that
            was read stays in any case.

    Returns:
        What `Trainer.fit` takes: dicts from columns to values.

    Raises:
        ConfigurationError: No file matches, one cannot be read, or columns
            are missing; or PyArrow is not installed.
    """
    source = ParquetRows(pattern, columns, memory_bytes)
    return RandomAccess(source, map=map)


class ParquetRows:
    """The rows of Parquet files.

    Args:
        pattern: As for `parquet`.
        columns: As for `parquet`.
        memory_bytes: As for `parquet`.

    Attributes:
        groups_read: How many row groups were read.
    """

    def __init__(
        self,
        pattern: str,
        columns: Sequence[str] | None = None,
        memory_bytes: int = 1_000_000_000,
    ) -> None:
        check_integer("memory_bytes", memory_bytes, 0)
        self._columns = None if columns is None else list(columns)
        self._memory_bytes = memory_bytes
        self._paths = _paths(pattern)
        self._groups: list[tuple[int, int]] = []
        lengths: list[int] = []
        for file, path in enumerate(self._paths):
            of_file = _lengths(path, columns)
            self._groups += [(file, group) for group in range(len(of_file))]
            lengths += of_file
        self._files = OpenFiles(_opened, lambda opened: opened.close())
        self._ends = np.cumsum(lengths, dtype=np.int64)
        self._held: collections.OrderedDict[int, Any] = (
            collections.OrderedDict()
        )
        self._lock = threading.Lock()
        self.groups_read = 0

    def __len__(self) -> int:
        """Returns the number of rows."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Returns one row."""
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: list[int]) -> list[dict[str, Any]]:
        """Returns rows; each row group of them is read once."""
        wanted = np.asarray(numbers, np.int64)
        if wanted.size and not 0 <= wanted.min() <= wanted.max() < len(self):
            raise IndexError(numbers)
        groups = np.searchsorted(self._ends, wanted, side="right")
        rows: list[Any] = [None] * len(numbers)
        for group in np.unique(groups).tolist():
            places = np.flatnonzero(groups == group)
            table = self._group(group)
            first = int(self._ends[group]) - table.num_rows
            found = table.take(wanted[places] - first)
            for name in found.column_names:
                missing = _missing(found.column(name))
                if missing.any() and not _is_empty(table.column(name)):
                    row = wanted[places][missing.argmax()]
                    raise ConfigurationError(self._lacks(group, row, name))
            columns = {
                name: _values(found.column(name)) for name in found.column_names
            }
            for row, place in enumerate(places.tolist()):
                rows[place] = {n: values[row] for n, values in columns.items()}
        return rows

    def _lacks(self, group: int, number: int, column: str) -> str:
        """Returns the message for a value that is missing."""
        file, of_file = self._groups[group]
        before = group - of_file
        row = number - (int(self._ends[before - 1]) if before else 0)
        return (
            "Every row must have a value in each column that is read. "
            f"Received: row {row} of {self._paths[file]!r}, counted from 0, "
            f"with null in the column {column!r}. Write a value there, leave "
            "the row out, or pass columns without it."
        )

    def _read(self, file: int, group: int) -> Any:
        """Returns a row group of a file."""
        import pyarrow as pa

        try:
            with self._files.opened(self._paths[file]) as opened:
                return opened.read_row_group(group, columns=self._columns)
        except (pa.ArrowException, OSError) as error:
            said = str(error).partition("\n")[0]
            raise ConfigurationError(
                "pattern must match whole Parquet files. Received: "
                f"{self._paths[file]!r}, whose row group {group} cannot be "
                f"read ({said:.120}). Write the file again."
            ) from None

    def _group(self, number: int) -> Any:
        """Returns a row group, from memory if it is there."""
        with self._lock:
            if number not in self._held:
                self._held[number] = self._read(*self._groups[number])
                self.groups_read += 1
            self._held.move_to_end(number)
            table = self._held[number]
            size = sum(held.nbytes for held in self._held.values())
            while size > self._memory_bytes and len(self._held) > 1:
                _, dropped = self._held.popitem(last=False)
                size -= dropped.nbytes
            return table


def _missing(column: Any) -> np.ndarray:
    """Returns where values are null, or lists that have a null."""
    import pyarrow as pa
    from pyarrow import compute

    missing = column.is_null().to_numpy()
    lists = (pa.ListType, pa.LargeListType, pa.FixedSizeListType)
    if isinstance(column.type, lists):
        inner = compute.is_null(compute.list_flatten(column)).to_numpy()
        if inner.any():
            rows = compute.list_parent_indices(column).to_numpy()
            missing = missing.copy()
            missing[rows[inner]] = True
    return missing


def _is_empty(column: Any) -> bool:
    """Returns whether no row of a row group has a value in a column."""
    return column.null_count == len(column)


def _values(column: Any) -> Any:
    """Returns the values of a column as NumPy or Python has them."""
    import pyarrow as pa

    kind = column.type
    numeric = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if numeric and column.null_count == 0:
        return column.to_numpy()
    values = column.to_pylist()
    lists = (pa.ListType, pa.LargeListType, pa.FixedSizeListType)
    if isinstance(kind, lists) and column.null_count == 0:
        dtype = kind.value_type.to_pandas_dtype()
        return [np.asarray(value, dtype) for value in values]
    return values


def _paths(pattern: str) -> list[str]:
    paths = sorted(glob.glob(check_path("pattern", pattern)))
    if not paths:
        raise ConfigurationError(
            "pattern must match one local file or more. Received: "
            f"pattern={pattern!r}, which matches none."
        )
    for path in paths:
        check_file("pattern", path)
    return paths


def _opened(path: str) -> Any:
    try:
        import pyarrow as pa
        from pyarrow import parquet as files
    except ImportError:
        raise ConfigurationError(
            "Parquet files need PyArrow. Received: an environment without it. "
            f"Run: {installing('parquet')}"
        ) from None
    try:
        return files.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        said = str(error).partition("\n")[0]
        raise ConfigurationError(
            "pattern must match Parquet files alone. Received: "
            f"{path!r} ({said:.120})."
        ) from None


def _lengths(path: str, columns: Sequence[str] | None) -> list[int]:
    """Returns the rows of each row group of a file; checks its columns."""
    opened = _opened(path)
    try:
        known = set(opened.schema_arrow.names)
        missing = [name for name in columns or () if name not in known]
        if missing:
            raise ConfigurationError(
                "columns must be columns of all files. Received: "
                f"{', '.join(missing)}, not in {path!r} with "
                f"{', '.join(sorted(known))}."
            )
        metadata = opened.metadata
        return [
            metadata.row_group(group).num_rows
            for group in range(metadata.num_row_groups)
        ]
    finally:
        opened.close()

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
    from pyarrow import compute

    missing = column.is_null().to_numpy().copy()
    inner, rows = column, np.arange(len(column))
    while _is_list(inner.type):
        rows = rows[compute.list_parent_indices(inner).to_numpy()]
        inner = compute.list_flatten(inner)
        missing[rows[inner.is_null().to_numpy()]] = True
    return missing


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    lists = (pa.ListType, pa.LargeListType, pa.FixedSizeListType)
    return isinstance(kind, lists)


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
    if isinstance(kind, pa.FixedShapeTensorType) and column.null_count == 0:
        return np.concatenate([c.to_numpy_ndarray() for c in column.chunks])
    values = column.to_pylist()
    inner = kind
    while _is_list(inner):
        inner = inner.value_type
    if inner is kind or column.null_count:
        return values
    dtype = inner.to_pandas_dtype()
    try:
        return [np.asarray(value, dtype) for value in values]
    except ValueError:
        raise ConfigurationError(
            "A list of lists must be a matrix, its rows of one length. "
            "Received: rows of several lengths. Write one list and its shape, "
            "or pass columns without it."
        ) from None


def _can_be_read(kind: Any) -> bool:
    """Whether a column of a type holds what an example may hold."""
    import pyarrow as pa

    if _is_list(kind):
        inner = kind.value_type
        return not isinstance(inner, pa.StructType) and _can_be_read(inner)
    if isinstance(kind, pa.DictionaryType):
        return _can_be_read(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return _can_be_read(kind.storage_type)
    if isinstance(kind, pa.StructType):
        fields = (kind.field(place) for place in range(kind.num_fields))
        return all(_can_be_read(field.type) for field in fields)
    known = (
        *(pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean),
        *(pa.types.is_string, pa.types.is_large_string, pa.types.is_binary),
        *(pa.types.is_large_binary, pa.types.is_fixed_size_binary),
        pa.types.is_null,
    )
    return any(is_kind(kind) for is_kind in known)


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
        for field in opened.schema_arrow:
            wanted = columns is None or field.name in columns
            if wanted and not _can_be_read(field.type):
                raise ConfigurationError(
                    "A column must hold numbers, booleans, text or bytes, or "
                    f"lists of them. Received: {path!r} with the column "
                    f"{field.name!r} of {field.type}. Write it as a number or "
                    "as text, or pass columns without it."
                )
        metadata = opened.metadata
        return [
            metadata.row_group(group).num_rows
            for group in range(metadata.num_row_groups)
        ]
    finally:
        opened.close()

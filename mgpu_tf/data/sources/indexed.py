"""Examples that are read by their number: `RandomAccess`."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mgpu_tf.data import structures
from mgpu_tf.data.sources.batches import RowOrder, Rows, Source
from mgpu_tf.data.sources.permutation import permuted
from mgpu_tf.datasets.random_access import RandomAccess, Table
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.strategies.replicas.topology import LocalReplicas

BATCH_SIZE = 32

# Elements that are read at a time: the next begins while the last rows of the
# one before it are read.
_ELEMENTS = 2
_OF_VALUES = "An example must hold numbers, booleans, text or bytes. Received: "


class RandomAccessSource(Source):
    """Examples by their number; every worker reads its own rows alone.

    A function of Python numbers the rows of a replica and reads them in
    threads; `map` runs in the graph.

    Args:
        data: The examples.
        batch_size: Rows of a global batch; 32 by default, or what `steps`
            batches need.
        shuffle: Whether rows come in a new order in each pass.
        seed: Decides the order, together with the pass.
        steps: Steps that are wanted of a pass.

    Raises:
        ConfigurationError: The first example is none, or cannot be mapped.
    """

    seekable = True

    def __init__(
        self,
        data: RandomAccess,
        batch_size: int | None,
        shuffle: bool | str,
        seed: int,
        steps: int | None = None,
    ) -> None:
        if shuffle == "batch":
            raise ConfigurationError(
                "The rows of a RandomAccess are shuffled one by one. Received: "
                "shuffle='batch'. Pass True or False."
            )
        self._source, self._broken = data.source, data.broken
        self._examples = len(data)
        if batch_size is None:
            batch_size = -(-self._examples // steps) if steps else BATCH_SIZE
        self._batch_size = self.batch_size = batch_size
        self.row_order: RowOrder = RowOrder(bool(shuffle), seed)
        self._passes = -(-self._examples // batch_size)
        self.steps = self._passes
        self._table = None
        if isinstance(data.source, Table):
            self._table = data.source.arrays
        self._threads = data.threads or min(32, (os.cpu_count() or 1) + 4)
        first = _example(self._one(0))
        # A lock where an example is written over by the next one.
        self._one_by_one = self._overwrites()
        self._leaf_specs = [
            tf.TensorSpec([None, *leaf.shape], _type(leaf))
            for leaf in tf.nest.flatten(first)
            if leaf is not None
        ]
        self._structure = tf.nest.map_structure(
            lambda leaf: None if leaf is None else 0, first
        )
        self._raw = self._packed(self._leaf_specs)
        self._mapped = data.map and _Mapped(data.map, self._raw)
        self._spec = self._mapped.spec if self._mapped else self._raw
        batch = self._packed([leaf[None] for leaf in _leaves(first)])
        self._fingerprint = structures.targets_digest(batch)

    def pass_dataset(self, index: Any, local: LocalReplicas) -> tf.data.Dataset:
        """Returns pass `index`; the order comes from (seed, index) alone."""
        return self.pass_from(index, local, 0)

    def pass_from(
        self, index: Any, local: LocalReplicas, start: int
    ) -> tf.data.Dataset:
        """Returns pass `index` from a batch on, without reading the others."""

        def read(position: tf.Tensor) -> tuple[Any, tf.Tensor, tf.Tensor]:
            first = (position // local.count) * self._batch_size
            size = tf.minimum(
                tf.constant(self._batch_size, tf.int64), self._examples - first
            )
            low, high = local.rows_of(size, position % local.count)
            begin, end = structures.or_another(low, high, size)
            place = tf.cast(
                tf.stack([index, first + begin, first + end]), tf.int64
            )
            return self._rows(place), high - low, size

        def elements(first: int, last: int) -> tf.data.Dataset:
            bounds = first * local.count, last * local.count
            return tf.data.Dataset.range(*bounds).map(
                read, num_parallel_calls=_ELEMENTS
            )

        if self._mapped is None:
            return elements(start, self._passes)
        mapped = self._mapped
        rows = self._rows_of_each(local)
        alike = 0 if rows is None else self._examples // self._batch_size

        def rest() -> tf.data.Dataset:
            return elements(max(start, alike), self._passes).map(
                lambda data, held, size: (mapped(data), held, size),
                num_parallel_calls=tf.data.AUTOTUNE,
            )

        if start >= alike:
            return rest()
        # Row by row: a dataset within one for each batch takes a third longer.
        counts = [tf.constant(n, tf.int64) for n in (rows, self._batch_size)]
        batches = (
            elements(start, alike)
            .map(lambda data, held, size: tuple(_leaves(data)))
            .unbatch()
            .map(mapped.leaves_of, num_parallel_calls=tf.data.AUTOTUNE)
            .batch(rows)
            .map(lambda *leaves: (mapped.packed(leaves), *counts))
        )
        return batches if alike == self._passes else batches.concatenate(rest())

    def _rows_of_each(self, local: LocalReplicas) -> int | None:
        """Returns the rows of a replica, if those here have as many each."""
        if local.bounds is not None:
            return None
        replicas = range(local.count)
        bounds = (local.rows_of(self._batch_size, r) for r in replicas)
        counts = {high - low for low, high in bounds}
        return counts.pop() or None if len(counts) == 1 else None

    def example(self) -> Any:
        """Returns the spec of a batch."""
        return self._spec

    def rows(self) -> Rows | None:
        """Returns the table and the order of its rows, if there is one."""
        if self._table is None:
            return None
        return Rows(self._table, self._batch_size, self._order, self._mapped)

    def broken(self) -> str:
        """Returns the first file that cannot be read, "" for none."""
        return self._broken() if self._broken else ""

    def length(self) -> str:
        """Returns how much there is, in words."""
        return f"{self._examples} examples in batches of {self._batch_size}"

    def fingerprint(self) -> str:
        """Returns a hash of the first example's targets."""
        return self._fingerprint

    def _order(self, index: int) -> np.ndarray:
        """Returns the row numbers of a whole pass."""
        return self._numbers(np.array([index, 0, self._examples]))

    def _rows(self, place: tf.Tensor) -> Any:
        """Returns the rows at some positions of a pass, in the graph.

        Args:
            place: The pass, the first position, and that after the last.
        """
        if self._table is not None:
            numbers = tf.numpy_function(self._numbers, [place], tf.int64)
            numbers.set_shape([None])
            return structures.gather(self._table, numbers)
        types = [spec.dtype for spec in self._leaf_specs]
        leaves = tf.numpy_function(self._stacked, [place], types)
        for leaf, spec in zip(leaves, self._leaf_specs, strict=True):
            leaf.set_shape(spec.shape)
        return self._packed(leaves)

    def _packed(self, leaves: Any) -> Any:
        """Returns leaves in the structure of an example."""
        queue = iter(leaves)
        return tf.nest.map_structure(
            lambda leaf: None if leaf is None else next(queue), self._structure
        )

    # Called by threads of TensorFlow.

    def _numbers(self, place: np.ndarray) -> np.ndarray:
        """Returns the rows at some positions; `place` as for `_rows`."""
        index, low, high = place.tolist()
        positions = np.arange(low, high, dtype=np.int64)
        if not self.row_order.shuffle:
            return positions
        return permuted(positions, self._examples, self.row_order.seed, index)

    def _stacked(self, place: np.ndarray) -> list[np.ndarray]:
        """Reads examples, and returns an array for each of their leaves."""
        examples = self._read(self._numbers(place).tolist())
        columns: list[np.ndarray] = []
        for leaf, spec in enumerate(self._leaf_specs):
            shape, dtype = spec.shape[1:], spec.dtype.as_numpy_dtype
            column = np.empty([len(examples), *shape], dtype)
            for row, example in enumerate(examples):
                found = example[leaf]
                if found.shape != tuple(shape):
                    raise ConfigurationError(_one_shape(shape, found))
                column[row] = _as_type(found, column.dtype)[()]
            columns.append(column)
        return columns

    def _read(self, numbers: list[int]) -> list[list[np.ndarray]]:
        """Returns the leaves of examples, in the order of the numbers."""
        if hasattr(self._source, "__getitems__"):
            found = self._source.__getitems__(numbers) if numbers else []
            if len(found) != len(numbers):
                raise ConfigurationError(
                    "__getitems__ must return an example for each number. "
                    f"Received: {len(found)} examples for {len(numbers)} "
                    "numbers."
                )
            return [*map(self._checked, found, numbers)]
        # As few tasks as there are threads: a task costs as much as a short
        # read.
        size = -(-len(numbers) // self._threads) or 1
        parts = [
            numbers[first : first + size]
            for first in range(0, len(numbers), size)
        ]
        found = self._pool.map(self._several, parts)
        return list(itertools.chain.from_iterable(found))

    def _several(self, numbers: list[int]) -> list[list[np.ndarray]]:
        return [self._checked_row(number) for number in numbers]

    def _checked_row(self, number: int) -> list[np.ndarray]:
        with self._one_by_one:
            return self._checked(self._source[number], number)

    def _overwrites(self) -> contextlib.AbstractContextManager[Any]:
        """Returns what to read an example in: a lock, if it is overwritten.

        Raises:
            ConfigurationError: `__getitems__` returns one example for all.
        """
        if self._examples == 1 or self._table is not None:
            return contextlib.nullcontext()
        if hasattr(self._source, "__getitems__"):
            one, other = (_example(self._one(number)) for number in (0, 1))
            both = self._source.__getitems__([0, 1])
            pair = [_example(example) for example in both]
            if _alike(*pair) and not _alike(one, other):
                raise ConfigurationError(
                    "__getitems__ must return an example of its own for each "
                    "number. Received: one array that is written over. Return "
                    "copies of it."
                )
            return contextlib.nullcontext()
        raw = self._source[0]
        before = _example(raw)
        self._source[1]
        if _alike(before, _example(raw)):
            return contextlib.nullcontext()
        return threading.Lock()

    def _checked(self, raw: Any, number: int) -> list[np.ndarray]:
        example = _example(raw)
        try:
            tf.nest.assert_same_structure(self._structure, example)
        except (TypeError, ValueError):
            raise ConfigurationError(
                "All examples of a source must have one structure. Received: "
                f"{_outline(example)} after {_outline(self._structure)}."
            ) from None
        known = tf.nest.flatten(self._structure)
        for wanted, leaf in zip(known, tf.nest.flatten(example), strict=True):
            if (wanted is None) != (leaf is None):
                what = "None" if leaf is None else "a value"
                raise ConfigurationError(
                    "All examples of a source must have a value in the same "
                    f"places. Received: {what} in example {number}, which is "
                    f"{_outline(example)} after {_outline(self._structure)}. "
                    "Return a value in its place, or leave the example out."
                )
        return _leaves(example)

    def _one(self, number: int) -> Any:
        if hasattr(self._source, "__getitems__"):
            return self._source.__getitems__([number])[0]
        return self._source[number]

    @functools.cached_property
    def _pool(self) -> futures.ThreadPoolExecutor:
        return futures.ThreadPoolExecutor(self._threads, "mgpu_tf_rows")


class _Mapped:
    """A function of one example, over the rows of a batch.

    Args:
        function: As of `RandomAccess`.
        spec: The spec of a batch of what it gets.
    """

    def __init__(self, function: Callable[..., Any], spec: Any) -> None:
        self._function = function
        self._structure: Any = None
        rows = [
            tf.TensorSpec(leaf.shape[1:], leaf.dtype) for leaf in _leaves(spec)
        ]
        self._given = spec
        traced = tf.function(self.leaves_of).get_concrete_function(*rows)
        self._signature = tuple(
            tf.TensorSpec(t.shape, t.dtype) for t in traced.outputs
        )
        self.spec = self.packed(
            tf.TensorSpec([None, *leaf.shape], leaf.dtype)
            if leaf.shape.rank is not None
            else tf.TensorSpec(None, leaf.dtype)
            for leaf in self._signature
        )

    def __call__(self, batch: Any) -> Any:
        rows = tuple(_leaves(batch))
        count = tf.shape(rows[0], tf.int64)[0]

        def of_rows() -> tuple[tf.Tensor, ...]:
            examples = tf.data.Dataset.from_tensor_slices(rows)
            mapped = examples.map(
                self.leaves_of, num_parallel_calls=tf.data.AUTOTUNE
            )
            return mapped.batch(count).get_single_element()

        def of_none() -> tuple[tf.Tensor, ...]:
            return tuple(_leaves(structures.empty(self.spec)))

        # Also where a worker of parameter servers maps inside of its step.
        with tf.device("CPU:0"):
            leaves = tf.cond(count > 0, of_rows, of_none)
        return self.packed(leaves)

    def leaves_of(self, *leaves: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """Returns the leaves of the function's result, from one example's."""
        queue = iter(leaves)
        example = tf.nest.map_structure(
            lambda leaf: None if leaf is None else next(queue), self._given
        )
        result = _tuples(self._call(example))
        self._structure = tf.nest.map_structure(
            lambda leaf: None if leaf is None else 0, result
        )
        return tuple(tf.convert_to_tensor(leaf) for leaf in _leaves(result))

    def _call(self, example: Any) -> Any:
        if type(example) is tuple:
            return self._function(*example)
        return self._function(example)

    def packed(self, leaves: Any) -> Any:
        """Returns leaves in the structure of the function's result."""
        queue = iter(leaves)
        return tf.nest.map_structure(
            lambda leaf: None if leaf is None else next(queue), self._structure
        )


def _leaves(data: Any) -> list[Any]:
    return [leaf for leaf in tf.nest.flatten(data) if leaf is not None]


def _tuples(data: Any) -> Any:
    return keras.tree.lists_to_tuples(data)


def _example(raw: Any) -> Any:
    """Returns an example with an array for each leaf."""
    return tf.nest.map_structure(_array, _tuples(raw))


def _array(leaf: Any) -> Any:
    """Converts a leaf; a number of Python gets the float type of Keras."""
    if leaf is None:
        return None
    if isinstance(leaf, float):
        return _as_type(np.asarray(leaf), np.dtype(keras.config.floatx()))
    # A source may write its next example into the same array.
    array = np.array(leaf)
    if array.dtype.kind in "SU":
        # Of one length, an array loses zeros at the end of bytes.
        array = np.asarray(leaf, object)
    if array.dtype == object:
        texts = [t.encode() if isinstance(t, str) else t for t in array.flat]
        others = [type(t).__name__ for t in texts if not isinstance(t, bytes)]
        if others:
            raise ConfigurationError(_OF_VALUES + f"a {others[0]}.")
        array = np.array([*texts, None], object)[:-1].reshape(array.shape)
    return array


def _type(leaf: np.ndarray) -> tf.DType:
    try:
        return tf.string if leaf.dtype == object else tf.as_dtype(leaf.dtype)
    except TypeError:
        raise ConfigurationError(
            _OF_VALUES + f"an array of {leaf.dtype}."
        ) from None


def _one_shape(shape: tf.TensorShape, found: np.ndarray) -> str:
    return (
        "All examples of a source must have one shape. Received: "
        f"{found.shape} after {tuple(shape)}. Give them one shape in "
        "__getitem__, or return encoded bytes and decode them in map."
    )


def _as_type(found: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Returns a value in another type, if that keeps it but for rounding.

    Args:
        found: The value of an example.
        dtype: The type of the first example.

    Raises:
        ConfigurationError: It would be another value.
    """
    if found.dtype == dtype:
        return found
    is_text = object in (found.dtype, dtype)
    if not is_text and np.can_cast(found.dtype, dtype, "same_kind"):
        with np.errstate(over="ignore"):
            kept = found.astype(dtype)
        if found.dtype.kind in "iu":
            is_kept = np.array_equal(found, kept)
        else:
            is_kept = np.array_equal(np.isfinite(found), np.isfinite(kept))
        if is_kept:
            return kept
    raise ConfigurationError(
        "All examples of a source must have one type. Received: "
        f"{_of_type(found.dtype)} after {_of_type(dtype)}. Convert them in "
        "__getitem__, such as with np.float32."
    )


def _of_type(dtype: np.dtype[Any]) -> str:
    return "text" if dtype.kind == "O" else str(dtype)


def _alike(one: Any, other: Any) -> bool:
    """Returns whether two examples have the same bytes."""
    leaves = _leaves(one), _leaves(other)
    return len(leaves[0]) == len(leaves[1]) and all(
        a.shape == b.shape
        and a.dtype == b.dtype
        and (a.dtype == object or a.tobytes() == b.tobytes())
        and (a.dtype != object or a.tolist() == b.tolist())
        for a, b in zip(*leaves, strict=True)
    )


def _outline(data: Any) -> Any:
    return tf.nest.map_structure(
        lambda leaf: "*" if leaf is not None else "-", data
    )

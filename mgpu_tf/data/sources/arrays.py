"""Arrays in memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mgpu_tf.data import structures
from mgpu_tf.data.sources.batches import RowOrder, Rows, Source
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.strategies.replicas.topology import LocalReplicas

BATCH_SIZE = 32
HASHED = 10_000


class ArraySource(Source):
    """Arrays in memory; every worker gathers only the rows that it needs.

    Args:
        data: Arrays, nested.
        batch_size: Rows of a global batch; 32 by default, or what `steps`
            batches need.
        shuffle: Whether rows come in a new order each pass; "batch" keeps
            the rows of a batch together.
        seed: Decides the order, together with the pass.
        steps: Steps that are wanted of a pass.
    """

    seekable = True

    def __init__(
        self,
        data: Any,
        batch_size: int | None,
        shuffle: bool | str,
        seed: int,
        steps: int | None = None,
    ) -> None:
        self._data = structures.tensors_of(data)
        self._examples = _common_length(self._data)
        if batch_size is None:
            batch_size = -(-self._examples // steps) if steps else BATCH_SIZE
        self._batch_size = self.batch_size = batch_size
        self.row_order: RowOrder = RowOrder(shuffle, seed)
        self._steps = -(-self._examples // batch_size)
        self.steps = self._steps

    @property
    def arrays(self) -> ArraySource:
        """Returns itself."""
        return self

    @property
    def leaves(self) -> tuple[tf.Tensor, ...]:
        """Returns the arrays of the data."""
        leaves = tf.nest.flatten(self._data)
        return tuple(leaf for leaf in leaves if leaf is not None)

    @contextlib.contextmanager
    def reading(self, leaves: Sequence[tf.Tensor]) -> Iterator[None]:
        """Lets passes that are made in the block read other arrays.

        A function of tf.data keeps the tensors that it captures until Python's
        garbage collector runs. It does not keep its arguments.

        Args:
            leaves: In place of those of `leaves`.
        """
        own, left = self._data, iter(leaves)
        self._data = tf.nest.map_structure(
            lambda leaf: None if leaf is None else next(left), own
        )
        try:
            yield
        finally:
            self._data = own

    def pass_dataset(self, index: Any, local: LocalReplicas) -> tf.data.Dataset:
        """Returns pass `index`; the order comes from (seed, index) alone."""
        return self.pass_from(index, local, 0)

    def pass_from(
        self, index: Any, local: LocalReplicas, start: int
    ) -> tf.data.Dataset:
        """Returns pass `index` from a batch on, without reading the others."""
        order = self._order(index) if self.row_order.shuffle else None

        def element(position: tf.Tensor) -> tuple[Any, tf.Tensor, tf.Tensor]:
            start = (position // local.count) * self._batch_size
            size = tf.minimum(
                tf.constant(self._batch_size, tf.int64),
                self._examples - start,
            )
            low, high = local.rows_of(size, position % local.count)
            first, after = structures.or_another(low, high, size)
            rows = slice(start + first, start + after)
            if order is None:
                data = structures.part(self._data, rows.start, rows.stop)
            else:
                data = structures.gather(self._data, order[rows])
            return data, high - low, size

        first, last = start * local.count, self._steps * local.count
        return tf.data.Dataset.range(first, last).map(element)

    def example(self) -> Any:
        """Returns the spec of a batch."""
        return structures.spec_of(self._data)

    def rows(self) -> Rows:
        """Returns the arrays and the order of their rows."""

        def order(index: int) -> np.ndarray:
            if self.row_order.shuffle:
                return self._order(index).numpy()
            return np.arange(self._examples)

        return Rows(self._data, self._batch_size, order)

    def length(self) -> str:
        """Returns how much there is, in words."""
        return f"{self._examples} examples in batches of {self._batch_size}"

    def fingerprint(self) -> str:
        """Returns a hash of up to `HASHED` examples, spread over all."""
        step = -(-self._examples // HASHED)
        leaves = structures.with_rows(self._data)
        return structures.digest([leaf[::step] for leaf in leaves])

    def _order(self, index: Any) -> tf.Tensor:
        rows = tf.range(self._examples, dtype=tf.int64)
        seed = tf.stack(
            [tf.cast(self.row_order.seed, tf.int64), tf.cast(index, tf.int64)]
        )
        if self.row_order.shuffle != "batch":
            return tf.random.experimental.stateless_shuffle(rows, seed)
        within = tf.random.stateless_uniform(
            [self._examples], seed, dtype=tf.float64
        )
        return tf.cast(
            tf.argsort(tf.cast(rows // self._batch_size, tf.float64) + within),
            tf.int64,
        )


def split_arrays(data: Any, fraction: float) -> tuple[Any, Any]:
    """Splits off the last examples, as Keras's `validation_split` does.

    Args:
        data: Nested arrays of the same length.
        fraction: What part of the examples to split off.

    Returns:
        The first examples, and the last ones.

    Raises:
        ConfigurationError: One of the two would be without examples.
    """
    data = structures.tensors_of(data)
    examples = _common_length(data)
    if not isinstance(fraction, float) or not 0 < fraction < 1:
        raise ConfigurationError(
            "validation_split must be a fraction between 0 and 1. Received: "
            f"validation_split={fraction!r}."
        )
    first = math.floor(examples * (1.0 - fraction))
    if first in (0, examples):
        raise ConfigurationError(
            "validation_split must leave examples on both sides. Received: "
            f"validation_split={fraction} of {examples} examples."
        )
    return (
        structures.part(data, None, first),
        structures.part(data, first, None),
    )


def rows_of_arrays(data: Any) -> int:
    """Returns the number of examples in nested arrays.

    Raises:
        ConfigurationError: They are no arrays, or of other lengths.
    """
    return _common_length(structures.tensors_of(data))


def _common_length(data: Any) -> int:
    leaves = [leaf for leaf in tf.nest.flatten(data) if leaf is not None]
    lengths = {int(leaf.shape[0]) if leaf.shape.rank else 0 for leaf in leaves}
    if len(lengths) != 1 or lengths == {0}:
        shapes = [tuple(leaf.shape) for leaf in leaves]
        raise ConfigurationError(
            "All arrays must have the same number of examples, 1 or more. "
            f"Received: shapes {shapes}. Give each example a row of every "
            "array; batches come from a generator or a keras.utils.PyDataset."
        )
    return lengths.pop()

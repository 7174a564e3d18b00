"""Gradients of embedding tables: the rows that were looked up, and no others.

The gradient of a lookup is a `tf.IndexedSlices`: a row for each time that an
index was looked up. Keras hands it to the optimizer as it is, so that an index
that comes twice in a batch has two rows, and Adam sees the squares of both,
not the square of their sum. What an optimizer makes of such rows is a sum over
them, which does not depend on who computed which. So replicas hand each other
their rows, in the order that one device would have had them in:

    replica 0    rows of its examples   ->   all rows, on every replica
    replica 1    rows of its examples   ->   all rows, on every replica

Only rows that were looked up are moved, whatever the size of the table.

A lookup that is the same for all examples, as of the places in a sequence, is
one on one device; its rows are summed over replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mgpu_tf.optimizers.lazy_adam import summed_rows
from mgpu_tf.options import StepOptions
from mgpu_tf.strategies.replicas.collectives import Groups
from mgpu_tf.strategies.replicas.own_gradient import sum_over_replicas

# Between processes rows travel in blocks of 64, 256, 1024 ... rows, each its
# own collective: one whose shape changes from step to step is an error in a
# loop.
SMALLEST_BLOCK = 64
BLOCKS = 8
# The index of what fills a block.
_NO_ROW = -1


class RowGather:
    """Gives every replica the rows of all replicas. Outside of replicas.

    Args:
        strategy: A synchronous strategy.
        options: Whether rows are summed, and what they are sent as.
        apart: Whether its replicas are in several processes.
        groups: Gathers over the members of a group. Default: over all
            replicas.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        options: StepOptions,
        *,
        apart: bool,
        groups: Groups | None = None,
    ) -> None:
        self._strategy = strategy
        self._groups = groups
        self._replicas = strategy.num_replicas_in_sync
        if groups is not None:
            self._replicas = groups.size
            apart = not groups.is_here
        self._sums = options.sums_rows
        name = options.gradient_dtype
        self._dtype = None if name is None else tf.as_dtype(name)
        self._apart = apart

    def __call__(
        self, gradients: list[Any], alike: Sequence[bool] | None = None
    ) -> list[Any]:
        """Gathers gradients.

        Args:
            gradients: `tf.IndexedSlices`, one for each replica in each.
            alike: Of each, whether all replicas have looked up the same
                whatever their examples, such as the places in a sequence.
                One device looks these up once: the rows are summed.

        Returns:
            The same with the rows of all replicas on each.
        """
        if not gradients:
            return []
        if self._sums:
            gradients = self._on_replicas(summed_rows, gradients)
        if self._replicas == 1:
            return gradients
        sent = self._on_replicas(self._sent, gradients)
        every = self._between(sent) if self._apart else self._copied(sent)
        dtypes = [self._first(gradient).dtype for gradient in gradients]
        every = [
            self._on_replicas(lambda s, to=dtype: _cast(s, to), [slices])[0]
            for slices, dtype in zip(every, dtypes, strict=True)
        ]
        if self._sums:
            return self._on_replicas(summed_rows, every)
        once = alike or [False] * len(every)
        return [
            self._on_replicas(self._folded, [slices])[0] if fold else slices
            for slices, fold in zip(every, once, strict=True)
        ]

    def _folded(self, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        """Sums the rows of replicas that have looked up the same.

        Without a graph, which shows it, the places are compared.
        """
        count = tf.shape(slices.indices)[0] // self._replicas
        if tf.executing_eagerly():
            first = tf.tile(slices.indices[:count], [self._replicas])
            if not np.array_equal(first, slices.indices):
                return slices
        shape = tf.concat(
            [[self._replicas, count], tf.shape(slices.values)[1:]], 0
        )
        return tf.IndexedSlices(
            tf.reduce_sum(tf.reshape(slices.values, shape), 0),
            slices.indices[:count],
            slices.dense_shape,
        )

    def _sent(self, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        if self._dtype is None or slices.dtype.size <= self._dtype.size:
            return slices
        return _cast(slices, self._dtype)

    def _on_replicas(self, function: Any, gradients: list[Any]) -> list[Any]:
        return self._strategy.run(
            lambda every: [function(slices) for slices in every],
            args=(gradients,),
        )

    def _first(self, value: Any) -> Any:
        return self._strategy.experimental_local_results(value)[0]

    # In one process: every device takes what the others have.

    def _copied(self, gradients: list[Any]) -> list[Any]:
        return [self._copied_rows(slices) for slices in gradients]

    def _copied_rows(self, slices: Any) -> Any:
        every = self._strategy.experimental_local_results(slices)

        def joined(place: int) -> tf.IndexedSlices:
            own, parts = every[place], every
            if self._groups is not None:
                parts = [every[p] for p in self._groups.places(place)]
            with tf.device(own.values.device):
                return tf.IndexedSlices(
                    tf.concat([part.values for part in parts], 0),
                    tf.concat([part.indices for part in parts], 0),
                    own.dense_shape,
                )

        return self._for_replicas([joined(p) for p in range(len(every))])

    def _for_replicas(self, every: list[tf.IndexedSlices]) -> Any:
        """Makes one value of those of the local replicas."""
        return self._strategy.experimental_distribute_values_from_function(
            lambda context: every[context.replica_id_in_sync_group % len(every)]
        )

    # Between processes.

    def _between(self, gradients: list[Any]) -> list[Any]:
        lengths = self._first(
            self._strategy.run(self._lengths, args=(gradients,))
        )
        return [
            self._in_block(slices, lengths[place])
            for place, slices in enumerate(gradients)
        ]

    def _lengths(self, gradients: list[tf.IndexedSlices]) -> tf.Tensor:
        """Returns the rows of every replica, `[gradients, replicas]`."""
        context = tf.distribute.get_replica_context()
        rank = context.replica_id_in_sync_group
        if self._groups is not None:
            rank = self._groups.rank()
        mine = [
            tf.shape(slices.indices, out_type=tf.int64)[0]
            for slices in gradients
        ]
        placed = tf.stack(mine)[:, None] * tf.one_hot(
            rank, self._replicas, dtype=tf.int64
        )
        if self._groups is not None:
            return self._groups.all_reduce(placed)
        return sum_over_replicas(placed)

    def _in_block(self, slices: Any, lengths: tf.Tensor) -> Any:
        """Gathers in the smallest block that holds any replica's rows."""
        sizes = [SMALLEST_BLOCK << 2 * power for power in range(BLOCKS)]
        longest = tf.reduce_max(lengths)
        block = tf.searchsorted(tf.constant(sizes, tf.int64), longest[None])[0]
        fits = tf.debugging.assert_less(
            block,
            BLOCKS,
            f"A replica may look up at most {sizes[-1]} rows of an embedding "
            "in a step. Use a smaller batch, or gradient accumulation.",
        )

        def gather(size: int) -> list[tf.Tensor]:
            every = self._strategy.run(
                self._gather, args=(slices, tf.constant(size))
            )
            local = self._strategy.experimental_local_results
            return [
                tensor
                for one in local(every)
                for tensor in (one.values, one.indices)
            ]

        with tf.control_dependencies([fits]):
            block = tf.identity(block)
        flat = tf.switch_case(
            block, [lambda size=size: gather(size) for size in sizes]
        )
        shape = self._first(slices).dense_shape
        every = [
            tf.IndexedSlices(values, indices, shape)
            for values, indices in zip(flat[::2], flat[1::2], strict=True)
        ]
        return self._for_replicas(every)

    def _gather(
        self, slices: tf.IndexedSlices, size: tf.Tensor
    ) -> tf.IndexedSlices:
        static = int(tf.get_static_value(size))
        # A mask of places would be a constant in the graph of each block.
        padded = [
            _padded(slices.values, static, 0),
            _padded(slices.indices, static, _NO_ROW),
        ]
        if self._groups is not None:
            values, indices = map(self._groups.all_gather, padded)
        else:
            context = tf.distribute.get_replica_context()
            values, indices = context.all_gather(padded, axis=0)
        held = indices != _NO_ROW
        return tf.IndexedSlices(
            tf.boolean_mask(values, held),
            tf.boolean_mask(indices, held),
            slices.dense_shape,
        )


def _padded(rows: tf.Tensor, size: int, filler: int) -> tf.Tensor:
    missing = size - tf.shape(rows)[0]
    paddings = [[0, missing], *[[0, 0]] * (rows.shape.rank - 1)]
    padded = tf.pad(rows, paddings, constant_values=filler)
    padded.set_shape([size, *rows.shape[1:]])
    return padded


def own_rows(
    slices: tf.IndexedSlices, bounds: tuple[int, int], row: Sequence[int]
) -> tf.IndexedSlices:
    """Returns the rows of a part of a table, counted from its first row.

    Args:
        slices: Rows of the whole table. What comes from other processes may
            not know its shape.
        bounds: The first row of the part, and the first one after it.
        row: The shape of a row.
    """
    (first, after), indices = bounds, slices.indices
    mine = (indices >= first) & (indices < after)
    shape = (after - first, *row)
    return tf.IndexedSlices(
        tf.boolean_mask(slices.values, mine),
        tf.boolean_mask(indices, mine) - first,
        tf.constant(shape, indices.dtype),
    )


def _cast(slices: tf.IndexedSlices, dtype: tf.DType) -> tf.IndexedSlices:
    if slices.dtype == dtype:
        return slices
    return tf.IndexedSlices(
        tf.cast(slices.values, dtype), slices.indices, slices.dense_shape
    )

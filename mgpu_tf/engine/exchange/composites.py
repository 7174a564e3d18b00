"""Rows of ragged and sparse tensors, which replicas exchange in components."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from mgpu_tf.data.structures import has_rows

COMPOSITES = (tf.RaggedTensor, tf.SparseTensor)


def composites_of(values: Any) -> list[Any]:
    """Returns the ragged and sparse tensors of a structure."""
    leaves = tf.nest.flatten(values)
    return [leaf for leaf in leaves if isinstance(leaf, COMPOSITES)]


def number_of_rows(value: Any) -> tf.Tensor:
    """Returns how many rows a tensor has, an int64 scalar."""
    if isinstance(value, tf.RaggedTensor):
        return tf.cast(value.nrows(), tf.int64)
    if isinstance(value, tf.SparseTensor):
        return value.dense_shape[0]
    return tf.shape(value, out_type=tf.int64)[0]


def own_rows(value: Any, local: tf.Tensor) -> Any:
    """Returns the rows of a replica: none where it computes another one.

    Args:
        value: A tensor, which may be ragged or sparse, with one or more rows
            for each example.
        local: The number of examples of the replica, an int64 scalar.
    """
    if tf.get_static_value(local):
        return value
    count = tf.where(local > 0, number_of_rows(value), 0)
    if isinstance(value, COMPOSITES):
        return part(value, tf.constant(0, tf.int64), count)
    return value[:count]


def without_another(data: Any, local: tf.Tensor) -> Any:
    """Returns the rows of a replica, none in place of another one.

    Args:
        data: What the replica was given to compute with
            (`structures.or_another`).
        local: The number of rows of the replica, an int64 scalar.
    """
    return tf.nest.map_structure(
        lambda leaf: own_rows(leaf, local) if has_rows(leaf) else leaf, data
    )


def joined(
    value: Any,
    cut: Callable[[tf.Tensor], Any],
    gather: Callable[[tf.Tensor, Any], tf.Tensor],
) -> Any:
    """Returns the rows of all replicas. On a replica.

    Args:
        value: A ragged or sparse tensor, with the rows of this replica.
        cut: Returns how entries are divided, given how many this replica has.
        gather: Returns the entries of all replicas, in order, given those of
            this replica and how they are divided.
    """

    def every(entries: tf.Tensor) -> tf.Tensor:
        return gather(entries, cut(tf.shape(entries, out_type=tf.int64)[0]))

    if isinstance(value, tf.RaggedTensor):
        return tf.RaggedTensor.from_nested_row_lengths(
            every(value.flat_values),
            [every(lengths) for lengths in value.nested_row_lengths()],
            validate=False,
        )
    rows = cut(number_of_rows(value))
    lengths = value.dense_shape[tf.newaxis, 1:]
    begin = tf.concat([[rows.low], tf.zeros_like(lengths[0])], 0)
    shape = tf.concat([[rows.total], tf.reduce_max(every(lengths), 0)], 0)
    whole = tf.SparseTensor(
        every(value.indices + begin), every(value.values), shape
    )
    return _as(whole, value)


def part(value: Any, low: tf.Tensor, count: tf.Tensor) -> Any:
    """Returns some rows of a ragged or sparse tensor.

    Args:
        value: The tensor.
        low: The first row, a scalar, int64.
        count: How many, the same.
    """
    if isinstance(value, tf.RaggedTensor):
        return value[low : low + count]
    lengths = value.dense_shape[1:]
    begin = tf.concat([[low], tf.zeros_like(lengths)], 0)
    rows = tf.sparse.slice(value, begin, tf.concat([[count], lengths], 0))
    return _as(rows, value)


def _as(made: tf.SparseTensor, value: tf.SparseTensor) -> tf.SparseTensor:
    """Lets a sparse tensor have the lengths that are known of another."""
    rows, *lengths = tf.unstack(made.dense_shape)
    known = [
        length if static is None else tf.constant(static, tf.int64)
        for length, static in zip(lengths, value.shape[1:], strict=True)
    ]
    return tf.SparseTensor(made.indices, made.values, tf.stack([rows, *known]))

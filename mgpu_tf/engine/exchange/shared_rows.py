"""Rows of a table that all replicas look up alike, beside rows of their own.

    table(words) + table(places)    words: of the rows; places: for all alike

One device looks such rows up once. So their gradient is summed over replicas,
and the first replica alone has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from mgpu_tf.errors import ConfigurationError


def lookups_of(indices: tf.Tensor) -> list[tf.Tensor]:
    """Returns the indices of each lookup whose gradients were joined."""
    op = indices.op
    if op.type == "Identity":
        return lookups_of(op.inputs[0])
    if op.type != "ConcatV2" or tf.get_static_value(op.inputs[-1]) != 0:
        return [indices]
    return [each for part in op.inputs[:-1] for each in lookups_of(part)]


def shared_once(
    gradient: Any,
    is_alike: Callable[[tf.Tensor], bool],
    summed: Callable[[tf.Tensor], tf.Tensor],
    *,
    is_first: bool,
) -> Any:
    """Returns a gradient whose shared rows the first replica alone has.

    Args:
        gradient: Of a weight. On a replica.
        is_alike: Whether indices are the same on all replicas.
        summed: Sums a value over the replicas that look up rows.
        is_first: Whether the replica is the first of these.

    Returns:
        The gradient as it is where all of its lookups are alike, or none is.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    lookups = lookups_of(gradient.indices)
    alike = [*map(is_alike, lookups)]
    if all(alike) or not any(alike):
        return gradient
    lengths = [tf.shape(each)[0] for each in lookups]
    parts = tf.split(gradient.values, tf.stack(lengths), num=len(lookups))
    kept = [
        (values, indices)
        for values, indices, same in zip(parts, lookups, alike, strict=True)
        if not same
    ]
    for values, indices, same in zip(parts, lookups, alike, strict=True):
        if same:
            count = None if is_first else 0
            kept.append((summed(values)[:count], indices[:count]))
    values, indices = zip(*kept, strict=True)
    return tf.IndexedSlices(
        tf.concat(values, 0), tf.concat(indices, 0), gradient.dense_shape
    )


def refuse_mixed(path: str) -> ConfigurationError:
    """Returns the refusal where parts of a batch come one after another."""
    return ConfigurationError(
        "Where a batch is computed in parts, a table is looked up by rows, or "
        "the same for all rows, and not in both ways. Received: "
        f"{path}. Use two tables, or a strategy without a pipeline and no "
        "step_parts."
    )

"""The global batch, on a replica that has rows of it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from mgpu_tf.engine.exchange import composites
from mgpu_tf.engine.exchange.crossing import Cut, Exchange


def of_all(
    exchange: Exchange, data: Any, cut: Cut, *, cuts_each: bool
) -> tuple[Any, dict[int, Cut]]:
    """Returns the global batch. On a replica.

    Args:
        exchange: Of the replicas.
        data: The rows of this replica.
        cut: How rows are divided.
        cuts_each: Whether arrays have numbers of rows of their own.

    Returns:
        The batch, and of its arrays that are cut by a number of rows of their
        own how, by identity.
    """

    def joined(part: Any, cut: Cut) -> Any:
        if isinstance(part, composites.COMPOSITES):
            return composites.joined(part, exchange.cut, exchange.all_rows)
        rows = exchange.all_rows(part, cut)
        return tf.ensure_shape(rows, [None, *part.shape[1:]])

    if not cuts_each:
        every = tf.nest.map_structure(
            lambda part: None if part is None else joined(part, cut), data
        )
        return every, {}
    parts = [
        part
        for part in tf.nest.flatten(data)
        if isinstance(part, tf.Tensor) and part.shape.rank
    ]
    sizes = [tf.shape(part, out_type=tf.int64)[0] for part in parts]
    cuts = {
        id(part): each
        for part, each in zip(parts, exchange.cuts(sizes), strict=True)
    }
    others: dict[int, Cut] = {}

    def whole(part: Any) -> Any:
        if isinstance(part, composites.COMPOSITES):
            return joined(part, cut)
        if id(part) not in cuts:
            return part
        rows = joined(part, cuts[id(part)])
        others[id(rows)] = cuts[id(part)]
        return rows

    return tf.nest.map_structure(whole, data), others

"""Values of the global batch that are functions of sums over the rows.

    found = of_sums(proof, [value], share, exchange)
    found.kinds, found.values         what each is; None where nothing is proven

Replicas add up the sums, which are few numbers, and send each other no rows
(`row_proof/sums.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from mgpu_tf.engine.author.contributions import BatchShare
from mgpu_tf.engine.exchange.crossing import Exchange
from mgpu_tf.engine.row_proof import MEAN, UNPROVEN, Kind, RowProof, SumProof
from mgpu_tf.strategies.replicas.own_gradient import sum_over_replicas


class OfSums(NamedTuple):
    """Values that were computed from sums of all replicas.

    Attributes:
        kinds: What each is over the rows: FIXED is the same on all replicas.
        values: The values.
    """

    kinds: list[Kind]
    values: list[tf.Tensor]


def of_sums(
    proof: RowProof,
    values: Sequence[tf.Tensor],
    share: BatchShare,
    exchange: Exchange | None,
) -> OfSums | None:
    """Computes values of the sums of all replicas. On a replica.

    Args:
        proof: Knows the rows.
        values: What was computed from the rows of this replica.
        share: This replica's part of the global batch.
        exchange: Of the replicas; None where they never step at once.

    Returns:
        The values; None where it is not proven that they are of sums.
    """
    if exchange is None:
        return None
    sums = SumProof(proof)
    kinds = [sums.of(value) for value in values]
    if UNPROVEN in kinds:
        return None

    def added_up(parts: list[tuple[tf.Tensor, Kind]]) -> list[tf.Tensor]:
        held = []
        for part, kind in parts:
            # Numbers of all types travel together.
            value = tf.cast(part, tf.float64)
            if kind == MEAN:
                value *= share.fraction(value.dtype)
            held.append(share.select(value, tf.zeros_like(value)))
        packed = tf.concat([tf.reshape(value, [-1]) for value in held], 0)
        with exchange.apart():
            total = sum_over_replicas(packed)
        total /= tf.cast(share.same_rows, total.dtype)
        sizes = [value.shape.num_elements() for value in held]
        return [
            _cast(tf.reshape(each, part.shape), part.dtype)
            for each, (part, _) in zip(
                tf.split(total, sizes), parts, strict=True
            )
        ]

    return OfSums(kinds, sums.computed(values, added_up))


def _cast(value: tf.Tensor, dtype: Any) -> tf.Tensor:
    """Whole numbers are sums of such, but for rounding."""
    return tf.cast(value if dtype.is_floating else tf.round(value), dtype)

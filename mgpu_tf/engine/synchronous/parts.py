"""Parts of weights and gradients that several processes exchange, in packs.

    parts = scattered(gradients, variables, None)    # the sums of own parts
    values = gathered(variables)                     # whole values, of parts

Both are called on every replica, with the same variables in the same order.
A pack is one collective: in it, what belongs to a rank lies together, each
part with zeros up to the longest of its variable.
"""

from __future__ import annotations

import math

import tensorflow as tf

from mgpu_tf.engine.reduction import of_one_type, packs
from mgpu_tf.strategies.sharded_variable import ShardedVariable


def scattered(
    gradients: list[tf.Tensor],
    variables: list[ShardedVariable],
    dtype: tf.DType | None,
) -> list[tf.Tensor]:
    """Returns this replica's parts of the sums over replicas.

    First the members of a group add up the part of each, then the replicas
    that store the same part.

    Args:
        gradients: This replica's, dense and whole.
        variables: The variable of each.
        dtype: What gradients are sent as, if that is smaller.
    """
    strategy = variables[0].distribute_strategy
    ranks = range(strategy.group.size)
    received: list[tf.Tensor] = list(gradients)
    for places in _packs(variables):
        longest = [_longest(variables[place]) for place in places]
        sent = tf.concat(
            [
                _padded(cut(gradients[p], variables[p], rank, dtype), size)
                for rank in ranks
                for p, size in zip(places, longest, strict=True)
            ],
            0,
        )
        flat = strategy.group.reduce_scatter(sent)
        flat = strategy.copies.all_reduce(flat)
        mine = strategy.group.rank()
        pieces = tf.split(flat, longest)
        for place, piece in zip(places, pieces, strict=True):
            shape = variables[place].split.shape_of(mine)
            piece = tf.reshape(piece[: math.prod(shape)], shape)
            received[place] = tf.cast(piece, gradients[place].dtype)
    return received


def gathered(variables: list[ShardedVariable]) -> list[tf.Tensor]:
    """Returns the whole values of variables.

    Args:
        variables: Variables of which this replica stores parts.
    """
    strategy = variables[0].distribute_strategy
    ranks = range(strategy.group.size)
    values: list[tf.Tensor] = [None] * len(variables)
    for places in _packs(variables):
        longest = [_longest(variables[place]) for place in places]
        sent = tf.concat(
            [
                _padded(variables[place].here().read_value(), size)
                for place, size in zip(places, longest, strict=True)
            ],
            0,
        )
        every = [
            tf.split(flat, longest)
            for flat in tf.split(strategy.group.all_gather(sent), len(ranks))
        ]
        for number, place in enumerate(places):
            split = variables[place].split
            parts = [
                every[rank][number][: math.prod(split.shape_of(rank))]
                for rank in ranks
            ]
            values[place] = tf.reshape(tf.concat(parts, 0), split.shape)
    return values


def cut(
    gradient: tf.Tensor,
    variable: ShardedVariable,
    rank: int,
    dtype: tf.DType | None,
) -> tf.Tensor:
    """Returns the part of a gradient of a rank, in the type it is sent in.

    Args:
        gradient: The whole gradient.
        variable: Its variable.
        rank: The rank.
        dtype: As for `scattered`.
    """
    # Where the rows of a batch are not known, shapes may not be.
    part = variable.part_of(tf.ensure_shape(gradient, variable.shape), rank)
    if dtype is not None and dtype.size < part.dtype.size:
        return tf.cast(part, dtype)
    return part


def _packs(variables: list[ShardedVariable]) -> list[list[int]]:
    sizes = [v.dtype.size * v.shape.num_elements() for v in variables]
    return [
        places
        for pack in packs(sizes)
        for places in of_one_type(pack, variables)
    ]


def _longest(variable: ShardedVariable) -> int:
    """Returns the elements of the largest part of a variable."""
    split = variable.split
    return max(math.prod(split.shape_of(rank)) for rank in range(split.parts))


def _padded(part: tf.Tensor, size: int) -> tf.Tensor:
    """Returns the elements of a part, with zeros up to a number of them."""
    flat = tf.reshape(part, [-1])
    missing = size - flat.shape[0]
    return tf.pad(flat, [[0, missing]]) if missing else flat

"""Parts of weights and gradients that replicas exchange, in packs.

    parts = scattered(gradients, variables, None)    # the sums of own parts
    values = computed(variables)                     # to compute with

Both are called on every replica, with the same variables in the same order.
A pack is one collective: in it, what belongs to a rank of the fsdp axis lies
together, each part with zeros up to the longest of its variable.

What a replica computes with is the whole of a weight, or where layers are
computed in parts its part on the axis of these.
"""

from __future__ import annotations

import math

import tensorflow as tf

from mgpu_tf.engine.reduction import of_one_type, packs
from mgpu_tf.mesh import Split, others_than
from mgpu_tf.strategies.sharded_variable import ShardedVariable, part_of


def scattered(
    gradients: list[tf.Tensor],
    variables: list[ShardedVariable],
    dtype: tf.DType | None,
) -> list[tf.Tensor]:
    """Returns this replica's parts of the sums over replicas.

    First the members of a group add up the part of each, then the replicas
    that store the same part.

    Args:
        gradients: This replica's, dense, of what it computes with.
        variables: The variable of each, all split over the same axes.
        dtype: What gradients are sent as, if that is smaller.
    """
    strategy = variables[0].distribute_strategy
    group = strategy.along("fsdp")
    copies = strategy.along(*others_than(variables[0].split.axes))
    splits = _inner(variables)
    received: list[tf.Tensor] = list(gradients)
    for places in _packs(variables, splits):
        longest = [_longest(splits[place]) for place in places]
        sent = tf.concat(
            [
                _padded(cut(gradients[p], splits[p], rank, dtype), size)
                for rank in range(group.size)
                for p, size in zip(places, longest, strict=True)
            ],
            0,
        )
        flat = copies.all_reduce(group.reduce_scatter(sent))
        pieces = tf.split(flat, longest)
        for place, piece in zip(places, pieces, strict=True):
            shape = splits[place].shape_of(group.rank())
            piece = tf.reshape(piece[: math.prod(shape)], shape)
            received[place] = tf.cast(piece, gradients[place].dtype)
    return received


def computed(variables: list[ShardedVariable]) -> list[tf.Tensor]:
    """Returns what this replica computes with, gathered over the fsdp axis.

    Args:
        variables: Variables of which this replica stores parts.
    """
    values = [variable.here().read_value() for variable in variables]
    places = [
        place
        for place, variable in enumerate(variables)
        if variable.inner() is not None
    ]
    if places:
        whole = _gathered([variables[place] for place in places])
        for place, value in zip(places, whole, strict=True):
            values[place] = value
    return values


def _gathered(variables: list[ShardedVariable]) -> list[tf.Tensor]:
    splits = _inner(variables)
    group = variables[0].distribute_strategy.along("fsdp")
    ranks = range(group.size)
    values: list[tf.Tensor] = [None] * len(variables)
    for places in _packs(variables, splits):
        longest = [_longest(splits[place]) for place in places]
        sent = tf.concat(
            [
                _padded(variables[place].here().read_value(), size)
                for place, size in zip(places, longest, strict=True)
            ],
            0,
        )
        every = [
            tf.split(flat, longest)
            for flat in tf.split(group.all_gather(sent), len(ranks))
        ]
        for number, place in enumerate(places):
            split = splits[place]
            parts = [
                every[rank][number][: math.prod(split.shape_of(rank))]
                for rank in ranks
            ]
            values[place] = tf.reshape(tf.concat(parts, 0), split.shape)
    return values


def cut(
    gradient: tf.Tensor, split: Split, rank: int, dtype: tf.DType | None
) -> tf.Tensor:
    """Returns the part of a gradient of a rank, in the type it is sent in.

    Args:
        gradient: The gradient of what a replica computes with.
        split: How that is divided.
        rank: The rank.
        dtype: As for `scattered`.
    """
    # Where the rows of a batch are not known, shapes may not be.
    part = part_of(tf.ensure_shape(gradient, split.shape), split, rank)
    if dtype is not None and dtype.size < part.dtype.size:
        return tf.cast(part, dtype)
    return part


def _inner(variables: list[ShardedVariable]) -> list[Split]:
    """Returns how what this replica computes with is divided over fsdp."""
    splits = [variable.inner() for variable in variables]
    return [split for split in splits if split is not None]


def _packs(
    variables: list[ShardedVariable], splits: list[Split]
) -> list[list[int]]:
    sizes = [
        variable.dtype.size * math.prod(split.shape)
        for variable, split in zip(variables, splits, strict=True)
    ]
    return [
        places
        for pack in packs(sizes)
        for places in of_one_type(pack, variables)
    ]


def _longest(split: Split) -> int:
    """Returns the elements of the largest part."""
    return max(math.prod(split.shape_of(rank)) for rank in range(split.parts))


def _padded(part: tf.Tensor, size: int) -> tf.Tensor:
    """Returns the elements of a part, with zeros up to a number of them."""
    flat = tf.reshape(part, [-1])
    missing = size - flat.shape[0]
    return tf.pad(flat, [[0, missing]]) if missing else flat

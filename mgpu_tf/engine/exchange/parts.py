"""Parts of weights and gradients that replicas exchange, in packs.

    values = gathered(variables)                  # whole ones, to compute with
    parts = scattered(gradients, variables)       # the sums of own parts

Both are called on every replica, with the same variables in the same order.
What is gathered or scattered together is one collective for each type of
number. In it, what belongs to a rank of the fsdp axis lies together:

    rank 0                       rank 1
    kernel, its part | bias |    kernel, its part | bias |

each part with zeros up to the longest of its variable. A weight that goes alone
is not copied into a pack.

What a replica computes with is the whole of a weight, or where layers are
computed in parts its part on the axis of these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.exchange.reduction import of_one_type, of_shape
from mgpu_tf.mesh import Split, others_than, packs
from mgpu_tf.strategies.replicas.collectives import Groups
from mgpu_tf.strategies.split.sharded_variable import ShardedVariable


class LayerParts:
    """Gathers the weights of a layer, and scatters their gradients.

    Args:
        dtype: What gradients are sent as, if that is smaller.
    """

    def __init__(self, dtype: tf.DType | None) -> None:
        self._dtype = dtype

    def gather(
        self,
        variables: list[keras.Variable],
        dtypes: list[tf.DType],
        after: list[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Returns the whole values of weights in some types. On a replica."""
        held = [keras_internals.stored(variable) for variable in variables]
        # Only reading waits: what other replicas send waits for their own.
        with tf.control_dependencies(after):
            parts = _read(held)
        parts = [
            tf.cast(part, dtype)
            for part, dtype in zip(parts, dtypes, strict=True)
        ]
        return joined(parts, held)

    def scatter(
        self, gradients: list[tf.Tensor], variables: list[keras.Variable]
    ) -> list[tf.Tensor]:
        """Returns own parts of the sums of gradients. On a replica."""
        held = [keras_internals.stored(variable) for variable in variables]
        return scattered(gradients, held, self._dtype)


class LayerCopies:
    """Reads weights of which each replica keeps a whole copy.

    Their gradients stay whole: sums of them may be kept by each replica.
    """

    scatter = None

    def gather(
        self,
        variables: list[keras.Variable],
        dtypes: list[tf.DType],
        after: list[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Returns the whole values of weights. On a replica."""
        del dtypes
        with tf.control_dependencies(after):
            return [
                tf.convert_to_tensor(keras_internals.stored(variable))
                for variable in variables
            ]


def scattered(
    gradients: list[tf.Tensor],
    variables: list[ShardedVariable],
    dtype: tf.DType | None = None,
) -> list[tf.Tensor]:
    """Returns this replica's parts of the sums over replicas.

    First the members of a group add up the part of each, then the replicas
    that store the same part.

    Args:
        gradients: This replica's, dense, of what it computes with.
        variables: The variable of each, all split over the same axes.
        dtype: What gradients are sent as, if that is smaller. They are added
            up in their own type.
    """
    strategy = variables[0].distribute_strategy
    copies = strategy.along(*others_than(variables[0].split.axes))
    splits = _inner(variables)
    received: list[tf.Tensor] = list(gradients)
    for places in of_one_type(list(range(len(gradients))), gradients):
        pack = _Pack([splits[place] for place in places])
        parts = pack.scattered(
            strategy.along("fsdp"),
            copies,
            [gradients[place] for place in places],
            [variables[place].dtype for place in places],
            dtype,
        )
        for place, part in zip(places, parts, strict=True):
            received[place] = part
    return received


def gathered(variables: list[ShardedVariable]) -> list[tf.Tensor]:
    """Returns the whole values of variables, gathered over the fsdp axis.

    Args:
        variables: Variables of which this replica stores parts, all split
            over the fsdp axis.
    """
    return joined(_read(variables), variables)


def joined(
    parts: list[tf.Tensor], variables: list[ShardedVariable]
) -> list[tf.Tensor]:
    """Returns whole values of the parts of all replicas of a group.

    Args:
        parts: This replica's, in the types in which they are sent.
        variables: The variable of each.
    """
    group = variables[0].distribute_strategy.along("fsdp")
    splits = _inner(variables)
    values: list[tf.Tensor] = list(parts)
    for places in of_one_type(list(range(len(parts))), parts):
        pack = _Pack([splits[place] for place in places])
        whole = pack.gathered(group, [parts[place] for place in places])
        for place, value in zip(places, whole, strict=True):
            values[place] = value
    return values


def _read(variables: list[ShardedVariable]) -> list[tf.Tensor]:
    return [variable.here().read_value() for variable in variables]


def in_packs(
    gradients: list[tf.Tensor],
    variables: list[ShardedVariable],
    dtype: tf.DType | None,
) -> list[tf.Tensor]:
    """As `scattered`; what is large goes alone, what is small together."""
    received = list(gradients)
    for places in _packs(variables):
        parts = scattered(
            [gradients[place] for place in places],
            [variables[place] for place in places],
            dtype,
        )
        for place, part in zip(places, parts, strict=True):
            received[place] = part
    return received


def computed(variables: list[ShardedVariable]) -> list[tf.Tensor]:
    """Returns what this replica computes with, gathered over the fsdp axis.

    What is large is gathered alone, what is small together.

    Args:
        variables: Variables of which this replica stores parts.
    """
    values = _read(variables)
    places = [
        place
        for place, variable in enumerate(variables)
        if variable.inner() is not None
    ]
    divided = [variables[place] for place in places]
    for pack in _packs(divided):
        whole = gathered([divided[number] for number in pack])
        for number, value in zip(pack, whole, strict=True):
            values[places[number]] = value
    return values


class _Pack:
    """Variables of one type that travel together, `[ranks, elements]`.

    Args:
        splits: How each is divided over the fsdp axis.
    """

    def __init__(self, splits: Sequence[Split]) -> None:
        self._splits = splits
        self._sizes = [_longest(split) for split in splits]

    def gathered(
        self, group: Groups, parts: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns whole values of the parts of a group. On a replica."""
        if len(parts) == 1:
            split = self._splits[0]
            whole = group.all_gather(parts[0], 0, split.length)
            return [tf.reshape(whole, split.shape)]
        sent = [
            piece
            for part, size in zip(parts, self._sizes, strict=True)
            for piece in _with_zeros(part, size)
        ]
        every = group.all_gather(tf.expand_dims(tf.concat(sent, 0), 0))
        pieces = tf.split(every, self._sizes, 1)
        return list(map(_whole, pieces, self._splits))

    def scattered(
        self,
        group: Groups,
        copies: Groups,
        gradients: list[tf.Tensor],
        owns: list[tf.DType],
        dtype: tf.DType | None,
    ) -> list[tf.Tensor]:
        """Returns a replica's parts of sums, over a group and its copies.

        Args:
            group: The replicas that store the parts.
            copies: Those that store the same parts.
            gradients: This replica's, of one type.
            owns: The types of the weights, in which gradients are added up.
            dtype: As for `scattered`.
        """
        splits = self._splits
        own = max(owns, key=lambda each: each.size)
        sent_as = gradients[0].dtype
        if dtype is not None and dtype.size < sent_as.size:
            sent_as = dtype
        gradients = [
            tf.cast(of_shape(gradient, split.shape), sent_as)
            for gradient, split in zip(gradients, splits, strict=True)
        ]
        if len(gradients) == 1:
            value = gradients[0]
            if not splits[0].by_rows:
                value = tf.reshape(value, [-1])
            return [copies.all_reduce(group.reduce_scatter(value, 0, own))]
        sent = tf.concat(
            [
                _by_rank(gradient, split)
                for gradient, split in zip(gradients, splits, strict=True)
            ],
            1,
        )
        flat = tf.reshape(group.reduce_scatter(sent, 0, own), [-1])
        flat = copies.all_reduce(flat)
        shapes = [split.shape_of(group.rank()) for split in splits]
        lengths = list(map(math.prod, shapes))
        parts = _without_zeros(flat, lengths, self._sizes)
        return [
            tf.cast(tf.reshape(part, shape), dtype)
            for part, shape, dtype in zip(parts, shapes, owns, strict=True)
        ]


def _inner(variables: list[ShardedVariable]) -> list[Split]:
    """Returns how what this replica computes with is divided over fsdp."""
    splits = [variable.inner() for variable in variables]
    return [split for split in splits if split is not None]


def _packs(variables: list[ShardedVariable]) -> list[list[int]]:
    sizes = [
        variable.dtype.size * math.prod(split.shape)
        for variable, split in zip(variables, _inner(variables), strict=True)
    ]
    return packs(sizes)


def _longest(split: Split) -> int:
    """Returns the elements of the largest part."""
    return max(_lengths(split))


def _lengths(split: Split) -> list[int]:
    """Returns the elements of each part."""
    return [math.prod(split.shape_of(rank)) for rank in range(split.parts)]


def _divides(split: Split) -> bool:
    """Whether all parts have as many elements."""
    return split.length % split.parts == 0


def _by_rank(value: tf.Tensor, split: Split) -> tf.Tensor:
    """Returns the parts of a whole value, `[ranks, elements]`."""
    shape = [split.parts, _longest(split)]
    if _divides(split):
        return tf.reshape(value, shape)
    parts = tf.split(tf.reshape(value, [-1]), _lengths(split))
    pieces = [piece for part in parts for piece in _with_zeros(part, shape[1])]
    return tf.reshape(tf.concat(pieces, 0), shape)


def _whole(every: tf.Tensor, split: Split) -> tf.Tensor:
    """Returns the whole value of parts, `[ranks, elements]`."""
    if _divides(split):
        return tf.reshape(every, split.shape)
    flat, longest = tf.reshape(every, [-1]), [_longest(split)] * split.parts
    pieces = _without_zeros(flat, _lengths(split), longest)
    return tf.reshape(tf.concat(pieces, 0), split.shape)


def _with_zeros(part: tf.Tensor, size: int) -> list[tf.Tensor]:
    """Returns the elements of a part, and zeros up to a number of them."""
    flat = part if part.shape.rank == 1 else tf.reshape(part, [-1])
    missing = size - flat.shape[0]
    return [flat, tf.zeros([missing], flat.dtype)] if missing else [flat]


def _without_zeros(
    flat: tf.Tensor, lengths: list[int], sizes: list[int]
) -> list[tf.Tensor]:
    """Returns the elements of parts that lie one after another.

    Args:
        flat: The parts, each with zeros up to its size.
        lengths: How many elements each has.
        sizes: The same with the zeros.
    """
    cut = [
        length
        for own, size in zip(lengths, sizes, strict=True)
        for length in (own, size - own)
    ]
    return tf.split(flat, cut)[::2]

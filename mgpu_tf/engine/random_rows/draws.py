"""Rows of a random tensor, without the others.

The generator is Philox: element k of a draw comes from the counter
`base + k // per`, whatever the shape. So the rows of a replica are

    elements [start, start + n) of the whole     start = low * row
    = elements [rest, rest + n) of a draw        rest = start % per
      whose counter begins start // per later

at the cost of these rows. Where the order of elements is another, the whole is
drawn and cut: it costs as much as one device pays.

Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

# A function of (shape, key, counter).
RawDraw = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]


def by_counter(
    draw: RawDraw,
    shape: tf.Tensor,
    seed: tf.Tensor,
    row: int | tf.Tensor,
    low: tf.Tensor,
    per: int,
    stride: int = 1,
) -> tf.Tensor:
    """Draws rows on the first axis.

    Args:
        draw: Draws a tensor.
        shape: The shape of the rows, int64.
        seed: The seed of the whole draw, `[2]`.
        row: Elements for each example, an integer or a tensor.
        low: The first example.
        per: Elements that share a counter.
        stride: How far the counter moves for them.

    Returns:
        The rows.
    """
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    start = low * row
    counter = _advanced(counter, start // per * stride)
    if isinstance(row, int) and row % per == 0:
        return draw(shape, key, counter)
    count = tf.reduce_prod(shape)
    flat = draw([count + per - 1], key, counter)
    return tf.reshape(tf.slice(flat, [start % per], [count]), shape)


def by_cutting(
    draw: Callable[[tf.Tensor], tf.Tensor],
    shape: tf.Tensor,
    axis: int,
    bounds: tuple[tf.Tensor, tf.Tensor],
) -> tf.Tensor:
    """Draws the whole batch, and takes the rows.

    Args:
        draw: Draws a tensor of a shape.
        shape: The shape of the rows, int64.
        axis: Where the rows are.
        bounds: The first row, and how many the whole has.

    Returns:
        The rows.
    """
    first, total = bounds
    where = tf.one_hot(axis, shape.shape[0], dtype=tf.int64)
    whole = draw(shape + where * (total - shape[axis]))
    return tf.slice(whole, where * first, shape)


def in_place_of_rows(
    parameter: Any,
    shape: tf.Tensor,
    axis: int,
    bounds: tuple[tf.Tensor, tf.Tensor],
) -> tf.Tensor:
    """Returns a parameter of a draw at the place of its rows, among ones.

    Each element of a draw has numbers of its own, so that it does not depend
    on the parameters of others.

    Args:
        parameter: Of the rows; or without rows, which is returned as it is.
        shape: The shape of the draw.
        axis: Where the rows are.
        bounds: The first row, and how many the whole has.
    """
    parameter = tf.convert_to_tensor(parameter)
    dimension = parameter.shape.rank - int(shape.shape[0]) + axis
    if dimension < 0 or parameter.shape[dimension] == 1:
        return parameter
    first, total = bounds
    after = total - first - shape[axis]
    paddings = [[tf.zeros([], tf.int64)] * 2 for _ in parameter.shape]
    paddings[dimension] = [first, after]
    return tf.pad(parameter, paddings, constant_values=1)


def _advanced(counter: tf.Tensor, skip: tf.Tensor) -> tf.Tensor:
    """Adds to a counter of 128 bits in two words, the low one first."""
    low = counter[0] + tf.cast(skip, tf.uint64)
    carry = tf.cast(low < counter[0], tf.uint64)
    return tf.stack([low, counter[1] + carry])

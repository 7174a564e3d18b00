"""The sum of gradients over replicas, in packs: by one rule everywhere.

A pack (`packs` in `mgpu_tf/mesh.py`) is one reduction. It begins as soon as the
backward pass has made its gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from mgpu_tf.mesh import packs
from mgpu_tf.options import StepOptions
from mgpu_tf.strategies.replicas.collectives import Groups
from mgpu_tf.strategies.replicas.own_gradient import sum_over_replicas


class Reduction:
    """Sums dense gradients over the replicas of a strategy.

    Args:
        options: How steps are computed. With `gradient_dtype` gradients are
            sent with half the bytes. Each worker that adds its part rounds
            the sum to that type, which for two workers is as exact as a sum
            in float32 that is sent back in it. The update itself is computed
            from the gradients' own type.
        groups: Sums over the members of a group. Default: over all replicas.
    """

    def __init__(
        self,
        options: StepOptions,
        groups: Groups | None = None,
    ) -> None:
        self._groups = groups
        name = options.gradient_dtype
        self._dtype = tf.as_dtype(name) if name else None

    def __call__(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums gradients. On a replica."""
        if self._groups is not None and self._groups.size == 1:
            return gradients
        sent = [self._sent(gradient) for gradient in gradients]
        summed = self._summed(sent)
        return [
            tf.cast(value, gradient.dtype)
            for value, gradient in zip(summed, gradients, strict=True)
        ]

    def _summed(self, sent: list[tf.Tensor]) -> list[tf.Tensor]:
        if self._groups is not None:
            return _in_packs(sent, self._groups.all_reduce)
        return _in_packs(sent, sum_over_replicas)

    def _sent(self, gradient: tf.Tensor) -> tf.Tensor:
        if self._dtype is None or gradient.dtype.size <= self._dtype.size:
            return gradient
        return tf.cast(gradient, self._dtype)


def _in_packs(
    gradients: list[tf.Tensor], all_reduce: Callable[[tf.Tensor], tf.Tensor]
) -> list[tf.Tensor]:
    summed = list(gradients)
    sizes = [
        gradient.dtype.size * gradient.shape.num_elements()
        for gradient in gradients
    ]
    for pack in packs(sizes):
        for places in of_one_type(pack, gradients):
            parts = [gradients[place] for place in places]
            if len(parts) == 1:
                summed[places[0]] = all_reduce(parts[0])
                continue
            flat = tf.concat([_reshaped(part, [-1]) for part in parts], 0)
            flat = all_reduce(flat)
            counts = [part.shape.num_elements() for part in parts]
            for place, part in zip(places, tf.split(flat, counts), strict=True):
                summed[place] = _reshaped(part, gradients[place].shape)
    return summed


def _reshaped(value: tf.Tensor, shape: Any) -> tf.Tensor:
    """Returns a value in a shape; itself where it is a vector of that size.

    A model has hundreds of vectors, and each operation is one in the graph of
    each replica.
    """
    vector = value.shape.rank == 1 and len(shape) == 1
    return value if vector else tf.reshape(value, shape)


def of_shape(gradient: tf.Tensor, shape: Any) -> tf.Tensor:
    """Returns a gradient whose graph knows the shape of its weight.

    Where the rows of a batch are not known, it may not.
    """
    if gradient.shape == shape:
        return gradient
    return tf.ensure_shape(gradient, shape)


def of_one_type(pack: list[int], gradients: list[tf.Tensor]) -> list[list[int]]:
    """Returns the gradients of a pack, those of each type together."""
    kinds: dict[tf.DType, list[int]] = {}
    for place in pack:
        kinds.setdefault(gradients[place].dtype, []).append(place)
    return list(kinds.values())

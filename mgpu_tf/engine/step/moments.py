"""The statistics that BatchNormalization takes, while a step is traced.

Keras's own reduces them over replicas, where a layer is synchronized, but not
those of inputs with a mask, and in a way that keeps graphs in memory. Here

    mean       sum over replicas of the sums of what is not masked out
               / how many they are (with a mask, + epsilon)
    variance   the same of the squared differences

are as on one device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.author.contributions import current_share
from mgpu_tf.engine.author.step_scope import is_read_inside
from mgpu_tf.engine.exchange.composites import own_rows
from mgpu_tf.strategies.replicas.own_gradient import sum_over_replicas


class Moments:
    """The statistics of a model's layers in one step of a replica.

    Args:
        model: A built model.
        replicas: Number of replicas that step together.
        same_rows: How many replicas have the same rows.
    """

    def __init__(
        self, model: keras.Model, replicas: int, same_rows: int = 1
    ) -> None:
        self._model = model
        self._replicas = replicas
        self._same_rows = same_rows

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Lets the layers take them so. Outside of replicas."""
        if self._replicas == 1:
            with contextlib.ExitStack() as stack:
                # Each replica has all rows: there is nothing to exchange.
                if self._same_rows > 1:
                    stack.enter_context(
                        keras_internals.moments_replaced(
                            self._model, _take_alone
                        )
                    )
                yield
            return
        with keras_internals.moments_replaced(self._model, self._take):
            yield

    def _take(
        self,
        layer: keras.layers.Layer,
        keras_own: Callable[..., Any],
        inputs: tf.Tensor,
        mask: Any,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        share = current_share()
        if layer.synchronized and share is not None:
            inputs = own_rows(inputs, share.local)
            mask = mask if mask is None else own_rows(mask, share.local)
        kept = [layer.axis % inputs.shape.rank]
        if layer.synchronized:
            # Within functions, replicas exchange nothing.
            is_read_inside([layer.moving_mean])
        if share is None:
            # Gradients of a replica without an example are dropped, and so
            # would be what flows to it from the sums.
            return _take_alone(layer, keras_own, inputs, mask)
        if not layer.synchronized:
            return keras_own(inputs, mask)
        if mask is None:
            return _of_all(inputs, kept)
        return _masked(inputs, mask, kept, share.same_rows)


def _take_alone(
    layer: keras.layers.Layer,
    keras_own: Callable[..., Any],
    inputs: tf.Tensor,
    mask: Any,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and variance of this replica's rows, which are all there are.

    Of a synchronized layer, as Keras takes them: the mean within the variance
    is no constant to gradients of gradients.
    """
    if layer.synchronized and mask is None:
        kept = [layer.axis % inputs.shape.rank]
        return _of_all(inputs, kept, lambda own: own)
    return keras_own(inputs, mask)


def normalizations(
    model: keras.Model,
) -> list[keras.layers.BatchNormalization]:
    """Returns the layers of a model that normalize by a batch."""
    return [
        layer
        for layer in keras_internals.layers_of(model)
        if isinstance(layer, keras.layers.BatchNormalization)
    ]


def _of_all(
    inputs: tf.Tensor,
    kept: list[int],
    summed: Callable[[Any], Any] = sum_over_replicas,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and variance of the rows of all replicas."""
    dtype = inputs.dtype
    if dtype.size < tf.float32.size:
        inputs = tf.cast(inputs, tf.float32)
    axes = [axis for axis in range(inputs.shape.rank) if axis not in kept]
    own = tf.reduce_sum(inputs, axes, keepdims=True)
    size = tf.size(inputs) // tf.maximum(tf.size(own), 1)
    total, count = summed([own, tf.cast(size, inputs.dtype)])
    mean = tf.math.divide_no_nan(total, count)
    squares = tf.reduce_sum(tf.square(inputs - mean), axes, keepdims=True)
    variance = tf.math.divide_no_nan(summed(squares), count)
    return (
        tf.cast(tf.squeeze(mean, axes), dtype),
        tf.cast(tf.squeeze(variance, axes), dtype),
    )


def _masked(
    inputs: tf.Tensor, mask: tf.Tensor, kept: list[int], same_rows: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and variance of what is not masked out, over all replicas."""
    axes = [axis for axis in range(inputs.shape.rank) if axis not in kept]
    mask = tf.cast(mask, tf.bool)[..., tf.newaxis]
    mask = tf.broadcast_to(mask, tf.shape(inputs))

    def total(values: tf.Tensor) -> tf.Tensor:
        local = tf.reduce_sum(values, axes, keepdims=True)
        return sum_over_replicas(local)

    # Each row counts so many times, and so does what Keras adds to the count.
    epsilon = tf.cast(same_rows * keras.config.epsilon(), inputs.dtype)
    count = total(tf.cast(mask, inputs.dtype)) + epsilon
    nothing = tf.zeros([], inputs.dtype)
    mean = total(tf.where(mask, inputs, nothing)) / count
    squares = tf.square(tf.where(mask, inputs - mean, nothing))
    return tf.squeeze(mean), tf.squeeze(total(squares) / count)

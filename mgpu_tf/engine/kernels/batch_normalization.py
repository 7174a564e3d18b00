"""Keras's BatchNormalization as one operation.

Keras takes mean and variance, and scales and shifts, in elementary operations.
`FusedBatchNormV3` and its gradient do the same in fewer passes over memory.
Keras's moving variance is that of the batch divided by n; TensorFlow's
operation returns that divided by n - 1.

Keras takes the variance by `tf.nn.moments`, in which the mean counts as a
constant, unless the layer is synchronized. That changes no gradient, but
gradients of gradients. TensorFlow's operation has those of the true function,
so in training a gradient of the gradient is computed by Keras's formula.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.runtime import determinism
from mgpu_tf.strategies.replicas.own_gradient import own_gradient

# What TensorFlow raises a smaller epsilon to on GPUs.
LEAST_EPSILON = 1.001e-5
DTYPES = ("float32", "float16", "bfloat16")
RANKS = (2, 3, 4, 5)


def is_same(layer: keras.layers.Layer, replicas: int) -> bool:
    """Returns whether the fused form computes what a built layer does.

    The fused form takes no mask. A call with a mask is one of Keras's own.

    Args:
        layer: Any layer.
        replicas: How many step together. A synchronized layer sees the rows
            of all of them.
    """
    if type(layer) is not keras.layers.BatchNormalization or not layer.built:
        return False
    rank = layer.input_spec.ndim
    return (
        rank in RANKS
        and layer.axis in (-1, rank - 1)
        and not (layer.synchronized and replicas > 1)
        and not layer.renorm
        and layer.epsilon >= LEAST_EPSILON
        and layer.compute_dtype in DTYPES
        and all(weight.dtype == "float32" for weight in layer.weights)
    )


def call(
    layer: keras.layers.BatchNormalization,
    own: Callable[..., Any],
    inputs: Any,
    training: Any = None,
    mask: Any = None,
) -> tuple[Any, bool]:
    """Calls a layer.

    Args:
        layer: A layer, of which `is_same` holds.
        own: Its own `call`.
        inputs: As for its own.
        training: As for its own.
        mask: As for its own.

    Returns:
        The outputs, and whether they are of the fused form.
    """
    training = bool(training) and layer.trainable
    fits = (
        mask is None
        and isinstance(inputs, tf.Tensor)
        and inputs.dtype == layer.compute_dtype
        # TensorFlow has no gradient that repeats on GPUs for fixed statistics.
        and (training or not determinism.is_enabled())
    )
    if not fits:
        return own(inputs, training=training, mask=mask), False
    return _fused(layer, inputs, training), True


def _fused(
    layer: keras.layers.BatchNormalization, inputs: tf.Tensor, training: bool
) -> tf.Tensor:
    moving_mean = tf.convert_to_tensor(layer.moving_mean)
    moving_variance = tf.convert_to_tensor(layer.moving_variance)
    rank = inputs.shape.rank
    # Rows keep the first axis, channels the last.
    added = list(range(1, 1 + max(4 - rank, 0)))
    images = inputs
    for axis in added:
        images = tf.expand_dims(images, axis)
    scale = (
        tf.convert_to_tensor(layer.gamma)
        if layer.scale
        else tf.ones_like(moving_mean)
    )
    offset = (
        tf.convert_to_tensor(layer.beta)
        if layer.center
        else tf.zeros_like(moving_mean)
    )
    if training:
        outputs, mean, variance = _by_batch(layer, images, scale, offset)
        kept, new = layer.momentum, 1.0 - layer.momentum
        size = tf.size(inputs, tf.int64) // inputs.shape[-1]
        count = tf.cast(tf.maximum(size, 2), variance.dtype)
        # That of a single value is zero; GPUs have divided by n - 1.
        variance = tf.where(
            size == 1, tf.zeros_like(variance), variance * (count - 1.0) / count
        )
        layer.moving_mean.assign(moving_mean * kept + mean * new)
        layer.moving_variance.assign(moving_variance * kept + variance * new)
    else:
        outputs, *_ = tf.raw_ops.FusedBatchNormV3(
            x=images,
            scale=scale,
            offset=offset,
            mean=moving_mean,
            variance=moving_variance,
            epsilon=layer.epsilon,
            data_format=_format_of(images),
            is_training=False,
        )
    return tf.squeeze(outputs, added) if added else outputs


def _by_batch(
    layer: keras.layers.BatchNormalization,
    images: tf.Tensor,
    scale: tf.Tensor,
    offset: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns outputs, and the mean and variance of the batch."""
    # What the gradients need, which are taken later.
    epsilon, synchronized = layer.epsilon, layer.synchronized
    options = {
        "epsilon": epsilon,
        "data_format": _format_of(images),
        "is_training": True,
    }

    @own_gradient
    def normalize(
        images: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor
    ) -> tuple[Any, Callable[..., Any]]:
        empty = tf.zeros([0])
        outputs, mean, variance, *reserved = tf.raw_ops.FusedBatchNormV3(
            x=images,
            scale=scale,
            offset=offset,
            mean=empty,
            variance=empty,
            **options,
        )

        @own_gradient
        def first(*given: tf.Tensor) -> tuple[Any, Callable[..., Any]]:
            upstream, images, scale = given
            found = tf.raw_ops.FusedBatchNormGradV3(
                y_backprop=upstream,
                x=images,
                scale=scale,
                **{
                    f"reserve_space_{number}": tensor
                    for number, tensor in enumerate(reserved, 1)
                },
                **options,
            )

            def second(*bent: tf.Tensor) -> Any:
                with tf.GradientTape() as tape:
                    tape.watch(given)
                    again = _gradient_of_keras(
                        upstream, images, scale, epsilon, synchronized
                    )
                return tape.gradient(again, given, bent)

            return tuple(found[:3]), second

        return (
            (outputs, mean, variance),
            lambda upstream, *_: first(upstream, images, scale),
        )

    outputs, mean, variance = normalize(images, scale, offset)
    return outputs, mean, variance


def _gradient_of_keras(
    upstream: tf.Tensor,
    images: tf.Tensor,
    scale: tf.Tensor,
    epsilon: float,
    synchronized: bool,
) -> list[tf.Tensor]:
    """Returns gradients of images, scale and offset of Keras's formula."""
    offset = tf.zeros_like(scale)
    given = [images, scale, offset]
    axes = list(range(images.shape.rank - 1))
    with tf.GradientTape() as tape:
        tape.watch(given)
        # Keras computes in float32 at least.
        wide = tf.cast(images, tf.float32)
        mean = tf.reduce_mean(wide, axes)
        center = mean if synchronized else tf.stop_gradient(mean)
        variance = tf.reduce_mean(tf.square(wide - center), axes)
        outputs = tf.nn.batch_normalization(
            wide, mean, variance, offset, scale, epsilon
        )
        outputs = tf.cast(outputs, images.dtype)
    gradients: list[tf.Tensor] = tape.gradient(outputs, given, upstream)
    return gradients


def _format_of(images: tf.Tensor) -> str:
    return "NDHWC" if images.shape.rank == 5 else "NHWC"

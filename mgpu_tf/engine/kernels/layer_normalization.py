"""Keras's LayerNormalization with a gradient of its own.

The gradient that TensorFlow derives from Keras's operations takes more passes
over memory than the formula, which is in Ba, Kiros and Hinton, "Layer
Normalization" (2016), of what is normalized:

    inputs' = inverse * (scaled - mean(scaled)
                         - normalized * mean(scaled * normalized))

where `scaled` is the gradient of the outputs times gamma. Keras takes the
variance by `tf.nn.moments`, in which the mean counts as a constant. That
changes no gradient, but gradients of gradients, so it is one here too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.strategies.replicas.own_gradient import own_gradient


def is_same(layer: keras.layers.Layer, replicas: int) -> bool:
    """Returns whether this form computes what a built layer does.

    Args:
        layer: Any layer.
        replicas: How many step together; each normalizes its own rows.
    """
    del replicas
    return (
        type(layer) is keras.layers.LayerNormalization
        and layer.built
        and not layer.rms_scaling
        and len(layer.axis) == 1
    )


def call(
    layer: keras.layers.LayerNormalization,
    own: Callable[..., Any],
    inputs: Any,
) -> tuple[Any, bool]:
    """Calls a layer.

    Args:
        layer: A layer, of which `is_same` holds.
        own: Its own `call`.
        inputs: As for its own.

    Returns:
        The outputs, and whether they are of this form.
    """
    fits = (
        isinstance(inputs, tf.Tensor)
        and inputs.shape.rank is not None
        and layer.axis[0] in (-1, inputs.shape.rank - 1)
    )
    if not fits:
        return own(inputs), False
    # Keras computes in float32 at least.
    wide = tf.float64 if inputs.dtype == tf.float64 else tf.float32
    values = tf.cast(inputs, wide)
    shape = tf.shape(values)[-1:]
    gamma = tf.ones(shape, wide)
    beta = tf.zeros(shape, wide)
    if layer.scale:
        gamma = tf.cast(tf.convert_to_tensor(layer.gamma), wide)
    if layer.center:
        beta = tf.cast(tf.convert_to_tensor(layer.beta), wide)
    outputs = _normalized(values, gamma, beta, layer.epsilon)
    return tf.cast(outputs, layer.compute_dtype), True


def _normalized(
    inputs: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, epsilon: float
) -> tf.Tensor:
    @own_gradient
    def normalize(
        inputs: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor
    ) -> tuple[tf.Tensor, Callable[..., Any]]:
        mean = _mean(inputs)
        apart = inputs - tf.stop_gradient(mean)
        inverse = tf.math.rsqrt(_mean(tf.square(apart)) + epsilon)
        normalized = (inputs - mean) * inverse

        def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, ...]:
            rows = list(range(upstream.shape.rank - 1))
            scaled = upstream * gamma
            of_inputs = inverse * (
                scaled
                - _mean(scaled)
                - apart * inverse * _mean(scaled * normalized)
            )
            return (
                of_inputs,
                tf.reduce_sum(upstream * normalized, rows),
                tf.reduce_sum(upstream, rows),
            )

        return normalized * gamma + beta, gradient

    return normalize(inputs, gamma, beta)


def _mean(values: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(values, -1, keepdims=True)

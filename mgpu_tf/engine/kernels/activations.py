"""Keras's GELU with a gradient of its own.

    gelu(x) = x * phi(x),  gelu'(x) = phi(x) + x * density(x)

with the distribution function and the density of the standard normal
(Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016). The gradient that
TensorFlow derives takes more passes over memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from mgpu_tf.strategies.replicas.own_gradient import own_gradient


def is_gelu(layer: keras.layers.Layer) -> bool:
    """Returns whether a layer ends with Keras's GELU, not approximated."""
    return getattr(layer, "activation", None) is keras.activations.gelu


def gelu(inputs: tf.Tensor) -> tf.Tensor:
    """Returns GELU of a tensor of floats, of the same shape and type."""
    # TensorFlow rounds it to float32, for float64 too.
    scale = float(np.float32(math.sqrt(0.5)))

    @own_gradient
    def of(inputs: tf.Tensor) -> tuple[tf.Tensor, Callable[..., tf.Tensor]]:
        phi = 0.5 * tf.math.erfc(-inputs * scale)

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            density = tf.exp(-tf.square(inputs * scale))
            density *= scale / math.sqrt(math.pi)
            return upstream * (phi + inputs * density)

        return inputs * phi, gradient

    return of(inputs)

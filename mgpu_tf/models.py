"""A small zoo of classifiers that need no download.

    model = create_model("cnn", input_shape=(8, 8, 1), num_classes=10)

Models take values of 0 to 1, come uncompiled and end in logits. Any strategy
trains them to the same weights: there is no Dropout and no statistic over the
batch, and what is computed is smooth. (Where a rectifier or a maximum meets a
tie, as plain background makes many, rounding decides which way a gradient
takes, and the curves of two strategies part at the sixth digit.)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import keras
from keras import layers

from mgpu_tf.errors import ConfigurationError, unknown_name

Shape = tuple[int, ...]

_SMOOTH = {"activation": "gelu", "kernel_initializer": "he_normal"}


def mlp(input_shape: Shape, num_classes: int) -> keras.Model:
    """Two hidden layers of 128 units.

    Args:
        input_shape: Shape of an example, any rank.
        num_classes: Size of the output.

    Returns:
        A model from `[batch, *input_shape]` to logits `[batch, num_classes]`.
    """
    inputs = keras.Input(input_shape)
    hidden = layers.Rescaling(2.0, offset=-1.0)(inputs)
    hidden = layers.Reshape((math.prod(input_shape),))(hidden)
    for _ in range(2):
        hidden = layers.Dense(128, **_SMOOTH)(hidden)
    outputs = layers.Dense(num_classes)(hidden)
    return keras.Model(inputs, outputs, name="mlp")


def cnn(input_shape: Shape, num_classes: int) -> keras.Model:
    """Three 3x3 convolutions, one pooling, one hidden layer.

    Args:
        input_shape: `(height, width, channels)`, sides of 2 or more.
        num_classes: Size of the output.

    Returns:
        A model from `[batch, height, width, channels]` to logits
        `[batch, num_classes]`.

    Raises:
        ConfigurationError: The examples are not images.
    """
    if len(input_shape) != 3 or min(input_shape[:2]) < 2:
        raise ConfigurationError(
            "The model 'cnn' takes images of shape (height, width, "
            f"channels). Received: input_shape={input_shape}. Use 'mlp'."
        )
    inputs = keras.Input(input_shape)
    hidden = layers.Rescaling(2.0, offset=-1.0)(inputs)
    for _ in range(2):
        hidden = layers.Conv2D(32, 3, padding="same", **_SMOOTH)(hidden)
    hidden = layers.AveragePooling2D(2)(hidden)
    hidden = layers.Conv2D(64, 3, padding="same", **_SMOOTH)(hidden)
    hidden = layers.Flatten()(hidden)
    hidden = layers.Dense(128, **_SMOOTH)(hidden)
    outputs = layers.Dense(num_classes)(hidden)
    return keras.Model(inputs, outputs, name="cnn")


_MODELS: dict[str, Callable[[Shape, int], keras.Model]] = {
    "mlp": mlp,
    "cnn": cnn,
}


def create_model(
    name: str, input_shape: Shape, num_classes: int
) -> keras.Model:
    """Creates a model by name.

    Args:
        name: `mlp` or `cnn`.
        input_shape: Shape of an example.
        num_classes: Size of the output.

    Returns:
        The model, not compiled.

    Raises:
        ConfigurationError: The name is unknown, or the shape does not fit.
    """
    if name not in _MODELS:
        raise ConfigurationError(unknown_name("model", name, _MODELS))
    return _MODELS[name](input_shape, num_classes)

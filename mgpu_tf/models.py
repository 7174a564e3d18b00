"""A small zoo of classifiers that need no download.

    model = create_model("cnn", input_shape=(8, 8, 1), num_classes=10)

Models come uncompiled and end in logits. None has Dropout or statistics that
replicas would not agree on, so any strategy trains them to the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import keras
from keras import layers

from mgpu_tf.errors import ConfigurationError, unknown_name

Shape = tuple[int, ...]


def mlp(input_shape: Shape, num_classes: int) -> keras.Model:
    """Two hidden layers of 128 units.

    Args:
        input_shape: Shape of an example, any rank.
        num_classes: Size of the output.

    Returns:
        A model from `[batch, *input_shape]` to logits `[batch, num_classes]`.
    """
    inputs = keras.Input(input_shape)
    hidden = layers.Reshape((math.prod(input_shape),))(inputs)
    for _ in range(2):
        hidden = layers.Dense(128, activation="relu")(hidden)
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
    hidden = inputs
    for filters in (32, 32):
        hidden = layers.Conv2D(filters, 3, padding="same", activation="relu")(
            hidden
        )
    hidden = layers.MaxPooling2D()(hidden)
    hidden = layers.Conv2D(64, 3, padding="same", activation="relu")(hidden)
    hidden = layers.Flatten()(hidden)
    hidden = layers.Dense(128, activation="relu")(hidden)
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

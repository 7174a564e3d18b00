"""A zoo of classifiers that need no download.

    model = create_model("cnn", input_shape=(8, 8, 1), num_classes=10)
    model = create_model("resnet/56", input_shape=(32, 32, 3), num_classes=10)
    model = create_model("MobileNetV2", (96, 96, 3), 10)

Models take values of 0 to 1, come uncompiled and end in logits. Those of this
package are trained by any strategy to the same weights: there is no Dropout,
statistics are taken over all replicas, and what `mlp`, `cnn` and
`transformer` compute is smooth. (Where a rectifier or a maximum meets a tie,
as plain background makes many, rounding decides which way a gradient takes,
and the curves of two strategies part at the sixth digit.) Those of
`keras.applications` are as Keras has them, with random weights.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

import keras
from keras import layers

from mgpu_tf.errors import ConfigurationError, unknown_name
from mgpu_tf.fields import checked
from mgpu_tf.names import APPLICATIONS

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
    _check_images("cnn", input_shape, 2)
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


def resnet(
    input_shape: Shape,
    num_classes: int,
    depth: int = 20,
    *,
    zero_init_residual: bool = False,
) -> keras.Model:
    """A residual network for small images.

    Three stages of (depth - 2) / 6 blocks with 16, 32 and 64 filters;
    BatchNormalization is synchronized.

    References:
        K. He et al.: Deep Residual Learning for Image Recognition, 2015,
        section 4.2, with the blocks of Identity Mappings in Deep Residual
        Networks, 2016.

    Args:
        input_shape: `(height, width, channels)`, sides of 4 or more.
        num_classes: Size of the output.
        depth: 6 n + 2.
        zero_init_residual: Whether each block begins as the identity. Where a
            block ends in BatchNormalization, its gamma is set to 0 for that.
            These blocks end in a convolution: its kernel is set to 0, since a
            gamma of 0 before a rectifier would never get a gradient.

    Returns:
        A model from `[batch, height, width, channels]` to logits
        `[batch, num_classes]`.

    Raises:
        ConfigurationError: The examples are not images.
    """
    _check_images("resnet", input_shape, 4)
    inputs = keras.Input(input_shape)
    hidden = layers.Rescaling(2.0, offset=-1.0)(inputs)
    hidden = _convolution(16)(hidden)
    for filters in (16, 32, 64):
        for block in range((depth - 2) // 6):
            halve = filters > 16 and block == 0
            hidden = _residual(
                hidden, filters, 2 if halve else 1, zero_init_residual
            )
    hidden = layers.Activation("relu")(_normalized(hidden))
    hidden = layers.GlobalAveragePooling2D()(hidden)
    outputs = layers.Dense(num_classes)(hidden)
    return keras.Model(inputs, outputs, name=f"resnet{depth}")


def transformer(input_shape: Shape, num_classes: int) -> keras.Model:
    """Two blocks of self-attention, 64 wide, with 4 heads.

    The first dimension of an example is its sequence: the rows of an image,
    the columns of a table.

    References:
        A. Vaswani et al.: Attention Is All You Need, 2017, with the
        normalization first, as in R. Xiong et al.: On Layer Normalization in
        the Transformer Architecture, 2020.

    Args:
        input_shape: Shape of an example, any rank.
        num_classes: Size of the output.

    Returns:
        A model from `[batch, *input_shape]` to logits `[batch, num_classes]`.
    """
    length = input_shape[0]
    width = 64
    inputs = keras.Input(input_shape)
    hidden = layers.Rescaling(2.0, offset=-1.0)(inputs)
    hidden = layers.Reshape((length, math.prod(input_shape[1:])))(hidden)
    hidden = layers.Dense(width)(hidden)
    hidden = _Positions(length, width)(hidden)
    for _ in range(2):
        query = layers.LayerNormalization()(hidden)
        attention = layers.MultiHeadAttention(4, width // 4)(query, query)
        hidden = layers.Add()([hidden, attention])
        wide = layers.LayerNormalization()(hidden)
        wide = layers.Dense(2 * width, activation="gelu")(wide)
        hidden = layers.Add()([hidden, layers.Dense(width)(wide)])
    hidden = layers.LayerNormalization()(hidden)
    hidden = layers.GlobalAveragePooling1D()(hidden)
    outputs = layers.Dense(num_classes)(hidden)
    return keras.Model(inputs, outputs, name="transformer")


@keras.saving.register_keras_serializable("mgpu_tf")
class _Positions(layers.Layer):
    """Adds what is learned for each place of a sequence."""

    def __init__(self, length: int, width: int, **options: object) -> None:
        super().__init__(**options)
        self._length, self._width = length, width

    def build(self, input_shape: object) -> None:
        self._table = self.add_weight(
            shape=(self._length, self._width),
            initializer=keras.initializers.RandomNormal(stddev=0.02),
            name="positions",
        )

    def call(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        return inputs + self._table

    def get_config(self) -> dict[str, object]:
        own = {"length": self._length, "width": self._width}
        return super().get_config() | own


def _residual(
    inputs: keras.KerasTensor, filters: int, strides: int, zero: bool
) -> keras.KerasTensor:
    hidden = layers.Activation("relu")(_normalized(inputs))
    shortcut = inputs
    if strides > 1 or inputs.shape[-1] != filters:
        shortcut = _convolution(filters, 1, strides)(hidden)
    hidden = _convolution(filters, 3, strides)(hidden)
    hidden = layers.Activation("relu")(_normalized(hidden))
    last = _convolution(filters, initializer="zeros" if zero else "he_normal")
    return layers.Add()([shortcut, last(hidden)])


def _convolution(
    filters: int,
    size: int = 3,
    strides: int = 1,
    initializer: str = "he_normal",
) -> layers.Layer:
    return layers.Conv2D(
        filters,
        size,
        strides,
        padding="same",
        use_bias=False,
        kernel_initializer=initializer,
    )


def _normalized(inputs: keras.KerasTensor) -> keras.KerasTensor:
    return layers.BatchNormalization(synchronized=True)(inputs)


def _check_images(name: str, shape: Shape, side: int) -> None:
    if len(shape) != 3 or min(shape[:2]) < side:
        raise ConfigurationError(
            f"The model {name!r} takes images of shape (height, width, "
            f"channels) with sides of {side} or more. Received: "
            f"input_shape={shape}. Use 'mlp'."
        )


_MODELS: dict[str, Callable[[Shape, int], keras.Model]] = {
    "mlp": mlp,
    "cnn": cnn,
    "resnet": resnet,
    "transformer": transformer,
}


@checked
def create_model(
    name: str,
    input_shape: Shape,
    num_classes: int,
    *,
    zero_init_residual: bool = False,
) -> keras.Model:
    """Creates a model by name.

    Args:
        name: `mlp`, `cnn`, `resnet` (depth 20), `resnet/DEPTH`,
            `transformer`, or a name of `keras.applications`.
        input_shape: Shape of an example.
        num_classes: Size of the output.
        zero_init_residual: As for `resnet`, which alone has it.

    Returns:
        The model, not compiled.

    Raises:
        ConfigurationError: The name is unknown, or the shape or the option
            does not fit.
    """
    base, _, depth = name.partition("/")
    if base == "resnet":
        return resnet(
            input_shape,
            num_classes,
            int(depth or 20),
            zero_init_residual=zero_init_residual,
        )
    if zero_init_residual:
        raise ConfigurationError(
            "zero_init_residual goes with the model 'resnet'. Received: "
            f"{name!r}."
        )
    if name in APPLICATIONS:
        return _application(name, input_shape, num_classes)
    if name not in _MODELS:
        raise ConfigurationError(unknown_name("model", name, _MODELS))
    return _MODELS[name](input_shape, num_classes)


def _application(
    name: str, input_shape: Shape, num_classes: int
) -> keras.Model:
    make = getattr(keras.applications, name)
    options = {
        "weights": None,
        "input_shape": input_shape,
        "classes": num_classes,
        "classifier_activation": None,
    }
    if "include_preprocessing" in inspect.signature(make).parameters:
        options["include_preprocessing"] = False
    try:
        return make(**options)
    except ValueError as error:
        raise ConfigurationError(
            f"The model {name!r} must get images that it can take. Received: "
            f"input_shape={input_shape} ({str(error).splitlines()[0]}). Use "
            "larger images, such as --dataset=images/96."
        ) from None

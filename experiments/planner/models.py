"""Models that the planner is tested on, each of another kind.

    model = build("unet", "adam", "float32")

All are trained from random weights, so nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers


def wide_mlp() -> keras.Model:
    """Five wide layers: nearly all memory is weights."""
    inputs = keras.Input((784,))
    hidden = inputs
    for units in (2048, 2048, 2048, 1024):
        hidden = layers.Dense(units, activation="relu")(hidden)
    return keras.Model(inputs, layers.Dense(10)(hidden))


def deep_mlp() -> keras.Model:
    """Fourteen layers of one size, as in `experiments/peak_memory.py`."""
    inputs = keras.Input((1024,))
    hidden = inputs
    for _ in range(14):
        hidden = layers.Dense(1024, activation="relu")(hidden)
    return keras.Model(inputs, hidden)


def plain_cnn() -> keras.Model:
    """Convolutions and pooling on small images."""
    inputs = keras.Input((32, 32, 3))
    hidden = inputs
    for filters in (32, 64, 128):
        hidden = layers.Conv2D(filters, 3, padding="same", activation="relu")(
            hidden
        )
        hidden = layers.Conv2D(filters, 3, padding="same", activation="relu")(
            hidden
        )
        hidden = layers.MaxPooling2D()(hidden)
    hidden = layers.Flatten()(hidden)
    hidden = layers.Dense(256, activation="relu")(hidden)
    return keras.Model(inputs, layers.Dense(10)(hidden))


def encoder() -> keras.Model:
    """A transformer over vectors, four blocks, 256 wide."""
    inputs = keras.Input((64, 32))
    hidden = layers.Dense(256)(inputs)
    for _ in range(4):
        hidden = _block(hidden, 256, 8)
    hidden = layers.GlobalAveragePooling1D()(hidden)
    return keras.Model(inputs, layers.Dense(10)(hidden))


def language_model() -> keras.Model:
    """A causal transformer over 4,000 tokens."""
    inputs = keras.Input((128,), dtype="int32")
    hidden = layers.Embedding(4000, 192)(inputs)
    for _ in range(3):
        hidden = _block(hidden, 192, 6, causal=True)
    hidden = layers.LayerNormalization()(hidden)
    return keras.Model(inputs, layers.Dense(4000)(hidden))


class Block(layers.Layer):
    """A causal block as authors write it, in a class with layers inside."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = [layers.LayerNormalization() for _ in range(2)]
        self.drops = [layers.Dropout(0.1) for _ in range(2)]
        self.attention = layers.MultiHeadAttention(heads, width // heads)
        self.inner = layers.Dense(4 * width, activation="gelu")
        self.outer = layers.Dense(width)

    def call(self, x: Any, training: bool | None = None) -> Any:
        """Returns the block's output, of the shape of its input."""
        y = self.norms[0](x)
        y = self.attention(y, y, use_causal_mask=True)
        x = x + self.drops[0](y, training=training)
        y = self.outer(self.inner(self.norms[1](x)))
        return x + self.drops[1](y, training=training)


def blocks() -> keras.Model:
    """A causal transformer whose blocks are layers of an author."""
    inputs = keras.Input((128,), dtype="int32")
    hidden = layers.Embedding(1000, 256)(inputs)
    for _ in range(6):
        hidden = Block(256, 8)(hidden)
    hidden = layers.LayerNormalization()(hidden)
    return keras.Model(inputs, layers.Dense(1000)(hidden))


def vision_transformer() -> keras.Model:
    """Patches of an image, and a transformer over them, with Dropout."""
    inputs = keras.Input((64, 64, 3))
    hidden = layers.Conv2D(128, 8, strides=8)(inputs)
    hidden = layers.Reshape((64, 128))(hidden)
    for _ in range(3):
        hidden = _block(hidden, 128, 4, dropout=0.1)
    hidden = layers.LayerNormalization()(hidden)
    hidden = layers.GlobalAveragePooling1D()(hidden)
    return keras.Model(inputs, layers.Dense(10)(hidden))


def _block(
    hidden: keras.KerasTensor,
    width: int,
    heads: int,
    *,
    causal: bool = False,
    dropout: float = 0.0,
) -> keras.KerasTensor:
    query = layers.LayerNormalization()(hidden)
    attention = layers.MultiHeadAttention(heads, width // heads)(
        query, query, use_causal_mask=causal
    )
    if dropout:
        attention = layers.Dropout(dropout)(attention)
    hidden = layers.Add()([hidden, attention])
    wide = layers.LayerNormalization()(hidden)
    wide = layers.Dense(4 * width, activation="gelu")(wide)
    wide = layers.Dense(width)(wide)
    if dropout:
        wide = layers.Dropout(dropout)(wide)
    return layers.Add()([hidden, wide])


def unet() -> keras.Model:
    """Down and up again with skips: a label for each pixel."""
    inputs = keras.Input((64, 64, 3))
    hidden, skips = inputs, []
    for filters in (16, 32, 64):
        hidden = _convolutions(hidden, filters)
        skips.append(hidden)
        hidden = layers.MaxPooling2D()(hidden)
    hidden = _convolutions(hidden, 128)
    for filters, skip in zip((64, 32, 16), reversed(skips), strict=True):
        hidden = layers.Conv2DTranspose(filters, 2, strides=2, padding="same")(
            hidden
        )
        hidden = layers.Concatenate()([hidden, skip])
        hidden = _convolutions(hidden, filters)
    return keras.Model(inputs, layers.Conv2D(4, 1)(hidden))


def _convolutions(hidden: keras.KerasTensor, filters: int) -> keras.KerasTensor:
    for _ in range(2):
        hidden = layers.Conv2D(filters, 3, padding="same")(hidden)
        hidden = layers.BatchNormalization()(hidden)
        hidden = layers.Activation("relu")(hidden)
    return hidden


def autoencoder() -> keras.Model:
    """Strided convolutions down and up, to the image itself."""
    inputs = keras.Input((64, 64, 3))
    hidden = inputs
    for filters in (32, 64, 128):
        hidden = layers.Conv2D(
            filters, 4, strides=2, padding="same", activation="relu"
        )(hidden)
    for filters in (64, 32):
        hidden = layers.Conv2DTranspose(
            filters, 4, strides=2, padding="same", activation="relu"
        )(hidden)
    outputs = layers.Conv2DTranspose(3, 4, strides=2, padding="same")(hidden)
    return keras.Model(inputs, outputs)


def recurrent() -> keras.Model:
    """Two layers of LSTM over words."""
    inputs = keras.Input((60,), dtype="int32")
    hidden = layers.Embedding(5000, 128)(inputs)
    hidden = layers.LSTM(128, return_sequences=True)(hidden)
    hidden = layers.LSTM(128)(hidden)
    return keras.Model(inputs, layers.Dense(10)(hidden))


def mobilenet() -> keras.Model:
    """MobileNetV2: depthwise convolutions."""
    return _application(keras.applications.MobileNetV2, 96)


def resnet50() -> keras.Model:
    """ResNet-50 at 96 x 96."""
    return _application(keras.applications.ResNet50, 96)


def efficientnet() -> keras.Model:
    """EfficientNetB0: squeeze and excitation, swish."""
    return _application(keras.applications.EfficientNetB0, 64)


def densenet() -> keras.Model:
    """DenseNet-121: each layer takes all before it."""
    return _application(keras.applications.DenseNet121, 64)


def _application(make: Callable[..., keras.Model], side: int) -> keras.Model:
    return make(
        weights=None,
        input_shape=(side, side, 3),
        classes=10,
        classifier_activation=None,
    )


MODELS: dict[str, Callable[[], keras.Model]] = {
    function.__name__: function
    for function in (
        wide_mlp,
        deep_mlp,
        plain_cnn,
        encoder,
        language_model,
        blocks,
        vision_transformer,
        unet,
        autoencoder,
        recurrent,
        mobilenet,
        resnet50,
        efficientnet,
        densenet,
    )
}

_OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "sgd": lambda: keras.optimizers.SGD(0.001),
    "momentum": lambda: keras.optimizers.SGD(0.001, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.0001),
    "adamw": lambda: keras.optimizers.AdamW(0.0001),
}


def build(
    name: str, optimizer: str = "adam", precision: str = "float32"
) -> keras.Model:
    """Makes a compiled model.

    Args:
        name: One of `MODELS`.
        optimizer: `sgd`, `momentum`, `adam` or `adamw`.
        precision: The policy of its layers, such as `mixed_bfloat16`.
    """
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(precision)
    try:
        model = MODELS[name]()
    finally:
        keras.config.set_dtype_policy(before)
    loss: keras.losses.Loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True
    )
    if name == "autoencoder":
        loss = keras.losses.MeanSquaredError()
    model.compile(_OPTIMIZERS[optimizer](), loss)
    return model


def transformer_8b() -> keras.Model:
    """A compiled causal transformer of 8 billion parameters, for plans alone.

    The sizes are those of Llama 3 8B (Grattafiori et al., "The Llama 3 Herd of
    Models", arXiv 2407.21783, table 3), over 2,048 tokens.
    """
    inputs = keras.Input((2048,), dtype="int32")
    hidden = layers.Embedding(128_256, 4096)(inputs)
    for _ in range(32):
        query = layers.RMSNormalization()(hidden)
        attention = layers.GroupQueryAttention(128, 32, 8, use_bias=False)(
            query, query, use_causal_mask=True
        )
        hidden = layers.Add()([hidden, attention])
        wide = layers.RMSNormalization()(hidden)
        gate = layers.Dense(14_336, activation="silu", use_bias=False)(wide)
        up = layers.Dense(14_336, use_bias=False)(wide)
        wide = layers.Multiply()([gate, up])
        hidden = layers.Add()(
            [hidden, layers.Dense(4096, use_bias=False)(wide)]
        )
    hidden = layers.RMSNormalization()(hidden)
    model = keras.Model(inputs, layers.Dense(128_256, use_bias=False)(hidden))
    model.compile(
        keras.optimizers.AdamW(0.0001),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def batch(name: str, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs and targets of a model, of random numbers.

    Args:
        name: One of `MODELS`.
        rows: How many.
    """
    model = MODELS[name]()
    taken, made = model.inputs[0], model.outputs[0]
    generator = np.random.default_rng(0)
    x = generator.random((rows, *taken.shape[1:]), dtype="float32")
    if "int" in str(taken.dtype):
        x = generator.integers(0, 1000, x.shape).astype("int32")
    if name == "autoencoder":
        return x, x
    return x, generator.integers(0, 4, (rows, *made.shape[1:-1])).astype(
        "int32"
    )

"""Models for pipelines, small ones of each kind."""

import keras
import numpy as np
from keras import layers

WORDS = 12
PLACES = 5


def skip():
    """Dense layers, one of which is used three layers later as well."""
    inputs = keras.Input((6,))
    a = layers.Dense(9, "tanh", name="a")(inputs)
    b = layers.Dense(9, "tanh", name="b", kernel_regularizer="l2")(a)
    c = layers.Dense(9, "tanh", name="c")(layers.Add()([a, b]))
    d = layers.Dense(7, "tanh", name="d")(c)
    return keras.Model(inputs, layers.Dense(2)(layers.Concatenate()([a, d])))


def convolutions():
    """Convolutions, one inside of a model of its own."""
    inner = keras.Sequential(
        [layers.Conv2D(4, 3, activation="tanh"), layers.MaxPooling2D(2)]
    )
    inputs = keras.Input((8, 8, 2))
    x = layers.Conv2D(3, 3, padding="same", activation="tanh")(inputs)
    x = layers.Flatten()(inner(x))
    return keras.Model(inputs, layers.Dense(2)(layers.Dense(5)(x)))


def transformer():
    """Two blocks of attention over words and their places."""
    words = keras.Input((PLACES,), dtype="int32")
    places = keras.ops.arange(PLACES)
    x = layers.Embedding(WORDS, 8)(words)
    x = x + layers.Embedding(PLACES, 8)(places)
    for _ in range(2):
        attended = layers.MultiHeadAttention(2, 4)(x, x)
        x = layers.LayerNormalization()(x + attended)
        wide = layers.Dense(16, "gelu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(8)(wide))
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(words, layers.Dense(2)(x))


def drops():
    """Dropout in both stages, and draws without a seed of its own."""
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(9, "tanh"),
            layers.Dropout(0.4, seed=3),
            layers.Dense(9, "tanh"),
            layers.Dropout(0.4, seed=4),
            layers.Dense(2),
        ]
    )


def normalizes():
    """BatchNormalization in both stages."""
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(9, "tanh"),
            layers.BatchNormalization(momentum=0.7),
            layers.Dense(9, "tanh"),
            layers.BatchNormalization(),
            layers.Dense(2),
        ]
    )


def data_for(model, examples):
    """Inputs and targets that fit a model."""
    generator = np.random.default_rng(3)
    shape = (examples, *model.inputs[0].shape[1:])
    if model.inputs[0].dtype == "int32":
        x = generator.integers(0, WORDS, shape).astype("int32")
    else:
        x = generator.normal(size=shape)
    y = np.stack([x.reshape(examples, -1)[:, i] * 0.3 for i in (0, 1)], 1)
    return x, y


OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.3),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.02),
}


def compiled(model, optimizer):
    """Returns what builds a model, its weights as of one seed."""

    def build():
        keras.utils.set_random_seed(1)
        built = model()
        built.compile(OPTIMIZERS[optimizer](), "mse", metrics=["mae"])
        return built

    return build

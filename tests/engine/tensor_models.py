"""Models that are trained in parts, and their data."""

import keras
import numpy as np
from keras import layers

VOCABULARY, LENGTH, WIDTH, HEADS = 24, 6, 12, 12
# 8 steps in an epoch, the last of 7 rows.
ROWS, BATCH = 119, 16


def compiled(model, optimizer, loss, **options):
    model.compile(optimizer, loss, metrics=options.pop("metrics", None))
    return model


def mlp(optimizer, rate=0.0, regularizer=None):
    return compiled(
        keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(
                    12, activation="gelu", kernel_regularizer=regularizer
                ),
                layers.Dropout(rate),
                layers.Dense(12, activation="relu"),
                layers.LayerNormalization(),
                layers.Dense(24, activation="softmax"),
                layers.Dense(3),
            ]
        ),
        optimizer,
        "mse",
        metrics=["mae"],
    )


def mlp_data():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(ROWS, 6))
    return x, 3 * x[:, :3]


def cnn(optimizer, synchronized=False):
    return compiled(
        keras.Sequential(
            [
                keras.Input((8, 8, 3)),
                layers.Conv2D(12, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Conv2D(6, 2, padding="same"),
                layers.BatchNormalization(synchronized=synchronized),
                layers.Flatten(),
                layers.Dense(12, activation="tanh"),
                layers.Dense(3),
            ]
        ),
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


def cnn_data():
    generator = np.random.default_rng(1)
    x = generator.normal(size=(ROWS, 8, 8, 3))
    return x, generator.integers(0, 3, ROWS)


@keras.saving.register_keras_serializable("tests")
class Block(layers.Layer):
    """A block as users write it: attention, and two layers after it."""

    def __init__(self, rate=0.0, causal=True, **options):
        super().__init__(**options)
        self.attention = layers.MultiHeadAttention(HEADS, 2, dropout=rate)
        self.first = layers.LayerNormalization()
        self.second = layers.LayerNormalization()
        self.inner = layers.Dense(4 * WIDTH, activation="gelu")
        self.drop = layers.Dropout(rate)
        self.outer = layers.Dense(WIDTH)
        self.causal = causal
        self.supports_masking = True

    def build(self, shape):
        self.attention.build(shape, shape)
        self.first.build(shape)
        self.second.build(shape)
        self.inner.build(shape)
        self.outer.build((*shape[:-1], 4 * WIDTH))

    def call(self, x, training=False):
        y = self.first(x)
        y = self.attention(y, y, use_causal_mask=self.causal, training=training)
        x = x + y
        y = self.inner(self.second(x))
        y = self.drop(y, training=training)
        return x + self.outer(y)


def transformer(optimizer, rate=0.0, mask=True):
    words = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH, mask_zero=mask)(words)
    x = Block(rate)(x)
    x = Block(rate, causal=False)(x)
    x = layers.LayerNormalization()(x)
    x = layers.Dense(VOCABULARY)(x)
    return compiled(
        keras.Model(words, x),
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


def transformer_data():
    generator = np.random.default_rng(2)
    words = generator.integers(1, VOCABULARY, (ROWS, LENGTH))
    lengths = generator.integers(2, LENGTH + 1, (ROWS, 1))
    x = np.where(np.arange(LENGTH) < lengths, words, 0)
    return x, np.roll(x, -1, 1)

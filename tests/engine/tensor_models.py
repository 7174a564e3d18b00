"""Models that are trained in parts, and their data."""

import keras
import numpy as np
from keras import layers, ops

import mgpu_tf

VOCABULARY, LENGTH, WIDTH, HEADS = 24, 6, 12, 12
# Of experts: what is between their layers, and the tokens of each.
HIDDEN, CAPACITY = 12, 2
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


class SwitchFeedForward(layers.Layer):
    """Fedus et al. 2021: each token to one expert, as far as it has room.

    Tokens of an example compete for the places; the loss that balances is of
    the global batch.
    """

    def __init__(self, experts, rate=0.0):
        super().__init__()
        self.experts = experts
        self.router = layers.Dense(experts)
        self.inner = layers.EinsumDense(
            "ebcd,edh->ebch",
            (None, None, HIDDEN),
            activation="gelu",
            bias_axes="eh",
            name="inner",
        )
        self.drop = layers.Dropout(rate)
        self.outer = layers.EinsumDense(
            "ebch,ehd->ebcd", (None, None, WIDTH), name="outer"
        )

    def build(self, shape):
        self.router.build(shape)
        self.inner.build((self.experts, None, CAPACITY, WIDTH))
        self.outer.build((self.experts, None, CAPACITY, HIDDEN))
        self.built = True

    def call(self, tokens):
        chances = ops.softmax(self.router(tokens))
        chosen = ops.one_hot(ops.argmax(chances, -1), self.experts)
        chosen = ops.cast(chosen, tokens.dtype)
        share = mgpu_tf.batch_mean(ops.mean(chosen, 1))
        chance = mgpu_tf.batch_mean(ops.mean(chances, 1))
        self.add_loss(0.1 * self.experts * ops.sum(share * chance))
        place = ops.cumsum(chosen, 1) * chosen - 1
        places = ops.one_hot(ops.cast(place, "int32"), CAPACITY)
        places = ops.cast(places, tokens.dtype)
        sent = ops.einsum("btec,btd->ebcd", places, tokens)
        made = self.outer(self.drop(self.inner(sent)))
        weights = places * ops.max(chances, -1)[..., None, None]
        return tokens + ops.einsum("btec,ebcd->btd", weights, made)


def switch(optimizer, experts, rate=0.0):
    words = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH)(words)
    x = SwitchFeedForward(experts, rate)(x)
    x = SwitchFeedForward(experts, rate)(layers.LayerNormalization()(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = keras.Model(words, layers.Dense(VOCABULARY)(x))
    return compiled(model, optimizer, loss)


def transformer_data():
    generator = np.random.default_rng(2)
    words = generator.integers(1, VOCABULARY, (ROWS, LENGTH))
    lengths = generator.integers(2, LENGTH + 1, (ROWS, 1))
    x = np.where(np.arange(LENGTH) < lengths, words, 0)
    return x, np.roll(x, -1, 1)

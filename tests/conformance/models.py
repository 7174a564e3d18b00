"""Small data and small models for the rows."""

import keras
import numpy as np
from keras import layers

# Batches of 8, 8, 8 and 5: on two and on three replicas parts differ in size.
EXAMPLES = 29
FEATURES = 4
CLASSES = 3
WORDS = 7
LENGTH = 5


def random(seed=1):
    return np.random.default_rng(seed)


def points(examples=EXAMPLES, features=FEATURES, seed=1):
    """Float inputs `[examples, features]`."""
    x = random(seed).normal(size=(examples, features))
    return x.astype(keras.config.floatx())


def numbers(examples=EXAMPLES, width=1, seed=2):
    """Float targets `[examples, width]`."""
    return points(examples, width, seed)


def kinds(examples=EXAMPLES, seed=3):
    """Integer classes `[examples]`."""
    return random(seed).integers(0, CLASSES, size=examples)


def one_hot(examples=EXAMPLES, seed=3):
    return np.eye(CLASSES, dtype=keras.config.floatx())[kinds(examples, seed)]


def weights(examples=EXAMPLES, seed=4):
    """Weights `[examples]`, some of them zero."""
    weight = random(seed).uniform(0.2, 3.0, size=examples)
    weight[::6] = 0.0
    return weight.astype(keras.config.floatx())


def words(examples=EXAMPLES, seed=5, padded=True):
    """Integers `[examples, LENGTH]`, zeros at the end."""
    generator = random(seed)
    found = generator.integers(1, WORDS, size=(examples, LENGTH))
    if padded:
        lengths = generator.integers(1, LENGTH + 1, size=(examples, 1))
        found = np.where(np.arange(LENGTH) < lengths, found, 0)
    return found


def images(examples=EXAMPLES, size=6, channels=3, seed=6):
    x = random(seed).uniform(size=(examples, size, size, channels))
    return x.astype(keras.config.floatx())


def sgd(rate=0.1, **options):
    return keras.optimizers.SGD(rate, **options)


def compiled(model, loss="mse", optimizer=None, **options):
    """Compiles a model, for Keras without XLA, which only costs time."""
    options = {"jit_compile": False} | options
    model.compile(optimizer or sgd(), loss, **options)
    return model


def dense(*middle, width=1, activation=None, features=FEATURES, **options):
    """What builds a network with layers in its middle."""

    def build():
        model = keras.Sequential(
            [
                keras.Input((features,)),
                layers.Dense(4, activation="tanh"),
                *(make() for make in middle),
                layers.Dense(width, activation=activation),
            ]
        )
        return compiled(model, **_made(options))

    return build


def embedded(*middle, width=1, mask_zero=False, **options):
    """What builds a network on words; their indices repeat."""

    def build():
        model = keras.Sequential(
            [
                keras.Input((LENGTH,), dtype="int32"),
                layers.Embedding(WORDS, 3, mask_zero=mask_zero),
                *(make() for make in middle or (layers.Flatten,)),
                layers.Dense(width),
            ]
        )
        return compiled(model, **_made(options))

    return build


def per_word(*middle, width=2, **options):
    """What builds a network with a masked prediction for each word."""
    return embedded(
        *(middle or (lambda: layers.Dense(4, activation="tanh"),)),
        width=width,
        mask_zero=True,
        **options,
    )


def on_images(*middle, width=1, size=6, channels=3, **options):
    def build():
        model = keras.Sequential(
            [
                keras.Input((size, size, channels)),
                *(make() for make in middle),
                layers.Flatten(),
                layers.Dense(width),
            ]
        )
        return compiled(model, **_made(options))

    return build


def _made(options):
    """What is callable makes the option, anew for each model."""
    return {
        name: value() if callable(value) else value
        for name, value in options.items()
    }

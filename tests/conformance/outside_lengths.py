"""Programs from outside: sequences of any length, images of any size.

The graph of a step knows neither the number of rows nor any other axis but the
last. Batches have 13 rows and 5, and each has lengths of its own.
"""

import keras
import tensorflow as tf
from keras import layers, ops

from tests.conformance import models
from tests.conformance.harness import row

GROUP = "Outside: of any length and size"
STEPS = 4


def endless(make, *shapes):
    """Batches of other sizes, again and again.

    Args:
        make: Returns the inputs and targets of a batch by its rows and its
            number.
        shapes: Those of inputs and targets.
    """

    def batches():
        for number in range(STEPS):
            yield make(13 if number % 2 else 5, number)

    signature = tuple(
        tf.TensorSpec(shape, keras.config.floatx()) for shape in shapes
    )
    data = tf.data.Dataset.from_generator(batches, output_signature=signature)
    return data.repeat()


def sequences(shortest, target):
    """Sequences of four features, and what is to be made of them."""

    def make(rows, number):
        random = models.random(number)
        x = random.normal(size=(rows, shortest + 3 * number, 4))
        return x, random.normal(size=target(x.shape))

    return make


def images(target):
    """Images, and what is to be made of them."""

    def make(rows, number):
        random = models.random(number)
        x = random.normal(size=(rows, 8 + 2 * number, 12 - 2 * number, 3))
        return x, random.normal(size=target(x.shape))

    return make


def learn(run, build, make, *shapes):
    run.fit(build, endless(make, *shapes), steps_per_epoch=STEPS)


def compiled(inputs, outputs):
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


@row(GROUP)
def a_temporal_convolutional_network(run):
    """Bai et al., 2018: causal convolutions that reach further and further."""

    def build():
        inputs = keras.Input((None, 4))
        x = layers.Dense(6)(inputs)
        for reach in (1, 2, 4):
            y = layers.Conv1D(
                6, 3, padding="causal", dilation_rate=reach, activation="relu"
            )(x)
            x = layers.Add()([x, layers.SpatialDropout1D(0.2)(y)])
        return compiled(inputs, layers.Dense(2)(x))

    make = sequences(7, lambda shape: (*shape[:2], 2))
    learn(run, build, make, (None, None, 4), (None, None, 2))


@row(GROUP)
def an_encoder_of_waves(run):
    """Baevski et al., 2020: strided convolutions, then dropout and words."""

    def build():
        inputs = keras.Input((None, 4))
        x = layers.Conv1D(6, 10, 5)(inputs)
        x = layers.GroupNormalization(3)(x)
        x = layers.Conv1D(6, 3, 2, activation="gelu")(x)
        x = layers.Dropout(0.3)(layers.LayerNormalization()(x))
        x = layers.Dense(6, "gelu")(x)
        x = layers.GaussianNoise(0.1)(x)
        return compiled(inputs, layers.Dense(2)(ops.mean(x, axis=1)))

    make = sequences(60, lambda shape: (shape[0], 2))
    learn(run, build, make, (None, None, 4), (None, 2))


class Attends(layers.Layer):
    """Bahdanau et al., 2015: a weighted mean over the words."""

    def __init__(self):
        super().__init__()
        self.hidden, self.score = layers.Dense(5, "tanh"), layers.Dense(1)

    def call(self, x):
        weights = tf.nn.softmax(self.score(self.hidden(x)), axis=1)
        return ops.sum(weights * x, axis=1)


@row(GROUP)
def attention_over_the_states_of_an_lstm(run):
    def build():
        inputs = keras.Input((None, 4))
        lstm = layers.LSTM(5, return_sequences=True, dropout=0.2)
        x = Attends()(layers.Bidirectional(lstm)(inputs))
        return compiled(inputs, layers.Dense(2)(layers.Dropout(0.2)(x)))

    make = sequences(4, lambda shape: (shape[0], 2))
    learn(run, build, make, (None, None, 4), (None, 2))


@row(GROUP)
def blocks_of_a_transformer(run):
    def build():
        inputs = keras.Input((None, 4))
        x = layers.Dense(6)(inputs)
        for _ in range(2):
            y = layers.LayerNormalization()(x)
            y = layers.MultiHeadAttention(2, 3, dropout=0.2)(
                y, y, use_causal_mask=True
            )
            x = x + layers.Dropout(0.2)(y)
            y = layers.Dense(12, "gelu")(layers.LayerNormalization()(x))
            x = x + layers.Dropout(0.2)(layers.Dense(6)(y))
        return compiled(inputs, layers.Dense(2)(x))

    make = sequences(4, lambda shape: (*shape[:2], 2))
    learn(run, build, make, (None, None, 4), (None, None, 2))


@row(GROUP)
def a_fully_convolutional_network(run):
    """Long et al., 2015: a class for each pixel of an image of any size."""

    def build():
        inputs = keras.Input((None, None, 3))
        x = layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
        x = layers.MaxPooling2D()(x)
        x = layers.Conv2D(6, 3, padding="same", dilation_rate=2)(x)
        x = layers.Dropout(0.3)(layers.ReLU()(x))
        x = layers.Conv2DTranspose(4, 3, 2, padding="same")(x)
        return compiled(inputs, layers.Conv2D(2, 1)(x))

    make = images(lambda shape: (*shape[:3], 2))
    learn(run, build, make, (None, None, None, 3), (None, None, None, 2))


@row(GROUP)
def a_classifier_of_images_of_any_size(run):
    """Convolutions that cut the border, noise, and a mean over all places."""

    def build():
        inputs = keras.Input((None, None, 3))
        x = layers.Conv2D(4, 3, activation="relu")(inputs)
        x = layers.SpatialDropout2D(0.2)(x)
        x = layers.Conv2D(4, 3, 2)(layers.GaussianDropout(0.2)(x))
        x = layers.AlphaDropout(0.1)(layers.GroupNormalization(2)(x))
        x = layers.GlobalAveragePooling2D()(x)
        return compiled(inputs, layers.Dense(2)(x))

    make = images(lambda shape: (shape[0], 2))
    learn(run, build, make, (None, None, None, 3), (None, 2))


@row(GROUP)
def larger_images(run):
    """Shi et al., 2016 (ESPCN): channels become places."""

    def build():
        inputs = keras.Input((None, None, 3))
        x = layers.Conv2D(6, 3, padding="same", activation="tanh")(inputs)
        x = layers.GaussianNoise(0.1)(x)
        x = layers.Conv2D(12, 3, padding="same")(x)
        x = layers.Lambda(lambda x: tf.nn.depth_to_space(x, 2))(x)
        return compiled(inputs, x)

    make = images(lambda s: (s[0], 2 * s[1], 2 * s[2], 3))
    learn(run, build, make, (None, None, None, 3), (None, None, None, 3))

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
        shapes: Those of inputs and targets, in tuples of any depth.
    """

    def batches():
        for number in range(STEPS):
            yield make(13 if number % 2 else 5, number)

    def spec(shape):
        if isinstance(shape[0], tuple):
            return tuple(map(spec, shape))
        return tf.TensorSpec(shape, keras.config.floatx())

    signature = spec(shapes)
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


class Noise(layers.Layer):
    """Draws for the features of a row, for each word, and for all rows."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(3)

    def normal(self, x, *shape):
        return keras.random.normal(shape, seed=self.seed, dtype=x.dtype)

    def call(self, x):
        rows, words, features = ops.shape(x)
        noise = (rows, 1, features)
        x = keras.random.dropout(x, 0.3, noise_shape=noise, seed=self.seed)
        x += 0.1 * self.normal(x, rows, words, 1)
        return x + 0.1 * self.normal(x, 1, words, features)


@row(GROUP)
def noise_of_several_shapes(run):
    def build():
        inputs = keras.Input((None, 4))
        x = Noise()(layers.Conv1D(6, 3)(inputs))
        x = Noise()(layers.MaxPooling1D(2)(x))
        return compiled(inputs, layers.Dense(2)(ops.max(x, axis=1)))

    make = sequences(9, lambda shape: (shape[0], 2))
    learn(run, build, make, (None, None, 4), (None, 2))


class Words(layers.Layer):
    """Computes all words of a batch as one list."""

    def __init__(self):
        super().__init__()
        self.dense, self.drop = layers.Dense(6), layers.Dropout(0.3)

    def call(self, x, training=None):
        shape = tf.shape(x)
        words = self.dense(tf.reshape(x, (-1, 4)))
        words = self.drop(words, training=training)
        return tf.reshape(words, (shape[0], shape[1], 6))


@row(GROUP)
def dropout_of_a_list_of_words(run):
    def build():
        inputs = keras.Input((None, 4))
        x = Words()(layers.Conv1D(4, 3)(inputs))
        return compiled(inputs, layers.Dense(2)(ops.mean(x, axis=1)))

    make = sequences(6, lambda shape: (shape[0], 2))
    learn(run, build, make, (None, None, 4), (None, 2))


@row(GROUP)
def two_inputs_of_other_lengths(run):
    def build():
        inputs = keras.Input((None, 4)), keras.Input((None, 4))
        x = layers.Dropout(0.2)(layers.Conv1D(6, 2)(inputs[0]))
        y = layers.Dropout(0.2)(layers.Conv1D(6, 3, 2)(inputs[1]))
        z = layers.Dropout(0.3)(layers.Attention(dropout=0.1)([x, y]))
        return compiled(inputs, layers.Dense(2)(ops.mean(z, axis=1)))

    first = sequences(5, lambda shape: (shape[0], 2))
    second = sequences(9, lambda shape: (shape[0], 2))

    def make(rows, number):
        (x, y), (z, _) = first(rows, number), second(rows, STEPS - number)
        return (x, z), y

    words = (None, None, 4)
    run.fit(
        build, endless(make, (words, words), (None, 2)), steps_per_epoch=STEPS
    )


class Stepping(keras.Model):
    """Has a step of its own."""

    def __init__(self):
        super().__init__()
        self.cut, self.head = layers.Conv1D(6, 3), layers.Dense(2)
        self.drop = layers.Dropout(0.3)

    def call(self, x, training=None):
        x = self.drop(self.cut(x), training=training)
        return self.head(ops.mean(x, axis=1))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@row(GROUP)
def a_step_of_ones_own(run):
    def build():
        model = Stepping()
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    make = sequences(6, lambda shape: (shape[0], 2))
    learn(run, build, make, (None, None, 4), (None, 2))


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

"""Ragged and sparse tensors, in code of the author's that mixes their rows.

Keras's own `fit` is the reference. With 3 replicas, since 2 divide exactly.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import mgpu_tf
from tests.tiers import tiered

pytestmark = pytest.mark.usefixtures("float64")


RANDOM = np.random.default_rng(0)
ROWS = [RANDOM.normal(size=(n, 4)) for n in RANDOM.integers(1, 5, size=20)]
Y = RANDOM.normal(size=(20, 1))


def batches():
    """Lines of one to four vectors, and a last batch of four lines."""
    lines = tf.RaggedTensor.from_row_lengths(
        np.concatenate(ROWS), list(map(len, ROWS))
    )
    return tf.data.Dataset.from_tensor_slices((lines, Y)).batch(8)


class Made(layers.Layer):
    """A layer of a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, *inputs):
        return self.function(*inputs)


class Keeping(layers.Layer):
    """Writes the largest of all entries, and multiplies by it."""

    def build(self, shape):
        self.largest = self.add_weight(
            shape=(), initializer="zeros", trainable=False
        )

    def call(self, x):
        self.largest.assign(tf.reduce_max(x))
        return tf.reduce_sum(x, axis=1) * self.largest


class Adding(layers.Layer):
    """Adds a square of a mean over all entries to the loss."""

    def call(self, x):
        self.add_loss(tf.square(tf.reduce_mean(x)) + tf.reduce_max(x) / 10)
        return tf.reduce_sum(x, axis=1)


class Chain(keras.Model):
    """Layers one after another, and a dense one."""

    def __init__(self, *chain):
        super().__init__()
        self.chain = list(chain)
        self.dense = layers.Dense(1)

    def call(self, x):
        for layer in self.chain:
            x = layer(x)
        return self.dense(x)


class Beside(Chain):
    """Lets rows meet the mean of all entries of a ragged tensor."""

    def __init__(self):
        super().__init__(Made(lambda x, lines: x - tf.reduce_mean(lines)))

    def call(self, x):
        (layer,) = self.chain
        return self.dense(layer(tf.reduce_mean(x, axis=1), x))


class OwnLoss(Chain):
    """Multiplies the loss by a mean over all entries."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return tf.reduce_mean(tf.square(y - y_pred)) * tf.reduce_mean(x)


class OwnStep(Chain):
    """Adds a square of a mean over all entries, in a step of its own."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self(x, training=True)))
            loss += tf.square(tf.reduce_mean(x))
        gradients = tape.gradient(loss, self.trainable_variables)
        pairs = zip(gradients, self.trainable_variables, strict=True)
        self.optimizer.apply_gradients(pairs)
        return {"loss": loss}


def mean(x):
    return tf.reduce_mean(x, axis=1)


def centered(x):
    return x - tf.reduce_mean(x)


def by_the_longest(x):
    padded = x.to_tensor() if isinstance(x, tf.RaggedTensor) else x
    longest = tf.cast(tf.shape(padded)[1], padded.dtype)
    return tf.reduce_sum(padded, axis=1) / longest


def sparse(x):
    return tf.sparse.from_dense(tf.nn.relu(tf.reduce_sum(x, axis=1)))


def by_the_largest(x):
    return tf.sparse.to_dense(x) / tf.reduce_max(x.values)


def classes(x):
    return tf.cast(mean(x) * 3 + 4, tf.int64) % 6


def centered_counts(x):
    if isinstance(x, tf.SparseTensor):
        x = tf.sparse.to_dense(x)
    counts = tf.cast(x, tf.float64)
    return counts - tf.reduce_mean(counts, axis=0)


def counted():
    return layers.CategoryEncoding(
        6, output_mode="count", sparse=True, dtype="int64"
    )


PROGRAMS = {
    "each line by itself": lambda: Chain(Made(mean)),
    "less the mean of all": lambda: Chain(Made(centered), Made(mean)),
    "by the longest line": lambda: Chain(Made(by_the_longest)),
    "state of all": lambda: Chain(Keeping()),
    "a loss of all": lambda: Chain(Adding()),
    "beside rows": Beside,
    "sparse between layers": lambda: Chain(Made(sparse), Made(by_the_largest)),
    "sparse of Keras's": lambda: Chain(
        Made(classes), counted(), layers.Dense(3)
    ),
    "sparse of Keras's, mixed": lambda: Chain(
        Made(classes), counted(), Made(centered_counts)
    ),
    "in a loss": lambda: OwnLoss(Made(mean)),
    "in a step": lambda: OwnStep(Made(mean)),
    "in a step, mixed": lambda: OwnStep(Made(centered), Made(mean)),
}


def compiled(program, eagerly=False):
    model = PROGRAMS[program]()
    model(next(iter(batches()))[0])
    model.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=eagerly)
    return model


def fitted(build, strategy=None):
    """Returns all variables, the losses and the predictions of a short fit."""
    keras.utils.set_random_seed(1)
    model = build() if strategy is None else mgpu_tf.Trainer(build, strategy)
    history = model.fit(batches(), epochs=2, shuffle=False, verbose=0).history
    trained = model if strategy is None else model.model
    predicted = model.predict(batches(), verbose=0)
    return [*trained.get_weights(), history["loss"], predicted]


def check(build, strategy):
    known, found = fitted(build), fitted(build, strategy)
    for expected, value in zip(known, found, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("program", "column"),
    tiered(
        [(p, c) for p in PROGRAMS for c in ("mirrored_x3", "fsdp_x3")],
        [
            ("less the mean of all", "mirrored_x3"),
            ("a loss of all", "fsdp_x3"),
            ("in a step, mixed", "mirrored_x3"),
        ],
    ),
)
def test_as_on_one_device(program, column, strategies):
    check(lambda: compiled(program), strategies[column])


@pytest.mark.full
@pytest.mark.parametrize("program", ["each line by itself", "a loss of all"])
def test_eagerly(program, strategies):
    check(lambda: compiled(program, True), strategies["mirrored_x3"])

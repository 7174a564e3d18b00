"""Losses of activations, and how they are read, in programs from outside."""

import keras
import tensorflow as tf
from keras import layers, ops

from tests.conformance import models, outside
from tests.conformance.harness import add, row

GROUP = "Outside: losses of activations"


def sparsity(activations):
    """Ng's sparse autoencoder: the divergence of mean activations."""
    mean = ops.mean(ops.sigmoid(activations), axis=0)
    mean = ops.clip(mean, 1e-6, 1.0 - 1e-6)
    other = 0.95 * ops.log(0.95 / (1.0 - mean))
    return ops.sum(0.05 * ops.log(0.05 / mean) + other)


@keras.saving.register_keras_serializable("conformance")
class Sparsity(keras.regularizers.Regularizer):
    """The same as a class."""

    def __call__(self, activations):
        return sparsity(activations)


def _autoencoder(regularizer, **options):
    def build():
        encoder = layers.Dense(6, "tanh", activity_regularizer=regularizer)
        model = keras.Sequential([keras.Input((4,)), encoder, layers.Dense(4)])
        return models.compiled(model, **options)

    def program(run):
        outside.use(run, build, outside.points(), outside.points())

    return program


add(GROUP, "a sparse autoencoder", _autoencoder(sparsity))
add(GROUP, "a sparse autoencoder, a class", _autoencoder(Sparsity()))
add(
    GROUP,
    "a sparse autoencoder, eager",
    _autoencoder(sparsity, run_eagerly=True),
)
add(
    GROUP,
    "the square of a mean activation",
    _autoencoder(lambda activations: ops.square(ops.mean(activations))),
)
add(GROUP, "activations by l1", _autoencoder("l1"))


def _on_sequences(name, *middle):
    def build():
        inputs = keras.Input((5, 3))
        outputs = inputs
        for make in middle:
            outputs = make(outputs)
        outputs = layers.Dense(1)(layers.Flatten()(outputs))
        return models.compiled(keras.Model(inputs, outputs))

    def program(run):
        x = outside.points(15).reshape(-1, 5, 3)
        outside.use(run, build, x, outside.numbers())

    add(GROUP, name, program)


def _attended(regularizer):
    def make(x):
        options = {"activity_regularizer": regularizer}
        return layers.MultiHeadAttention(2, 3, **options)(x, x)

    return make


_on_sequences("attention with sparse projections", _attended(sparsity))
_on_sequences("attention with small projections", _attended("l2"))
_on_sequences(
    "a sparse lstm",
    lambda x: layers.LSTM(
        4, activity_regularizer=sparsity, return_sequences=True
    )(x),
)
_on_sequences(
    "each step of time, which Keras does not regularize",
    lambda x: layers.TimeDistributed(
        layers.Dense(4, activity_regularizer=sparsity)
    )(x),
)


class Residual(layers.Layer):
    """A layer whose inner layer regularizes."""

    def __init__(self, **options):
        super().__init__(**options)
        self.inner = layers.Dense(4, activity_regularizer=sparsity)

    def call(self, x):
        return x + self.inner(x)


class Block(layers.Layer):
    """Adds a loss of its own, beside those of two layers within."""

    def __init__(self, **options):
        super().__init__(**options)
        self.residual = Residual()
        self.last = layers.Dense(4, activity_regularizer="l2")

    def call(self, x):
        self.add_loss(ops.mean(x))
        return self.last(self.residual(x))


class Blocks(keras.Model):
    """Its losses come from all depths."""

    def __init__(self):
        super().__init__()
        self.block = Block()
        self.head = layers.Dense(1, activity_regularizer="l1")

    def call(self, x):
        return self.head(self.block(x))


class WeighsLosses(Blocks):
    """Reads the losses of layers by where they come from."""

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        weighted = sum(
            (place + 1) * loss for place, loss in enumerate(self.losses)
        )
        inner = self.block.last.losses[0] + 0.3 * self.block.losses[0]
        return ops.mean((y - y_pred) ** 2) + 0.1 * weighted + inner


class AddsRoot(Blocks):
    """Adds what is no sum of a loss to what Keras computes."""

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        return loss + ops.sqrt(1.0 + self.block.losses[0] ** 2)


class OwnStep(Blocks):
    """Reads them in a training step."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            error = ops.mean((y - self(x, training=True)) ** 2)
            loss = error + sum(self.losses) + self.block.last.losses[0] ** 2
        outside.learn(self.optimizer, tape, loss, self.trainable_variables)
        return {"loss": loss}


def _of_blocks(name, make, loss=None, use=outside.use):
    def program(run):
        def build():
            return models.compiled(make(), loss)

        use(run, build, outside.points(), outside.numbers())

    add(GROUP, name, program)


_of_blocks("losses of all depths", Blocks, "mse")
_of_blocks("losses weighed by their place", WeighsLosses)
_of_blocks("the root of a loss added to Keras's", AddsRoot, "mse")
_of_blocks("losses read in a training step", OwnStep, use=outside.train)


class Normalized(keras.losses.Loss):
    """Divides errors by a moving mean that it keeps itself."""

    def __init__(self):
        super().__init__()
        self.scale = keras.Variable(
            1.0, trainable=False, dtype=keras.config.floatx()
        )

    def call(self, y_true, y_pred):
        errors = (y_true - y_pred) ** 2
        self.scale.assign(0.9 * self.scale + 0.1 * ops.mean(errors))
        return ops.mean(errors, -1) / self.scale


@row(GROUP)
def a_loss_that_keeps_a_variable(run):
    def build():
        return models.compiled(outside.mlp(1), Normalized())

    outside.use(run, build, outside.points(), outside.numbers())

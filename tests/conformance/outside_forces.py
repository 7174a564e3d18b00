"""Models with gradients in their own call: forces, penalties, Jacobians."""

import keras
import tensorflow as tf
from keras import layers, ops

from tests.conformance import models, outside
from tests.conformance.harness import add

GROUP = "Outside: gradients within calls"


class Energy(keras.Model):
    """A network of an energy."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(6, "tanh")
        self.drop = layers.Dropout(0.3, seed=3)
        self.energy = layers.Dense(1)

    def of(self, x, training=False):
        return self.energy(self.drop(self.hidden(x), training=training))

    def call(self, x, training=False):
        return self.of(x, training)


class Forces(Energy):
    """Behler and Parrinello: forces are gradients of the energy."""

    def call(self, x, training=False):
        with tf.GradientTape() as tape:
            tape.watch(x)
            energy = self.of(x, training)
        return {"energy": energy, "forces": -tape.gradient(energy, x)}


class Penalized(Energy):
    """A penalty on the gradient, added by the call."""

    def call(self, x, training=False):
        with tf.GradientTape() as tape:
            tape.watch(x)
            energy = self.of(x)
        slope = ops.norm(tape.gradient(energy, x), axis=1)
        self.add_loss(ops.mean(ops.square(slope - 1.0)))
        return energy


class PenalizedLoss(Energy):
    """The same in `compute_loss`."""

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        with tf.GradientTape() as tape:
            tape.watch(x)
            energy = self.of(x)
        slope = tape.gradient(energy, x)
        return ops.mean((y - y_pred) ** 2) + ops.mean(slope**2)


class PenalizedStep(Penalized):
    """The same in a call that a training step makes."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            error = ops.mean((y - self(x, training=True)) ** 2)
            loss = error + sum(self.losses)
        outside.learn(self.optimizer, tape, loss, self.trainable_variables)
        return {"loss": loss}


class AroundTheCall(Energy):
    """The same by a training step, around the call."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                energy = self(x, training=False)
            slope = inner.gradient(energy, x)
            loss = ops.mean((y - energy) ** 2) + ops.mean(slope**2)
        outside.learn(self.optimizer, tape, loss, self.trainable_variables)
        return {"loss": loss}


class Jacobians(layers.Layer):
    """A layer whose outputs have the Jacobian of another."""

    def build(self, shape):
        self.inner = layers.Dense(3)
        self.inner.build(shape)

    def call(self, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = self.inner(x) ** 2
        return ops.concatenate([x, ops.sum(tape.batch_jacobian(y, x), 1)], -1)


class OfWords(keras.Model):
    """Saliency of words, by gradients of what is looked up."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(outside.WORDS, 4)
        self.hidden = layers.Dense(4, "tanh")
        self.score = layers.Dense(1)

    def call(self, words):
        looked_up = self.table(words)
        with tf.GradientTape() as tape:
            tape.watch(looked_up)
            score = self.score(self.hidden(looked_up))
        slope = tape.gradient(score, looked_up)
        return ops.mean(score + ops.sum(slope, -1, keepdims=True), 1)


def _add(name, make, loss=None, x=outside.points, y=outside.numbers, **options):
    use = outside.train if loss is None else outside.use

    def program(run):
        use(run, lambda: models.compiled(make(), loss), x(), y(), **options)

    add(GROUP, name, program)


def _targets():
    return {"energy": outside.numbers(), "forces": outside.points(seed=9)}


def _with_jacobians():
    parts = [keras.Input((4,)), Jacobians(), layers.Dense(1)]
    return keras.Sequential(parts)


_add("forces", Forces, {"energy": "mse", "forces": "mse"}, y=_targets)
_add("a penalty on the gradient in the call", Penalized, "mse")
_add("a penalty on the gradient in compute_loss", PenalizedLoss)
_add("a penalty in the call of a training step", PenalizedStep)
_add("a penalty of a training step around the call", AroundTheCall)
_add("Jacobians in a layer", _with_jacobians, "mse")
_add("saliency of words", OfWords, "mse", x=outside.words)

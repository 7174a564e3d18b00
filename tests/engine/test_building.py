"""Models that Keras's `fit` trains though `call` cannot build them."""

from typing import ClassVar

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import mgpu_tf
from mgpu_tf.engine import throwaway
from tests.data.test_structures import (
    BATCHES,
    NAMES,
    OPTIONS,
    A,
    Y,
    check_same,
    dataset,
    reference,
)
from tests.tiers import tiered

pytestmark = [
    pytest.mark.usefixtures("float64"),
    # What Keras says at the end of data whose length it does not know.
    pytest.mark.filterwarnings("ignore:Your input ran out of data"),
]

EVEN = {**OPTIONS, "batch_size": 11}


def replicas():
    """What the author of a step divides a mean over its examples by."""
    return tf.distribute.get_strategy().num_replicas_in_sync


class Adversarial(keras.Model):
    """No `call`, two optimizers, and data of inputs alone.

    Args:
        built: Whether the networks have their variables from the beginning.
    """

    def __init__(self, built):
        super().__init__()
        self.critic = keras.Sequential(
            [keras.Input((3,))] * built
            + [layers.Dense(4, activation="tanh"), layers.Dense(1)]
        )
        self.maker = keras.Sequential(
            [keras.Input((2,))] * built
            + [layers.Dense(4, activation="tanh"), layers.Dense(3)]
        )

    def compile(self, critic_optimizer, maker_optimizer, **options):
        super().compile(**options)
        self.critic_optimizer = critic_optimizer
        self.maker_optimizer = maker_optimizer
        self.critic_loss = keras.metrics.Mean(name="critic_loss")
        self.maker_loss = keras.metrics.Mean(name="maker_loss")

    @property
    def metrics(self):
        return [self.critic_loss, self.maker_loss]

    def train_step(self, real):
        if isinstance(real, tuple):
            real = real[0]
        noise = real[:, :2] / 2
        entropy = keras.losses.binary_crossentropy
        both = ops.concatenate([self.maker(noise), real], axis=0)
        ones = ops.ones_like(real[:, :1])
        labels = ops.concatenate([ones, 0 * ones], axis=0)
        with tf.GradientTape() as tape:
            loss = ops.mean(entropy(labels, self.critic(both), True))
        weights = self.critic.trainable_weights
        gradients = tape.gradient(loss, weights)
        self.critic_optimizer.apply_gradients(
            zip(gradients, weights, strict=True)
        )
        self.critic_loss.update_state(loss)
        with tf.GradientTape() as tape:
            fake = self.critic(self.maker(noise))
            loss = ops.mean(entropy(0 * ones, fake, True))
        weights = self.maker.trainable_weights
        gradients = tape.gradient(loss, weights)
        self.maker_optimizer.apply(gradients, weights)
        self.maker_loss.update_state(loss)
        return {metric.name: metric.result() for metric in self.metrics}


def adversarial(built, **options):
    def build():
        model = Adversarial(built)
        model.compile(
            keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02), **options
        )
        return model

    return build


@pytest.mark.full
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("built", [False, True])
def test_a_model_without_call(built, eager, strategies):
    build = adversarial(built, run_eagerly=eager)

    def act(model):
        return [model.fit(A, **EVEN)]

    own = check_same(build, act, strategies, ["one_device"])
    # Of 11 rows replicas have 5 and 6, and their means are not the mean.
    trainer = mgpu_tf.Trainer(build, strategies["mirrored_x2"])
    trainer.fit(A, **EVEN | {"batch_size": 22, "epochs": 4})
    alone = reference(build)
    alone.fit(A, **EVEN | {"batch_size": 22, "epochs": 4})
    for a, b in zip(
        alone.get_weights(), trainer.model.get_weights(), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)
    for name in ("critic_optimizer", "maker_optimizer"):
        ours = getattr(trainer.model, name).variables
        keras_own = getattr(own, name).variables
        assert [v.shape for v in ours] == [v.shape for v in keras_own]
        for a, b in zip(getattr(alone, name).variables, ours, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)


class Siamese(keras.Model):
    """Triplets, three inputs and no target."""

    def __init__(self):
        super().__init__()
        self.embed = layers.Dense(4, activation="tanh")
        self.tracker = keras.metrics.Mean(name="loss")

    def call(self, inputs):
        anchor, positive, negative = map(self.embed, inputs)
        return (
            ops.sum((anchor - positive) ** 2, -1),
            ops.sum((anchor - negative) ** 2, -1),
        )

    @staticmethod
    def hinge(near, far):
        return ops.maximum(near - far + 0.5, 0.0)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            values = self.hinge(*self(data))
            loss = ops.mean(values) / replicas()
        weights = self.embed.trainable_weights
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.tracker.update_state(values)
        return {"loss": self.tracker.result()}

    def test_step(self, data):
        self.tracker.update_state(self.hinge(*self(data)))
        return {"loss": self.tracker.result()}

    @property
    def metrics(self):
        return [self.tracker]


class AddedLoss(Siamese):
    """The same with Keras's steps, for triplets as one input."""

    train_step = keras.Model.train_step
    test_step = keras.Model.test_step
    metrics = keras.Model.metrics

    def call(self, inputs):
        near, far = super().call(inputs)
        self.add_loss(ops.mean(self.hinge(near, far)))
        return near, far


def compiled(model_class, **options):
    def build():
        model = model_class()
        model.compile(keras.optimizers.Adam(0.01), **options)
        return model

    return build


TRIPLETS = (A, A + 0.1, A[::-1].copy())


@pytest.mark.parametrize("eager", tiered([False, True], [False]))
def test_triplets_for_a_step_of_the_author(eager, strategies):
    data = tf.data.Dataset.from_tensor_slices(TRIPLETS).batch(22)

    def act(model):
        return [model.fit(data, validation_data=data, **BATCHES)]

    check_same(
        compiled(Siamese, run_eagerly=eager),
        act,
        strategies,
        ["one_device", "mirrored_x2"],
    )


def as_input(*triplet):
    return (triplet,)


@pytest.mark.full
def test_triplets_as_one_input(strategies):
    data = tf.data.Dataset.from_tensor_slices(TRIPLETS).batch(8).map(as_input)

    def act(model):
        return [
            model.fit(data, **BATCHES),
            model.fit(list(TRIPLETS), **OPTIONS),
            model.predict(data, verbose=0),
            model.predict(TRIPLETS, verbose=0),
        ]

    check_same(compiled(AddedLoss), act, strategies)


def test_a_step_that_cannot_be_traced(strategies):
    class Broken(Adversarial):
        def train_step(self, real):
            raise RuntimeError("on purpose")

    def build():
        model = Broken(False)
        model.compile("sgd", "sgd")
        return model

    trainer = mgpu_tf.Trainer(build, strategies["one_device"])
    with pytest.raises(mgpu_tf.ConfigurationError, match="on purpose"):
        trainer.fit(A, **EVEN)


LENGTHS = [(8, 5), (8, 7), (6, 3)]
PADDED = [np.sin(np.arange(b * t * 2.0)).reshape(b, t, 2) for b, t in LENGTHS]


def sequences(each_step):
    for x in PADDED:
        yield (
            x,
            x.sum(2, keepdims=True) if each_step else x.sum((1, 2))[:, None],
        )


def padded(each_step):
    target = (None, None, 1) if each_step else (None, 1)
    return tf.data.Dataset.from_generator(
        lambda: sequences(each_step),
        output_signature=(
            tf.TensorSpec((None, None, 2), tf.float64),
            tf.TensorSpec(target, tf.float64),
        ),
    )


@pytest.mark.full
@pytest.mark.parametrize("each_step", [False, True])
def test_lengths_that_vary(each_step, strategies):
    def build():
        model = keras.Sequential(
            [layers.LSTM(3, return_sequences=each_step), layers.Dense(1)]
        )
        model.compile("sgd", "mse")
        return model

    def act(model):
        data = padded(each_step)
        return [
            model.fit(data, validation_data=data, **BATCHES),
            model.fit(sequences(each_step), shuffle=False, verbose=0),
            model.predict(data, verbose=0),
        ]

    check_same(build, act, strategies)


class Looked(keras.Model):
    """Takes numbers out of tensors, which only eager steps have."""

    seen: ClassVar[list[float]] = []

    def __init__(self):
        super().__init__()
        self.first = layers.Dense(4, activation="tanh", kernel_regularizer="l2")
        self.last = layers.Dense(1)

    def call(self, inputs):
        hidden = self.first(inputs)
        self.seen.append(float(hidden.numpy().sum()))
        return self.last(hidden)


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_run_eagerly(name, strategies):
    def build():
        model = Looked()
        model.compile(
            keras.optimizers.Adam(0.01, global_clipnorm=0.1),
            "mse",
            metrics=["mae"],
            run_eagerly=True,
        )
        return model

    def act(model):
        Looked.seen.clear()
        history = model.fit(A, Y, validation_data=(A, Y), **OPTIONS)
        steps = len(Looked.seen)
        ended = model.fit(dataset(A, Y).filter(whole), **BATCHES)
        return [history, ended, model.predict(A, verbose=0), [steps > 11]]

    check_same(build, act, strategies, [name])


def whole(x, y):
    return tf.shape(x)[0] > 0


def test_what_a_throwaway_trace_left_is_not_run():
    """It stands on how TensorFlow keeps apart what it traces to save."""
    seen = []

    @tf.function
    def authored(x):
        seen.append("traced")
        return x + len(seen)

    spec = tf.TensorSpec([], tf.float32)
    throwaway.graph_of(authored, spec)
    throwaway.graph_of(authored, spec)
    assert len(seen) == 1
    assert authored(tf.constant(0.0)) == 2.0
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    assert strategy.run(authored, (tf.constant(0.0),)) == 2.0

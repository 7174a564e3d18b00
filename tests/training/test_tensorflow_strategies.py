"""Strategies that TensorFlow's own classes made give the numbers of one device.

Keras divides a reduced loss by the replicas that it finds, also where each
replica computes it from all rows.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import mgpu_tf
from mgpu_tf.strategies.replicas.mirrored import OneReplicaView


class OfTheBatch(keras.losses.Loss):
    """Weighs classes by how often a batch has them."""

    def call(self, y_true, y_pred):
        positive = ops.cast(y_true > 0, y_pred.dtype)
        return ops.mean((y_true - y_pred) ** 2, -1) / (1 + ops.sum(positive))


class Steps(keras.Model):
    """Its step uses a loss of Keras's."""

    def __init__(self):
        super().__init__()
        self.head = layers.Dense(1)
        self.error = keras.losses.MeanSquaredError()

    def call(self, x):
        return self.head(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.error(y, self(x, training=True))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def of_loss(loss):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), loss)
    return model


def of_steps():
    model = Steps()
    model.compile(keras.optimizers.SGD(0.1))
    return model


BUILDS = {
    "Keras's loss": lambda: of_loss("mse"),
    "a loss of the batch": lambda: of_loss(OfTheBatch()),
    "its step": of_steps,
}
X = np.random.default_rng(0).normal(size=(13, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


@pytest.fixture(scope="module")
def made():
    """One of each, since a second `MirroredStrategy` cannot communicate."""
    devices = [f"CPU:{device}" for device in range(3)]
    central = tf.distribute.experimental.CentralStorageStrategy
    return {
        "mirrored": tf.distribute.MirroredStrategy(devices),
        "central storage": central(devices, "CPU:0"),
    }


@pytest.mark.parametrize(
    ("build", "name"),
    [
        ("Keras's loss", "mirrored"),
        ("Keras's loss", "central storage"),
        ("a loss of the batch", "mirrored"),
        ("a loss of the batch", "central storage"),
        ("its step", "mirrored"),
    ],
)
def test_a_model_made_in_their_scope(build, name, strategies, made):
    strategy, found = made[name], []
    for scope in (tf.distribute.get_strategy().scope, strategy.scope):
        keras.utils.set_random_seed(0)
        with scope():
            model = BUILDS[build]()
        trainer = model if not found else mgpu_tf.Trainer(model)
        options = {"batch_size": 7, "epochs": 2, "shuffle": False}
        history = trainer.fit(X, Y, verbose=0, **options).history["loss"]
        found.append([history, *model.get_weights()])
    for expected, received in zip(*found, strict=True):
        np.testing.assert_allclose(received, expected, rtol=1e-5, atol=1e-6)
    assert strategy.num_replicas_in_sync == 3
    assert not issubclass(tf.distribute.MirroredStrategy, OneReplicaView)

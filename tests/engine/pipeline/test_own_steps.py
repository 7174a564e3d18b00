"""A `train_step` of the author's own on a pipeline, against Keras."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import mgpu_tf
from tests.engine.pipeline.test_head import arrays, pairs

pytestmark = pytest.mark.usefixtures("float64")


class Seen(layers.Layer):
    """It notes on which devices it is computed."""

    devices: set

    def call(self, x):
        x = tf.identity(x)
        self.devices.add(x.device)
        return x


class Own(keras.Model):
    """Rows are mixed in the loss; it clips, and keeps an average."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            loss = pairs(y, p) + ops.mean(ops.square(y - p)) + sum(self.losses)
        weights = self.trainable_variables
        gradients, norm = tf.clip_by_global_norm(
            tape.gradient(loss, weights), 0.1
        )
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss, "norm": norm}

    def test_step(self, data):
        x, y = data
        return {"loss": pairs(y, self(x, training=False))}


@pytest.mark.parametrize(
    "column",
    ["data_2_pipeline_2", pytest.param("pipeline_x2", marks=pytest.mark.full)],
)
def test_the_numbers_of_one_device(column, strategies):
    devices: list[set] = []

    def build():
        keras.utils.set_random_seed(0)
        seen = Seen(), Seen()
        for layer in seen:
            layer.devices = set()
        devices[:] = [layer.devices for layer in seen]
        inputs = keras.Input((5,))
        x = layers.Dense(6, "tanh", kernel_regularizer="l2")(seen[0](inputs))
        x = layers.Dense(4, "tanh")(x)
        model = Own(inputs, layers.Dense(1)(seen[1](x)))
        adam = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
        model.compile(adam)
        return model

    options = {"shuffle": False, "verbose": 0}
    x, y = arrays()
    model = build()
    history = model.fit(x, y, 8, 2, **options).history
    score = model.evaluate(x, y, batch_size=8, verbose=0)
    trainer = mgpu_tf.Trainer(build, strategies[column])
    found = trainer.fit(x, y, 8, 2, **options).history
    for name, values in history.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-12)
    np.testing.assert_allclose(
        trainer.evaluate(x, y, batch_size=8, verbose=0), score, rtol=1e-12
    )
    for one, other in zip(
        model.get_weights(), trainer.model.get_weights(), strict=True
    ):
        np.testing.assert_allclose(other, one, atol=1e-13)
    first, second = ({d for d in each if "CPU" in d} for each in devices)
    assert first and second and not first & second

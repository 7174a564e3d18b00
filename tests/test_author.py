"""A `train_step` of the author's own, and what it does not go with."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf


class Own(keras.Model):
    """Squares by hand; returns a value that is no metric."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            square = tf.square(self(x) - y)
            replicas = tf.distribute.get_strategy().num_replicas_in_sync
            loss = tf.reduce_mean(square) / replicas
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.apply(gradients, variables)
        return {"square": tf.reduce_mean(square)}

    def apply(self, gradients, variables):
        self.optimizer.apply(gradients, variables)


class OwnClipped(Own):
    def apply(self, gradients, variables):
        mgpu_tf.apply_gradients(self.optimizer, gradients, variables)


def build(model_class, optimizer):
    def build_model():
        model = model_class()
        model.compile(optimizer())
        return model

    return build_model


def arrays(examples=8):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(examples, 3)).astype("float32")
    return x, x.sum(1, keepdims=True) + 1


def fit(strategy, model_class, optimizer, examples=8):
    trainer = mgpu_tf.Trainer(build(model_class, optimizer), strategy)
    x, y = arrays(examples)
    history = trainer.fit(
        x, y, batch_size=8, epochs=2, shuffle=False, verbose=0
    )
    return trainer, history.history


@pytest.mark.parametrize("column", ["mirrored_x2", "mirrored_x4"])
def test_values_that_are_no_metric_are_means(column, strategies):
    def sgd():
        return keras.optimizers.SGD(0.1)

    _, alone = fit(strategies["one_device"], Own, sgd)
    _, ours = fit(strategies[column], Own, sgd)
    assert list(ours) == ["square"]
    np.testing.assert_allclose(ours["square"], alone["square"], rtol=1e-5)


def test_apply_gradients_clips_the_sum(strategies):
    def clipped():
        return keras.optimizers.SGD(0.1, global_clipnorm=0.2)

    alone, _ = fit(strategies["one_device"], Own, clipped)
    ours, _ = fit(strategies["mirrored_x2"], OwnClipped, clipped)
    for a, b in zip(
        alone.model.get_weights(), ours.model.get_weights(), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5)


REFUSED = {
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=1.0),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=1.0),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=1.0),
    "gradient_accumulation_steps": lambda: keras.optimizers.SGD(
        0.1, gradient_accumulation_steps=2
    ),
    "ema_overwrite_frequency": lambda: keras.optimizers.SGD(
        0.1, use_ema=True, ema_overwrite_frequency=2
    ),
    "LossScaleOptimizer": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1)
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name, strategies):
    with pytest.raises(mgpu_tf.ConfigurationError, match=name) as error:
        fit(strategies["mirrored_x2"], Own, REFUSED[name])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name",
    [
        "gradient_accumulation_steps",
        "ema_overwrite_frequency",
        "LossScaleOptimizer",
    ],
)
def test_apply_gradients_refuses_the_rest(name, strategies):
    with pytest.raises(mgpu_tf.ConfigurationError, match=name):
        fit(strategies["mirrored_x2"], OwnClipped, REFUSED[name])


def test_one_device_refuses_nothing(strategies):
    for optimizer in REFUSED.values():
        fit(strategies["one_device"], Own, optimizer)


def test_replica_without_an_example(strategies):
    with pytest.raises(mgpu_tf.ConfigurationError, match="on every replica"):
        fit(
            strategies["mirrored_x4"],
            Own,
            lambda: keras.optimizers.SGD(0.1),
            examples=10,
        )

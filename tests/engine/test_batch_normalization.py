"""BatchNormalization of the global batch, by one option."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from tests.tiers import full


def build():
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(5),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def weights(trained):
    """What is left of two passes over 13 and 5 rows."""
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(18, 4)), generator.normal(size=(18, 1))
    trained.fit(x, y, batch_size=13, epochs=2, shuffle=False, verbose=0)
    model = getattr(trained, "model", trained)
    return [
        keras.ops.convert_to_numpy(variable) for variable in model.variables
    ]


@full
@pytest.mark.parametrize("name", ["mirrored_x3", "fsdp_x3", "one_device"])
def test_one_option_gives_the_numbers_of_one_device(name, strategies, float64):
    keras.utils.set_random_seed(1)
    expected = weights(build())
    trainer = mgpu_tf.Trainer(
        build, strategies[name], seed=1, batch_normalization="synchronized"
    )
    found = weights(trainer)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


def test_what_is_added_to_a_count_of_words(strategies, float64):
    """Keras adds 1e-7 to the count of what a mask keeps."""

    def build():
        words = keras.Input((5,), dtype="int32")
        x = keras.layers.Embedding(9, 8, mask_zero=True)(words)
        x = keras.layers.BatchNormalization(synchronized=True)(x)
        model = keras.Model(words, keras.layers.Dense(3)(x))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    generator = np.random.default_rng(0)
    x = generator.integers(0, 9, size=(7, 5))
    y = generator.normal(size=(7, 5, 3))
    fit = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
    keras.utils.set_random_seed(1)
    expected = build()
    expected.fit(x, y, **fit)
    keras.utils.set_random_seed(1)
    trainer = mgpu_tf.Trainer(build, strategies["data_2_tensor_2"])
    trainer.fit(x, y, **fit)
    pairs = zip(trainer.model.weights, expected.weights, strict=True)
    for weight, same in pairs:
        np.testing.assert_allclose(weight, same, rtol=0, atol=1e-12)


@full
def test_one_line_names_layers_of_each_replica(strategies, caplog):
    with caplog.at_level(logging.INFO, "mgpu_tf"):
        trainer = mgpu_tf.Trainer(build, strategies["mirrored_x3"], seed=1)
        weights(trainer)
        weights(trainer)
    lines = [r.getMessage() for r in caplog.records if "norm" in r.getMessage()]
    assert len(lines) == 1, lines
    assert "batch_normalization='synchronized'" in lines[0]


def test_moving_means_are_the_mean_over_replicas(strategies, float64):
    x = np.random.default_rng(0).normal(1.0, size=(30, 4))

    def build():
        layers = [keras.layers.BatchNormalization(momentum=0.5)]
        layers += [keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile("sgd", "mse")
        return model

    trainer = mgpu_tf.Trainer(build, strategies["mirrored_x3"])
    trainer.fit(x, x[:, :1], batch_size=30, verbose=0)
    found = trainer.model.layers[0].moving_mean.numpy()
    np.testing.assert_allclose(found, 0.5 * x.mean(0), rtol=1e-12)


class Penalized(keras.Model):
    """Its loss has a gradient in it."""

    def __init__(self, *, synchronized):
        super().__init__()
        self.first = keras.layers.Dense(5, activation="tanh")
        self.norm = keras.layers.BatchNormalization(synchronized=synchronized)
        self.last = keras.layers.Dense(1)

    def call(self, x, training=False):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = self.last(self.norm(self.first(x), training=training))
            bent = tf.tanh(y)
        slopes = tape.gradient(bent, x)
        if slopes is not None:
            self.add_loss(tf.reduce_mean(tf.reduce_sum(slopes**2, -1)))
        return y


@pytest.mark.parametrize(
    ("name", "synchronized"),
    [
        ("tensor_x3", True),
        pytest.param("tensor_x3", False, marks=full),
        ("mirrored_x3", True),
        pytest.param("fsdp_x3", True, marks=full),
    ],
)
def test_gradients_of_gradients(name, synchronized, strategies, float64):
    """Keras counts the mean as a constant where a layer is on its own."""

    def build():
        model = Penalized(synchronized=synchronized)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model(np.zeros((2, 4)))
        return model

    keras.utils.set_random_seed(1)
    expected = weights(build())
    found = weights(mgpu_tf.Trainer(build, strategies[name], seed=1))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)

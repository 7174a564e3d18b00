"""Parts of a step without a row, and code that takes no empty batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import mgpu_tf

pytestmark = pytest.mark.usefixtures("float64")


def entropy(y, p):
    """It ends with an error where there is no row."""
    with tf.control_dependencies(
        [tf.debugging.assert_greater(tf.shape(p)[0], 0)]
    ):
        return keras.losses.sparse_categorical_crossentropy(y, p)


class Counts(keras.metrics.Metric):
    """It counts rows, those that have no part in a loss too."""

    def __init__(self, name="rows"):
        super().__init__(name=name)
        self.rows = self.add_variable((), "zeros", name="rows")

    def update_state(self, y, p, sample_weight=None):
        tf.debugging.assert_greater(tf.shape(p)[0], 0)
        self.rows.assign_add(tf.cast(tf.shape(p)[0], self.rows.dtype))

    def result(self):
        return self.rows


class NeedsRows(layers.Layer):
    def call(self, x):
        tf.debugging.assert_greater(tf.shape(x)[0], 0)
        return x


def build():
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(6, "tanh", kernel_regularizer="l2"),
            NeedsRows(),
            layers.Dropout(0.4, seed=3),
            layers.Dense(3, "softmax"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.03), entropy, metrics=["accuracy", Counts()]
    )
    return model


@pytest.mark.parametrize(
    "column",
    [
        "one_device",
        "mirrored_x3",
        pytest.param("fsdp_x3", marks=pytest.mark.full),
        pytest.param("tensor_x3", marks=pytest.mark.full),
    ],
)
def test_as_in_keras(column, strategies):
    # The last batch has three rows: some replica has one, in four parts.
    x = np.random.default_rng(0).normal(size=(27, 4))
    y = np.arange(27) % 3
    fit = {"batch_size": 24, "epochs": 2, "shuffle": False, "verbose": 0}
    keras.utils.set_random_seed(1)
    alone = build()
    expected = alone.fit(x, y, **fit).history
    keras.utils.set_random_seed(1)
    trainer = mgpu_tf.Trainer(
        build, strategies[column], seed=None, step_parts=4
    )
    found = trainer.fit(x, y, **fit).history
    assert expected["rows"] == [27, 27]
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, 1e-9)
    pairs = zip(trainer.model.weights, alone.weights, strict=True)
    for mine, theirs in pairs:
        np.testing.assert_allclose(mine, theirs, 1e-9, 1e-12)

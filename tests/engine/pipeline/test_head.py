"""Losses and metrics that need all rows, behind the stages of a pipeline."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import mgpu_tf
from tests.tiers import tiered

pytestmark = pytest.mark.usefixtures("float64")


class OwnLoss(keras.Model):
    """A ratio beside what Keras computes, with its regularizers."""

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        size = ops.sum(ops.cast(ops.abs(y), y_pred.dtype))
        return loss + ops.sum(ops.abs(y_pred)) / size


class OwnMetrics(keras.Model):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        return results | {"largest": ops.max(ops.abs(y_pred))}


def dense(kind=keras.Model, regularizer=None):
    inputs = keras.Input((5,))
    x = layers.Dense(6, "tanh", kernel_regularizer=regularizer)(inputs)
    x = layers.Dense(4, "tanh", kernel_regularizer=regularizer)(x)
    return kind(inputs, layers.Dense(1)(x))


def tagger(kind=keras.Model, regularizer=None):
    words = keras.Input((7,), dtype="int32")
    x = layers.Embedding(
        6, 4, mask_zero=True, embeddings_regularizer=regularizer
    )(words)
    x = layers.LSTM(4, return_sequences=True)(x)
    x = layers.LSTM(4, return_sequences=True)(x)
    return kind(words, layers.Dense(6)(x))


def pairs(y, p):
    scores = ops.log_softmax(-ops.square(p - ops.transpose(y)), axis=-1)
    return -ops.mean(tf.linalg.diag_part(scores))


def share_of(y, p):
    return ops.sum(ops.abs(y - p)) / ops.sum(ops.abs(y) + 1)


def arrays():
    generator = np.random.default_rng(0)
    return generator.normal(size=(22, 5)), generator.normal(size=(22, 1))


def words():
    every = np.random.default_rng(0).integers(0, 6, (22, 7))
    return every, np.roll(every, 1, 1)


def weighted():
    return keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


CASES = {
    "weights": (lambda: dense(regularizer="l2"), weighted, ["mae"], arrays),
    "mask": (tagger, crossentropy, ["accuracy"], words),
    "pairs": (dense, lambda: pairs, [share_of], arrays),
    "a metric alone": (dense, lambda: "mse", [share_of], arrays),
    "own compute_loss": (
        lambda: dense(OwnLoss, "l2"),
        lambda: "mse",
        ["mae"],
        arrays,
    ),
    "own compute_loss and rows": (
        lambda: tagger(OwnLoss, "l2"),
        crossentropy,
        ["accuracy"],
        words,
    ),
    "own compute_metrics": (
        lambda: dense(OwnMetrics),
        lambda: "mse",
        ["mae"],
        arrays,
    ),
}
COLUMNS = ["data_2_pipeline_2", "pipeline_x2"]
ROWS = [(name, column) for name in CASES for column in COLUMNS]


@pytest.mark.parametrize(
    ("name", "column"),
    tiered(
        ROWS,
        [("pairs", "data_2_pipeline_2")],
        [row for row in ROWS if row[1] == "data_2_pipeline_2"],
    ),
)
def test_the_numbers_of_one_device(name, column, strategies):
    """Weights, logs and an evaluation, with rows that do not divide."""
    make, loss, metrics, data = CASES[name]
    x, y = data()
    weights = np.random.default_rng(1).uniform(0.1, 1.0, 22)
    options = {"sample_weight": weights} if name == "weights" else {}

    def build():
        keras.utils.set_random_seed(0)
        model = make()
        model.compile(keras.optimizers.Adam(0.01), loss(), metrics=metrics)
        return model

    def seen(trained):
        history = trained.fit(
            x, y, 8, 2, shuffle=False, verbose=0, **options
        ).history
        scores = trained.evaluate(
            x, y, batch_size=8, verbose=0, return_dict=True, **options
        )
        return history, scores

    model = build()
    trainer = mgpu_tf.Trainer(build, strategies[column])
    for expected, found in zip(seen(model), seen(trainer), strict=True):
        assert set(found) == set(expected)
        for key, value in expected.items():
            np.testing.assert_allclose(found[key], value, rtol=1e-12)
    for expected, found in zip(
        model.get_weights(), trainer.model.get_weights(), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-13)


def test_losses_of_layers_and_an_own_compute_loss_are_refused(strategies):
    class Adds(layers.Layer):
        def call(self, x):
            self.add_loss(0.1 * ops.mean(ops.square(x)))
            return x

    def build():
        inputs = keras.Input((5,))
        x = Adds()(layers.Dense(4)(inputs))
        model = OwnLoss(inputs, layers.Dense(1)(x))
        model.compile("sgd", "mse")
        return model

    trainer = mgpu_tf.Trainer(build, strategies["pipeline_x2"])
    with pytest.raises(mgpu_tf.ConfigurationError, match="add_loss") as error:
        trainer.fit(*arrays(), batch_size=8, verbose=0)
    assert "\n" not in str(error.value)

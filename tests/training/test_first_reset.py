"""Metrics begin an epoch as in Keras, whose first reset comes before them."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from tests.tiers import tiered


class Least(keras.metrics.Metric):
    """The smallest error; its `reset_state` is Keras's, to zero."""

    def __init__(self):
        super().__init__(name="least")
        self.value = self.add_weight(
            shape=(), initializer=keras.initializers.Constant(50.0), name="v"
        )

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = tf.reduce_min(tf.abs(y_true - y_pred))
        self.value.assign(tf.minimum(self.value, error))

    def result(self):
        return self.value + 0.0  # Not the variable, which is reset later.


def build():
    kernel = keras.initializers.Ones()
    layer = keras.layers.Dense(1, kernel_initializer=kernel)
    model = keras.Sequential([keras.Input((4,)), layer])
    model.compile("sgd", "mse", metrics=[Least()])
    return model


X = np.random.default_rng(0).normal(size=(14, 4)).astype("float32")
Y = np.ones((14, 1), "float32")
OPTIONS = {"batch_size": 7, "verbose": 0}


def fits(model):
    history = model.fit(X, Y, epochs=2, shuffle=False, **OPTIONS)
    return history.history["least"]


def evaluates_first(model):
    scores = model.evaluate(X, Y, return_dict=True, **OPTIONS)
    return [scores["least"], *fits(model)]


def validates(model):
    history = model.fit(
        X, Y, validation_data=(X, Y), epochs=2, shuffle=False, **OPTIONS
    )
    return [*history.history["least"], *history.history["val_least"]]


def predicts_first(model):
    model.predict(X, **OPTIONS)
    return fits(model)


RUNS = [fits, evaluates_first, validates, predicts_first]


@pytest.mark.parametrize(
    ("name", "run"),
    tiered(
        list(itertools.product(["mirrored_x3", "fsdp_x3"], RUNS)),
        [
            ("mirrored_x3", validates),
            ("mirrored_x3", evaluates_first),
            ("fsdp_x3", predicts_first),
        ],
    ),
)
def test_compiled_metrics_begin_as_in_keras(run, name, strategies):
    expected = run(build())
    assert max(expected) > 0
    received = run(mgpu_tf.Trainer(build, strategies[name]))
    np.testing.assert_allclose(received, expected, rtol=1e-6)


def test_a_resumed_run_resets_all(tmp_path, strategies):
    def run(epochs, folder):
        trainer = mgpu_tf.Trainer(build, strategies["mirrored_x3"])
        options = {"epochs": epochs, "checkpoint_dir": str(folder)}
        return trainer.fit(X, Y, shuffle=False, **OPTIONS, **options).history

    whole = run(3, tmp_path / "whole")
    run(1, tmp_path / "parts")
    parts = run(3, tmp_path / "parts")
    assert whole["least"][0] > 0
    assert parts["least"] == whole["least"][-len(parts["least"]) :]

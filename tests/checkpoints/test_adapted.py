"""Layers that were adapted compute with what a checkpoint has of them."""

import keras
import numpy as np
import pytest

import mgpu_tf

X = np.random.default_rng(0).normal(3.0, 2.0, size=(26, 5)).astype("float32")
Y = X[:, :1]


def build(adapted=None):
    """A model whose inputs are normalized by numbers of some data."""
    normal = keras.layers.Normalization()
    model = keras.Sequential([keras.Input((5,)), normal, keras.layers.Dense(1)])
    if adapted is not None:
        normal.adapt(adapted)
    model.compile("adam", "mse")
    return model


@pytest.mark.parametrize("name", ["mirrored_x3", "fsdp_x3"])
def test_a_restored_model_predicts_as_the_saved_one(name, strategies, tmp_path):
    saved = mgpu_tf.Trainer(lambda: build(X), strategies[name])
    fit = {"epochs": 1, "verbose": 0, "checkpoint_dir": str(tmp_path)}
    saved.fit(X, Y, batch_size=8, **fit)
    expected = saved.predict(X, verbose=0)
    trainer = mgpu_tf.Trainer(build, strategies[name])
    before = trainer.predict(X, verbose=0)  # A trace has the old numbers.
    assert np.abs(before - expected).max() > 0.1
    trainer.restore(str(tmp_path), "newest", X, Y)
    np.testing.assert_array_equal(trainer.predict(X, verbose=0), expected)
    # A run that is resumed goes on with the numbers of its checkpoint.
    resumed = mgpu_tf.Trainer(lambda: build(X + 1.0), strategies[name])
    resumed.fit(X, Y, batch_size=8, **fit | {"epochs": 2})
    saved.fit(X, Y, batch_size=8, **fit | {"epochs": 2})
    np.testing.assert_array_equal(
        resumed.predict(X, verbose=0), saved.predict(X, verbose=0)
    )

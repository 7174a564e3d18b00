"""Layers that load a SavedModel, whose operations no graph here has made."""

import keras
import numpy as np
import pytest

import mgpu_tf

X = np.random.default_rng(0).normal(size=(26, 5)).astype("float32")
Y = X[:, :2]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a network that was exported."""
    folder = str(tmp_path_factory.mktemp("saved"))
    keras.utils.set_random_seed(1)
    network = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(4, activation="tanh")]
    )
    network.export(folder, verbose=False)
    return folder


@pytest.mark.parametrize("name", ["mirrored_x3", "fsdp_x3", "tensor_x3"])
def test_a_saved_network_as_a_layer(name, saved, strategies):
    def build():
        inputs = keras.Input((5,))
        hidden = keras.layers.TFSMLayer(
            saved, call_endpoint="serve", trainable=False
        )(inputs)
        model = keras.Model(inputs, keras.layers.Dense(2)(hidden))
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    losses = []
    for kind in ("keras", name):
        keras.utils.set_random_seed(7)
        model = build() if kind == "keras" else None
        model = model or mgpu_tf.Trainer(build, strategies[name])
        fit = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
        losses.append(model.fit(X, Y, **fit).history["loss"])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)

import keras
import numpy as np
import pytest

import mgpu_tf
from mgpu_tf import models
from mgpu_tf.errors import ConfigurationError


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet/8", "transformer"])
def test_logits_for_each_example(name):
    model = models.create_model(name, (8, 8, 1), 10)
    outputs = model(np.zeros([3, 8, 8, 1], "float32"))
    assert outputs.shape == (3, 10)
    assert model.layers[-1].activation is keras.activations.linear
    assert not model.compiled


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
def test_no_state_that_replicas_disagree_on(name):
    model = models.create_model(name, (8, 8, 1), 10)
    assert model.non_trainable_variables == []


def test_depth_counts_layers_with_weights():
    for depth in (8, 20):
        model = models.create_model(f"resnet/{depth}", (8, 8, 1), 10)
        kinds = keras.layers.Conv2D, keras.layers.Dense
        counted = [
            layer
            for layer in model.layers
            if isinstance(layer, kinds)
            and getattr(layer, "kernel_size", (3, 3)) == (3, 3)
        ]
        assert len(counted) == depth


def test_blocks_that_begin_as_the_identity():
    x = np.random.default_rng(0).uniform(size=(4, 8, 8, 1)).astype("float32")
    model = models.create_model(
        "resnet/8", (8, 8, 1), 3, zero_init_residual=True
    )
    branches = [
        layer.input for layer in model.layers if layer.name[:3] == "add"
    ]
    assert len(branches) == 3
    outputs = [output for _, output in branches]
    for branch in keras.Model(model.input, outputs)(x):
        assert not np.any(branch)
    # And they learn: the convolution that is zero has a gradient.
    model.compile("sgd", "mse")
    model.fit(x, np.ones((4, 3)), verbose=0)
    for branch in keras.Model(model.input, outputs)(x):
        assert np.any(branch)


def test_statistics_of_all_replicas():
    own = models.create_model("resnet", (8, 8, 1), 10)
    other = models.create_model("MobileNetV2", (32, 32, 3), 10)
    mgpu_tf.synchronize_batch_normalization(other)
    for model in (own, other):
        found = [
            layer.synchronized
            for layer in model.layers
            if isinstance(layer, keras.layers.BatchNormalization)
        ]
        assert found
        assert all(found)


def test_transformer_is_saved_and_loaded(tmp_path):
    model = models.create_model("transformer", (20,), 3)
    x = np.random.default_rng(0).uniform(size=(4, 20)).astype("float32")
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded(x), model(x), rtol=1e-6)


def test_refused():
    with pytest.raises(ConfigurationError, match="Did you mean 'cnn'"):
        models.create_model("cn", (8, 8, 1), 10)
    with pytest.raises(ConfigurationError, match="takes images"):
        models.create_model("cnn", (20,), 10)

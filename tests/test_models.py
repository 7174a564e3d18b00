import keras
import numpy as np
import pytest

from mgpu_tf import models
from mgpu_tf.errors import ConfigurationError


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_logits_for_each_example(name):
    model = models.create_model(name, (8, 8, 1), 10)
    outputs = model(np.zeros([3, 8, 8, 1], "float32"))
    assert outputs.shape == (3, 10)
    assert model.layers[-1].activation is keras.activations.linear
    assert not model.compiled


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_no_state_that_replicas_disagree_on(name):
    model = models.create_model(name, (8, 8, 1), 10)
    assert model.non_trainable_variables == []


def test_refused():
    with pytest.raises(ConfigurationError, match="Did you mean 'cnn'"):
        models.create_model("cn", (8, 8, 1), 10)
    with pytest.raises(ConfigurationError, match="takes images"):
        models.create_model("cnn", (20,), 10)

"""Where the passes of models with split weights compute."""

import collections

import keras
import numpy as np
import pytest
from keras import layers

import mgpu_tf
from tests.partition_graphs import graphs_of

LAYERS, WIDTH, ROWS = 6, 24, 24


def build(name):
    model = keras.Sequential(
        [keras.Input((WIDTH,))]
        + [
            layers.Dense(WIDTH, "tanh", use_bias=False, name=f"{name}_{number}")
            for number in range(LAYERS)
        ]
    )
    model.compile("sgd", "mse")
    return model


def graphs_on(strategy, name):
    trainer = mgpu_tf.Trainer(
        lambda: build(name), strategy, steps_per_execution=1
    )
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("float32")
    return graphs_of(
        lambda: trainer.fit(x, x, batch_size=ROWS, epochs=1, verbose=0)
    )


def strategy_of(**axes):
    devices = np.prod([*axes.values()])
    return mgpu_tf.create_model_parallel_strategy(
        num_virtual_devices=int(devices), smallest_split=4, **axes
    )


@pytest.mark.full
@pytest.mark.parametrize("axes", [{"fsdp": 4}, {"tensor": 2}])
def test_each_device_computes_its_own_passes(axes):
    name = f"of_{'_'.join(axes)}"
    graphs = graphs_on(strategy_of(**axes), name)
    # Work of the tests before is recorded as well: it has other names.
    forward = collections.Counter(
        device
        for device, nodes in graphs.items()
        for node in nodes
        if node.op == "Tanh" and name in node.name
    )
    devices = int(np.prod([*axes.values()]))
    assert forward == {f"CPU:{i}": LAYERS for i in range(devices)}
    for device in forward:
        count = collections.Counter(node.op for node in graphs[device])
        # Layers are computed again with fsdp.
        assert count["Tanh"] >= LAYERS * (2 if "fsdp" in axes else 1)
        assert count["TanhGrad"] >= LAYERS

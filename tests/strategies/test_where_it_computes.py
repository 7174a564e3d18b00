"""Where the passes of models with split weights compute."""

import collections

import keras
import numpy as np
import pytest
from keras import layers

import mgpu_tf
from tests.partition_graphs import graphs_of

LAYERS, WIDTH, ROWS = 6, 24, 24


def build():
    model = keras.Sequential(
        [keras.Input((WIDTH,))]
        + [layers.Dense(WIDTH, "tanh", use_bias=False) for _ in range(LAYERS)]
    )
    model.compile("sgd", "mse")
    return model


def graphs_on(strategy):
    trainer = mgpu_tf.Trainer(build, strategy, steps_per_execution=1)
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
    graphs = graphs_on(strategy_of(**axes))
    counts = {
        device: collections.Counter(node.op for node in nodes)
        for device, nodes in graphs.items()
    }
    # Other work of this process in between is recorded as well.
    counts = {device: ops for device, ops in counts.items() if ops["Tanh"]}
    devices = int(np.prod([*axes.values()]))
    assert sorted(counts) == [f"CPU:{i}" for i in range(devices)]
    for count in counts.values():
        # Layers are computed again with fsdp.
        assert count["Tanh"] == LAYERS * (2 if "fsdp" in axes else 1)
        assert count["TanhGrad"] == LAYERS

"""What devices send each other in a step, counted in its graph.

Every tensor that an operation takes from another device counts once for each
device that takes it. An all-reduce of P bytes over n devices moves at least
2 (n - 1) P.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from tests.tiers import tiered

WIDTH, LAYERS = 32, 4
BYTES = LAYERS * WIDTH * WIDTH * 4


def build():
    model = keras.Sequential([keras.Input((WIDTH,))])
    for _ in range(LAYERS):
        model.add(keras.layers.Dense(WIDTH, use_bias=False))
    model.compile(keras.optimizers.Adam(), "mse")
    return model


def device(op):
    return op.device and tf.DeviceSpec.from_string(op.device).device_index


def moved(graph):
    """The bytes of large tensors that cross devices in a graph."""
    seen, total = set(), 0
    for op in graph.get_operations():
        here = device(op)
        for tensor in op.inputs:
            there = device(tensor.op)
            size = (tensor.shape.num_elements() or 0) * tensor.dtype.size
            if tensor.dtype == tf.resource or size < WIDTH * WIDTH // 4:
                continue
            if "" in (here, there):
                continue
            if here != there and (id(tensor), here) not in seen:
                seen.add((id(tensor), here))
                total += size
    return total


def body_of(trainer):
    """The graph of one step of training."""
    functions = trainer._distributed.engine._functions
    [train] = [f for key, f in functions.items() if key[0] == "train"]
    [concrete] = train._list_all_concrete_functions()
    [loop] = [
        op
        for op in concrete.graph.get_operations()
        if op.type in ("While", "StatelessWhile")
    ]
    name = loop.get_attr("body").name
    return concrete.graph._get_function(name).graph


@pytest.mark.parametrize(
    ("shard", "most"),
    [("optimizer", 1.0), ("gradients", 1.0), ("weights", 1.5)],
)
@pytest.mark.parametrize("devices", tiered([2, 4], [2]))
def test_no_more_than_an_all_reduce(shard, most, devices):
    strategy = mgpu_tf.create_model_parallel_strategy(
        shard=shard, num_virtual_devices=devices
    )
    trainer = mgpu_tf.Trainer(build, strategy)
    x = np.ones((16, WIDTH), "float32")
    trainer.fit(x, x, batch_size=8, verbose=0)
    all_reduce = 2 * (devices - 1) * BYTES
    found = moved(body_of(trainer)) / all_reduce
    assert 0.99 * most <= found <= 1.05 * most

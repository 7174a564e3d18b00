"""What stays in memory after steps: variables, and nothing of their size."""

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from tests.planner import counts

WIDTH = 1024


def build():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((WIDTH,)),
            # Each weight has a shape of its own.
            keras.layers.Dense(WIDTH // 2, use_bias=False),
            keras.layers.Dense(WIDTH, use_bias=False),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def held():
    gc.collect()
    return tf.config.experimental.get_memory_info("CPU:0")["current"]


@pytest.mark.parametrize("column", ["mirrored_x3", "fsdp_x3"])
def test_a_step_leaves_nothing_but_variables(column, strategies):
    counts.needed()
    x = np.ones((7, WIDTH), "float32")
    before = held()
    trainer = mgpu_tf.Trainer(build, strategies[column])
    trainer.fit(x, x, batch_size=4, verbose=0)
    # Four bytes, of a weight and of what the optimizer keeps for it.
    variables = 8 * sum(np.prod(v.shape) for v in trainer.model.variables)
    copies = 3 if column == "mirrored_x3" else 1
    # What replicas keep of the shape of all gradients would be half as much.
    assert held() - before < 1.25 * copies * variables

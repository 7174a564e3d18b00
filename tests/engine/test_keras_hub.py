"""Tasks of keras-hub on meshes, against their own `fit` on one device.

A BERT that classifies, and causal language models.
"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from mgpu_tf.strategies.split.sharded_variable import ShardedVariable
from tests.tiers import tiered

pytest.importorskip("keras_hub")
from tests.engine import hub_tasks


def build(name):
    keras.utils.set_random_seed(1)
    return hub_tasks.compiled(hub_tasks.TASKS[name]())


def state_of(model):
    """Weights, and what the optimizer keeps."""
    return [v.numpy() for v in [*model.variables, *model.optimizer.variables]]


FIT = {
    "epochs": hub_tasks.EPOCHS,
    "batch_size": hub_tasks.BATCH,
    "shuffle": False,
    "verbose": 0,
}
_stock = {}


def stock(name):
    """Keras's own result, computed once."""
    if name not in _stock:
        x, y, weight = hub_tasks.data_of(name)
        with tf.device("CPU:0"):
            task = build(name)
            history = task.fit(x, y, sample_weight=weight, **FIT).history
        _stock[name] = history, state_of(task)
    return _stock[name]


pytestmark = pytest.mark.usefixtures("float64")


def tensor_x2():
    return mgpu_tf.create_model_parallel_strategy(
        tensor=2, num_virtual_devices=2, smallest_split=4
    )


MESHES = ["tensor_x2", "fsdp_x3", "data_2_tensor_2"]
MESHES += ["pipeline_x2", "data_2_pipeline_2", "fsdp_3_pipeline_2"]
MESHES += ["tensor_2_pipeline_2"]
ROWS_OF_TESTS = list(itertools.product(MESHES, hub_tasks.TASKS))


# Llama computes its norms and its attention in float32, whatever the type.
TOLERANCES = {"llama": 1e-6}


def made(mesh, strategies):
    return tensor_x2() if mesh == "tensor_x2" else strategies[mesh]


@pytest.mark.parametrize(("mesh", "name"), tiered(ROWS_OF_TESTS, []))
def test_as_on_one_device(mesh, name, strategies):
    history, state = stock(name)
    atol = TOLERANCES.get(name, 1e-9)
    strategy = made(mesh, strategies)
    trainer = mgpu_tf.Trainer(lambda: build(name), strategy, seed=None)
    x, y, weight = hub_tasks.data_of(name)
    found = trainer.fit(x, y, sample_weight=weight, **FIT).history
    assert trainer.global_step == 16
    assert set(found) == set(history)
    for curve, values in history.items():
        np.testing.assert_allclose(found[curve], values, rtol=0, atol=atol)
    for ours, theirs in zip(state_of(trainer.model), state, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)
    split = [
        v.path
        for v in trainer.model.trainable_variables
        if isinstance(v.value, ShardedVariable)
    ]
    assert bool(split) == ("fsdp" in mesh or "tensor" in mesh)
    if "tensor" in mesh:
        for part in ("token_embedding", "query", "output"):
            assert any(part in path for path in split), (part, split)

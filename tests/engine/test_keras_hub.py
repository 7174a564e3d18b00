"""Tasks of keras-hub on meshes, against their own `fit` on one device.

Tiny, with random weights, on token ids: a BERT that classifies, and causal
language models.
"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from mgpu_tf.strategies.split.sharded_variable import ShardedVariable
from tests.tiers import tiered

hub = pytest.importorskip("keras_hub")

VOCABULARY, LENGTH, CLASSES = 24, 6, 3
# 8 steps in an epoch, the last of 7 rows.
ROWS, BATCH, EPOCHS = 119, 16, 2
SIZES = {"vocabulary_size": VOCABULARY, "num_layers": 2, "hidden_dim": 8}


def bert():
    body = hub.models.BertBackbone(
        **SIZES,
        num_heads=2,
        intermediate_dim=12,
        max_sequence_length=LENGTH,
        dropout=0.0,
    )
    return hub.models.BertTextClassifier(body, CLASSES, dropout=0.0)


def gpt2():
    body = hub.models.GPT2Backbone(
        **SIZES,
        num_heads=2,
        intermediate_dim=12,
        max_sequence_length=LENGTH,
        dropout=0.0,
    )
    return hub.models.GPT2CausalLM(body)


def llama():
    body = hub.models.LlamaBackbone(
        **SIZES,
        num_query_heads=4,
        num_key_value_heads=2,
        intermediate_dim=12,
        dropout=0.0,
    )
    return hub.models.LlamaCausalLM(body)


TASKS = {"bert": bert, "gpt2": gpt2, "llama": llama}


def data_of(name):
    """Returns inputs, targets and weights of examples with padding."""
    generator = np.random.default_rng(4)
    words = generator.integers(1, VOCABULARY, (ROWS, LENGTH))
    present = np.arange(LENGTH) < generator.integers(3, LENGTH + 1, (ROWS, 1))
    x = {"token_ids": words * present, "padding_mask": present}
    if name != "bert":
        return x, np.roll(words, -1, 1), present.astype("float64")
    x["segment_ids"] = (np.arange(LENGTH) > 2) * present.astype("int32")
    y = generator.integers(0, CLASSES, ROWS)
    return x, y, generator.uniform(0.5, 1.5, ROWS)


def build(name):
    keras.utils.set_random_seed(1)
    task = TASKS[name]()
    task.compile(
        keras.optimizers.AdamW(
            0.02, weight_decay=0.1, epsilon=1e-3, global_clipnorm=0.2
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
    )
    return task


def state_of(model):
    """Weights, and what the optimizer keeps."""
    return [v.numpy() for v in [*model.variables, *model.optimizer.variables]]


FIT = {"epochs": EPOCHS, "batch_size": BATCH, "shuffle": False, "verbose": 0}
_stock = {}


def stock(name):
    """Keras's own result, computed once."""
    if name not in _stock:
        x, y, weight = data_of(name)
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
ROWS_OF_TESTS = list(itertools.product(MESHES, TASKS))


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
    x, y, weight = data_of(name)
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

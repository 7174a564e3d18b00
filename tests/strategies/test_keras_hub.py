"""Tasks of keras-hub, with random weights, on each mesh in float64."""

import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from mgpu_tf.strategies.sharded_variable import ShardedVariable

hub = pytest.importorskip("keras_hub")
pytestmark = pytest.mark.full

VOCABULARY, LENGTH, ROWS, BATCH, EPOCHS = 24, 6, 130, 16, 2


def adam():
    return keras.optimizers.Adam(0.01, epsilon=1e-3, global_clipnorm=0.5)


def loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def bert():
    body = hub.models.BertBackbone(
        vocabulary_size=VOCABULARY,
        num_layers=2,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        max_sequence_length=LENGTH,
        dropout=0.0,
    )
    task = hub.models.BertTextClassifier(body, 3, dropout=0.0)
    task.compile(adam(), loss(), metrics=["accuracy"])
    return task


def gpt2():
    body = hub.models.GPT2Backbone(
        vocabulary_size=VOCABULARY,
        num_layers=2,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        max_sequence_length=LENGTH,
        dropout=0.0,
    )
    task = hub.models.GPT2CausalLM(body)
    task.compile(adam(), loss(), weighted_metrics=["accuracy"])
    return task


def llama():
    """Embeddings and the last layer are two weights, unlike GPT-2's."""
    body = hub.models.LlamaBackbone(
        vocabulary_size=VOCABULARY,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
    )
    task = hub.models.LlamaCausalLM(body)
    task.compile(adam(), loss(), weighted_metrics=["accuracy"])
    return task


TASKS = {"bert": bert, "gpt2": gpt2, "llama": llama}


def data_of(task):
    generator = np.random.default_rng(0)
    words = generator.integers(1, VOCABULARY, (ROWS, LENGTH))
    there = np.arange(LENGTH) < generator.integers(2, LENGTH + 1, (ROWS, 1))
    x = {"token_ids": np.where(there, words, 0), "padding_mask": there * 1}
    if task == "bert":
        x["segment_ids"] = np.zeros_like(words)
        return x, generator.integers(0, 3, ROWS), None
    return x, np.roll(x["token_ids"], -1, 1), there.astype("float64")


@pytest.fixture(autouse=True)
def wide():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


def seeded(task):
    def build():
        keras.utils.set_random_seed(1)
        return TASKS[task]()

    return build


def numbers_of(model, history):
    return [
        *(variable.numpy() for variable in model.variables),
        *(variable.numpy() for variable in model.optimizer.variables),
        *history.history.values(),
    ]


def fit(trainer, task):
    x, y, weights = data_of(task)
    return trainer.fit(
        x,
        y,
        sample_weight=weights,
        batch_size=BATCH,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
    )


@functools.cache
def reference(task):
    with tf.device("CPU:0"):
        model = seeded(task)()
        return numbers_of(model, fit(model, task))


def strategy_of(axes):
    return mgpu_tf.create_model_parallel_strategy(
        num_virtual_devices=int(np.prod([*axes.values()])),
        **({} if "pipeline" in axes else {"smallest_split": 4}),
        **axes,
    )


def split_weights(trainer):
    return {
        re.sub(r"^\w*backbone/", "", variable.path): variable.value.split.dim
        for variable in trainer.model.trainable_variables
        if isinstance(variable.value, ShardedVariable)
    }


MESHES = {
    "fsdp 4": {"fsdp": 4},
    "data 2 x fsdp 2": {"data": 2, "fsdp": 2},
    "tensor 2": {"tensor": 2},
    "data 2 x tensor 2": {"data": 2, "tensor": 2},
    "pipeline 2": {"pipeline": 2},
}
CASES = [
    (task, mesh)
    for mesh in MESHES
    for task in TASKS
    if (task, mesh) != ("gpt2", "pipeline 2")
]


@pytest.mark.parametrize(("task", "mesh"), CASES)
def test_eighteen_steps_have_the_numbers_of_one_device(task, mesh):
    trainer = mgpu_tf.Trainer(seeded(task), strategy_of(MESHES[mesh]))
    history = fit(trainer, task)
    assert trainer.global_step == EPOCHS * -(-ROWS // BATCH) >= 16
    seen = numbers_of(trainer.model, history)
    difference = max(
        float(np.abs(np.subtract(*pair)).max())
        for pair in zip(seen, reference(task), strict=True)
    )
    print(f"{task} on {mesh}: {difference:.1e}")
    assert difference < 1e-9
    if mesh == "tensor 2":
        assert split_weights(trainer) == SPLIT[task]
    elif mesh != "pipeline 2":
        assert len(split_weights(trainer)) >= 10


def test_a_tied_embedding_is_kept_in_one_stage():
    """GPT-2 reads its embedding in the first and in the last layer."""
    with pytest.raises(mgpu_tf.ConfigurationError, match="shared") as error:
        fit(
            mgpu_tf.Trainer(seeded("gpt2"), strategy_of({"pipeline": 2})),
            "gpt2",
        )
    assert "\n" not in str(error.value)


# By structure: the dimension along which each weight is split.
SPLIT = {"bert": {}, "gpt2": {}, "llama": {}}

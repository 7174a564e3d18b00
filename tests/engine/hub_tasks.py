"""Tasks of keras-hub, tiny and with random weights, on token ids."""

import keras
import keras_hub as hub
import numpy as np

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


def compiled(task):
    task.compile(
        keras.optimizers.AdamW(
            0.02, weight_decay=0.1, epsilon=1e-3, global_clipnorm=0.2
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
    )
    return task

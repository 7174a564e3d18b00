"""Memory of a step whose devices have whole sequences, or parts of them.

    python experiments/sequence_memory.py
    python experiments/sequence_memory.py --sequence_parallel
    python experiments/sequence_memory.py --sequence_parallel --recompute

Trains a causal language model of 12 blocks of width 512 on batches of 16
sequences of 128 tokens, with Adam, on two parts of one CPU that compute parts
of each layer. It prints a line of JSON: the loss, the seconds of the first
epoch and of a step, and in MiB for each device what stays between steps, and
the most that a step had beside it, of TensorFlow's allocator. `--recompute`
computes blocks again in the backward pass. About 2 minutes on 2 cores.
"""

import gc
import json
import statistics
import time

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from keras import layers

import mgpu_tf

SEQUENCE_PARALLEL = flags.DEFINE_bool(
    "sequence_parallel", False, "Devices have parts of a sequence."
)
RECOMPUTE = flags.DEFINE_bool("recompute", False, "Blocks are computed again.")
TENSOR = flags.DEFINE_integer("tensor", 2, "Devices that compute a layer.")
LENGTH = flags.DEFINE_integer("length", 128, "Tokens of a sequence.")
WIDTH = flags.DEFINE_integer("width", 512, "Features of a token.")
BLOCKS = flags.DEFINE_integer("blocks", 12, "Blocks of the model.")
VOCABULARY, HEADS, BATCH, STEPS, RUNS = 64, 8, 16, 4, 3


class Block(layers.Layer):
    """A transformer block with norms before its layers."""

    def __init__(self, width, **options):
        super().__init__(**options)
        self.norms = [layers.LayerNormalization() for _ in range(2)]
        self.drops = [layers.Dropout(0.1) for _ in range(2)]
        self.attention = layers.MultiHeadAttention(HEADS, width // HEADS)
        self.inner = layers.Dense(4 * width, activation="gelu")
        self.outer = layers.Dense(width)

    def call(self, x, training=None):
        y = self.norms[0](x)
        y = self.attention(y, y, use_causal_mask=True)
        x = x + self.drops[0](y, training=training)
        y = self.outer(self.inner(self.norms[1](x)))
        return x + self.drops[1](y, training=training)


def build():
    """Returns a compiled causal language model."""
    words = keras.Input((LENGTH.value,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH.value)(words)
    for place in range(BLOCKS.value):
        x = Block(WIDTH.value, name=f"block_{place}")(x)
    x = layers.Dense(VOCABULARY)(layers.LayerNormalization()(x))
    model = keras.Model(words, x)
    model.compile(
        keras.optimizers.Adam(1e-4),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def main(arguments):
    """Trains, and prints what it took."""
    del arguments
    strategy = mgpu_tf.create_model_parallel_strategy(
        tensor=TENSOR.value,
        num_virtual_devices=TENSOR.value,
        sequence_parallel=SEQUENCE_PARALLEL.value,
    )
    recompute = "block_*" if RECOMPUTE.value else None
    trainer = mgpu_tf.Trainer(build, strategy, recompute=recompute)
    shape = (BATCH * STEPS, LENGTH.value)
    words = np.random.default_rng(0).integers(0, VOCABULARY, shape)

    def fit():
        began = time.monotonic()
        found = trainer.fit(
            words, words, batch_size=BATCH, shuffle=False, verbose=0
        )
        return found.history["loss"][0], time.monotonic() - began

    loss, first = fit()
    gc.collect()
    memory = tf.config.experimental
    stays = memory.get_memory_info("CPU:0")["current"]
    peaks, seconds = [], []
    for _ in range(RUNS):
        memory.reset_memory_stats("CPU:0")
        seconds.append(fit()[1] / STEPS)
        peaks.append(memory.get_memory_info("CPU:0")["peak"])
    mib = 2**20 * TENSOR.value
    print(
        json.dumps(
            {
                "loss": loss,
                "first_epoch_seconds": round(first, 1),
                "step_seconds": round(statistics.median(seconds), 2),
                "stays_mib": round(stays / mib),
                "beside_mib": [round((peak - stays) / mib) for peak in peaks],
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    app.run(main)

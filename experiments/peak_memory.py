"""The peak of TensorFlow's allocator in a step, with weights split or whole.

    python experiments/peak_memory.py --strategy=one_device
    python experiments/peak_memory.py --strategy=fsdp --devices=4
    python experiments/peak_memory.py --strategy=model_parallel --devices=4 \
        --fsdp=2 --pipeline=2
    mgpu-tf launch --num_workers=3 -- \
        python experiments/peak_memory.py --strategy=fsdp

Trains 14 dense layers of width 1,024 with Adam (14.7M parameters) on batches of
64, and prints a line of JSON for each process, in multiples of the bytes of all
weights: what stays between steps, and the peak. Parts of one CPU share an
allocator, so with `--devices` divide by their number. A minute on 2 cores.
"""

import gc
import json

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import mgpu_tf

STRATEGY = flags.DEFINE_string("strategy", "fsdp", "The name of a strategy.")
DEVICES = flags.DEFINE_integer("devices", None, "Parts of the CPU.")
FSDP = flags.DEFINE_integer("fsdp", None, "Over how many weights are split.")
PIPELINE = flags.DEFINE_integer("pipeline", 1, "The number of stages.")
LAYERS, WIDTH, BATCH, STEPS, RUNS = 14, 1024, 64, 8, 3


def build():
    """Returns a compiled model of dense layers."""
    model = keras.Sequential([keras.Input((WIDTH,))])
    for _ in range(LAYERS):
        model.add(keras.layers.Dense(WIDTH, activation="relu"))
    model.compile(keras.optimizers.Adam(1e-4), "mse")
    return model


def main(arguments):
    """Trains, and prints the peak."""
    del arguments
    strategy = mgpu_tf.create_strategy(
        STRATEGY.value,
        num_virtual_devices=DEVICES.value,
        fsdp_parallel=FSDP.value,
        pipeline_parallel=PIPELINE.value,
    )
    trainer = mgpu_tf.Trainer(build, strategy)
    x = np.random.default_rng(0).normal(size=(BATCH * STEPS, WIDTH))
    x = x.astype("float32")

    def fit():
        trainer.fit(x, x, batch_size=BATCH, shuffle=False, verbose=0)

    fit()
    gc.collect()
    memory = tf.config.experimental
    stays = memory.get_memory_info("CPU:0")["current"]
    peaks = []
    for _ in range(RUNS):
        memory.reset_memory_stats("CPU:0")
        fit()
        peaks.append(memory.get_memory_info("CPU:0")["peak"])
    weights = 4 * sum(
        np.prod(variable.shape)
        for variable in trainer.model.trainable_variables
    )
    print(
        json.dumps(
            {
                "parameters": int(weights // 4),
                "stays": round(stays / weights, 2),
                "peaks": [round(peak / weights, 2) for peak in peaks],
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    app.run(main)

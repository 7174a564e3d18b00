"""Memory of the host that each worker holds while it trains for long.

    mgpu-tf launch --num_workers=2 -- python experiments/host_memory.py

tensorflow#42616: with several workers it grows until the machine has none.
TensorFlow keeps a record of each collective operation of each execution of a
function, and does not delete it. Each worker trains and evaluates a small
convolutional network `--fits` times, with new data each time, and prints a line
of JSON ten times: the minutes, fits and steps so far, its resident memory, and
by how many bytes a step it has grown since the first line. Five minutes on 2
CPU cores.
"""

import gc
import json
import os
import time

import keras
import numpy as np
from absl import app, flags

import mgpu_tf

FITS = flags.DEFINE_integer("fits", 300, "Calls of fit, 10 or more.")
EXECUTION = flags.DEFINE_string(
    "steps_per_execution", "auto", "Steps in one execution, or auto."
)
BATCH, STEPS, EPOCHS = 32, 20, 2


def build():
    """Returns a compiled network."""
    model = keras.Sequential(
        [
            keras.Input((16, 16, 1)),
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


def resident():
    """Returns the resident memory of this process, in bytes."""
    gc.collect()  # What Python has not collected yet is no growth.
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(arguments):
    """Trains, and prints what the memory was."""
    del arguments
    strategy = mgpu_tf.create_strategy("auto")
    execution = EXECUTION.value
    trainer = mgpu_tf.Trainer(
        build,
        strategy,
        steps_per_execution=execution
        if execution == "auto"
        else int(execution),
    )
    generator = np.random.default_rng(0)
    x = generator.normal(size=(BATCH * STEPS, 16, 16, 1)).astype("float32")
    y = generator.integers(0, 10, BATCH * STEPS)
    began, first = time.monotonic(), None
    for fits in range(1, FITS.value + 1):
        trainer.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0)
        trainer.evaluate(x, y, batch_size=BATCH, verbose=0)
        if fits % (FITS.value // 10):
            continue
        held = resident()
        steps = trainer.global_step
        first = first or (steps, held)
        found = {
            "minutes": round((time.monotonic() - began) / 60, 1),
            "fits": fits,
            "steps": steps,
            "mib": round(held / 2**20, 1),
            "bytes_a_step": (held - first[1]) // max(steps - first[0], 1),
        }
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    app.run(main)

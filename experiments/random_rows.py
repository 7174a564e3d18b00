"""What it costs that replicas draw the random numbers of one device.

    python experiments/random_rows.py

Models with dropout, recurrent dropout and augmentation train on two replicas,
with `random="equal"` (each replica draws its rows of the numbers of one device)
and with `random="per_replica"` (each draws its own), in turns. A ratio is the
processor time of a step with equal numbers, divided by that of a step with
each replica's own. 1.00 is no cost.

It writes random_rows.json and prints a table. Hardware: any; on 2 CPU cores
about five minutes. Measured: docs/guarantees.md.
"""

import json
import os
import statistics
import time

import keras
import numpy as np
from absl import app, flags

import mgpu_tf

FLAGS = flags.FLAGS
flags.DEFINE_string("output_dir", "runs/random_rows", "Where to write.")
flags.DEFINE_integer("turns", 5, "Turns of both, one after the other.")
flags.DEFINE_integer("steps", 10, "Steps of a turn.")
flags.DEFINE_integer("batch_size", 128, "Global batch size.")

layers = keras.layers
SHAPE = (32, 32, 3)


def dense():
    return [
        layers.Flatten(),
        layers.Dense(512, "relu"),
        layers.Dropout(0.5),
        layers.Dense(512, "relu"),
        layers.Dropout(0.5),
    ]


def recurrent():
    return [
        layers.Reshape((32, 96)),
        layers.LSTM(96, dropout=0.2, recurrent_dropout=0.2),
    ]


def augmented():
    return [
        layers.RandomFlip("horizontal"),
        layers.RandomTranslation(0.1, 0.1),
        layers.RandomContrast(0.2),
        layers.Conv2D(16, 3, 2, activation="relu"),
        layers.Conv2D(32, 3, 2, activation="relu"),
        layers.GlobalAveragePooling2D(),
        layers.Dropout(0.3),
    ]


MODELS = {
    "dense layers, dropout": dense,
    "LSTM, recurrent dropout": recurrent,
    "convolutions, augmentation": augmented,
}


def trainer(parts, strategy, random, jit_compile):
    def build():
        model = keras.Sequential(
            [keras.Input(SHAPE), *parts(), layers.Dense(10)]
        )
        model.compile(
            keras.optimizers.SGD(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=jit_compile,
        )
        return model

    return mgpu_tf.Trainer(
        build,
        strategy,
        random=random,
        steps_per_execution=FLAGS.steps,
    )


def ratio(parts, strategy, jit_compile):
    """Returns the median ratio of the turns."""
    rows = FLAGS.steps * FLAGS.batch_size
    generator = np.random.default_rng(0)
    x = generator.random((rows, *SHAPE), np.float32)
    y = generator.integers(0, 10, rows)
    both = [
        trainer(parts, strategy, random, jit_compile)
        for random in ("equal", "per_replica")
    ]

    def seconds(one):
        before = time.process_time()
        one.fit(x, y, batch_size=FLAGS.batch_size, verbose=0)
        return time.process_time() - before

    for one in both:
        seconds(one)
    found = []
    for turn in range(FLAGS.turns):
        order = both if turn % 2 else both[::-1]
        spent = {id(one): seconds(one) for one in order}
        found.append(spent[id(both[0])] / spent[id(both[1])])
    return statistics.median(found)


def main(argv):
    del argv
    os.makedirs(FLAGS.output_dir, exist_ok=True)
    strategy = mgpu_tf.create_strategy("mirrored", num_virtual_devices=2)
    found = {}
    for name, parts in MODELS.items():
        for jit_compile in (False, True):
            key = f"{name}, {'with' if jit_compile else 'without'} XLA"
            found[key] = ratio(parts, strategy, jit_compile)
            print(f"{key:45} {found[key]:.2f}", flush=True)
    with open(os.path.join(FLAGS.output_dir, "random_rows.json"), "w") as file:
        json.dump(found, file, indent=1)


if __name__ == "__main__":
    app.run(main)

"""The peak of TensorFlow's allocator in a step, with weights split or whole.

    python experiments/peak_memory.py --strategy=one_device
    python experiments/peak_memory.py --strategy=fsdp --devices=4
    python experiments/peak_memory.py --strategy=model_parallel --devices=4 \
        --fsdp=2 --pipeline=2
    mgpu-tf launch --num_workers=3 -- \
        python experiments/peak_memory.py --strategy=fsdp

Trains 14 dense layers of width 1,024 with Adam (14.7M parameters; 58.7M with
`--width=2048`) on batches of 64, and prints a line of JSON for each process, in
multiples of the bytes of all weights: what stays between steps, the peaks, and
what was asked for. The first two are of the allocator, which hands out up to
twice of what is asked for. The last is the most that operations of an epoch had
asked for at once, read from a profile, without what was there before. Beside
them, in MiB: the most RAM that the process has had (its RSS) before the
profile, with Python, TensorFlow and graphs, and what it had before the model.
Parts of one CPU share an allocator, so with `--devices` divide by their number.
A minute on 2 cores.
"""

import gc
import json
import resource
import tempfile

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import mgpu_tf
from mgpu_tf.reports.profile_file import newest_profile

STRATEGY = flags.DEFINE_string("strategy", "fsdp", "The name of a strategy.")
DEVICES = flags.DEFINE_integer("devices", None, "Parts of the CPU.")
FSDP = flags.DEFINE_integer("fsdp", None, "Over how many weights are split.")
PIPELINE = flags.DEFINE_integer("pipeline", 1, "The number of stages.")
WIDTH = flags.DEFINE_integer("width", 1024, "Units of a layer.")
LAYERS, BATCH, STEPS, RUNS = 14, 64, 8, 3


def build():
    """Returns a compiled model of dense layers."""
    model = keras.Sequential([keras.Input((WIDTH.value,))])
    for _ in range(LAYERS):
        model.add(keras.layers.Dense(WIDTH.value, activation="relu"))
    model.compile(keras.optimizers.Adam(1e-4), "mse")
    return model


def asked_for(run):
    """Returns the most bytes that what runs has asked for at once."""
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        run()
        tf.profiler.experimental.stop()
        space = newest_profile(folder)
    events = []
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                name = plane.event_metadata[event.metadata_id].name
                if name.startswith("Memory"):
                    told = {
                        plane.stat_metadata[stat.metadata_id].name: stat
                        for stat in event.stats
                    }
                    when = 1000 * line.timestamp_ns + event.offset_ps
                    events.append((when, name, told))
    held, now, most = {}, 0, 0
    for _, name, told in sorted(events, key=lambda event: event[0]):
        place = number(told["addr"])
        now -= held.pop(place, 0)
        if name == "MemoryAllocation":
            held[place] = number(told["requested_bytes"])
            now += held[place]
        most = max(most, now)
    return most


def number(stat):
    """Returns the number in a line of a profile."""
    return stat.uint64_value or stat.int64_value


def most_rss():
    """Returns the most MiB of RAM that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(arguments):
    """Trains, and prints the peak."""
    del arguments
    strategy = mgpu_tf.create_strategy(
        STRATEGY.value,
        num_virtual_devices=DEVICES.value,
        fsdp_parallel=FSDP.value,
        pipeline_parallel=PIPELINE.value,
    )
    empty = most_rss()
    trainer = mgpu_tf.Trainer(build, strategy)
    x = np.random.default_rng(0).normal(size=(BATCH * STEPS, WIDTH.value))
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
    rss = most_rss()
    asked = asked_for(fit)
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
                "asked": round(asked / weights, 2),
                "rss_mib": round(rss),
                "rss_without_model_mib": round(empty),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    app.run(main)

"""Trains a GPT-2 that one process cannot hold on three that each can.

    python experiments/memory_limit.py --make --preset=gpt2
    python experiments/memory_limit.py --preset=gpt2 --strategy=one_device \
        --limit_gib=3.6
    mgpu-tf launch --num_workers=3 -- python experiments/memory_limit.py \
        --preset=gpt2 --strategy=fsdp --limit_gib=3.6 --save=gpt2.keras

The first line writes a preset of keras-hub with 291M parameters: 10 blocks of
width 1,536. The others build the model from it, train two epochs of two steps
with Adam, save, and print a line of JSON for each process: the losses, and the
largest memory that it has had. The limit is that of a control group of Linux,
which needs root. The kernel kills a process that exceeds it. Six minutes on 2
cores.
"""

import atexit
import contextlib
import json
import os
import pathlib
import resource
import sys

import keras
import keras_hub
import numpy as np
import tensorflow as tf
from absl import app, flags

import mgpu_tf

PRESET = flags.DEFINE_string("preset", None, "A folder.", required=True)
MAKE = flags.DEFINE_bool("make", False, "Writes the preset, and ends.")
STRATEGY = flags.DEFINE_string("strategy", "fsdp", "The name of a strategy.")
LIMIT = flags.DEFINE_float("limit_gib", None, "Of each process.")
SAVE = flags.DEFINE_string("save", None, "Where the trained model goes.")
BLOCKS = flags.DEFINE_integer("blocks", 10, "Of the preset.")
WIDTH = flags.DEFINE_integer("width", 1536, "Of the preset.")
VOCABULARY, LENGTH, BATCH, STEPS = 5000, 16, 3, 2
GROUPS = pathlib.Path("/sys/fs/cgroup")


def limit_memory(gib):
    """Starts this process anew in a control group with so much memory."""
    version_1 = GROUPS / "memory"
    parent, name = (
        (version_1, "memory.limit_in_bytes")
        if version_1.exists()
        else (GROUPS, "memory.max")
    )
    group = parent / f"memory_limit_{os.getpid()}"
    if group.exists():
        atexit.register(group.rmdir)
        atexit.register((parent / "cgroup.procs").write_text, str(os.getpid()))
        return
    for left in parent.glob("memory_limit_*"):
        if not pathlib.Path("/proc", left.name.rpartition("_")[2]).exists():
            # Other tasks of the job do the same.
            with contextlib.suppress(FileNotFoundError):
                left.rmdir()
    group.mkdir()
    (group / name).write_text(str(int(gib * 2**30)))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    # Memory stays with the group in which it was asked for.
    os.execv(sys.executable, [sys.executable, *sys.argv])


def make():
    """Writes the preset."""
    keras.utils.set_random_seed(0)
    keras_hub.models.GPT2Backbone(
        vocabulary_size=VOCABULARY,
        num_layers=BLOCKS.value,
        num_heads=8,
        hidden_dim=WIDTH.value,
        intermediate_dim=4 * WIDTH.value,
        max_sequence_length=LENGTH,
        dropout=0.0,
    ).save_to_preset(PRESET.value)


def build():
    """Returns a language model whose head is the table of its tokens."""
    backbone = keras_hub.models.Backbone.from_preset(PRESET.value)
    logits = backbone.token_embedding(backbone.output, reverse=True)
    model = keras.Model(backbone.input, logits)
    model.compile(
        keras.optimizers.Adam(1e-4),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def main(arguments):
    """Trains, saves, and prints the peaks."""
    del arguments
    if LIMIT.value:
        limit_memory(LIMIT.value)
    if MAKE.value:
        make()
        return
    trainer = mgpu_tf.Trainer(build, mgpu_tf.create_strategy(STRATEGY.value))
    tokens = np.random.default_rng(0).integers(
        0, VOCABULARY, (BATCH * STEPS, LENGTH + 1)
    )
    x = {
        "token_ids": tokens[:, :-1],
        "padding_mask": np.ones((BATCH * STEPS, LENGTH), "int32"),
    }
    history = trainer.fit(
        x,
        tokens[:, 1:],
        batch_size=BATCH,
        epochs=2,
        shuffle=False,
        verbose=0,
    )
    if SAVE.value:
        trainer.save(SAVE.value)
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    print(
        json.dumps(
            {
                "parameters": trainer.model.count_params(),
                "losses": history.history["loss"],
                "allocator_peak_gib": round(peak / 2**30, 2),
                "process_peak_gib": round(
                    resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
                    2,
                ),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    app.run(main)

"""What saving a large model costs: memory above training, and time.

    python -m tests.checkpoints.at_size 50 2 file    # 50 M weights, 2 replicas

Adam is the optimizer, so a checkpoint has 12 bytes for each weight. One is
kept, so the first two saves make new files, and later ones write over old ones.
"""

import json
import os
import sys
import tempfile
import time
from typing import ClassVar

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import mgpu_tf
from mgpu_tf.checkpoints import store
from mgpu_tf.checkpoints.saving import saver
from mgpu_tf.checkpoints.saving.writer import Writer

LAYERS = 5
STEPS = 5


def peak_bytes():
    """The most memory that this process has had."""
    with open("/proc/self/status", encoding="ascii") as file:
        (line,) = (line for line in file if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


class Timed(Writer):
    """Notes how long training waits, by the clock and by the processor."""

    waits: ClassVar[list[tuple[float, float]]] = []

    def begin(self, step, pieces):
        began = time.monotonic(), time.thread_time()
        super().begin(step, pieces)
        ended = time.monotonic(), time.thread_time()
        self.waits.append((ended[0] - began[0], ended[1] - began[1]))


def plain_write_seconds(path, size):
    """The same for as many bytes from memory, by the system alone."""
    chunk = np.ones(1 << 23, "uint8").data
    began = time.monotonic(), time.thread_time()
    with open(path, "wb", buffering=0) as file:
        for _ in range(size // len(chunk)):
            file.write(chunk)
    ended = time.monotonic(), time.thread_time()
    return ended[0] - began[0], ended[1] - began[1]


class Peaks(keras.callbacks.Callback):
    """Notes the peak after each step, which is before its save."""

    def __init__(self):
        super().__init__()
        self.bytes = []

    def on_train_batch_end(self, batch, logs=None):
        self.bytes.append(peak_bytes())


def measure(millions, replicas, snapshot_in, folder):
    """Trains without saving and then with; returns the difference."""
    width = int((millions * 1e6 / LAYERS) ** 0.5)

    def build():
        model = keras.Sequential(
            [keras.Input((width,))]
            + [keras.layers.Dense(width, use_bias=False) for _ in range(LAYERS)]
        )
        model.compile("adam", "mse")
        return model

    x = np.ones((replicas * STEPS, width), "float32")
    strategy = mgpu_tf.create_mirrored_strategy(num_virtual_devices=replicas)
    trainer = mgpu_tf.Trainer(build, strategy, steps_per_execution=1)
    options = {"batch_size": replicas, "epochs": 1, "verbose": 0}
    trainer.fit(x, x, **options)
    trainer.fit(x, x, **options)
    peaks = Peaks()
    saver.Writer = Timed
    trainer.fit(
        x,
        x,
        **options,
        callbacks=[peaks],
        checkpoint=mgpu_tf.SaveOptions(
            folder,
            save_every_steps=1,
            snapshot_in=snapshot_in,
            keep_checkpoints=1,
        ),
    )
    (*_, newest) = store.entries(folder)
    plain = plain_write_seconds(os.path.join(folder, "plain"), newest.bytes)
    return {
        "weights": trainer.model.count_params(),
        "replicas": replicas,
        "checkpoint_bytes": newest.bytes,
        "training_bytes": peaks.bytes[0],
        "above_training_bytes": peak_bytes() - peaks.bytes[0],
        "blocked_seconds": rounded(wall for wall, _ in Timed.waits),
        "blocked_processor_seconds": rounded(used for _, used in Timed.waits),
        "plain_write_seconds": rounded(plain),
    }


def rounded(numbers):
    return [round(number, 2) for number in numbers]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=os.getcwd()) as where:
        found = measure(
            float(sys.argv[1]), int(sys.argv[2]), sys.argv[3], where
        )
    print(json.dumps(found))

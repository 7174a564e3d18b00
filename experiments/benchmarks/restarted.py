"""The job of `benchmarks.restarts`: trains until it is ended.

    mgpu-tf launch --num_workers=2 -- python -m \\
        experiments.benchmarks.restarted FOLDER

The first worker writes when the first step of this start was done; each worker
writes its process. Hardware: any.
"""

import os
import sys
import time

import keras
import numpy as np

import mgpu_tf
from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.launch.job import RESTARTS


def _note(path: str, text: str) -> None:
    with open(path + ".part", "w") as file:
        file.write(text)
    os.replace(path + ".part", path)


class _Noted(keras.callbacks.Callback):
    """Notes the first step on one worker, and slows the steps down."""

    def __init__(self, path: str | None) -> None:
        super().__init__()
        self._path = path

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        del batch, logs
        if self._path is not None and not os.path.exists(self._path):
            _note(self._path, repr(time.time()))
        time.sleep(0.05)


def build_model() -> keras.Model:
    """Returns a small compiled model."""
    model = keras.Sequential(
        [keras.layers.Dense(256, activation="tanh"), keras.layers.Dense(10)]
    )
    model.compile(
        "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return model


def main(folder: str) -> None:
    cluster = ClusterConfig.from_environment()
    index = cluster.task_index if cluster else 0
    _note(os.path.join(folder, f"notes.pid.{index}"), str(os.getpid()))
    strategy = mgpu_tf.create_multi_worker_mirrored_strategy()
    generator = np.random.default_rng(0)
    x = generator.normal(size=(6400, 64)).astype("float32")
    y = generator.integers(0, 10, len(x))
    trainer = mgpu_tf.Trainer(build_model, strategy, steps_per_execution=1)
    path = os.path.join(folder, f"notes.{os.environ[RESTARTS]}")
    trainer.fit(
        x,
        y,
        batch_size=64,
        epochs=1000,
        verbose=0,
        callbacks=[_Noted(path if index == 0 else None)],
        checkpoint=mgpu_tf.SaveOptions(
            os.path.join(folder, "checkpoints"), save_every_steps=10
        ),
    )


if __name__ == "__main__":
    main(sys.argv[1])

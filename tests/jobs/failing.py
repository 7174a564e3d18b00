"""A bad batch, and slow workers, on a cluster."""

import os
import time

import keras
import numpy as np
import tensorflow as tf

import mgpu_tf
from mgpu_tf.reports.report import weights_sha256
from tests.jobs.callbacks import worker

ROWS, SIZE, BAD = 80, 10, 5
SECONDS = 0.1


def numbers(bad=True):
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
    y = x[:, :1] + 0.1
    if bad:
        # A row of the second worker.
        x[SIZE * BAD + 8] = np.nan
    return x, y


def build(pause=0.0):
    def make():
        model = keras.Sequential(
            [keras.Input((4,)), Pause(pause), keras.layers.Dense(1)]
        )
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
        return model

    return make


class Pause(keras.layers.Layer):
    """Takes its time on the second worker."""

    def __init__(self, seconds=0.0, **options):
        super().__init__(**options)
        self.seconds = seconds

    def call(self, x):
        if not self.seconds:
            return x

        def pause():
            if worker() == 1:
                time.sleep(self.seconds)
            return np.float32(0)

        with tf.control_dependencies(
            [tf.numpy_function(pause, [], tf.float32)]
        ):
            return tf.identity(x)


class Batches(keras.utils.PyDataset):
    """Batches that the second worker is slow to make."""

    def __init__(self, seconds):
        super().__init__()
        self.data, self.seconds = numbers(False), seconds

    @property
    def num_batches(self):
        return ROWS // SIZE

    def __getitem__(self, index):
        if worker() == 1:
            time.sleep(self.seconds)
        rows = slice(SIZE * index, SIZE * (index + 1))
        return tuple(part[rows] for part in self.data)


def restore(strategy, folder):
    trainer = mgpu_tf.Trainer(
        build(), strategy, on_nan="restore", steps_per_execution=2
    )
    trainer.fit(
        *numbers(),
        batch_size=SIZE,
        shuffle=False,
        verbose=0,
        checkpoint=mgpu_tf.SaveOptions(
            os.path.join(folder, "restore"), save_every_steps=3
        ),
    )
    return {
        "steps": trainer.global_step,
        "left_out": [batch.step for batch in trainer.left_out],
        "weights": [w.tolist() for w in trainer.model.get_weights()],
        "hash": weights_sha256(trainer.model.get_weights()),
    }


def _slow(strategy, step=0.0, read=0.0, **options):
    trainer = mgpu_tf.Trainer(build(step), strategy, steps_per_execution=1)
    trainer.fit(Batches(read), epochs=2, verbose=0, shuffle=False, **options)
    return [[slow.worker, slow.section, str(slow)] for slow in trainer.slow]


def slow_input(strategy, folder):
    return _slow(strategy, read=SECONDS)


def slow_step(strategy, folder):
    return _slow(strategy, step=SECONDS)


def slow_step_that_repeats(strategy, folder):
    """Where operations must repeat, and cannot read a clock."""
    path = os.path.join(folder, "slow")
    return _slow(strategy, step=SECONDS, checkpoint_dir=path)


def healthy(strategy, folder):
    return _slow(strategy)


JOBS = {
    job.__name__: job
    for job in (
        healthy,
        slow_input,
        slow_step,
        slow_step_that_repeats,
        restore,
    )
}

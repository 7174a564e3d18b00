"""A run with checkpoints that is told to end in the middle, and one that not.

It ends in the middle of an epoch and of an accumulation of gradients, so that
what goes on from it elsewhere needs all that a checkpoint holds.
"""

import contextlib
import os
import signal

import keras
import numpy as np

import mgpu_tf
from mgpu_tf.errors import Preempted

SIZE = 75
BATCH = 8
EPOCHS = 3
STEP = 15  # Of 10 in an epoch, with 3 to an update; one more is done.


def arrays():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(SIZE, 6)).astype("float32")
    return x, generator.integers(0, 3, size=SIZE)


def build():
    model = keras.Sequential(
        [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)]
    )
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


class EndsAt(keras.callbacks.Callback):
    """Sends SIGTERM to its own process after some steps; never for 0."""

    def __init__(self, step):
        super().__init__()
        self._left = step

    def on_train_batch_end(self, batch, logs=None):
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), signal.SIGTERM)


def train(strategy, folder, ends_at=0):
    """Trains to the end; returns losses, accuracies, weights, step begun at."""
    trainer = mgpu_tf.Trainer(build, strategy, steps_per_execution=1)
    history = trainer.fit(
        *arrays(),
        batch_size=BATCH,
        epochs=EPOCHS,
        verbose=0,
        checkpoint_dir=folder,
        callbacks=[EndsAt(ends_at)],
    )
    weights = [w.ravel().tolist() for w in trainer.model.get_weights()]
    restarts = trainer.recovery.restarts
    return {**history.history, "weights": weights, "restarts": restarts}


def whole(strategy, folder):
    return train(strategy, os.path.join(folder, "whole"))


def ended(strategy, folder):
    with contextlib.suppress(Preempted):
        train(strategy, os.path.join(folder, "ended"), STEP)
        return {"ended": False}
    return {"ended": True}


JOBS = {job.__name__: job for job in (whole, ended)}

"""Which rows a worker reads of a source of examples by number.

A job is a function from a strategy and a folder to what it observed.
"""

import collections
import threading

import keras
import numpy as np
import tensorflow as tf

import mgpu_tf
from tests.parity import cases

LENGTH, BATCH, EPOCHS = 61, 8, 3


class Counting:
    """Rows made of their numbers; counts what is read."""

    def __init__(self, length):
        self.length = length
        self.counts = collections.Counter()
        self._lock = threading.Lock()

    def __len__(self):
        return self.length

    def __getitem__(self, number):
        with self._lock:
            self.counts[number] += 1
        x = np.cos(number * np.arange(1.0, 5.0))
        return x, np.sin(x.sum() * 3)[None]


class InBatches(Counting):
    def __getitems__(self, numbers):
        return [self[number] for number in numbers]


def build():
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(5, "tanh"),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def fit(strategy, shuffle):
    """Trains in float64; returns losses, weights and the rows that were read.

    Making a source reads row 0 for its shape, then the first two together.
    """
    cases.set_floatx("float64")
    try:
        rows = Counting(LENGTH)
        trainer = mgpu_tf.Trainer(build, strategy, seed=3)
        history = trainer.fit(
            mgpu_tf.RandomAccess(rows),
            batch_size=BATCH,
            epochs=EPOCHS,
            shuffle=shuffle,
            verbose=0,
        )
        weights = [w.ravel().tolist() for w in trainer.model.get_weights()]
    finally:
        cases.set_floatx("float32")
    rows.counts[0] -= 2
    rows.counts[1] -= 1
    return {
        "losses": history.history["loss"],
        "weights": weights,
        "counts": [rows.counts[number] for number in range(LENGTH)],
    }


def of_dataset(strategy, after):
    """Trains from a dataset that is cut before its map.

    Args:
        strategy: Where.
        after: Whether the shuffle comes after the map.
    """
    rows = Counting(LENGTH)

    def parse(number):
        types = [tf.float64, tf.float64]
        x, y = tf.numpy_function(
            lambda n: rows[int(n)], [number], types, stateful=False
        )
        return tf.ensure_shape(x, [4]), tf.ensure_shape(y, [1])

    cases.set_floatx("float64")
    try:
        data = tf.data.Dataset.range(LENGTH)
        if after:
            data = data.map(parse).shuffle(20, seed=5)
        else:
            data = data.shuffle(20, seed=5).map(parse, num_parallel_calls=2)
        trainer = mgpu_tf.Trainer(build, strategy, seed=3)
        history = trainer.fit(data.batch(BATCH), epochs=EPOCHS, verbose=0)
        weights = [w.ravel().tolist() for w in trainer.model.get_weights()]
    finally:
        cases.set_floatx("float32")
    return {
        "losses": history.history["loss"],
        "weights": weights,
        "counts": [rows.counts[number] for number in range(LENGTH)],
    }


def dataset(strategy, folder):
    return of_dataset(strategy, False)


def shuffled_after_the_map(strategy, folder):
    return of_dataset(strategy, True)


def in_order(strategy, folder):
    return fit(strategy, False)


def shuffled(strategy, folder):
    return fit(strategy, True)


JOBS = {
    job.__name__: job
    for job in (in_order, shuffled, dataset, shuffled_after_the_map)
}

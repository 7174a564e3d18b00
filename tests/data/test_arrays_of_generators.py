"""Arrays that a program makes batches of stay as they are.

TensorFlow takes slices of NumPy's memory for its own, and writes into them.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from mgpu_tf.data import structures

X = np.random.default_rng(0).normal(size=(64, 32))
STEPS = 4


def aligned():
    """A copy that TensorFlow takes as it lies in memory."""
    memory = np.empty(X.nbytes + 64, np.uint8)
    first = -memory.ctypes.data % 64
    found = memory[first : first + X.nbytes].view(X.dtype).reshape(X.shape)
    found[:] = X
    return found


def autoencoder():
    model = keras.Sequential(
        [
            keras.Input((32,)),
            keras.layers.Dense(32, name="wide"),
            keras.layers.Dense(32),
        ]
    )
    model.compile("sgd", "mse", jit_compile=False)
    return model


def of_a_generator(x):
    def batches():
        for rows in np.split(x, STEPS):
            yield rows, rows

    spec = tf.TensorSpec((None, 32), tf.float64)
    return tf.data.Dataset.from_generator(
        batches, output_signature=(spec, spec)
    ).repeat()


def of_a_map(x):
    parts = np.split(x, STEPS)

    def batch(number):
        rows = tf.numpy_function(lambda n: parts[n], [number], tf.float64)
        rows = tf.ensure_shape(rows, (None, 32))
        return rows, rows

    return tf.data.Dataset.range(STEPS).map(batch).repeat()


@pytest.mark.parametrize("data", [of_a_generator, of_a_map])
@pytest.mark.parametrize(
    "name", ["mirrored_x3", "fsdp_x3", "data_2_pipeline_2"]
)
def test_training_leaves_them(name, data, strategies, float64):
    x = aligned()
    trainer = mgpu_tf.Trainer(autoencoder, strategies[name])
    trainer.evaluate(data(x), steps=STEPS, verbose=0)
    trainer.fit(data(x), steps_per_epoch=STEPS, epochs=2, verbose=0)
    trainer.predict(data(x), steps=STEPS, verbose=0)
    np.testing.assert_array_equal(x, X)


@pytest.mark.parametrize("cut", ["rows", "part"])
def test_only_a_copy_is_written_to(cut):
    """That slices still are: without it the test above says nothing."""
    x = aligned()
    spec = tf.TensorSpec((64, 32), tf.float64)
    whole = tf.data.Dataset.from_generator(lambda: [x], output_signature=spec)
    slices = whole.map(lambda rows: getattr(structures, cut)(rows, 8, 24))
    for _ in slices.map(tf.exp):
        pass
    assert np.array_equal(x, X) == (cut == "rows")

"""The losses that `anywhere.py` has everywhere: those of Keras's own `fit`."""

import functools
import json
import pathlib

import pytest

from tests.launch import anywhere

SCRIPT = str(pathlib.Path(anywhere.__file__))


@functools.cache
def expected():
    """Returns the losses of Keras on one device, without this package."""
    import keras
    import tensorflow as tf

    from tests.parity import cases

    cases.set_floatx("float64")
    try:
        keras.utils.set_random_seed(0)
        with tf.device("CPU:0"):
            history = anywhere.build_model().fit(
                *anywhere.arrays(),
                batch_size=anywhere.BATCH,
                epochs=anywhere.EPOCHS,
                shuffle=False,
                verbose=0,
            )
    finally:
        cases.set_floatx("float32")
    return history.history["loss"]


def compare(folder, output=""):
    """Compares what the script has left in a folder.

    Args:
        folder: The folder.
        output: What the tasks printed, to tell where they failed.
    """
    file = pathlib.Path(folder, "losses.json")
    assert file.exists(), output
    assert json.loads(file.read_text()) == pytest.approx(expected(), rel=1e-12)

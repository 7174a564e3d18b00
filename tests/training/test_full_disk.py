"""A disk that is full: one line, and what was there stays."""

import os
import shutil
from types import SimpleNamespace

import keras
import numpy as np
import pytest

import mgpu_tf
from mgpu_tf.errors import ConfigurationError

UNITS = 300


def build():
    """With many layers that have no weights: each takes 2 KB of a file."""
    network = [keras.layers.Dense(UNITS) for _ in range(3)]
    network += [keras.layers.Activation("tanh") for _ in range(100)]
    model = keras.Sequential([keras.Input((UNITS,)), *network])
    model.compile("adam", "mse")
    return model


@pytest.fixture(scope="module")
def trainer(strategies):
    trainer = mgpu_tf.Trainer(build, strategies["one_device"])
    trainer.train_on_batch(np.ones((2, UNITS)), np.ones((2, UNITS)))
    return trainer


@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5"])
def test_a_full_disk(name, trainer, tmp_path, monkeypatch):
    """HDF5 ends the process where it cannot write, so nothing is begun."""
    save = trainer.save if name.endswith(".keras") else trainer.save_weights
    path = str(tmp_path / name)
    save(path)
    with open(path, "rb") as file:
        before = file.read()
    free = SimpleNamespace(free=len(before) - 1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: free)
        with pytest.raises(ConfigurationError, match="Free some space") as info:
            save(path)
    assert "\n" not in str(info.value)
    with open(path, "rb") as file:
        assert file.read() == before
    assert os.listdir(tmp_path) == [name]
    # What it asks for is no more than a little above what a file takes.
    free = SimpleNamespace(free=len(before) + 700_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
    save(path)

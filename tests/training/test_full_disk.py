"""A disk that is full: one line, what was there stays, and nothing is left."""

import contextlib
import os
import resource

import keras
import numpy as np
import pytest

import mgpu_tf
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.training import model_file

UNITS = 300


def build():
    model = keras.Sequential(
        [keras.Input((UNITS,)), *(keras.layers.Dense(UNITS) for _ in range(3))]
    )
    model.compile("adam", "mse")
    return model


@contextlib.contextmanager
def no_file_above(size):
    """Lets writes fail as on a full disk, by a limit of the system."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="module")
def trainer(strategies):
    trainer = mgpu_tf.Trainer(build, strategies["one_device"])
    trainer.train_on_batch(np.ones((2, UNITS)), np.ones((2, UNITS)))
    return trainer


@pytest.mark.parametrize("missing", [1, 1000, 200_000, 800_000])
@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5"])
def test_a_full_disk(name, missing, trainer, tmp_path):
    save = trainer.save if name.endswith(".keras") else trainer.save_weights
    path = str(tmp_path / name)
    save(path)
    with open(path, "rb") as file:
        before = file.read()
    with (
        no_file_above(len(before) - missing),
        pytest.raises(ConfigurationError, match="Free some space") as info,
    ):
        save(path)
    assert "\n" not in str(info.value)
    with open(path, "rb") as file:
        assert file.read() == before
    assert os.listdir(tmp_path) == [name]
    save(path)
    if name.endswith(".keras"):
        again = keras.models.load_model(path).get_weights()
        own = trainer.model.get_weights()
        for one, other in zip(again, own, strict=True):
            np.testing.assert_array_equal(one, other)


def test_what_was_not_written_is_read(tmp_path):
    file = model_file._Weights(str(tmp_path / "file"))
    file.write(b"0123456789")
    with no_file_above(12):
        assert file.write(b"abcdef") == 6
    file.seek(8)
    file.write(b"XYZ")
    file.seek(0)
    assert file.read(20) == b"01234567XYZbcdef"
    assert file.seek(0, os.SEEK_END) == 16
    with pytest.raises(OSError, match="too large"):
        file.check()
    file.end()
    assert file.write(b"lost") == 4

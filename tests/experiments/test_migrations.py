"""Three jobs moved by docs/migrate.md: only the lines that the page names."""

import os
import pathlib
import re

import keras
import numpy as np
import pytest

from tests import clusters

PAGE = (pathlib.Path(clusters.ROOT) / "docs" / "migrate.md").read_text()
DIFFS = dict(
    re.findall(r"<!-- migration: (\w+) -->\n```diff\n(.*?)```", PAGE, re.S)
)


def side(name, mark):
    """The script before ("-") or after ("+") the move."""
    return "\n".join(
        line[1:]
        for line in DIFFS[name].splitlines()
        if not line or line[0] in (" ", mark)
    )


def run(text, folder):
    os.chdir(folder)
    values = {"__name__": "__main__"}
    exec(compile(text, "job", "exec"), values)
    return values


def test_the_page_has_three_jobs():
    assert set(DIFFS) == {"mirrored", "plain", "workers"}
    added = [x for x in DIFFS["mirrored"].splitlines() if x[:1] in ("+", "-")]
    assert len(added) == 3


@pytest.fixture
def folder(tmp_path, monkeypatch, strategies):
    strategies["one_device"]  # The CPU is split before the first operation.
    monkeypatch.chdir(tmp_path)
    return tmp_path


# A process may have one strategy of TensorFlow's own: see `mirrored.py`.
TWO_PARTS = """
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
two = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(cpu, two)
"""


@pytest.mark.full
def test_from_a_scope(folder):
    """On two parts of the CPU it has the weights of one device."""
    stock = "tf.distribute.MirroredStrategy()"
    one = 'tf.distribute.OneDeviceStrategy("CPU:0")'
    assert stock in side("mirrored", "-")
    run(side("mirrored", "-").replace(stock, one), folder)
    expected = keras.models.load_model("model.keras").get_weights()
    done = clusters.run(["-c", TWO_PARTS + side("mirrored", "+")], cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "mirrored on CPU:0 and CPU:1; 2 replicas" in done.stdout
    found = keras.models.load_model("model.keras").get_weights()
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.full
def test_from_plain_keras(folder):
    history = run(side("plain", "+"), folder)["history"]
    assert set(history.history) == {"loss", "mae", "val_loss", "val_mae"}
    assert keras.models.load_model(folder / "best.keras").built
    assert len((folder / "log.csv").read_text().splitlines()) == 4


@pytest.mark.full
def test_from_keras_2_on_two_workers(tmp_path):
    (tmp_path / "job.py").write_text(side("workers", "+"))
    done = clusters.mgpu_tf(
        *("launch", "--num_workers=2", "--startup_seconds=0"),
        *("--", clusters.PYTHON, "job.py"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "model.keras").exists()
    # Nothing of TensorFlow's own, and the line that says what runs.
    assert ".cc:" not in done.stdout
    assert "multi_worker_mirrored on 2 workers" in done.stdout

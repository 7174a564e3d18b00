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


ONE = 'tf.distribute.OneDeviceStrategy("CPU:0")'
SEED = "import keras\nkeras.utils.set_random_seed(1)\n"


def replaced(text, old, new):
    assert old in text
    return text.replace(old, new)


def weights(path):
    return keras.models.load_model(path).get_weights()


def assert_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.full
def test_from_a_scope(folder):
    """On two parts of the CPU it has the weights of one device."""
    stock = "tf.distribute.MirroredStrategy()"
    run(replaced(side("mirrored", "-"), stock, ONE), folder)
    expected = weights("model.keras")
    done = clusters.run(["-c", TWO_PARTS + side("mirrored", "+")], cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "mirrored on CPU:0 and CPU:1; 2 replicas" in done.stdout
    assert_equal(weights("model.keras"), expected)


@pytest.mark.full
def test_from_plain_keras(folder):
    """Its history, best model and log are those of the old script."""
    before, after = (
        replaced(SEED + side("plain", mark), "=3,", "=3, shuffle=False,")
        for mark in "-+"
    )
    expected = run(before, folder)["history"].history
    best = weights("best.keras")
    rows = np.genfromtxt("log.csv", delimiter=",", names=True)
    found = run(after, folder)["history"].history
    assert set(found) == {"loss", "mae", "val_loss", "val_mae"}
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-4)
    assert_equal(weights("best.keras"), best)
    logged = np.genfromtxt("log.csv", delimiter=",", names=True)
    for name in rows.dtype.names:
        np.testing.assert_allclose(logged[name], rows[name], rtol=1e-4)


# Of Keras's own `fit`, which the old script calls.
@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed")
@pytest.mark.full
def test_from_keras_2_on_two_workers(folder):
    """Without a shuffle it has the weights of Keras on one device."""
    before = replaced(side("workers", "-"), ".shuffle(256)", "")
    stock = "tf.distribute.MultiWorkerMirroredStrategy()"
    before = replaced(before, stock, ONE)
    before = replaced(before, "strategy.cluster_resolver.task_id", "0")
    run(SEED + before, folder)
    expected = weights("model.keras")
    after = replaced(side("workers", "+"), ".shuffle(256, seed=1)", "")
    (folder / "job.py").write_text(SEED + after)
    done = clusters.mgpu_tf(
        *("launch", "--num_workers=2", "--startup_seconds=0"),
        *("--", clusters.PYTHON, "job.py"),
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert_equal(weights("model.keras"), expected)
    # Nothing of TensorFlow's own, and the line that says what runs.
    assert ".cc:" not in done.stdout
    assert "multi_worker_mirrored on 2 workers" in done.stdout

"""`check_parity` and `mgpu-tf parity` on models of one's own."""

import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from mgpu_tf.studies import parity
from tests import clusters


def data():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(90, 6)).astype("float32")
    return x, generator.integers(0, 3, size=90)


class BatchMean(keras.layers.Layer):
    """Centres on the mean of the examples that the replica holds."""

    def call(self, inputs):
        return inputs - tf.reduce_mean(inputs, axis=0, keepdims=True)


def build(*middle, optimizer="sgd"):
    def build_model():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, activation="tanh", name="first"),
                *(make() for make in middle),
                keras.layers.Dense(3, name="last"),
            ],
            name="own",
        )
        model.compile(
            optimizer,
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        return model

    return build_model


@pytest.mark.parametrize("as_dataset", [False, True])
def test_same(as_dataset, strategies):
    batches = data()
    if as_dataset:
        batches = tf.data.Dataset.from_tensor_slices(batches).batch(32)
    report = mgpu_tf.check_parity(
        build(),
        batches,
        ["mirrored", strategies["central_storage_x2"]],
        batch_size=32,
        steps=3,
    )
    assert report.same, report
    assert report.steps == 3
    assert [row.strategy for row in report.rows] == [
        "mirrored (2 replicas)",
        "central_storage (2 replicas)",
    ]
    assert all(row.difference < 1e-5 for row in report.rows)


def test_planted_error_is_named(strategies):
    report = mgpu_tf.check_parity(
        build(BatchMean), data(), [strategies["mirrored_x2"]], steps=4
    )
    assert not report.same
    [row] = report.rows
    assert row.mismatch.step == 1
    assert row.mismatch.variable == "own/first/kernel"
    assert row.mismatch.difference > row.mismatch.allowed
    assert "differs at step 1 in own/first/kernel" in str(report)


def test_gradient_of_zero_under_adam_is_noise(strategies):
    """A bias before BatchNormalization moves by rounding alone."""
    normalized = build(
        lambda: keras.layers.Dense(8, name="before"),
        lambda: keras.layers.BatchNormalization(synchronized=True),
        optimizer="adam",
    )
    report = mgpu_tf.check_parity(
        normalized, data(), [strategies["mirrored_x2"]], steps=6
    )
    assert report.same, report
    # More than any rounding of a single sum.
    assert report.rows[0].noise > 1e-5


def trajectory(*values):
    weights = [[np.array([value], np.float32)] for value in values]
    return parity.Trajectory(["w"], weights, [1.0] * len(values))


@pytest.mark.parametrize(
    ("ours", "same"),
    [
        ((1.0, 2.0), True),
        ((1.0, 2.04), True),
        ((1.0, 2.06), False),
        ((1.0, np.nan), False),
        ((1.01, 2.0), False),
    ],
)
def test_judged_by_the_noise_so_far(ours, same):
    reference, permuted = trajectory(1.0, 2.0), trajectory(1.0, 2.01)
    row = parity.compare("x", trajectory(*ours), reference, permuted)
    assert (row.mismatch is None) is same
    if not same:
        assert row.mismatch.step == (1 if ours[0] != 1.0 else 2)


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({"data": np.zeros([3, 2])}, r"arrays \(x, y\)"),
        ({"data": data(), "steps": 0}, "steps must be"),
        ({"data": data(), "strategies": ["miror"]}, "Did you mean"),
    ],
)
def test_refused(arguments, rule, strategies):
    with pytest.raises(mgpu_tf.ConfigurationError, match=rule):
        mgpu_tf.check_parity(build(), **arguments)


MODULE = """
import keras, numpy as np, tensorflow as tf

def load():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(90, 6)).astype("float32")
    return x, generator.integers(0, 3, size=90)

class BatchMean(keras.layers.Layer):
    def call(self, inputs):
        return inputs - tf.reduce_mean(inputs, axis=0, keepdims=True)

def model(*middle):
    model = keras.Sequential(
        [keras.layers.Dense(8, activation="tanh", name="first"), *middle,
         keras.layers.Dense(3)], name="own")
    model.compile(
        "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model

def good():
    return model()

def planted():
    return model(BatchMean())
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(textwrap.dedent(MODULE))
    return str(tmp_path)


def command(folder, *arguments):
    return clusters.mgpu_tf(
        "parity", "--data=mine:load", "--steps=3", *arguments, cwd=folder
    )


def test_command_line(folder):
    good = command(folder, "--model=mine:good")
    assert good.returncode == 0, good.stdout + good.stderr
    assert "mirrored (2 replicas)" in good.stdout
    assert "same" in good.stdout
    planted = command(folder, "--model=mine:planted", "--num_workers=2")
    assert planted.returncode == 1, planted.stdout + planted.stderr
    assert "2 workers" in planted.stdout
    assert "differs at step 1 in own/first/kernel" in planted.stdout


@pytest.mark.parametrize(
    ("flag", "rule"),
    [
        ("--model=mine:goood", "Did you mean 'good'"),
        ("--model=absent:good", "module that can be imported"),
        ("--model=mlp", "model must be one's own"),
    ],
)
def test_command_line_refuses_in_one_line(folder, flag, rule):
    done = command(folder, flag)
    assert done.returncode == 2
    assert rule in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr

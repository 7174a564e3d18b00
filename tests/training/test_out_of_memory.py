"""Steps that do not fit: one line, steps in parts, and the same weights."""

import json
import subprocess
import sys

import keras
import numpy as np
import pytest

import mgpu_tf
from mgpu_tf.errors import ConfigurationError
from tests import clusters, columns
from tests.tiers import tiered

ROWS = 24


def build(normalizes=False):
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, activation="tanh")(inputs)
    hidden = keras.layers.Dropout(0.2)(hidden)
    if normalizes:
        hidden = keras.layers.BatchNormalization()(hidden)
    model = keras.Model(inputs, keras.layers.Dense(3)(hidden))
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def data():
    generator = np.random.default_rng(1)
    x = generator.random((ROWS, 6), dtype="float32")
    return x, generator.integers(0, 3, ROWS).astype("int32")


def trained(strategy, **options):
    trainer = mgpu_tf.Trainer(build, strategy, seed=0, **options)
    history = trainer.fit(*data(), batch_size=11, epochs=2, verbose=0)
    return trainer.model.get_weights(), history.history


@pytest.mark.parametrize(
    "name", tiered(["one_device", "mirrored_x3"], ["mirrored_x3"])
)
def test_steps_in_parts_give_the_numbers_of_whole_steps(name):
    strategy = columns.strategies()[name]
    weights, history = trained(strategy)
    again, logs = trained(strategy, step_parts=3)
    for one, other in zip(weights, again, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)
    for key, values in history.items():
        np.testing.assert_allclose(values, logs[key], rtol=1e-5, err_msg=key)


def test_what_takes_statistics_of_a_batch_is_refused():
    trainer = mgpu_tf.Trainer(
        lambda: build(normalizes=True), "one_device", step_parts=2
    )
    with pytest.raises(ConfigurationError, match="do not look at other rows"):
        trainer.fit(*data(), batch_size=12, verbose=0)


@pytest.mark.parametrize("name", ["one_device", "mirrored_x3"])
def test_a_loss_of_all_rows_is_refused(name):
    """No part of a step has all rows, on one replica and on three."""

    def mixing(y, p):
        return keras.ops.mean(keras.ops.log_softmax(p, axis=0))

    def mixed():
        model = build()
        model.compile("sgd", mixing)
        return model

    trainer = mgpu_tf.Trainer(mixed, columns.strategies()[name], step_parts=2)
    with pytest.raises(ConfigurationError, match="never has all rows"):
        trainer.fit(*data(), batch_size=12, verbose=0)


@pytest.mark.full
def test_a_batch_that_fits_is_left_whole():
    trainer = mgpu_tf.Trainer(build, "one_device", auto_micro_batch=True)
    trainer.fit(*data(), batch_size=12, verbose=0)
    assert trainer.step_options.step_parts == 1
    assert trainer.global_step == 2


def limited(limit, auto):
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.limited", str(limit), auto],
        cwd=clusters.ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.full
def test_a_device_with_too_little_memory():
    """The line, and with auto_micro_batch the weights of enough memory."""
    line = limited(900, "0")["error"]
    assert line.count("\n") == 0
    for word in ("activations", "Remedies:", "--auto_micro_batch", "saves"):
        assert word in line, line
    assert line.count("saves") == 3
    less, enough = limited(900, "1"), limited(0, "1")
    assert less["parts"] > 1 == enough["parts"]
    assert less["steps"] == enough["steps"] == 2
    np.testing.assert_allclose(less["some"], enough["some"], atol=1e-6)

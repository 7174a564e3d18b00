"""Batches of more than three parts, for steps that the author wrote."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from mgpu_tf.errors import ConfigurationError
from tests.tiers import tiered

ops = keras.ops

pytestmark = pytest.mark.usefixtures("float64")

STRATEGIES = ["one_device", "mirrored_x3", "fsdp_x3", "tensor_x3"]
KINDS = ["dataset", "generator"]
METHODS = ["fit", "evaluate", "predict"]
ROWS = 23


def columns():
    """State, action, reward, next state, and whether an episode is over."""
    generator = np.random.default_rng(3)
    return (
        generator.normal(size=(ROWS, 6)),
        generator.integers(0, 3, size=ROWS),
        generator.normal(size=ROWS),
        generator.normal(size=(ROWS, 6)),
        generator.integers(0, 2, size=ROWS).astype("float64"),
    )


def dataset():
    return tf.data.Dataset.from_tensor_slices(columns()).batch(8)


def generator():
    while True:
        for first in range(0, ROWS, 8):
            yield tuple(part[first : first + 8] for part in columns())


class Values(keras.Model):
    """Learns what an action is worth, from five parts of a batch."""

    def __init__(self):
        super().__init__()
        self.net = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(3)]
        )
        self.mean = keras.metrics.Mean(name="mean")

    @property
    def metrics(self):
        return [self.mean]

    def call(self, state):
        return self.net(state)

    def error(self, batch):
        state, action, reward, following, done = batch
        best = ops.max(self.net(following), -1) * (1.0 - done)
        chosen = ops.sum(self.net(state) * ops.one_hot(action, 3), -1)
        wanted = ops.stop_gradient(reward + 0.9 * best)
        return ops.mean(ops.square(chosen - wanted))

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            loss = self.error(batch)
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}

    def test_step(self, batch):
        self.mean.update_state(batch[2], sample_weight=batch[4])
        return {"mean": self.mean.result()}


def build():
    keras.utils.set_random_seed(4)
    model = Values()
    model.build((None, 6))
    model.compile(keras.optimizers.Adam(0.05), jit_compile=False)
    return model


def plain():
    """A model with Keras's own steps."""
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(
    ("name", "kind"),
    tiered(
        [(name, kind) for name in STRATEGIES for kind in KINDS],
        [("mirrored_x3", "dataset"), ("tensor_x3", "generator")],
    ),
)
def test_five_parts(name, kind, strategies):
    if kind == "dataset":
        given = {"epochs": 2}
        data = dataset
    else:
        given = {"epochs": 2, "steps_per_epoch": 3}
        data = generator
    model = build()
    history = model.fit(data(), verbose=0, shuffle=False, **given).history
    scores = model.evaluate(dataset(), verbose=0)
    trainer = mgpu_tf.Trainer(build, strategies[name])
    ours = trainer.fit(data(), verbose=0, shuffle=False, **given).history
    np.testing.assert_allclose(ours["loss"], history["loss"], rtol=1e-9)
    np.testing.assert_allclose(
        trainer.evaluate(dataset(), verbose=0), scores, rtol=1e-9
    )
    for one, other in zip(
        trainer.model.get_weights(), model.get_weights(), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "method"),
    tiered(
        [(name, method) for name in STRATEGIES for method in METHODS],
        [("one_device", "fit"), ("mirrored_x3", "fit")],
    ),
)
def test_steps_of_keras_take_three(name, method, strategies):
    trainer = mgpu_tf.Trainer(plain, strategies[name])
    with pytest.raises(ConfigurationError, match="batches of 5 parts") as info:
        getattr(trainer, method)(dataset(), verbose=0)
    assert "\n" not in str(info.value)


def test_complex_parts_are_refused(strategies):
    state, *rest = columns()
    data = tf.data.Dataset.from_tensor_slices((state, *rest[:-1], state * 1j))
    trainer = mgpu_tf.Trainer(build, strategies["mirrored_x3"])
    with pytest.raises(ConfigurationError, match="part 5 of type complex128"):
        trainer.fit(data.batch(8), verbose=0)

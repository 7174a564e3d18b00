"""The lines of an update that no number shows until they matter.

Keras's own `fit` on one device is the reference, in float64.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from tests.tiers import tiered

STRATEGIES = tiered(["mirrored_x2", "mirrored_x3"], ["mirrored_x3"])
WEIGHTS = np.random.default_rng(1).normal(size=(4, 3))


pytestmark = pytest.mark.usefixtures("float64")


def data(examples):
    generator = np.random.default_rng(0)
    return (
        generator.normal(size=(examples, 4)),
        generator.normal(size=(examples, 3)),
    )


def build(optimizer, constraint=None):
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3, kernel_constraint=constraint)]
    )
    model.layers[0].set_weights([WEIGHTS, np.zeros(3)])
    model.compile(optimizer(), "mse")
    return model


def check(build_model, x, y, strategy):
    """Weights, and what the optimizer keeps, after 6 steps of 6 examples."""
    options = {"batch_size": 6, "shuffle": False, "verbose": 0}
    reference = build_model()
    reference.fit(x, y, **options)
    trainer = mgpu_tf.Trainer(build_model, strategy)
    trainer.fit(x, y, **options)
    for ours, theirs in zip(
        trainer.model.weights + trainer.model.optimizer.variables,
        reference.weights + reference.optimizer.variables,
        strict=True,
    ):
        np.testing.assert_allclose(
            ours.numpy(), theirs.numpy(), 1e-9, 1e-12, err_msg=ours.path
        )
    return reference


def accumulating():
    return keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.05, gradient_accumulation_steps=2),
        initial_scale=8.0,
    )


@pytest.mark.parametrize("row", tiered([0, 3, 5], [5]))
@pytest.mark.parametrize("name", STRATEGIES)
def test_one_replica_that_overflows_skips_the_step_on_all(
    name, row, strategies
):
    """While gradients accumulate, they are the replica's own."""
    x, y = data(36)
    # Two of the six steps: no accumulation is left open at the end.
    x[[6 + row, 18 + row]] = np.inf
    reference = check(lambda: build(accumulating), x, y, strategies[name])
    weights, _ = reference.layers[0].get_weights()
    assert np.isfinite(weights).all()
    assert np.abs(weights - WEIGHTS).max() > 1e-3


def averaging():
    return keras.optimizers.SGD(
        0.3, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3
    )


@pytest.mark.parametrize("name", STRATEGIES)
def test_averages_that_are_written_over_weights_are_constrained(
    name, strategies
):
    """An average of vectors of length 1 is shorter."""
    unit = keras.constraints.UnitNorm(axis=0)
    check(lambda: build(averaging, unit), *data(36), strategies[name])


class Normalized(keras.optimizers.SGD):
    """It changes gradients where Keras hands them over."""

    def apply_gradients(self, grads_and_vars):
        pairs = list(grads_and_vars)
        length = keras.ops.sqrt(
            sum(keras.ops.sum(keras.ops.square(g)) for g, _ in pairs)
        )
        return super().apply_gradients([(g / length, v) for g, v in pairs])


class Stepping(keras.Model):
    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(3)
        self.layer.build((None, 4))
        self.layer.set_weights([WEIGHTS, np.zeros(3)])

    def call(self, x):
        return self.layer(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        weights = self.trainable_variables
        pairs = zip(tape.gradient(loss, weights), weights, strict=True)
        self.optimizer.apply_gradients(pairs)
        return {"loss": loss}


@pytest.mark.parametrize("own_step", [False, True])
@pytest.mark.parametrize("name", STRATEGIES)
def test_apply_gradients_of_ones_own_sees_the_gradient_of_the_batch(
    name, own_step, strategies
):
    def build_model():
        if not own_step:
            return build(lambda: Normalized(0.1))
        model = Stepping()
        model.compile(Normalized(0.1), "mse")
        return model

    check(build_model, *data(35), strategies[name])


def product(y, p):
    return keras.ops.mean(y * p)


def looked_up():
    model = keras.Sequential(
        [
            keras.Input((1,), dtype="int32"),
            keras.layers.Embedding(3, 1, "ones"),
            keras.layers.Flatten(),
        ]
    )
    model.compile(
        keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=2.0**100
        ),
        product,
    )
    return model


@pytest.mark.parametrize("column", ["one_device", *STRATEGIES])
def test_an_overflow_before_a_later_row_of_the_same_word(column, strategies):
    """Keras looks at the last row of a word alone; docs/guarantees.md says so.

    The gradient of the first row overflows, that of the second does not.
    """
    words, y = np.array([[1], [1], [2]]), np.array([[1e300], [1.0], [1.0]])
    reference = looked_up()
    reference.fit(words, y, batch_size=3, shuffle=False, verbose=0)
    assert not np.isfinite(reference.get_weights()[0]).all()
    trainer = mgpu_tf.Trainer(looked_up, strategies[column])
    trainer.fit(words, y, batch_size=3, shuffle=False, verbose=0)
    np.testing.assert_array_equal(
        trainer.model.get_weights()[0], np.ones((3, 1))
    )
    assert trainer.model.optimizer.dynamic_scale.numpy() == 2.0**99

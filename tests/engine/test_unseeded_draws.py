"""Numbers that a model draws from `keras.random` without a seed.

Keras keeps one generator for them, which goes on from step to step.
"""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from mgpu_tf.engine.step.same_draws import SameDraws
from tests.tiers import full, tiered

ROWS = 12


def build():
    inputs = keras.Input((4,))
    noisy = keras.layers.Lambda(
        lambda x: x + keras.random.normal(keras.ops.shape(x), stddev=0.5)
    )(inputs)
    outputs = keras.layers.Dense(1, kernel_initializer="ones")(noisy)
    model = keras.Model(inputs, outputs)
    # Nothing is learned: what changes from step to step is drawn.
    model.compile(keras.optimizers.SGD(0.0), "mse")
    return model


def arrays():
    x = np.ones([ROWS, 4], np.float32)
    return x, x.sum(1)


def losses(fit, epochs=3):
    x, y = arrays()
    done = fit(x, y, batch_size=ROWS, epochs=epochs, shuffle=False, verbose=0)
    return done.history["loss"]


@pytest.mark.parametrize(
    "name",
    tiered(
        ["one_device", "mirrored_x3", "central_storage_x2"], ["mirrored_x3"]
    ),
)
def test_draws_are_those_of_keras(name, strategies):
    keras.utils.set_random_seed(0)
    model = build()
    expected = losses(model.fit)
    predicted = model.predict(arrays()[0], batch_size=ROWS, verbose=0)
    assert len(set(expected)) == 3
    trainer = mgpu_tf.Trainer(build, strategies[name], seed=0)
    assert losses(trainer.fit) == pytest.approx(expected, rel=1e-5)
    again = trainer.predict(arrays()[0], batch_size=ROWS, verbose=0)
    np.testing.assert_allclose(again, predicted, rtol=1e-5)


@pytest.mark.parametrize(
    "name", tiered(["mirrored_x3", "central_storage_x2"], ["mirrored_x3"])
)
def test_steps_draw_anew(name, strategies):
    trainer = mgpu_tf.Trainer(
        build, strategies[name], seed=0, random="per_replica"
    )
    assert len(set(losses(trainer.fit))) == 3


@full
def test_replicas_may_draw_apart(strategies):
    trainer = mgpu_tf.Trainer(
        build, strategies["mirrored_x3"], seed=0, random="per_replica"
    )
    x, _ = arrays()
    first, second = (
        trainer.predict(x, batch_size=ROWS, verbose=0)[:, 0] for _ in range(2)
    )
    # All rows are alike, so that any two that are equal were drawn alike.
    assert len(np.unique(np.concatenate([first, second]))) == 2 * ROWS


def test_a_generator_from_before(strategies):
    """What was drawn outside of the strategy's scope is gone on from."""
    keras.utils.set_random_seed(0)
    keras.random.normal([2])
    expected = losses(build().fit)
    keras.utils.set_random_seed(0)
    keras.random.normal([2])
    trainer = mgpu_tf.Trainer(build, strategies["one_device"], seed=None)
    assert losses(trainer.fit) == pytest.approx(expected, rel=1e-5)
    keras.utils.set_random_seed(0)
    keras.random.normal([2])
    trainer = mgpu_tf.Trainer(build, strategies["mirrored_x3"], seed=None)
    assert losses(trainer.fit) == pytest.approx(expected, rel=1e-5)


def test_many_trainers_trace_without_a_warning(strategies, caplog):
    logger = tf.get_logger()
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.WARNING, logger.name):
            for _ in range(7):
                SameDraws(strategies["mirrored_x3"])
    finally:
        logger.removeHandler(caplog.handler)
    assert not [r for r in caplog.messages if "retracing" in r]


class DrawsItself(keras.Sequential):
    """Its step draws by operations that keep a state of their own."""

    def train_step(self, x):
        noise = tf.random.normal(tf.shape(x))
        ids, *_ = tf.random.uniform_candidate_sampler(
            tf.ones([1, 1], tf.int64), 1, 3, True, 9, seed=3
        )
        drawn = keras.ops.sum(tf.cast(ids, x.dtype))
        return {"drawn": drawn + keras.ops.mean(self(x + noise))}


@pytest.mark.parametrize("name", ["mirrored_x3", "fsdp_x3"])
def test_a_step_that_draws_by_tensorflow_says_so(name, strategies, caplog):
    """Once for each draw and each trainer."""

    def build_step():
        model = DrawsItself([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1))
        return model

    with caplog.at_level(logging.WARNING, "mgpu_tf"):
        for _ in range(2):
            caplog.clear()
            trainer = mgpu_tf.Trainer(build_step, strategies[name])
            trainer.fit(arrays()[0], batch_size=ROWS, verbose=0)
            told = [t for t in caplog.messages if "state of its own" in t]
            assert len(told) == 2
            assert not any("replica" in text for text in told)

"""Gradients of one's own, and sums over replicas, whose graphs are freed."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from mgpu_tf.strategies.replicas.own_gradient import (
    own_gradient,
    sum_over_replicas,
)
from tests.tiers import tiered


@own_gradient
def scaled(x, y):
    """Two results; the gradients are ten times those of the functions."""
    return (x * y, {"sum": x + y}), lambda a, b: (
        10 * (a * y + b),
        10 * (a * x + b),
    )


def by_tape(x, y):
    with tf.GradientTape() as tape:
        tape.watch([x, y])
        product, others = scaled(x, y)
        loss = product + 3 * others["sum"]
    return [loss, *tape.gradient(loss, [x, y])]


def by_graph(x, y):
    product, others = scaled(x, y)
    loss = product + 3 * others["sum"]
    return [loss, *tf.gradients(loss, [x, y])]


def in_a_loop(x, y):
    """A tape around a loop asks the loop's own graph."""
    with tf.GradientTape() as tape:
        tape.watch([x, y])
        total = tf.while_loop(
            lambda total, left: left > 0,
            lambda total, left: (total + scaled(x, y)[0], left - 1),
            (tf.zeros_like(x), tf.constant(3)),
        )[0]
    return [total, *tape.gradient(total, [x, y])]


def of_a_function(x, y):
    """A tape around a function asks for its gradient when it has ended."""
    inner = tf.function(lambda x, y: scaled(x, y)[0])
    with tf.GradientTape() as tape:
        tape.watch([x, y])
        product = inner(x, y)
    return [product, *tape.gradient(product, [x, y])]


WAYS = {
    "tape": (by_tape, [31.0, 80.0, 50.0]),
    "graph": (by_graph, [31.0, 80.0, 50.0]),
    "loop": (in_a_loop, [30.0, 150.0, 60.0]),
    "function": (of_a_function, [10.0, 50.0, 20.0]),
}


@pytest.mark.parametrize("way", WAYS)
def test_its_gradient_is_that_of_its_author(way):
    python, expected = WAYS[way]
    x, y = tf.constant(2.0), tf.constant(5.0)
    found = tf.function(python)(x, y)
    assert [float(value) for value in found] == expected
    if way != "graph":
        assert [float(value) for value in python(x, y)] == expected


@pytest.mark.parametrize("way", WAYS)
def test_its_graph_is_freed(way):
    function = tf.function(WAYS[way][0])
    x = tf.constant(2.0)
    concrete = function.get_concrete_function(x, x)
    graph = weakref.ref(concrete.graph)
    del concrete, function
    gc.collect()
    assert graph() is None


def test_sums_and_their_gradients_are_tensorflows(strategies):
    strategy = strategies["mirrored_x3"]

    def on_replica(summed):
        context = tf.distribute.get_replica_context()
        mine = tf.cast(context.replica_id_in_sync_group, tf.float32) + 1.0
        values = {"a": tf.stack([mine, 2.0]), "b": mine * mine}
        with tf.GradientTape() as tape:
            tape.watch(values)
            found = summed(values)
            loss = tf.reduce_sum(found["a"]) * mine + found["b"]
        return found, tape.gradient(loss, values)

    def tensorflows(values):
        context = tf.distribute.get_replica_context()
        return context.all_reduce("sum", values)

    def outside(summed):
        return strategy.run(on_replica, (summed,))

    found, expected = (
        tf.nest.flatten(tf.function(outside)(summed))
        for summed in (sum_over_replicas, tensorflows)
    )
    values = [
        [copy.numpy() for copy in strategy.experimental_local_results(each)]
        for each in found
    ]
    others = [
        [copy.numpy() for copy in strategy.experimental_local_results(each)]
        for each in expected
    ]
    for one, other in zip(values, others, strict=True):
        np.testing.assert_array_equal(one, other)
    assert any(np.any(np.not_equal(copy, 0)) for copy in values[-1])


def build():
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="gelu"),
            keras.layers.LayerNormalization(),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ]
    )
    model.compile("adam", "mse", metrics=["mae"])
    return model


def graphs():
    """The graphs of steps; those of datasets are small."""
    gc.collect()
    return sum(
        isinstance(each, tf.Graph) and len(each.get_operations()) > 100
        for each in gc.get_objects()
    )


@pytest.mark.parametrize(
    "column",
    tiered(["one_device", "mirrored_x3", "fsdp_x3", "tensor_x3"], []),
)
def test_a_trainer_leaves_no_graphs(column, strategies):
    x = np.random.default_rng(0).normal(size=(24, 6)).astype("float32")

    def trains():
        trainer = mgpu_tf.Trainer(build, strategies[column])
        trainer.fit(x, x[:, :1], batch_size=6, verbose=0)
        trainer.evaluate(x, x[:, :1], batch_size=6, verbose=0)

    trains()
    before = graphs()
    trains()
    assert graphs() <= before


def forward(x):
    with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
        product, _ = scaled(x, tf.constant(3.0))
    return accumulator.jvp(product)


def by_two_gradients(x):
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            inner.watch(x)
            product, _ = scaled(x, tf.constant(3.0))
        v = tf.zeros_like(product)
        outer.watch(v)
        back = inner.gradient(product, x, v)
    return outer.gradient(back, v, tf.ones_like(x))


@pytest.mark.parametrize("compiled", [False, True])
def test_derivatives_are_not_taken_forward(compiled):
    """It has a gradient alone. What the refusal offers is computed by it."""

    def wrapped(function):
        return tf.function(function, autograph=False) if compiled else function

    x = tf.constant(2.0)
    with pytest.raises(mgpu_tf.ConfigurationError, match="gradient of a grad"):
        wrapped(forward)(x)
    assert float(wrapped(by_two_gradients)(x)) == 30.0

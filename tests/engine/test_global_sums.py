"""Functions of sums over rows, on replicas that have other numbers of them.

A value and its gradient are those of the whole batch, and no rows are sent.
"""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

from mgpu_tf.engine.author.contributions import BatchShare
from mgpu_tf.engine.author.global_sums import of_sums
from mgpu_tf.engine.row_proof import RowProof, Rows
from mgpu_tf.engine.step.losses import of_added_sums
from mgpu_tf.engine.step.replica_step import of_unknown_length
from tests.tiers import tiered

GENERATOR = np.random.default_rng(0)
X = GENERATOR.uniform(0.1, 0.9, size=(7, 4))
Y = GENERATOR.uniform(0.1, 0.9, size=(7, 4))
W = GENERATOR.uniform(0.5, 0.9, size=(4,))
# The last replica has no row.
BOUNDS = [0, 5, 7, 7]


class NoRows:
    """An exchange that sends no rows."""

    @staticmethod
    def apart():
        return contextlib.nullcontext()


def dice(x, y):
    both = tf.reduce_sum(tf.reshape(x, [-1]) * tf.reshape(y, [-1]))
    return 1 - 2 * both / (tf.reduce_sum(x) + tf.reduce_sum(y) + 0.1)


def pearson(x, y):
    x, y = x - tf.reduce_mean(x, 0), y - tf.reduce_mean(y, 0)
    spread = tf.reduce_sum(x**2, 0) * tf.reduce_sum(y**2, 0)
    return -tf.reduce_mean(tf.reduce_sum(x * y, 0) / tf.sqrt(spread))


def masked(x, y):
    kept = tf.cast(y > 0.4, x.dtype)
    return tf.reduce_sum(x * kept) / tf.reduce_sum(kept)


FUNCTIONS = {
    "ratio": masked,
    "dice": dice,
    "correlation": pearson,
    "product of means": lambda x, y: tf.reduce_sum(
        tf.reduce_mean(x, 0) * tf.reduce_mean(y, 0)
    ),
    "weights by their sum": lambda x, y: tf.reduce_sum(
        x * (y / tf.reduce_sum(y))
    ),
    "a mean by another number": lambda x, y: (
        tf.reduce_sum(x) / (tf.cast(tf.shape(x)[0], x.dtype) - 1.0)
    ),
    "whole numbers": lambda x, y: (
        tf.reduce_sum(x)
        / tf.cast(tf.reduce_sum(tf.cast(y > 0.5, tf.int32)) + 1, x.dtype)
    ),
    "a sum and a mean": lambda x, y: tf.reduce_sum(x) + tf.reduce_mean(y),
    "where there is none": lambda x, y: tf.where(
        tf.reduce_sum(y) > 100.0, tf.reduce_sum(x), tf.reduce_mean(x) ** 2
    ),
    "a function": tf.function(masked),
    "a function of a function": tf.function(
        lambda x, y: 0.5 * tf.function(pearson)(x, y) + dice(x, y)
    ),
    "a function of a sum": lambda x, y: tf.function(tf.exp)(
        tf.reduce_mean(x * y)
    ),
    "joined sums": lambda x, y: tf.math.reduce_variance(
        tf.stack([tf.reduce_sum(x), tf.reduce_sum(y) * 2])
    ),
}


def on_replicas(strategy, function):
    """Returns the sum of what replicas give, and of its gradients."""
    found = {}

    @tf.function
    def step():
        def on_replica():
            context = tf.distribute.get_replica_context()
            replica = int(tf.get_static_value(context.replica_id_in_sync_group))
            bounds = tf.constant(BOUNDS)
            low, high = bounds[replica], bounds[replica + 1]
            with tf.GradientTape() as tape:
                weight = tf.constant(W)
                tape.watch(weight)
                rows = [
                    of_unknown_length(tf.constant(each)[low:high])
                    for each in (X, Y)
                ]
                rows[0] *= weight
                proof = RowProof()
                proof.skip(tf.compat.v1.get_default_graph())
                proof.take(rows, Rows())
                count = tf.cast(high - low, tf.int64)
                share = BatchShare(count, tf.constant(7, tf.int64), 3)
                value = function(*rows)
                part = of_added_sums(proof, value, share, NoRows())
                found["proven"] = part is not None
                part = tf.zeros([], W.dtype) if part is None else part
                part = share.select(part, 0)
            gradient = tape.gradient(part, weight, unconnected_gradients="zero")
            return context.all_reduce("sum", [part, gradient])

        return strategy.run(on_replica)

    part, gradient = step()
    local = strategy.experimental_local_results
    assert found["proven"]
    return local(part)[0].numpy(), local(gradient)[0].numpy()


QUICK = ["a function of a function"]


@pytest.mark.parametrize("name", tiered(list(FUNCTIONS), QUICK))
def test_as_the_whole_batch(name, strategies):
    function = FUNCTIONS[name]
    weight = tf.constant(W)
    with tf.GradientTape() as tape:
        tape.watch(weight)
        whole = function(X * weight, tf.constant(Y))
    value, gradient = on_replicas(strategies["mirrored_x3"], function)
    np.testing.assert_allclose(value, whole, rtol=1e-12)
    expected = tape.gradient(whole, weight, unconnected_gradients="zero")
    np.testing.assert_allclose(gradient, expected, rtol=1e-11, atol=1e-14)


@tf.custom_gradient
def clipped(x):
    return tf.minimum(x, 1.0), lambda up: up


UNPROVEN = {
    "a gradient of one's own, of a sum": lambda x, y: clipped(tf.reduce_sum(x)),
    "the largest": lambda x, y: tf.reduce_max(x) / tf.reduce_sum(x),
    "pairs": lambda x, y: tf.reduce_sum(x @ tf.transpose(y)),
    "a loop as long as a sum": lambda x, y: tf.while_loop(
        lambda n: n < tf.reduce_sum(x),
        lambda n: (n + 1.0,),
        (tf.zeros([], x.dtype),),
    )[0],
    "a product over rows, as large as they": lambda x, y: tf.reduce_sum(
        tf.reduce_mean(tf.tile(x, [1, 1 << 13]), 0) ** 2
    ),
}


@pytest.mark.parametrize("name", UNPROVEN)
def test_what_is_no_function_of_sums(name):
    @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.float64)] * 2)
    def step(x, y):
        proof = RowProof([x, y])
        value = UNPROVEN[name](x, y)
        share = BatchShare(tf.constant(3, tf.int64), tf.constant(7, "int64"), 3)
        assert of_sums(proof, [value], share, NoRows()) is None
        return x

    step.get_concrete_function()

"""Packs of weights and gradients that replicas of a group exchange.

The reference is numpy: a whole value, and the sum of those of the replicas.
"""

import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from mgpu_tf.engine.exchange import parts

# Rows and elements that three devices divide evenly, that they do not, and
# both in one pack.
SHAPES = {
    "even": [(6, 2), (9,), (3, 2, 2)],
    "uneven": [(4, 2), (8,), (5, 1), (7,), (2, 2, 2)],
    "both": [(6, 2), (4, 3), (9,), (10,)],
    "alone": [(5, 2)],
}


# Of each weight and replica, where three devices do not divide it evenly. With
# a slice for each part there were twice as many.
OPERATIONS = 29


@pytest.fixture(params=["auto", "ring"])
def strategy(request):
    """Devices that copy from each other, or exchange by collectives."""
    return mgpu_tf.create_model_parallel_strategy(
        fsdp=3,
        num_virtual_devices=3,
        smallest_split=4,
        communication=request.param,
    )


def values_of(shapes):
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape) for shape in shapes]


def variables_of(values, strategy):
    with strategy.scope():
        return [tf.Variable(value, trainable=True) for value in values]


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_what_is_gathered_is_whole(shapes, strategy):
    values = values_of(shapes)
    variables = variables_of(values, strategy)

    def on_replica():
        return parts.gathered(variables)

    found = tf.function(strategy.run, autograph=False)(on_replica)
    for value, each in zip(values, found, strict=True):
        for own in strategy.experimental_local_results(each):
            np.testing.assert_array_equal(own, value)


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_what_is_scattered_is_this_replicas_part_of_the_sum(shapes, strategy):
    values = values_of(shapes)
    variables = variables_of([0 * value for value in values], strategy)

    def on_replica():
        # Replicas 0, 1, 2 give 1, 2 and 4 times the value.
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        times = tf.cast(2**replica, tf.float64)
        gradients = [times * tf.constant(value) for value in values]
        found = parts.scattered(gradients, variables)
        for variable, part in zip(variables, found, strict=True):
            variable.here().assign(part)

    tf.function(strategy.run, autograph=False)(on_replica)
    for value, variable in zip(values, variables, strict=True):
        np.testing.assert_allclose(variable.numpy(), 7 * value, rtol=1e-15)


def test_a_weight_adds_few_operations(strategy):
    """One cut is that of all weights of a pack and of all devices."""

    def made_of(count):
        variables = variables_of([np.ones((4, 2))] * count, strategy)

        def on_replica():
            parts.scattered(parts.gathered(variables), variables)

        step = tf.function(strategy.run, autograph=False)
        graph = step.get_concrete_function(on_replica).graph
        return len(graph.get_operations()) / strategy.num_replicas_in_sync

    assert (made_of(6) - made_of(3)) / 3 <= OPERATIONS

"""The shuffle that is computed: a permutation, other each pass, uniform."""

import numpy as np
import pytest
import tensorflow as tf

from mgpu_tf.data.permutation import permuted


def order(length, seed=0, index=0):
    return permuted(tf.range(length, dtype=tf.int64), length, seed, index)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 26, 64, 1000, 65_537])
def test_each_row_once(length):
    found = order(length, seed=7, index=3).numpy()
    assert found.dtype == np.int64
    assert sorted(found) == list(range(length))


def test_another_order_for_each_seed_and_pass():
    orders = {
        tuple(order(100, seed, index).numpy())
        for seed in (0, 1, -1)
        for index in (0, 1, 2)
    }
    assert len(orders) == 9
    again = order(100, seed=1, index=tf.constant(2, tf.int64)).numpy()
    assert tuple(again) in orders


def test_any_part_of_a_billion_rows():
    length = 10**9 + 7
    positions = np.random.default_rng(0).choice(length, 10_000, replace=False)
    found = permuted(tf.constant(positions, tf.int64), length, 0, 1).numpy()
    assert len(set(found.tolist())) == 10_000
    assert found.min() >= 0
    assert found.max() < length
    # Spread over the range: the mean of uniform numbers, five deviations.
    assert abs(found.mean() / length - 0.5) < 5 / np.sqrt(12 * 10_000)
    part = permuted(tf.constant(positions[:3], tf.int64), length, 0, 1)
    assert part.numpy().tolist() == found[:3].tolist()


@pytest.mark.parametrize("length", [7, 10])
def test_every_row_comes_at_every_place_equally_often(length):
    """Chi-square over the places of rows, and over the first two rows."""
    keys = 2000

    @tf.function
    def orders():
        return tf.map_fn(
            lambda index: order(length, seed=5, index=index),
            tf.range(keys, dtype=tf.int64),
        )

    found = orders().numpy()
    places = np.stack([(found == row).sum(0) for row in range(length)])
    check_uniform(places.ravel(), (length - 1) ** 2)
    pairs = np.zeros((length, length))
    np.add.at(pairs, (found[:, 0], found[:, 1]), 1)
    pairs = pairs[~np.eye(length, dtype=bool)]
    check_uniform(pairs, pairs.size - 1)


def check_uniform(counts, freedom):
    expected = counts.sum() / counts.size
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert abs(statistic - freedom) / np.sqrt(2 * freedom) < 4

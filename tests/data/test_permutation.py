"""The shuffle that is computed: a permutation, other each pass, uniform."""

import numpy as np
import pytest

from mgpu_tf.data.sources.permutation import permuted


def order(length, seed=0, index=0):
    return permuted(np.arange(length), length, seed, index)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 26, 64, 1000, 65_537])
def test_each_row_once(length):
    found = order(length, seed=7, index=3)
    assert found.dtype == np.int64
    assert sorted(found) == list(range(length))


def test_another_order_for_each_seed_and_pass():
    orders = {
        tuple(order(100, seed, index))
        for seed in (0, 1, -1)
        for index in (0, 1, 2)
    }
    assert len(orders) == 9
    assert tuple(order(100, seed=1, index=2)) in orders


def of_python(position, length, seed, index, rounds):
    """The same from the papers, with Python's integers."""

    def mixed(value):
        value %= 2**64
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        return value ^ value >> 31

    golden = 0x9E3779B97F4A7C15
    key = mixed(mixed(seed + golden) + index)
    keys = [mixed(key + (number + 1) * golden) for number in range(rounds)]
    bits = max(2, (length - 1).bit_length())
    while True:
        narrow, wide = bits // 2, bits - bits // 2
        left, right = position >> narrow, position % 2**narrow
        for key in keys:
            noise = mixed(right * golden + key) % 2**wide
            left, right = right, left ^ noise
            narrow, wide = wide, narrow
        position = left << narrow | right
        if position < length:
            return position


@pytest.mark.parametrize(
    ("length", "rounds"), [(25, 12), (1000, 12), (10**9 + 7, 6)]
)
@pytest.mark.parametrize("seed", [0, 5, -3])
def test_the_numbers_of_the_papers(length, rounds, seed):
    expected = [of_python(n, length, seed, 2, rounds) for n in range(20)]

    found = permuted(np.arange(20), length, seed, 2)
    assert found.tolist() == expected


def test_any_part_of_a_billion_rows():
    length = 10**9 + 7
    positions = np.random.default_rng(0).choice(length, 10_000, replace=False)
    found = permuted(positions, length, 0, 1)
    assert len(set(found.tolist())) == 10_000
    assert found.min() >= 0
    assert found.max() < length
    # Spread over the range: the mean of uniform numbers, five deviations.
    assert abs(found.mean() / length - 0.5) < 5 / np.sqrt(12 * 10_000)
    part = permuted(positions[:3], length, 0, 1)
    assert part.tolist() == found[:3].tolist()


@pytest.mark.parametrize("length", [7, 10])
def test_every_row_comes_at_every_place_equally_often(length):
    """Chi-square over the places of rows, and over the first two rows."""
    keys = 2000

    found = np.stack([order(length, seed=5, index=k) for k in range(keys)])
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


def deviations(rows):
    """What a permutation at random has, in deviations from what is expected."""
    count = len(rows)
    centred = rows - (count - 1) / 2
    variance = (count**2 - 1) / 12
    tenth = count // 10
    spread = variance / tenth * (count - tenth) / (count - 1)
    blocks = np.histogram2d(np.arange(count), rows, bins=10)
    return {
        "mean of the first tenth": centred[:tenth].mean() / np.sqrt(spread),
        **{
            f"correlation of rows {lag} apart": np.sqrt(count)
            * (
                (centred * np.roll(centred, -lag)).mean() / variance
                + 1 / (count - 1)
            )
            for lag in (1, 2, 64)
        },
        "rises": ((np.diff(rows) > 0).sum() - (count - 1) / 2)
        / np.sqrt((count + 1) / 12),
        "places of blocks": (
            ((blocks[0] - count / 100) ** 2).sum() / (count / 100) - 81
        )
        / np.sqrt(2 * 81),
    }


@pytest.mark.parametrize(
    ("length", "seeds"),
    [
        (1009, 600),
        *[
            pytest.param(*row, marks=pytest.mark.full)
            for row in [(4096, 2000), (65_537, 300), (1_000_003, 60)]
        ],
    ],
)
def test_statistics_over_many_seeds(length, seeds):
    """One seed tells little: of twenty statistics one is beyond 2."""
    found = [deviations(order(length, seed, seed % 5)) for seed in range(seeds)]
    for name in found[0]:
        values = np.array([each[name] for each in found])
        # Mean 0 and variance 1, each within four of its own deviations.
        assert abs(values.mean()) < 4 / np.sqrt(seeds), name
        assert abs(values.var() - 1) < 4 * np.sqrt(2 / seeds) + 0.02, name

"""Stretches of time in bins: nothing is lost, and the memory is bounded."""

import collections

import pytest

from mgpu_tf.reports.time_line import MOST_BINS, TimeLine


def sums(line):
    found = collections.Counter()
    for one in line.bins:
        found.update(one)
    return dict(found)


def test_a_stretch_is_spread_over_its_bins():
    line = TimeLine(width=2.0)
    line.add(1.0, 5.0, {"step": 3.0, "input": 1.0})
    assert line.bins == [
        {"step": 0.75, "input": 0.25},
        {"step": 1.5, "input": 0.5},
        {"step": 0.75, "input": 0.25},
    ]


def test_what_nothing_has_taken_is_filled():
    line = TimeLine(width=2.0)
    line.add(1.0, 2.0, {"evaluate": 1.0})
    line.fill("start", until=3.0)
    line.add(3.0, 4.0, {"step": 1.0})
    line.fill("other", until=5.0)
    assert line.bins == [
        {"evaluate": 1.0, "start": 1.0},
        {"start": 1.0, "step": 1.0},
        {"other": 1.0},
    ]


@pytest.mark.parametrize("seconds", [1.0, 100.0, 86_400.0 * 30])
def test_the_number_of_bins_is_bounded(seconds):
    line = TimeLine()
    for number in range(1000):
        begin, kind = number * seconds / 1000, ("step", "save")[number % 2]
        line.add(begin, begin + seconds / 1000, {kind: seconds / 1000})
    assert len(line.bins) <= MOST_BINS
    half = pytest.approx(seconds / 2)
    assert sums(line) == {"step": half, "save": half}
    # Each bin but the last is full.
    for one in line.bins[:-1]:
        assert sum(one.values()) == pytest.approx(line.width)


def test_one_line_goes_on_after_another():
    line = TimeLine(width=1.0)
    line.add(0.0, 2.5, {"step": 2.5})
    after = TimeLine(width=2.0)
    after.add(0.0, 3.0, {"start": 3.0})
    line.join(after, 2.5)
    assert line.bins == [
        {"step": 1.0},
        {"step": 1.0},
        {"step": 0.5, "start": 0.5},
        {"start": 1.0},
        {"start": 1.0},
        {"start": 0.5},
    ]
    assert TimeLine(**line.as_json()).bins == line.bins

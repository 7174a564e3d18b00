"""How often a run saves, from planted costs and failures."""

import math
import time

import pytest

from mgpu_tf.checkpoints import step_losses
from mgpu_tf.checkpoints.interval import (
    FIRST_SECONDS,
    LEAST_SECONDS,
    Interval,
    best_interval,
)
from mgpu_tf.checkpoints.saving.saver import CheckpointSaver
from mgpu_tf.engine.step.base import Votes
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.options import SaveOptions
from mgpu_tf.reports.goodput import Meter
from mgpu_tf.strategies.peers import Peers


def test_youngs_formula():
    # 2 s a save, a failure a day: 588 s.
    assert best_interval(2.0, 86_400.0) == pytest.approx(587.88, abs=0.01)
    assert best_interval(8.0, 86_400.0) == 2 * best_interval(2.0, 86_400.0)
    # Saves that cost more than half the time between failures.
    assert best_interval(100.0, 50.0) == 50.0


def waste(interval, cost, mean):
    """Returns the share of the time for saves and for lost work."""
    return cost / interval + interval / (2 * mean)


@pytest.mark.parametrize(("cost", "mean"), [(0.5, 3600.0), (30.0, 90_000.0)])
def test_no_other_interval_wastes_less(cost, mean):
    best = best_interval(cost, mean)
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert waste(best, cost, mean) < waste(factor * best, cost, mean)


def test_what_is_measured_decides():
    interval = Interval(mean_hours_between_failures=10.0)
    assert interval.seconds(0.0, 0) == FIRST_SECONDS
    interval.note(9.0)
    assert interval.seconds(0.0, 0) == pytest.approx(
        math.sqrt(2 * 9.0 * 36_000)
    )
    # The first save traces; the others tell.
    for cost in (2.0, 1.0, 30.0):
        interval.note(cost)
    assert interval.seconds(0.0, 0) == pytest.approx(math.sqrt(4 * 36_000))
    # Four failures in 5 hours, and the one that was expected in 10.
    assert interval.seconds(5.0, 4) == pytest.approx(math.sqrt(4 * 3600 * 3))
    for _ in range(5):
        interval.note(1e-9)
    assert interval.seconds(0.0, 0) == LEAST_SECONDS


def test_losses_are_kept_to_the_bit(tmp_path):
    folder = str(tmp_path)
    assert step_losses.read(folder) == {}
    step_losses.write(folder, 4, [0.1, math.pi])
    step_losses.write(folder, 5, [math.inf])
    assert step_losses.read(folder) == {4: 0.1, 5: math.inf}


def test_a_run_saves_when_it_pays(strategies, tmp_path, clock, monkeypatch):
    """The vote of the chief, by a clock that stands for all clocks."""
    monkeypatch.setattr(time, "monotonic", clock)
    costs = iter([50.0, 2.0, 2.0])

    def capture():
        clock.now += next(costs)
        return 7, {}, []

    options = SaveOptions(
        str(tmp_path), save_every="auto", mean_hours_between_failures=1.0
    )
    saver = CheckpointSaver(
        options,
        Peers(strategies["one_device"]),
        is_chief=True,
        capture=capture,
        meter=Meter(clock.now),
    )
    assert saver.find() is None

    def asks_after():
        """Returns the whole seconds until it asks for a save, and saves."""
        began = clock.now
        while not saver.votes().save:
            clock.now += 1.0
        waited = clock.now - began
        saver.boundary(7, Votes(save=True))
        saver._thread.join()
        return waited

    assert asks_after() == FIRST_SECONDS
    # What has passed of the hour counts.
    hours = 1 + (60.0 + 50.0 + 600.0) / 3600
    assert asks_after() == pytest.approx(
        math.sqrt(2 * 50.0 * 3600 * hours), abs=15
    )
    hours = 1 + (60.0 + 50.0 + 660.0 + 2.0) / 3600
    assert asks_after() == pytest.approx(
        math.sqrt(2 * 2.0 * 3600 * hours), abs=5
    )


@pytest.mark.parametrize(
    "given", [{"save_every_steps": 5}, {"save_every_seconds": 5.0}]
)
def test_one_way_to_choose(given):
    with pytest.raises(ConfigurationError, match="not both") as error:
        SaveOptions("a", save_every="auto", **given)
    assert "\n" not in str(error.value)

"""Percentiles from bins, beside those of all times."""

import numpy as np
import pytest

from mgpu_tf.reports.distribution import PERCENTILES, Distribution


def test_percentiles_are_known_to_a_bin():
    times = np.random.default_rng(0).lognormal(-4.0, 0.8, 2000)
    found = Distribution()
    for seconds in times:
        found.note(seconds, steps=3)
    told = found.as_json()
    for name, part in PERCENTILES.items():
        assert told[name] == pytest.approx(np.quantile(times, part), rel=0.045)
    assert (told["least"], told["most"]) == (times.min(), times.max())
    assert (told["steps"], told["executions"]) == (6000, 2000)
    for low, high, steps in told["bins"]:
        assert steps == 3 * np.sum((low <= times) & (times < high))


def test_a_slow_call_counts_with_its_steps():
    found = Distribution()
    found.note(0.001, steps=98)
    found.note(1.0, steps=2)
    told = found.as_json()
    assert told["p90"] == pytest.approx(0.001, rel=0.045)
    assert told["p99"] == pytest.approx(1.0, rel=0.045)


def test_the_memory_is_bounded():
    found = Distribution()
    for power in np.linspace(-300, 300, 5000):
        found.note(10.0**power, steps=1)
    found.note(0.0, steps=1)
    assert len(found.as_json()["bins"]) < 700


def test_no_steps():
    assert Distribution().as_json() is None

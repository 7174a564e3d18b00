"""Reads a set through and adds it up, with no model behind it.

The sum is what contestants must agree on: whoever leaves out an example, or
changes one, does not reach it.
"""

from __future__ import annotations

import time
from typing import Any

import tensorflow as tf

import mgpu_tf
from experiments.benchmarks.contestants import datasets
from experiments.benchmarks.jobs import JOBS
from mgpu_tf import data as data_lib


def create(place) -> Reading:
    return Reading(place)


class Reading:
    """Options: `pipeline`, "mgpu_tf", "by_number" or "by_hand"."""

    def __init__(self, place) -> None:
        self._job = JOBS[place.job]
        pipeline = place.options["pipeline"]
        if pipeline == "by_hand":
            self._next = self._by_hand()
        elif pipeline == "by_number":
            self._next = self._own(datasets.by_number(self._job))
        else:
            self._next = self._own(datasets.for_fit(self._job, 1))

        @tf.function(autograph=False)
        def run(steps: tf.Tensor) -> tf.Tensor:
            zero = tf.constant(0)
            _, total = tf.while_loop(
                lambda step, _: step < steps,
                lambda step, total: (step + 1, total + _sum(self._next())),
                (zero, tf.constant(0.0, tf.float64)),
                parallel_iterations=1,
            )
            return total

        self._run = run

    def _own(self, arguments: dict[str, Any]):
        """Reads as `Trainer.fit` does."""
        strategy = mgpu_tf.create_one_device_strategy("CPU:0")
        source = data_lib.as_source(
            **arguments, strategy=strategy, shuffle=True
        )
        feed = data_lib.Feed(source, strategy, chain=True)
        self._iterator = feed.iterator(0)

        def following() -> Any:
            return data_lib.next_batch(self._iterator, source.form, strategy)[0]

        return following

    def _by_hand(self):
        self._iterator = iter(datasets.of_worker(self._job, 0, 1))
        return lambda: next(self._iterator)

    def check(self, steps: int) -> float:
        return float(self._run(tf.constant(steps))) / self._job.examples

    def burst(self, steps: int) -> tuple[int, float]:
        started = time.perf_counter()
        float(self._run(tf.constant(steps)))
        return steps, time.perf_counter() - started


def _sum(batch: Any) -> tf.Tensor:
    return tf.add_n(
        [tf.reduce_sum(tf.cast(leaf, tf.float64)) for leaf in batch]
    )

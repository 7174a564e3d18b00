"""A loop around `ClusterCoordinator`, as TensorFlow's tutorial writes it.

Several steps in one closure; loss and accuracy are variables on the parameter
server, which every step adds to by one operation each.
"""

from __future__ import annotations

import time

import tensorflow as tf

from experiments.benchmarks.contestants import (
    datasets,
    strategies,
    tensorflow_model,
)
from experiments.benchmarks.contestants.tensorflow_loop import step_of
from experiments.benchmarks.jobs import JOBS


def create(place) -> CoordinatorLoop:
    return CoordinatorLoop(place)


class CoordinatorLoop:
    """Options: `call` (steps to a closure)."""

    def __init__(self, place) -> None:
        job = JOBS[place.job]
        self._strategy = strategies.create("parameter_server", place)
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(
            self._strategy
        )
        self._call = place.options["call"]
        with self._strategy.scope():
            self._model = tensorflow_model.build(job)
            self._model.optimizer.build(self._model.trainable_variables)
            self._sums = [tf.Variable(0.0) for _ in range(2)]
        self._iterator = iter(
            self._coordinator.create_per_worker_dataset(
                lambda: datasets.of_worker(job, 0, 1)
            )
        )
        batch = tf.constant(float(job.batch(1)))
        step = step_of(self._model, batch, self._sums)

        @tf.function(reduce_retracing=True)
        def run(iterator, steps):
            for _ in tf.range(steps):
                self._strategy.run(step, args=next(iterator))

        self._run = run
        self._made = 0

    def _steps(self, steps: int) -> float:
        """Runs steps in closures; returns the mean loss of them all."""
        for total in self._sums:
            total.assign(0.0)
        left = steps
        while left:
            now = min(left, self._call)
            self._coordinator.schedule(
                self._run, args=(self._iterator, tf.constant(now))
            )
            left -= now
        self._coordinator.join()
        loss, accuracy = (float(total) for total in self._sums)
        self._made += steps
        counted = int(self._model.optimizer.iterations)
        print(
            f"loss {loss / steps:.4f} accuracy {accuracy / steps:.4f} "
            f"counted {counted} of {self._made}"
        )
        return loss / steps

    def check(self, steps: int) -> float:
        return self._steps(steps)

    def burst(self, steps: int) -> tuple[int, float]:
        started = time.perf_counter()
        self._steps(steps)
        return steps, time.perf_counter() - started

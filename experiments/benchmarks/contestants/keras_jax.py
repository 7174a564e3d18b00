"""Keras's `fit` on JAX: `keras.distribution.DataParallel` over processes.

As Keras's guide on distributed training with JAX writes it: one device to a
process, every process brings its part of each batch. Needs the environment
`KERAS_BACKEND=jax`.
"""

from __future__ import annotations

import itertools
import os

import jax
import keras

from experiments.benchmarks.contestants import tensorflow_model
from experiments.benchmarks.jobs import JOBS


def create(place) -> KerasJax:
    return KerasJax(place)


class KerasJax:
    """Options: `clock`, `steps_per_execution`."""

    EPOCHS = 2

    def __init__(self, place) -> None:
        job = JOBS[place.job]
        self._clock = place.options.get("clock", "wall")
        if place.workers > 1:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            environment = os.environ
            address = (
                f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
            )
            jax.distributed.initialize(address, place.workers, place.index)
            keras.distribution.set_distribution(
                keras.distribution.DataParallel(auto_shard_dataset=False)
            )
        # A seed, since every process must make the same first weights.
        keras.utils.set_random_seed(0)
        parts = list(zip(*job.part(place.index, place.workers), strict=True))
        self._batches = (part for part in itertools.cycle(parts))
        self._model = tensorflow_model.build(
            job,
            steps_per_execution=place.options.get("steps_per_execution", 1),
        )

    def check(self, steps: int) -> float:
        history = self._model.fit(
            self._batches, epochs=1, steps_per_epoch=steps, shuffle=False
        )
        return history.history["loss"][0]

    def burst(self, steps: int) -> tuple[int, float]:
        times = tensorflow_model.EpochTimes(self._clock)
        self._model.fit(
            self._batches,
            epochs=self.EPOCHS,
            steps_per_epoch=steps,
            shuffle=False,
            callbacks=[times],
        )
        return steps * (self.EPOCHS - 1), times.seconds

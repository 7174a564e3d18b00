"""Keras's own `fit`, as its guide on distributed training writes it."""

from __future__ import annotations

from experiments.benchmarks.contestants import (
    datasets,
    strategies,
    tensorflow_model,
)
from experiments.benchmarks.jobs import JOBS


def create(place) -> KerasFit:
    return KerasFit(place)


class KerasFit:
    """Options: `strategy`, `replicas`, `clock`, `steps_per_execution`."""

    EPOCHS = 2

    def __init__(self, place) -> None:
        job = JOBS[place.job]
        name = place.options.get("strategy", "one_device")
        self._clock = place.options.get("clock", "wall")
        strategy = strategies.create(name, place)
        self._dataset = datasets.of_worker(job, 0, 1)
        with strategy.scope():
            self._model = tensorflow_model.build(
                job,
                steps_per_execution=place.options.get("steps_per_execution", 1),
            )

    def check(self, steps: int) -> float:
        history = self._model.fit(
            self._dataset, epochs=1, steps_per_epoch=steps
        )
        return history.history["loss"][0]

    def burst(self, steps: int) -> tuple[int, float]:
        times = tensorflow_model.EpochTimes(self._clock)
        self._model.fit(
            self._dataset,
            epochs=self.EPOCHS,
            steps_per_epoch=steps,
            callbacks=[times],
        )
        return steps * (self.EPOCHS - 1), times.seconds

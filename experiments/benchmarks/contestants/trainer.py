"""`mgpu_tf.Trainer`, as its README has it."""

from __future__ import annotations

import mgpu_tf
from experiments.benchmarks.contestants import (
    datasets,
    strategies,
    tensorflow_model,
)
from experiments.benchmarks.jobs import JOBS


def create(place) -> TrainerFit:
    return TrainerFit(place)


class TrainerFit:
    """Options: `strategy`, `replicas`, `clock`, and those of `Trainer`.

    `mesh` has further options of the strategy.
    """

    EPOCHS = 2

    def __init__(self, place) -> None:
        strategies.set_threads(place)
        options = dict(place.options)
        name = options.pop("strategy", "one_device")
        replicas = options.pop("replicas", None)
        self._clock = options.pop("clock", "wall")
        job = JOBS[place.job]
        strategy = mgpu_tf.create_strategy(
            name,
            num_virtual_devices=replicas,
            **options.pop("mesh", {}),
        )
        self._data = datasets.for_fit(job, place.workers)
        self._trainer = mgpu_tf.Trainer(
            lambda: tensorflow_model.build(job), strategy, **options
        )
        self._made = 0

    def check(self, steps: int) -> float:
        return self._fit(steps, 1, []).history["loss"][0]

    def burst(self, steps: int) -> tuple[int, float]:
        times = tensorflow_model.EpochTimes(self._clock)
        self._fit(steps, self.EPOCHS, [times])
        return steps * (self.EPOCHS - 1), times.seconds

    def _fit(self, steps: int, epochs: int, callbacks: list):
        trainer = self._trainer
        history = trainer.fit(
            **self._data,
            epochs=epochs,
            steps_per_epoch=steps,
            callbacks=callbacks,
        )
        self._made += steps * epochs
        iterations = int(trainer.model.optimizer.iterations.numpy())
        counts = {trainer.global_step, iterations}
        if counts != {self._made}:
            raise RuntimeError(f"made {self._made} steps, counted {counts}")
        return history

"""Keras 2's `fit`, on one device or on parameter servers.

On parameter servers as TensorFlow's tutorial has it. It refuses a progress bar
there; it prints a line for each epoch. Bursts take how many steps go into an
execution, and there is a model for each number.
"""

from __future__ import annotations

import tf_keras

from experiments.benchmarks.contestants import (
    datasets,
    strategies,
    tensorflow_model,
)
from experiments.benchmarks.jobs import JOBS


def create(place) -> TfKerasFit:
    return TfKerasFit(place)


class TfKerasFit:
    """Options: `strategy`, `clock`."""

    EPOCHS = 2

    def __init__(self, place) -> None:
        self._job = JOBS[place.job]
        name = place.options.get("strategy", "parameter_server")
        self._clock = place.options.get("clock", "wall")
        self._strategy = strategies.create(name, place)
        if name == "parameter_server":
            self._data = tf_keras.utils.experimental.DatasetCreator(
                lambda _: datasets.of_worker(self._job, 0, 1)
            )
        else:
            self._data = datasets.of_worker(self._job, 0, 1)
        self._models: dict[int, tf_keras.Model] = {}

    def check(self, steps: int) -> float:
        return self._fit(1, steps, 1, []).history["loss"][0]

    def burst(
        self, steps: int, steps_per_execution: int = 1
    ) -> tuple[int, float]:
        times = tensorflow_model.EpochTimes(self._clock)
        marks = tf_keras.callbacks.LambdaCallback(
            on_epoch_begin=times.on_epoch_begin,
            on_train_end=times.on_train_end,
        )
        self._fit(steps_per_execution, steps, self.EPOCHS, [marks])
        return steps * (self.EPOCHS - 1), times.seconds

    def _fit(
        self,
        steps_per_execution: int,
        steps: int,
        epochs: int,
        callbacks: list,
    ):
        if steps_per_execution not in self._models:
            with self._strategy.scope():
                model = tensorflow_model.build(
                    self._job,
                    tf_keras,
                    steps_per_execution=steps_per_execution,
                )
            self._models[steps_per_execution] = model
        model = self._models[steps_per_execution]
        before = int(model.optimizer.iterations)
        history = model.fit(
            self._data,
            epochs=epochs,
            steps_per_epoch=steps,
            callbacks=callbacks,
        )
        counted = int(model.optimizer.iterations) - before
        print(f"counted {counted} of {steps * epochs}")
        return history

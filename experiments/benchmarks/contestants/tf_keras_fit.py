"""Keras 2's `fit` on parameter servers, as TensorFlow's tutorial has it.

It refuses a progress bar there; it prints a line for each epoch. Bursts take
how many steps go into an execution, and there is a model for each number.
"""

from __future__ import annotations

import time

import tf_keras

from experiments.benchmarks import jobs
from experiments.benchmarks.contestants import datasets, strategies
from experiments.benchmarks.jobs import JOBS


def create(place) -> TfKerasFit:
    return TfKerasFit(place)


def build(job: jobs.Job, steps_per_execution: int) -> tf_keras.Model:
    """Returns the compiled MLP with the job's first weights."""
    inputs = tf_keras.Input(job.input_shape)
    hidden = inputs
    for width in job.widths:
        hidden = tf_keras.layers.Dense(width, activation="relu")(hidden)
    model = tf_keras.Model(inputs, tf_keras.layers.Dense(jobs.CLASSES)(hidden))
    model.compile(
        tf_keras.optimizers.SGD(jobs.LEARNING_RATE, jobs.MOMENTUM),
        tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=steps_per_execution,
    )
    model.set_weights(job.weights())
    return model


class TfKerasFit:
    """Without options."""

    EPOCHS = 2

    def __init__(self, place) -> None:
        self._job = JOBS[place.job]
        self._strategy = strategies.create("parameter_server", place)
        self._data = tf_keras.utils.experimental.DatasetCreator(
            lambda _: datasets.of_worker(self._job, 0, 1)
        )
        self._models: dict[int, tf_keras.Model] = {}

    def check(self, steps: int) -> float:
        return self._fit(1, steps, 1, []).history["loss"][0]

    def burst(
        self, steps: int, steps_per_execution: int = 1
    ) -> tuple[int, float]:
        marks: list[float] = []
        times = tf_keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda *_: marks.append(time.perf_counter()),
            on_train_end=lambda *_: marks.append(time.perf_counter()),
        )
        self._fit(steps_per_execution, steps, self.EPOCHS, [times])
        # The first epoch warms up.
        return steps * (self.EPOCHS - 1), marks[-1] - marks[1]

    def _fit(
        self,
        steps_per_execution: int,
        steps: int,
        epochs: int,
        callbacks: list,
    ):
        if steps_per_execution not in self._models:
            with self._strategy.scope():
                model = build(self._job, steps_per_execution)
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

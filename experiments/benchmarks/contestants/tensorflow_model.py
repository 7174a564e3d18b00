"""The jobs as Keras 3 models, for every contestant on TensorFlow or JAX."""

from __future__ import annotations

import time

import keras
from keras import layers

from experiments.benchmarks import jobs


def build(job: jobs.Job, **compile_options) -> keras.Model:
    """Returns the compiled model with the job's first weights."""
    inputs = keras.Input(job.input_shape)
    hidden = inputs
    for width in job.widths:
        if job.convolution:
            for _ in range(2):
                hidden = layers.Conv2D(
                    width, 3, padding="same", use_bias=False
                )(hidden)
                hidden = layers.BatchNormalization()(hidden)
                hidden = layers.ReLU()(hidden)
            hidden = layers.MaxPooling2D()(hidden)
        else:
            hidden = layers.Dense(width, activation="relu")(hidden)
    if job.convolution:
        hidden = layers.GlobalAveragePooling2D()(hidden)
    model = keras.Model(inputs, layers.Dense(jobs.CLASSES)(hidden))
    model.compile(
        keras.optimizers.SGD(jobs.LEARNING_RATE, jobs.MOMENTUM),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        **compile_options,
    )
    model.set_weights(job.weights())
    return model


class EpochTimes(keras.callbacks.Callback):
    """The seconds of the epochs after the first, which warms up."""

    def __init__(self) -> None:
        super().__init__()
        self._marks: list[float] = []

    def on_epoch_begin(self, epoch, logs=None) -> None:
        del epoch, logs
        self._marks.append(time.perf_counter())

    def on_train_end(self, logs=None) -> None:
        del logs
        self._marks.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        """From the beginning of the second epoch to the end."""
        return self._marks[-1] - self._marks[1]

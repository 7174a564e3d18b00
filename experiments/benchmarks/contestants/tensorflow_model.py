"""The jobs as Keras 3 models, for every contestant on TensorFlow or JAX."""

from __future__ import annotations

import time

import keras
from keras import layers

from experiments.benchmarks import jobs


def build(job: jobs.Job, **compile_options) -> keras.Model:
    """Returns the compiled model with the job's first weights."""
    if job.network is not None:
        keras.utils.set_random_seed(0)
        network = NETWORKS[job.network]
    else:
        network = _convolutions if job.convolution else _dense
    inputs = keras.Input(job.input_shape)
    hidden = network(inputs, job.widths)
    model = keras.Model(inputs, layers.Dense(jobs.CLASSES)(hidden))
    model.compile(
        _optimizer(job.optimizer),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        **compile_options,
    )
    if job.network is None:
        model.set_weights(job.weights())
    return model


def _optimizer(name: str) -> keras.optimizers.Optimizer:
    if name == "adam":
        return keras.optimizers.Adam()
    return keras.optimizers.SGD(jobs.LEARNING_RATE, jobs.MOMENTUM)


def _dense(hidden: keras.KerasTensor, widths) -> keras.KerasTensor:
    for width in widths:
        hidden = layers.Dense(width, activation="relu")(hidden)
    return hidden


def _convolutions(hidden: keras.KerasTensor, widths) -> keras.KerasTensor:
    for width in widths:
        for _ in range(2):
            hidden = layers.ReLU()(_normalized(hidden, width))
        hidden = layers.MaxPooling2D()(hidden)
    return layers.GlobalAveragePooling2D()(hidden)


def _normalized(
    hidden: keras.KerasTensor, width: int, strides: int = 1, size: int = 3
) -> keras.KerasTensor:
    hidden = layers.Conv2D(
        width, size, strides, padding="same", use_bias=False
    )(hidden)
    return layers.BatchNormalization()(hidden)


def _resnet20(hidden: keras.KerasTensor, widths) -> keras.KerasTensor:
    """ResNet-20 for small images (He et al., 2016)."""
    del widths
    hidden = layers.ReLU()(_normalized(hidden, 16))
    for width in (16, 32, 64):
        for block in range(3):
            strides = 2 if width > 16 and block == 0 else 1
            short = hidden
            hidden = layers.ReLU()(_normalized(hidden, width, strides))
            hidden = _normalized(hidden, width)
            if strides > 1:
                short = _normalized(short, width, strides, 1)
            hidden = layers.ReLU()(layers.Add()([hidden, short]))
    return layers.GlobalAveragePooling2D()(hidden)


def _transformer(hidden: keras.KerasTensor, widths) -> keras.KerasTensor:
    """Four blocks of width 128: attention of four heads, then GELU."""
    del widths
    hidden = layers.Dense(128)(hidden)
    for _ in range(4):
        normed = layers.LayerNormalization()(hidden)
        attention = layers.MultiHeadAttention(4, 32)(normed, normed)
        hidden = layers.Add()([hidden, attention])
        normed = layers.LayerNormalization()(hidden)
        wide = layers.Dense(512, activation="gelu")(normed)
        hidden = layers.Add()([hidden, layers.Dense(128)(wide)])
    return layers.GlobalAveragePooling1D()(hidden)


def _lstm(hidden: keras.KerasTensor, widths) -> keras.KerasTensor:
    del widths
    return layers.LSTM(128)(hidden)


NETWORKS = {
    "resnet20": _resnet20,
    "transformer": _transformer,
    "lstm": _lstm,
}


class EpochTimes(keras.callbacks.Callback):
    """The seconds of the epochs after the first, which warms up.

    Args:
        clock: "wall", or "processor" for the time that all threads of this
            process have had, which other work on the machine does not
            lengthen much.
    """

    def __init__(self, clock: str = "wall") -> None:
        super().__init__()
        self._now = {
            "wall": time.perf_counter,
            "processor": time.process_time,
        }[clock]
        self._marks: list[float] = []

    def on_epoch_begin(self, epoch, logs=None) -> None:
        del epoch, logs
        self._marks.append(self._now())

    def on_train_end(self, logs=None) -> None:
        del logs
        self._marks.append(self._now())

    @property
    def seconds(self) -> float:
        """From the beginning of the second epoch to the end."""
        return self._marks[-1] - self._marks[1]

"""The jobs as models of Keras 3 or Keras 2."""

from __future__ import annotations

import types

import keras

from experiments.benchmarks import jobs
from experiments.benchmarks.contestants import clocks


def build(
    job: jobs.Job, of: types.ModuleType = keras, **compile_options
) -> keras.Model:
    """Returns the compiled model with the job's first weights.

    Args:
        job: What is trained.
        of: The package that has the layers: Keras 3, or `tf_keras`.
        **compile_options: Of `compile`.
    """
    layers = of.layers
    if job.network is not None:
        network = NETWORKS[job.network]
    else:
        network = _convolutions if job.convolution else _dense
    inputs = of.Input(job.input_shape)
    hidden = network(layers, inputs, job.widths)
    model = of.Model(inputs, layers.Dense(jobs.CLASSES)(hidden))
    model.compile(
        _optimizer(of, job.optimizer),
        of.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        **compile_options,
    )
    if job.network is None:
        model.set_weights(job.weights())
    else:
        model.set_weights(
            [
                # Biases of attention are matrices too, of zeros.
                jobs.kernel(*value.shape)
                if value.ndim > 1 and value.any()
                else value
                for value in model.get_weights()
            ]
        )
    return model


def _optimizer(of, name: str) -> keras.optimizers.Optimizer:
    if name == "adam":
        return of.optimizers.Adam()
    return of.optimizers.SGD(jobs.LEARNING_RATE, jobs.MOMENTUM)


def _dense(layers, hidden, widths):
    for width in widths:
        hidden = layers.Dense(width, activation="relu")(hidden)
    return hidden


def _convolutions(layers, hidden, widths):
    for width in widths:
        for _ in range(2):
            hidden = layers.ReLU()(_normalized(layers, hidden, width))
        hidden = layers.MaxPooling2D()(hidden)
    return layers.GlobalAveragePooling2D()(hidden)


def _normalized(layers, hidden, width: int, strides: int = 1, size: int = 3):
    hidden = layers.Conv2D(
        width, size, strides, padding="same", use_bias=False
    )(hidden)
    return layers.BatchNormalization()(hidden)


def _resnet20(layers, hidden, widths):
    """ResNet-20 for small images (He et al., 2016)."""
    del widths
    hidden = layers.ReLU()(_normalized(layers, hidden, 16))
    for width in (16, 32, 64):
        for block in range(3):
            strides = 2 if width > 16 and block == 0 else 1
            short = hidden
            hidden = _normalized(layers, hidden, width, strides)
            hidden = _normalized(layers, layers.ReLU()(hidden), width)
            if strides > 1:
                short = _normalized(layers, short, width, strides, 1)
            hidden = layers.ReLU()(layers.Add()([hidden, short]))
    return layers.GlobalAveragePooling2D()(hidden)


def _mobilenetv2(layers, hidden, widths):
    """MobileNetV2 of width 1 (Sandler et al., 2018)."""
    del widths
    hidden = layers.ReLU(6.0)(_normalized(layers, hidden, 32, 2))
    for expansion, width, strides in jobs.MOBILENETV2:
        before = hidden.shape[-1]
        short = hidden
        if expansion > 1:
            hidden = _normalized(layers, hidden, expansion * before, size=1)
            hidden = layers.ReLU(6.0)(hidden)
        hidden = layers.DepthwiseConv2D(
            3, strides, padding="same", use_bias=False
        )(hidden)
        hidden = layers.ReLU(6.0)(layers.BatchNormalization()(hidden))
        hidden = _normalized(layers, hidden, width, size=1)
        if strides == 1 and before == width:
            hidden = layers.Add()([short, hidden])
    hidden = layers.ReLU(6.0)(_normalized(layers, hidden, 1280, size=1))
    return layers.GlobalAveragePooling2D()(hidden)


def _transformer(layers, hidden, widths):
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


def _lstm(layers, hidden, widths):
    del widths
    return layers.LSTM(128)(hidden)


NETWORKS = {
    "resnet20": _resnet20,
    "mobilenetv2": _mobilenetv2,
    "transformer": _transformer,
    "lstm": _lstm,
}


class EpochTimes(keras.callbacks.Callback):
    """The seconds of the epochs after the first, which warms up.

    Args:
        clock: A key of `clocks.CLOCKS`.
    """

    def __init__(self, clock: str = "wall") -> None:
        super().__init__()
        self._now = clocks.CLOCKS[clock]
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

"""The rows of the parity matrix, run by tests here and by worker processes.

A case trains a small model; `run_stock` does it with Keras's own `fit` on one
device, `run` with the `Trainer` on a strategy. Both give the weights and the
loss of each epoch.
"""

import dataclasses
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

import mgpu_tf

BATCH_SIZE = 64
EPOCHS = 3
FEATURES = 12
CLASSES = 5

EVEN = 3 * BATCH_SIZE
UNEVEN = 3 * BATCH_SIZE + 7
EMPTY_REPLICA = 3 * BATCH_SIZE + 1


def set_floatx(name):
    """Sets the type of data, weights and computation."""
    keras.config.set_floatx(name)
    keras.config.set_dtype_policy(name)


@keras.saving.register_keras_serializable("mgpu_tf_tests")
class MeanSquare(keras.layers.Layer):
    """Adds the mean square over the batch to the loss: NaN for no example."""

    def call(self, inputs):
        self.add_loss(0.1 * tf.reduce_mean(tf.square(inputs)))
        return inputs


@dataclasses.dataclass(frozen=True)
class Case:
    """A row: what the optimizer is, and how many examples there are."""

    optimizer: Callable[[], keras.optimizers.Optimizer]
    examples: int = UNEVEN
    layers: Callable[[], list] = list

    def data(self):
        generator = np.random.default_rng(7)
        x = generator.normal(size=(self.examples, FEATURES))
        y = generator.integers(0, CLASSES, size=self.examples)
        return x.astype(keras.config.floatx()), y

    def build(self):
        model = keras.Sequential(
            [
                keras.Input((FEATURES,)),
                keras.layers.Dense(
                    16,
                    activation="tanh",
                    kernel_regularizer=keras.regularizers.L2(0.01),
                ),
                *self.layers(),
                keras.layers.Dense(CLASSES),
            ]
        )
        model.compile(
            self.optimizer(),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        return model


_OPTIMIZERS = {
    "sgd": lambda **clip: keras.optimizers.SGD(0.2, **clip),
    "momentum": lambda **clip: keras.optimizers.SGD(0.1, momentum=0.9, **clip),
    "adam": lambda **clip: keras.optimizers.Adam(0.02, **clip),
}
# Each bites: the gradients of the first steps are larger.
_CLIPS = {
    "clipnorm": 0.05,
    "global_clipnorm": 0.1,
    "clipvalue": 0.01,
}


def _with(optimizer, **clip):
    return lambda: _OPTIMIZERS[optimizer](**clip)


CASES = {}
for _name in _OPTIMIZERS:
    CASES[f"{_name}/even"] = Case(_with(_name), EVEN)
    CASES[f"{_name}/uneven"] = Case(_with(_name), UNEVEN)
    CASES[f"{_name}/empty_replica"] = Case(_with(_name), EMPTY_REPLICA)
    for _clip, _value in _CLIPS.items():
        CASES[f"{_name}/{_clip}"] = Case(_with(_name, **{_clip: _value}))
CASES["sgd/add_loss_empty_replica"] = Case(
    _with("sgd"), EMPTY_REPLICA, lambda: [MeanSquare()]
)


@dataclasses.dataclass(frozen=True)
class Result:
    weights: list
    losses: list
    evaluation: list
    predictions: np.ndarray

    def largest_difference(self, other):
        """The largest difference of any weight."""
        pairs = zip(self.weights, other.weights, strict=True)
        return max(float(np.abs(a - b).max()) for a, b in pairs)

    def loss_difference(self, other):
        """The largest relative difference of any epoch's loss."""
        ours, theirs = np.array(self.losses), np.array(other.losses)
        return float(np.abs(ours / theirs - 1).max())

    def save(self, path):
        np.savez(
            path,
            losses=self.losses,
            evaluation=self.evaluation,
            predictions=self.predictions,
            **{f"weight_{i}": w for i, w in enumerate(self.weights)},
        )

    @classmethod
    def load(cls, path):
        with np.load(path) as file:
            count = sum(name.startswith("weight_") for name in file.files)
            return cls(
                [file[f"weight_{i}"] for i in range(count)],
                file["losses"].tolist(),
                file["evaluation"].tolist(),
                file["predictions"],
            )


def run_stock(case):
    """Trains with `keras.Model.fit` on one device."""
    keras.utils.set_random_seed(0)
    with tf.device("CPU:0"):
        model = case.build()
        x, y = case.data()
        history = model.fit(
            x,
            y,
            batch_size=BATCH_SIZE,
            epochs=EPOCHS,
            shuffle=False,
            verbose=0,
        )
        evaluation = model.evaluate(x, y, batch_size=BATCH_SIZE, verbose=0)
        predictions = model.predict(x, batch_size=BATCH_SIZE, verbose=0)
    return Result(
        model.get_weights(), history.history["loss"], evaluation, predictions
    )


def run(case, strategy):
    """Trains with the `Trainer` on a strategy."""
    trainer = mgpu_tf.Trainer(case.build, strategy)
    x, y = case.data()
    history = trainer.fit(
        x, y, batch_size=BATCH_SIZE, epochs=EPOCHS, shuffle=False, verbose=0
    )
    assert trainer.examples_seen == EPOCHS * len(x)
    evaluation = trainer.evaluate(x, y, batch_size=BATCH_SIZE, verbose=0)
    predictions = trainer.predict(x, batch_size=BATCH_SIZE, verbose=0)
    return Result(
        trainer.model.get_weights(),
        history.history["loss"],
        evaluation,
        predictions,
    )

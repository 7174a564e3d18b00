"""What goes with what: each cell of the table of docs/layouts.md, tried.

A cell that says yes trains two steps in float64, and ends with the weights of
Keras's `fit`. One that says no is refused in one line.
"""

import dataclasses
import itertools
import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import mgpu_tf
from tests.tiers import tiered

PAGE = pathlib.Path(mgpu_tf.__file__).parents[1] / "docs" / "layouts.md"
COLUMNS = {
    "`mirrored`": "mirrored_x3",
    "`central_storage`": "central_storage_x2",
    "`fsdp`": "fsdp_x3",
    "`tensor`": "tensor_x3",
    "`pipeline`": "data_2_pipeline_2",
    "`fsdp` x `pipeline`": "fsdp_3_pipeline_2",
    "`tensor` x `pipeline`": "data_2_tensor_2_pipeline_2",
}


class OwnStep(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self(x, training=True) - y))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


class OwnLoss(keras.Model):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return ops.sum(ops.abs(y - y_pred)) / ops.sum(ops.abs(y))


class OwnMetrics(keras.Model):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return {"largest": ops.max(ops.abs(y - y_pred))}


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.last = layers.Dense(6, "tanh"), layers.Dense(1)

    def call(self, x):
        return self.last(self.first(x))


class Centred(layers.Layer):
    """It mixes rows."""

    def call(self, x):
        return x - ops.mean(x, axis=0)


class Signed(keras.optimizers.SGD):
    """An update by the largest gradient of a weight."""

    def update_step(self, gradient, variable, learning_rate):
        step = gradient / (ops.max(ops.abs(gradient)) + 1)
        self.assign_sub(variable, learning_rate * step)


def functional(kind=keras.Model, between=None):
    inputs = keras.Input((5,))
    x = layers.Dense(6, "tanh")(inputs)
    for layer in between() if between else ():
        x = layer(x)
    x = layers.Dense(6, "tanh")(x)
    return kind(inputs, layers.Dense(1)(x))


def pairs(y, p):
    scores = ops.log_softmax(-ops.square(p - ops.transpose(y)), axis=-1)
    return -ops.mean(tf.linalg.diag_part(scores))


def weighted():
    return keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")


class Descends(keras.callbacks.Callback):
    """A step of its own, on numbers of its own."""

    def on_train_batch_end(self, batch, logs=None):
        x = np.random.default_rng(batch).normal(size=(4, 5))
        weights = self.model.trainable_variables
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self.model(x)))
        self.model.optimizer.apply(tape.gradient(loss, weights), weights)


@dataclasses.dataclass
class Feature:
    """A program, and what the Trainer is given beside it."""

    make: object = functional
    optimizer: object = lambda: keras.optimizers.Adam(0.01)
    loss: object = lambda: "mse"
    compiled: dict = dataclasses.field(default_factory=dict)
    options: dict = dataclasses.field(default_factory=dict)
    fitted: object = dict
    weights: bool = False
    # One device draws or normalizes as the option says.
    alone: bool = True
    # Relative and absolute.
    tolerance: tuple = (1e-9, 1e-12)


def adam(**options):
    return lambda: keras.optimizers.Adam(0.01, **options)


FEATURES = {
    "your own `train_step`": Feature(lambda: functional(OwnStep)),
    "your own `compute_loss`": Feature(lambda: functional(OwnLoss)),
    "your own `compute_metrics`": Feature(lambda: functional(OwnMetrics)),
    "a subclassed model": Feature(Subclassed),
    "losses of pairs of rows": Feature(loss=lambda: pairs),
    "means by weights or masks": Feature(loss=weighted, weights=True),
    "a layer that mixes rows": Feature(
        lambda: functional(between=lambda: [Centred()])
    ),
    "dropout, equal to one device": Feature(
        lambda: functional(between=lambda: [layers.Dropout(0.5, seed=1)])
    ),
    "synchronized BatchNormalization": Feature(
        lambda: functional(
            between=lambda: [layers.BatchNormalization(synchronized=True)]
        )
    ),
    "clipping, accumulation, averages": Feature(
        optimizer=adam(
            global_clipnorm=0.1,
            gradient_accumulation_steps=2,
            use_ema=True,
            ema_overwrite_frequency=2,
        )
    ),
    "loss scaling": Feature(
        optimizer=lambda: keras.optimizers.LossScaleOptimizer(adam()())
    ),
    "layers in float8": Feature(
        lambda: functional(
            between=lambda: [
                layers.Dense(6, use_bias=False, dtype="float8_from_float32")
            ]
        ),
        tolerance=(1e-5, 1e-6),
    ),
    "Muon": Feature(optimizer=lambda: keras.optimizers.Muon(0.01)),
    "your own `update_step`": Feature(optimizer=lambda: Signed(0.01)),
    "`recompute`": Feature(options={"recompute": "layers"}),
    "`step_parts`": Feature(options={"step_parts": 2}),
    "`run_eagerly`": Feature(compiled={"run_eagerly": True}),
    "`optimizer.apply` in a callback": Feature(
        fitted=lambda: {"callbacks": [Descends()]}
    ),
    "`noise_scale`": Feature(options={"noise_scale": True}),
    "`check_replicas_every`": Feature(options={"check_replicas_every": 1}),
}


def table():
    """Reads the table: whether a feature goes with a layout."""
    text = PAGE.read_text()
    rows = [
        [cell.strip() for cell in line.strip("| ").split(" | ")]
        for line in text.splitlines()
        if line.startswith("| ")
    ]
    columns = rows[0][1:]
    assert columns == list(COLUMNS)
    return {
        (row[0], column): cell
        for row in rows[1:]
        for column, cell in zip(columns, row[1:], strict=True)
    }


CELLS = table()


def test_the_table_has_every_feature_and_every_reason():
    assert list(CELLS) == list(itertools.product(FEATURES, COLUMNS))
    noted = set(re.findall(r"^(\d+)\. ", PAGE.read_text(), re.MULTILINE))
    given = {cell.split()[1] for cell in CELLS.values() if cell != "yes"}
    assert given == noted


YES = [cell for cell, says in CELLS.items() if says == "yes"]
NO = [cell for cell, says in CELLS.items() if says != "yes"]


pytestmark = pytest.mark.usefixtures("float64")


def program(feature):
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(11, 5)), generator.normal(size=(11, 1))

    def build():
        keras.utils.set_random_seed(0)
        model = feature.make()
        model.compile(feature.optimizer(), feature.loss(), **feature.compiled)
        return model

    options = {"batch_size": 7, "epochs": 1, "shuffle": False, "verbose": 0}
    options |= feature.fitted()
    if feature.weights:
        options["sample_weight"] = generator.uniform(0.1, 1.0, 11)
    return build, x, y, options


@pytest.mark.parametrize(
    ("name", "column"),
    tiered(YES, [("losses of pairs of rows", "`fsdp`")], []),
)
def test_it_is_equal(name, column, strategies):
    feature = FEATURES[name]
    build, x, y, options = program(feature)
    model = build()
    model.fit(x, y, **options)
    trainer = mgpu_tf.Trainer(
        build, strategies[COLUMNS[column]], **feature.options
    )
    trainer.fit(x, y, **options)
    for expected, found in zip(
        model.get_weights(), trainer.model.get_weights(), strict=True
    ):
        relative, absolute = feature.tolerance
        np.testing.assert_allclose(
            found, expected, rtol=relative, atol=absolute
        )


@pytest.mark.parametrize(("name", "column"), NO)
def test_it_is_refused(name, column, strategies):
    feature = FEATURES[name]
    build, x, y, options = program(feature)
    with pytest.raises(mgpu_tf.ConfigurationError) as error:
        trainer = mgpu_tf.Trainer(
            build, strategies[COLUMNS[column]], **feature.options
        )
        trainer.fit(x, y, **options)
    assert "\n" not in str(error.value)

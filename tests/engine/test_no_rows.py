"""Replicas, parts of a step and micro-batches without a row.

Code may end with an error, or with NaN, where it gets no row. It gets another
row of the batch then, of which nothing may be used: not in sums over replicas,
in state, in metrics, in gathered rows or in predictions.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import mgpu_tf

pytestmark = pytest.mark.usefixtures("float64")

FULL = [
    pytest.param(column, marks=pytest.mark.full)
    for column in ("fsdp_x3", "data_2_tensor_2")
]


def needs_rows(x):
    """Ends with an error where there is no row."""
    with tf.control_dependencies(
        [tf.debugging.assert_greater(tf.shape(x)[0], 0)]
    ):
        return tf.identity(x)


def entropy(y, p):
    return keras.losses.sparse_categorical_crossentropy(y, needs_rows(p))


def over_batch(y, p):
    """A loss that is no mean over rows."""
    chosen = ops.take_along_axis(needs_rows(p), ops.cast(y, "int32"), 1)
    return ops.logsumexp(-ops.log(chosen))


class Counts(keras.metrics.Metric):
    """It counts rows, those that have no part in a loss too."""

    def __init__(self, name="rows"):
        super().__init__(name=name)
        self.rows = self.add_variable((), "zeros", name="rows")

    def update_state(self, y, p, sample_weight=None):
        p = needs_rows(p)
        self.rows.assign_add(tf.cast(tf.shape(p)[0], self.rows.dtype))

    def result(self):
        return self.rows


class Ratio(keras.metrics.Metric):
    """A metric whose state is no sum over rows."""

    def __init__(self, name="ratio"):
        super().__init__(name=name)
        self.last = self.add_variable((), "zeros", name="last")

    def update_state(self, y, p, sample_weight=None):
        p = needs_rows(p)
        top = ops.max(p) / ops.cast(tf.size(p), p.dtype)
        self.last.assign(0.5 * self.last + top)

    def result(self):
        return self.last


class NeedsRows(layers.Layer):
    def call(self, x):
        return needs_rows(x)


class Regularized(layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(needs_rows(x))))
        return x


class Remembers(layers.Layer):
    """It keeps a moving mean of its rows."""

    def build(self, shape):
        self.mean = self.add_weight(
            (shape[-1],), "zeros", trainable=False, name="mean"
        )

    def call(self, x, training=False):
        if training:
            mean = mgpu_tf.batch_mean(needs_rows(x))
            self.mean.assign(0.9 * self.mean + 0.1 * mean)
        return x - self.mean


class Mixes(layers.Layer):
    """Each row is compared with all."""

    def call(self, x):
        x = needs_rows(x)
        nearest = tf.nn.softmax(tf.matmul(x, x, transpose_b=True))
        return x + tf.matmul(nearest, x)


class Norm(layers.BatchNormalization):
    def __init__(self):
        super().__init__(momentum=0.8, synchronized=True)


class OwnStep(keras.Sequential):
    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            loss = ops.mean(entropy(y, p)) + 0.1 * ops.logsumexp(p)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        for metric in self.metrics[1:]:
            metric.update_state(y, p)
        return {"loss": loss}


def built(*between, model=keras.Sequential, loss=entropy, metrics=()):
    """Returns what builds a model, with layers between its first and last."""

    def build():
        made = model(
            [
                keras.Input((4,)),
                layers.Dense(6, "tanh", kernel_regularizer="l2"),
                *[layer() for layer in between],
                NeedsRows(),
                layers.Dropout(0.4, seed=3),
                layers.Dense(3, "softmax"),
            ]
        )
        compiled = loss() if isinstance(loss, type) else loss
        made.compile(
            keras.optimizers.Adam(0.03),
            compiled,
            metrics=["accuracy", *[metric() for metric in metrics]],
        )
        return made

    return build


class Weighted(keras.losses.SparseCategoricalCrossentropy):
    def __init__(self):
        super().__init__(reduction="mean_with_sample_weight")


PROGRAMS = {
    "by_row": built(metrics=[Counts]),
    "over_batch": built(loss=over_batch, metrics=[Ratio]),
    "weighted": built(loss=Weighted),
    "regularized": built(Regularized),
    "remembers": built(Remembers),
    "mixes": built(Mixes, metrics=[Counts]),
    "synchronized": built(Norm),
    "own_step_normalized": built(Norm, model=OwnStep),
    "own_step": built(model=OwnStep, metrics=[Counts]),
    "own_step_synchronized": built(Norm, Mixes, model=OwnStep),
}
IN_DEFAULT = {"mixes", "own_step_normalized", "remembers", "weighted"}


def data(rows, weighted):
    x = np.random.default_rng(0).normal(size=(rows, 4))
    y = np.arange(rows)[:, None] % 3
    weights = np.linspace(0.5, 2.0, rows)
    return (x, y, weights) if weighted else (x, y)


def ends_as_keras(build, strategy, arrays, batch, **options):
    """Trains, evaluates and predicts; returns Keras's history."""
    fit = {"batch_size": batch, "shuffle": False, "verbose": 0}
    weights = dict(zip(["x", "y", "sample_weight"], arrays, strict=False))
    keras.utils.set_random_seed(1)
    alone = build()
    expected = alone.fit(**weights, **fit, epochs=2).history
    keras.utils.set_random_seed(1)
    trainer = mgpu_tf.Trainer(build, strategy, seed=None, **options)
    found = trainer.fit(**weights, **fit, epochs=2).history
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, 1e-9)
    pairs = zip(trainer.model.weights, alone.weights, strict=True)
    for mine, theirs in pairs:
        np.testing.assert_allclose(mine, theirs, 1e-9, 1e-12)
    once = {"batch_size": batch, "verbose": 0, "return_dict": True}
    scores, found = (
        each.evaluate(**weights, **once) for each in (alone, trainer)
    )
    for name, value in scores.items():
        np.testing.assert_allclose(found[name], value, 1e-9)
    np.testing.assert_allclose(
        trainer.predict(arrays[0], batch_size=batch, verbose=0),
        alone.predict(arrays[0], batch_size=batch, verbose=0),
        1e-9,
    )
    return expected


@pytest.mark.parametrize("column", ["mirrored_x3", *FULL])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[] if name in IN_DEFAULT else [pytest.mark.full]
        )
        for name in PROGRAMS
    ],
)
def test_replicas(name, column, strategies):
    # The last batch has fewer rows than there are replicas.
    arrays = data(18 if "x3" in column else 17, name == "weighted")
    ends_as_keras(PROGRAMS[name], strategies[column], arrays, 8)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full) for name in PROGRAMS],
)
def test_replicas_eagerly(name, strategies):
    arrays = data(18, name == "weighted")

    def build():
        model = PROGRAMS[name]()
        model.run_eagerly = True
        return model

    ends_as_keras(build, strategies["mirrored_x3"], arrays, 8)


@pytest.mark.parametrize(
    "column",
    [
        "one_device",
        "mirrored_x3",
        pytest.param("fsdp_x3", marks=pytest.mark.full),
        pytest.param("tensor_x3", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("rows", [27, 25])
def test_parts(column, rows, strategies):
    # The last batch has three rows, or one, for four parts of each replica.
    expected = ends_as_keras(
        PROGRAMS["by_row"], strategies[column], data(rows, False), 24, **PARTS
    )
    assert expected["rows"] == [rows, rows]


PARTS = {"step_parts": 4}


@pytest.mark.full
@pytest.mark.parametrize("column", ["pipeline_x2", "data_2_pipeline_2"])
@pytest.mark.parametrize("name", ["by_row", "over_batch"])
def test_micro_batches(name, column, strategies):
    # The last batch has one row, for the micro-batches of all replicas.
    ends_as_keras(PROGRAMS[name], strategies[column], data(25, False), 8)


@pytest.mark.parametrize("kind", ["dataset", "mapped", "random_access"])
def test_sources(kind, strategies):
    x, y = data(17, False)
    build, fit = PROGRAMS["by_row"], {"epochs": 2, "verbose": 0}
    keras.utils.set_random_seed(1)
    alone = build()
    alone.fit(x, y, batch_size=8, shuffle=False, **fit)
    rows = tf.data.Dataset.from_tensor_slices((x, y))
    given = {
        "dataset": rows.batch(8),
        "mapped": rows.map(lambda x, y: (x, y)).batch(8),
        "random_access": mgpu_tf.RandomAccess(list(zip(x, y, strict=True))),
    }[kind]
    if kind == "random_access":
        fit |= {"batch_size": 8, "shuffle": False}
    keras.utils.set_random_seed(1)
    trainer = mgpu_tf.Trainer(build, strategies["mirrored_x3"], seed=None)
    trainer.fit(given, **fit)
    pairs = zip(trainer.model.weights, alone.weights, strict=True)
    for mine, theirs in pairs:
        np.testing.assert_allclose(mine, theirs, 1e-9, 1e-12)

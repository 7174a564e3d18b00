"""State of layers and metrics on several replicas, against one device.

Keras's own `fit` is the reference: weights, state, slots, scores.
"""

import itertools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import mgpu_tf
from mgpu_tf.checkpoints.saving.writer import piece_of
from mgpu_tf.engine.snapshot import Held
from mgpu_tf.mesh import Region
from tests.conformance.layers import Moving
from tests.parity import cases
from tests.tiers import tiered

pytestmark = pytest.mark.usefixtures("float64")


class Stateful(layers.Layer):
    """Counts, adds up and remembers, in variables of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)

    def build(self, shape):
        def make(name, value=0.0, **options):
            return self.add_weight(
                shape=(),
                initializer=keras.initializers.Constant(value),
                trainable=False,
                name=name,
                **options,
            )

        self.steps = make("steps", 0, dtype="int32")
        self.float_steps = make("float_steps")
        self.rows = make("rows", 0, dtype="int32")
        self.float_rows = make("float_rows")
        self.largest = make("largest", -100.0)
        self.smallest = make("smallest", 100.0)
        self.constant = make("constant", 1 / 3)
        self.decayed = make("decayed", 1.0)
        self.mean = make("mean", 0.5)
        self.total = make("total", 0.5)
        self.declared = make("declared", aggregation="sum")

    def call(self, inputs, training=False):
        # What was remembered of earlier batches.
        outputs = inputs * self.constant + 0.1 * (self.mean + self.rows / 100)
        if training:
            size = tf.shape(inputs)[0]
            self.steps.assign_add(1)
            self.float_steps.assign_add(1.0)
            self.rows.assign_add(size)
            self.float_rows.assign(self.float_rows + tf.cast(size, "float64"))
            self.largest.assign(
                keras.ops.maximum(self.largest, keras.ops.max(inputs))
            )
            self.smallest.assign(
                keras.ops.minimum(keras.ops.min(inputs), self.smallest)
            )
            self.decayed.assign(self.decayed * 0.9)
            self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(inputs))
            self.total.assign(
                self.total - (self.total - keras.ops.sum(inputs)) * 0.1
            )
            self.declared.assign_add(keras.ops.sum(inputs))
        return outputs


class StaticRows(Stateful):
    """Counts by the number that is known while it is traced, if one is."""

    def call(self, inputs, training=False):
        rows = inputs.shape[0] or tf.shape(inputs)[0]
        if training:
            self.rows.assign_add(rows)
            self.float_rows.assign_add(tf.cast(rows, "float64"))
        return inputs


class Largest(keras.metrics.Metric):
    """The largest target and how many were seen."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.value = self.add_variable((), "zeros", name="value")
        self.seen = self.add_variable((), "zeros", name="seen")
        self.batches = self.add_variable((), "zeros", name="batches")

    def update_state(self, y_true, y_pred, sample_weight=None):
        values = keras.ops.abs(y_pred)
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(values)))
        self.seen.assign_add(keras.ops.cast(keras.ops.size(y_true), self.dtype))
        self.batches.assign_add(1.0)

    def result(self):
        return self.value + 100 * self.seen + 10_000 * self.batches


def regression(examples=cases.UNEVEN):
    random = np.random.default_rng(0)
    x = random.normal(size=(examples, 6))
    return {"x": x, "y": x[:, :1] ** 2}


def model_of(*middle, metrics=(), optimizer=None):
    def build():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(5, activation="tanh"),
                *(make() for make in middle),
                layers.Dense(1),
            ]
        )
        model.compile(
            optimizer() if optimizer else keras.optimizers.SGD(0.1, 0.9),
            "mse",
            metrics=[make() for make in metrics],
        )
        return model

    return build


def normalized():
    layer = layers.Normalization()
    layer.adapt(np.random.default_rng(2).normal(size=(7, 5)))
    return layer


def frozen():
    layer = layers.Dense(5, kernel_initializer="glorot_normal")
    layer.trainable = False
    return layer


CASES = {
    "stateful": model_of(Stateful),
    "largest": model_of(metrics=[Largest]),
    "frozen": model_of(frozen),
    "spectral": model_of(
        lambda: layers.SpectralNormalization(layers.Dense(5)),
        optimizer=lambda: keras.optimizers.Adam(0.02, clipnorm=0.05),
    ),
}


@pytest.mark.parametrize(
    ("column", "name"),
    tiered(
        list(itertools.product(["mirrored_x3", "central_storage_x2"], CASES)),
        # test_written_state.py has the others.
        [("mirrored_x3", "spectral")],
    ),
)
def test_as_keras(column, name, strategies):
    # The last batch leaves replicas without an example.
    case = cases.Case(CASES[name], lambda: regression(2 * 16 + 2))
    reference = cases.run_stock(case)
    result = cases.run(case, strategies[column])
    assert result.loss_difference(reference) < 1e-12
    assert result.largest_difference(reference) < 1e-12
    assert result.score_difference(reference) < 1e-12


@pytest.mark.full
def test_state_that_is_read_by_the_step_that_writes_it(strategies):
    """The layer is computed whole, so what it reads is of all rows."""
    case = cases.Case(model_of(Moving), lambda: regression(34))
    reference = cases.run_stock(case)
    result = cases.run(case, strategies["mirrored_x3"])
    assert result.largest_difference(reference) < 1e-12


def test_rows_that_are_known_when_traced(strategies):
    x, y = regression(32).values()
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    dataset = dataset.batch(16, drop_remainder=True)
    trainer = mgpu_tf.Trainer(model_of(StaticRows), strategies["mirrored_x3"])
    trainer.fit(dataset, epochs=2, verbose=0)
    layer = trainer.model.layers[1]
    assert layer.rows.numpy() == layer.float_rows.numpy() == 64


def test_frozen_weights_are_not_touched(strategies):
    """Not even by rounding: a third has no exact third of its triple."""
    cases.set_floatx("float32")
    values = {}

    def build():
        model = model_of(frozen, normalized)()
        kernel = model.layers[1].kernel
        kernel.assign(np.full(kernel.shape, 1 / 3))
        values["before"] = [v.numpy() for v in model.non_trainable_variables]
        return model

    trainer = mgpu_tf.Trainer(
        build, strategies["mirrored_x3"], steps_per_execution=1
    )
    trainer.fit(**regression(), batch_size=16, epochs=5, verbose=0)
    after = trainer.model.non_trainable_variables
    for before, now in zip(values["before"], after, strict=True):
        np.testing.assert_array_equal(before, now.numpy())


class Unreadable(Stateful):
    def call(self, inputs, training=False):
        if training:
            self.largest.assign(
                keras.ops.cos(keras.ops.sum(inputs) * self.largest)
            )
        return inputs


class Deviation(Stateful):
    """Adds what is made of a sum over rows in the end."""

    def call(self, inputs, training=False):
        if training:
            self.largest.assign_add(keras.ops.std(inputs))
        return inputs


@pytest.mark.full
@pytest.mark.parametrize("layer", [Unreadable, Deviation])
def test_what_cannot_be_added_up_is_made_of_all_rows(layer, strategies):
    found = []
    for column in ("one_device", "mirrored_x3"):
        keras.utils.set_random_seed(0)
        trainer = mgpu_tf.Trainer(model_of(layer), strategies[column])
        trainer.fit(**regression(), shuffle=False, verbose=0)
        found.append(trainer.model.layers[1].largest.numpy())
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("layer", [Unreadable, Deviation])
def test_where_none_has_all_rows_it_is_refused(layer, strategies):
    trainer = mgpu_tf.Trainer(model_of(layer), strategies["pipeline_x2"])
    words = "what it writes adds up over the rows. Use a strategy without"
    with pytest.raises(mgpu_tf.ConfigurationError, match=words) as error:
        trainer.fit(**regression(), verbose=0)
    assert "\n" not in str(error.value)


def root_of_mean(y_true, y_pred):
    return keras.ops.sqrt(keras.ops.mean(keras.ops.square(y_true - y_pred)))


def of_metric():
    model = model_of(frozen)()
    model.compile("sgd", "mse", metrics=[root_of_mean])
    return model


def test_a_metric_that_is_a_root_is_that_of_the_batch(strategies):
    data = regression()
    keras.utils.set_random_seed(0)
    scores = [
        model.fit(**data, batch_size=16, shuffle=False, verbose=0).history
        for model in (
            of_metric(),
            mgpu_tf.Trainer(of_metric, strategies["mirrored_x3"]),
        )
    ]
    np.testing.assert_allclose(*(s["root_of_mean"] for s in scores), rtol=1e-9)


def test_checkpoints_of_the_older_layout(strategies):
    """Moving statistics were once stored for every replica."""

    def build():
        return model_of(frozen, layers.BatchNormalization)()

    trainer = mgpu_tf.Trainer(build, strategies["mirrored_x3"])
    trainer.fit(**regression(), batch_size=16, verbose=0)
    snapshot = trainer._distributed.engine.snapshot()
    held = snapshot.held()
    arrays = {
        name: held.read(name, Region(0, math.prod(shape))).reshape(shape)
        for name, (_, shape) in held.arrays.items()
    }
    before = [v.numpy() for v in trainer.model.weights]
    floats = [
        v.path
        for v in trainer.model.non_trainable_variables
        if keras.backend.is_float_dtype(v.dtype)
    ]
    paths = snapshot.paths()
    shared = [n for n in sorted(arrays) if n.startswith("shared/")]
    older = {n: a for n, a in arrays.items() if n.startswith("sums/")}
    means = {path: i for i, path in enumerate(floats)}
    others = [n for n in shared if paths[n] not in means]
    older |= {f"shared/{i:05d}": arrays[name] for i, name in enumerate(others)}
    older |= {
        f"means/{means[paths[n]]:05d}": np.stack([arrays[n]] * 3)
        for n in shared
        if paths[n] in means
    }
    for variable in trainer.model.weights:
        variable.assign(tf.zeros_like(variable))
    snapshot.put(Held(piece_of(name, a) for name, a in older.items()))
    for wanted, variable in zip(before, trainer.model.weights, strict=True):
        np.testing.assert_array_equal(wanted, variable.numpy())

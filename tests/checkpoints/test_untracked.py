"""State that Keras does not track is in checkpoints as well."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import mgpu_tf
from mgpu_tf.engine import untracked
from mgpu_tf.engine.untracked import untracked_variables
from tests.conformance.outside_training import LookaheadAfter
from tests.tiers import tiered


class Box:
    """An object of the author's."""

    def __init__(self, value):
        self.value = value


def counter():
    return tf.Variable(0.0, trainable=False, name="counter")


class Counts(layers.Layer):
    """Counts its calls by a variable of TensorFlow."""

    def build(self, shape):
        self.count = counter()

    def call(self, x, training=False):
        if training:
            self.count.assign_add(1.0)
        return x * (1.0 + 0.1 * self.count)


class CountingStep(keras.Model):
    """Counts its steps by a variable that another object holds."""

    def __init__(self, make):
        super().__init__()
        self.head = layers.Dense(1)
        self.box = {"held": [Box(make())]}

    def call(self, x):
        return self.head(x)

    def train_step(self, data):
        x, y = data
        count = self.box["held"][0].value
        count.assign_add(1.0)
        with tf.GradientTape() as tape:
            loss = ops.mean((y - self(x, training=True)) ** 2) / count
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


class Normalized(keras.losses.Loss):
    """Divides errors by a moving mean that it keeps."""

    def __init__(self):
        super().__init__()
        self.scale = keras.Variable(1.0, trainable=False)

    def call(self, y_true, y_pred):
        errors = (y_true - y_pred) ** 2
        self.scale.assign(0.9 * self.scale + 0.1 * ops.mean(errors))
        return ops.mean(errors, -1) / self.scale


def of_layers(*middle, loss="mse", optimizer=None):
    parts = [keras.Input((4,)), *middle, layers.Dense(1)]
    model = keras.Sequential(parts)
    model.compile(optimizer or keras.optimizers.SGD(0.05), loss)
    return model


def of_step(make):
    model = CountingStep(make)
    model.compile(keras.optimizers.SGD(0.05))
    return model


BUILDS = {
    "layer": lambda: of_layers(Counts()),
    "step": lambda: of_step(counter),
    "step, Keras": lambda: of_step(lambda: keras.Variable(0.0, False)),
    "loss": lambda: of_layers(loss=Normalized()),
    "optimizer": lambda: of_layers(
        optimizer=LookaheadAfter(keras.optimizers.Adam(0.05))
    ),
}
X = np.random.default_rng(0).normal(size=(22, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
COLUMNS = ["one_device", "mirrored_x3", "fsdp_x3"]
OPTIONS = {"batch_size": 6, "shuffle": False, "verbose": 0}


@pytest.mark.parametrize(
    ("build", "name"),
    tiered(
        list(itertools.product(BUILDS, COLUMNS)),
        [
            ("layer", "mirrored_x3"),
            ("step", "fsdp_x3"),
            ("step, Keras", "one_device"),
            ("loss", "one_device"),
        ],
    ),
)
def test_a_resumed_run_goes_on_with_it(build, name, strategies, tmp_path):
    def run(folder, epochs):
        every = 1 if name == "mirrored_x3" else None
        trainer = mgpu_tf.Trainer(
            BUILDS[build], strategies[name], check_replicas_every=every
        )
        options = {"checkpoint_dir": str(tmp_path / folder), **OPTIONS}
        trainer.fit(X, Y, epochs=epochs, **options)
        return trainer.model.get_weights()

    whole = run("whole", 3)
    run("parts", 1)
    for a, b in zip(whole, run("parts", 3), strict=True):
        np.testing.assert_array_equal(a, b)


def of_closure(count):
    class Closure(keras.Sequential):
        def train_step(self, data):
            x, y = data
            count["in it"].assign_add(1.0)
            return {"loss": ops.mean((y - self(x)) ** 2)}

    def build():
        count.setdefault("in it", counter())
        model = Closure([keras.Input((4,)), layers.Dense(1)])
        model.compile("sgd")
        return model

    return build


@pytest.mark.parametrize("name", ["one_device", "mirrored_x3"])
def test_what_no_checkpoint_would_have_is_refused(name, strategies, tmp_path):
    trainer = mgpu_tf.Trainer(of_closure({}), strategies[name])
    with pytest.raises(mgpu_tf.ConfigurationError, match="counter") as error:
        trainer.fit(X, Y, checkpoint_dir=str(tmp_path), **OPTIONS)
    assert "\n" not in str(error.value)


def test_what_each_replica_would_write_is_refused(strategies):
    build = of_closure({"in it": counter()})
    trainer = mgpu_tf.Trainer(build, strategies["mirrored_x3"])
    with pytest.raises(mgpu_tf.ConfigurationError, match="outside of it"):
        trainer.fit(X, Y, **OPTIONS)


def test_what_a_step_only_reads_is_not_compared(strategies, monkeypatch):
    table = counter()

    class Reads(keras.Sequential):
        def train_step(self, data):
            x, y = data
            return {"loss": ops.mean((y - self(x) - table) ** 2)}

    def build():
        model = Reads([keras.Input((4,)), layers.Dense(1)])
        model.compile("sgd")
        return model

    monkeypatch.setattr(untracked, "_digest", pytest.fail)
    mgpu_tf.Trainer(build, strategies["mirrored_x3"]).fit(X, Y, **OPTIONS)


def test_what_is_found():
    model = of_step(counter)
    model(tf.zeros([1, 4]))
    box = model.box["held"][0]
    box.more = [keras.Variable(1.0, name="own"), model.head.kernel, "text"]
    box.names, box.again = Box(tf.Variable("text")), box
    paths = [variable.path for variable in untracked_variables(model)]
    assert paths == [f"{model.name}/box/held/0/value", "own"]

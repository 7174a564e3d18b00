"""Layers whose author wrote a gradient, with `tf.custom_gradient`."""

import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from tests.tiers import tiered


class Doubled(keras.layers.Layer):
    """Twice the gradient of a dense layer, for its weights.

    Args:
        passes: Whether its function gets the weights as an argument.
    """

    def __init__(self, passes):
        super().__init__()
        self.passes = passes

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 6), name="kernel")

    def call(self, x):
        @tf.custom_gradient
        def passed(x, kernel):
            return x @ kernel, lambda upstream: (
                upstream @ tf.transpose(kernel),
                2 * tf.transpose(x) @ upstream,
            )

        @tf.custom_gradient
        def read(x):
            kernel = keras.ops.convert_to_tensor(self.kernel)

            def backward(upstream, variables=()):
                of_kernel = 2 * tf.transpose(x) @ upstream
                return upstream @ tf.transpose(kernel), [
                    of_kernel for _ in variables
                ]

            return x @ kernel, backward

        if self.passes:
            return passed(x, tf.convert_to_tensor(self.kernel))
        return read(x)


class Own(keras.Model):
    """A step that an author wrote."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def trained(model, passes, fit, eager=False):
    def build():
        keras.utils.set_random_seed(0)
        inputs = keras.Input((8,))
        outputs = keras.layers.Dense(1)(Doubled(passes)(inputs))
        built = model(inputs, outputs)
        built.compile(keras.optimizers.SGD(0.05), "mse", run_eagerly=eager)
        return built

    x = np.random.default_rng(0).normal(size=(17, 8))
    options = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    built = fit(build)
    built.fit(x, x.sum(1, keepdims=True), **options)
    return getattr(built, "model", built).get_weights()


@pytest.mark.parametrize("eager", tiered([False, True], [False]))
@pytest.mark.parametrize("passes", [True, False])
@pytest.mark.parametrize(
    ("column", "model"),
    tiered(
        [
            (column, model)
            for column in ("mirrored_x3", "fsdp_x3", "tensor_x3")
            for model in (keras.Model, Own)
        ],
        [("mirrored_x3", Own), ("fsdp_x3", keras.Model)],
    ),
)
def test_as_keras_or_refused(strategies, float64, column, model, passes, eager):
    def fit(build):
        return mgpu_tf.Trainer(build, strategies[column])

    # Run eagerly, a train_step of the author's is one device's.
    lends = column == "fsdp_x3" if model is not Own else not eager
    if lends and not passes:
        with pytest.raises(mgpu_tf.ConfigurationError, match="as arguments"):
            trained(model, passes, fit, eager)
        return
    expected = trained(model, passes, lambda build: build(), eager)
    found = trained(model, passes, fit, eager)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


def by_value(upstream):
    return tf.clip_by_value(upstream, -0.01, 0.01)


def by_norm(upstream):
    return upstream / (1e-3 + tf.norm(upstream))


def centred(upstream):
    return upstream - tf.reduce_mean(upstream, 0, keepdims=True)


class SentBack(keras.layers.Layer):
    """What flows back through it is changed.

    Args:
        change: Changes it.
        mixes: Whether rows are mixed behind it.
    """

    def __init__(self, change, mixes=False):
        super().__init__()
        self.change, self.mixes = change, mixes

    def call(self, x):
        @tf.custom_gradient
        def same(x):
            return tf.identity(x), self.change

        x = same(x)
        return x - tf.reduce_mean(x, 0, keepdims=True) if self.mixes else x


def of_weights(change):
    """A layer whose weights get a changed gradient."""

    class Scaled(keras.layers.Dense):
        def call(self, x):
            @tf.custom_gradient
            def same(kernel):
                return tf.identity(kernel), change

            return x @ same(tf.convert_to_tensor(self.kernel))

    return lambda: Scaled(6, use_bias=False)


CHANGED = {
    "reversed": lambda: SentBack(lambda upstream: -0.3 * upstream),
    "by value": lambda: SentBack(by_value),
    "centred": lambda: SentBack(centred),
    "reversed before rows are mixed": lambda: SentBack(
        lambda upstream: -0.3 * upstream, True
    ),
    "of weights, scaled": of_weights(lambda upstream: 0.3 * upstream),
    "by norm": lambda: SentBack(by_norm),
    "by value before rows are mixed": lambda: SentBack(by_value, True),
    "of weights, by norm": of_weights(by_norm),
}
NONLINEAR = set(list(CHANGED)[-3:])


@pytest.mark.parametrize("eager", tiered([False, True], [False]))
@pytest.mark.parametrize("model", [keras.Sequential, "own step"])
@pytest.mark.parametrize("name", CHANGED)
def test_what_flows_back(strategies, float64, name, model, eager):
    """It is of one row, linear, refused, or in a step of one's own."""

    def build():
        layers = [
            keras.layers.Dense(6, "tanh"),
            CHANGED[name](),
            keras.layers.Dense(1),
        ]
        inputs = x = keras.Input((4,))
        for layer in layers:
            x = layer(x)
        kind = Own if model == "own step" else keras.Model
        made = kind(inputs, x)
        made.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=eager)
        return made

    x = np.random.default_rng(0).normal(size=(13, 4))
    fit = {"batch_size": 5, "epochs": 2, "shuffle": False, "verbose": 0}
    keras.utils.set_random_seed(1)
    expected = build()
    expected.fit(x, x[:, :1], **fit)
    keras.utils.set_random_seed(1)
    trainer = mgpu_tf.Trainer(build, strategies["mirrored_x3"], seed=None)
    # Run eagerly, each replica has all rows.
    if name in NONLINEAR and model != "own step" and not eager:
        with pytest.raises(mgpu_tf.ConfigurationError, match="linear"):
            trainer.fit(x, x[:, :1], **fit)
        return
    trainer.fit(x, x[:, :1], **fit)
    for mine, theirs in zip(
        trainer.model.weights, expected.weights, strict=True
    ):
        np.testing.assert_allclose(mine, theirs, 1e-9, 1e-12)


# Each was read: what flows back to a row comes of that row alone, and what
# flows back to a weight is a sum over rows; float8 has a rule of its own.
TRUSTED = {
    "keras/src/backend/tensorflow/core.py",
    "keras/src/layers/core/dense.py",
    "keras/src/layers/core/einsum_dense.py",
    "keras/src/ops/core.py",
    "keras/src/quantizers/quantizers.py",
    "tensorflow/python/distribute/distribute_lib.py",
    "tensorflow/python/ops/ctc_ops.py",
    "tensorflow/python/ops/custom_gradient.py",
    "tensorflow/python/ops/nn_impl.py",
}
MADE = re.compile(r"@[\w.]*custom_gradient$|custom_gradient\(", re.MULTILINE)
LEFT_OUT = re.compile(r"backend/(jax|numpy|openvino|torch)|_test\.py")


def test_those_of_keras_and_tensorflow_are_known():
    of_keras = pathlib.Path(keras.__file__).parent / "src"
    of_tensorflow = pathlib.Path(tf.__file__).parent / "python"
    files = [
        *of_keras.rglob("*.py"),
        *(of_tensorflow / "ops").rglob("*.py"),
        *(of_tensorflow / "distribute").rglob("*.py"),
    ]
    found = {
        file.as_posix().split("site-packages/")[-1]
        for file in files
        if not LEFT_OUT.search(str(file)) and MADE.search(file.read_text())
    }
    assert "keras/src/layers/core/dense.py" in found
    assert found <= TRUSTED

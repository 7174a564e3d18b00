"""Layers in functions, branches and loops of TensorFlow, outside of calls.

A loss, a metric or a step may call layers there: of a network that compares
features, for one. Keras's own `fit` is the reference.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import mgpu_tf
from tests.tiers import tiered

pytestmark = pytest.mark.usefixtures("float64")


RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(22, 6))
Y = X[:, :1] ** 2


class Centered(layers.Layer):
    """Mixes the rows of the batch."""

    def call(self, x):
        return x - ops.mean(x, axis=0)


class Scaled(layers.Layer):
    """Reads state, which another layer of the step might write."""

    def build(self, shape):
        self.scale = self.add_weight(
            shape=(), initializer="ones", trainable=False
        )

    def call(self, x):
        return x * self.scale


def chain(last, *more, make=keras.Sequential):
    return make(
        [
            keras.Input((6,)),
            layers.Dense(4, activation="tanh"),
            Centered(),
            *more,
            layers.Dense(last),
        ]
    )


class InFunction(keras.Model):
    """Compares outputs with features, which it trains as well."""

    more = (Scaled,)

    def __init__(self):
        super().__init__()
        self.features = chain(3, *(make() for make in self.more))
        self.dense = layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def distance(self, x, y_pred):
        return tf.reduce_mean(tf.square(self.features(x) - y_pred))

    @tf.function
    def traced_distance(self, x, y_pred):
        return self.distance(x, y_pred)

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return self.traced_distance(x, y_pred)


class InLoop(InFunction):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        begin = tf.constant(0), tf.constant(0.0, y_pred.dtype)
        return tf.while_loop(
            lambda i, total: i < 2,
            lambda i, total: (i + 1, total + self.distance(x, y_pred)),
            begin,
        )[1]


class InBranch(InFunction):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return tf.cond(
            self.optimizer.iterations < 2,
            lambda: self.distance(x, y_pred),
            lambda: tf.reduce_mean(tf.square(y - y_pred)),
        )


class FunctionAsCall(keras.Sequential):
    @tf.function
    def call(self, inputs, training=None, mask=None):
        return super().call(inputs, training=training, mask=mask)


class NeedsAutoGraph(InFunction):
    """Has a branch of Python's, which AutoGraph makes one of TensorFlow's."""

    more = ()

    @tf.function
    def traced_distance(self, x, y_pred):
        distance = self.distance(x, y_pred)
        if distance > 0.5:
            distance = 2 * distance
        return distance


class InStep(InFunction):
    def __init__(self):
        super().__init__()
        self.centered = Centered()
        self.centered.build((None, 6))

    def train_step(self, data):
        x, y = data
        return super().train_step((tf.function(self.centered)(x), y))


class Kept(layers.Layer):
    """A function that is called again, in each replica and in each trace."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(4)
        self.dropout = layers.Dropout(0.3, seed=3)

    def build(self, shape):
        self.dense.build(shape)
        self.largest = self.add_weight(
            shape=(), initializer="zeros", trainable=False
        )

    @tf.function
    def call(self, x, training=False):
        if training:
            self.largest.assign(ops.max(x))
        return self.dropout(self.dense(x), training=training)


class Drops(layers.Layer):
    """Reads no weight in its function."""

    def __init__(self):
        super().__init__()
        self.dropout = layers.Dropout(0.3, seed=3)

    @tf.function
    def call(self, x, training=False):
        return self.dropout(x, training=training)


class Normalizes(layers.Layer):
    def __init__(self):
        super().__init__()
        self.norm = layers.BatchNormalization(synchronized=True)
        self.first, self.last = layers.Dense(4), layers.Dense(4)

    def build(self, shape):
        self.first.build(shape)
        self.norm.build((None, 4))
        self.last.build((None, 4))

    @tf.function
    def call(self, x, training=False):
        return self.last(self.norm(self.first(x), training=training))


class Looped(layers.Layer):
    """What AutoGraph converts, in a function that writes and calls another."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(4)

    def build(self, shape):
        self.dense.build(shape)
        self.calls = self.add_weight(
            shape=(), initializer="zeros", trainable=False
        )

    @tf.function
    def often(self, x):
        for _ in tf.range(2):
            x = ops.tanh(x)
        return x

    @tf.function
    def call(self, x, training=False):
        x = self.often(self.dense(x))
        if training:
            self.calls.assign_add(1.0)
            if self.calls > 2.0:
                x = 2.0 * x
        return x


class WritesInBranch(Looped):
    @tf.function
    def call(self, x, training=False):
        if training and self.calls < 2.0:
            self.calls.assign_add(1.0)
        return self.often(self.dense(x))


class Convolves(layers.Layer):
    """Keras computes it by a function of XLA."""

    def __init__(self):
        super().__init__()
        self.first = layers.Conv1D(4, 3, groups=2, padding="same")

    def build(self, shape):
        self.first.build((None, 3, 2))
        self.kernel = self.add_weight(shape=(3, 1, 4))

    def call(self, x):
        x = self.first(ops.reshape(x, (-1, 3, 2)))
        return layers.Flatten()(ops.conv(x, self.kernel))


class OwnStep(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


class WritesInStep(OwnStep):
    def build(self, shape=None):
        super().build(shape)
        if not hasattr(self, "largest"):
            self.largest, self.last = (
                self.add_weight(shape=(), initializer="zeros", trainable=False)
                for _ in range(2)
            )

    @tf.function
    def note(self, x):
        self.largest.assign(tf.reduce_max(x))
        if tf.reduce_sum(x) > 0.0:
            self.last.assign(tf.reduce_sum(x))

    def train_step(self, data):
        self.note(data[0])
        return super().train_step(data)


def of(*parts, make=keras.Sequential):
    return make([keras.Input((6,)), *parts, layers.Dense(1)])


def subclassed(kind):
    def build():
        model = kind()
        model(X)
        return model

    return build


PROGRAMS = {
    "a loss in a function": subclassed(InFunction),
    "a loss in a loop": subclassed(InLoop),
    "a loss in a branch": subclassed(InBranch),
    "a branch of AutoGraph's": subclassed(NeedsAutoGraph),
    "a call in a function": lambda: chain(1, Scaled(), make=FunctionAsCall),
    "a layer in a step's function": subclassed(InStep),
    "a layer that is a function": lambda: of(Kept()),
    "a layer of a step that is a function": lambda: of(Kept(), make=OwnStep),
    "dropout in a function": lambda: of(Drops()),
    "dropout of a step in a function": lambda: of(Drops(), make=OwnStep),
    "normalization in a function": lambda: of(Normalizes()),
    "normalization of a step": lambda: of(Normalizes(), make=OwnStep),
    "branches of a layer": lambda: of(Looped()),
    "branches of a layer of a step": lambda: of(Looped(), make=OwnStep),
    "a branch that writes": lambda: of(WritesInBranch()),
    "a step's function that writes": lambda: of(make=WritesInStep),
    "convolutions in groups": lambda: of(Convolves()),
    "convolutions of a step in groups": lambda: of(Convolves(), make=OwnStep),
}
COLUMNS = ("mirrored_x3", "fsdp_x3", "tensor_x3", "data_2_tensor_2")


def fitted(program, strategy=None):
    """Returns all weights, the losses, a score and the predictions of a fit."""

    def build():
        model = PROGRAMS[program]()
        # XLA, which Keras takes on GPUs, draws other numbers.
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        return model

    keras.utils.set_random_seed(1)
    model = build() if strategy is None else mgpu_tf.Trainer(build, strategy)
    history = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    trained = model if strategy is None else model.model
    weights = [np.array(v.numpy()) for v in trained.variables]
    score = model.evaluate(X, Y, batch_size=8, verbose=0)
    predicted = model.predict(X, batch_size=8, verbose=0)
    return [*weights, history.history["loss"], score, predicted]


@pytest.mark.parametrize(
    ("program", "column"),
    tiered(
        [
            (program, column)
            for program in PROGRAMS
            for column in COLUMNS
            # Where weights are split, a branch writes no state.
            if program != "a branch that writes" or column == "mirrored_x3"
        ],
        [
            ("a loss in a function", "mirrored_x3"),
            ("a layer of a step that is a function", "mirrored_x3"),
            ("dropout in a function", "tensor_x3"),
            ("convolutions in groups", "fsdp_x3"),
            ("normalization in a function", "tensor_x3"),
            ("branches of a layer", "mirrored_x3"),
        ],
    ),
)
def test_as_keras(program, column, strategies):
    known, found = fitted(program), fitted(program, strategies[column])
    for expected, value in zip(known, found, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-9, atol=1e-11)


class Concrete(Kept):
    """A function that is traced apart from what calls it."""

    def call(self, x, training=False):
        function = tf.function(lambda x: self.dense(x) * (1.0 + self.largest))
        return function.get_concrete_function(x)(x)


@pytest.mark.parametrize("make", [keras.Sequential, OwnStep])
def test_what_cannot_be_traced_with_a_step_is_refused(make, strategies):
    def build():
        model = of(Concrete(), make=make)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    trainer = mgpu_tf.Trainer(build, strategies["mirrored_x3"])
    with pytest.raises(mgpu_tf.ConfigurationError) as error:
        trainer.fit(X, Y, batch_size=8, verbose=0)
    assert "reads or writes" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_convolution_in_groups_beside_a_function_is_refused(strategies):
    def build():
        model = of(Convolves(), Kept())
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    trainer = mgpu_tf.Trainer(build, strategies["fsdp_x3"])
    with pytest.raises(mgpu_tf.ConfigurationError, match="in groups") as error:
        trainer.fit(X, Y, batch_size=8, verbose=0)
    assert "\n" not in str(error.value)


class Refused(InFunction):
    """Gives a number where one for each row is asked for."""

    @tf.function
    def traced_distance(self, x, y_pred):
        return mgpu_tf.mean_over_batch(tf.reduce_mean(y_pred))


class RefusedAndHandled(InFunction):
    """Has an error of its own, where it handles a refusal."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        try:
            return mgpu_tf.mean_over_batch(tf.reduce_mean(y_pred))
        except mgpu_tf.ConfigurationError:
            raise ValueError("of the author's") from None


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        (Refused, mgpu_tf.ConfigurationError, "^mean_over_batch"),
        (RefusedAndHandled, ValueError, "of the author's"),
    ],
)
def test_an_error_in_a_loss_stands_for_itself(kind, error, text, strategies):
    def build():
        model = subclassed(kind)()
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    trainer = mgpu_tf.Trainer(build, strategies["mirrored_x3"])
    with pytest.raises(error, match=text):
        trainer.fit(X, Y, batch_size=8, verbose=0)

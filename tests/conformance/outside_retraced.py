"""Programs from outside: calls that are no functions of their arguments.

Tensors in closures and objects, counters and flags of Python, attributes of
tensors, complex numbers. A layer that is computed again in the backward pass,
or of a part of the batch, does the same as when it is called once.
"""

import dataclasses
import types
from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

from tests.conformance import models
from tests.conformance.harness import row

GROUP = "Outside: calls beside their arguments"


class Times(layers.Layer):
    """A product with a weight."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 6), name="kernel")

    def times(self, x):
        return ops.matmul(x, self.kernel)

    def call(self, x):
        return self.times(x)


class Network(keras.Model):
    """Layers between one that widens and one that narrows."""

    def __init__(self, *inner):
        super().__init__()
        self.wide, self.inner = layers.Dense(6, "tanh"), list(inner)
        self.narrow = layers.Dense(2)

    def between(self, x):
        for layer in self.inner:
            x = layer(x)
        return x

    def call(self, x):
        return self.narrow(self.between(self.wide(x)))


class Stepping(Network):
    """The same, with a step of its own."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def in_both_ways(run, make):
    """Trains by `fit`, and by a step of one's own."""

    def build(base=Network):
        model = make(base)
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    data = models.points(), models.points()[:, :2]
    run.fit(build, *data)
    run.fit(lambda: build(Stepping), *data)


class Applies(Times):
    """Calls a function."""

    def call(self, x, function=None):
        return function(self.times(x))


class Leaves(Times):
    """Leaves a tensor in an object."""

    def call(self, x, memory=None):
        memory.last = ops.tanh(self.times(x))
        return x


class Passes(Times):
    """Reads a tensor of an object, and leaves others."""

    def call(self, x, memory=None):
        made = self.times(x) * memory.last
        memory.last = ops.tanh(made)
        memory.place = ops.argmax(made, axis=-1)
        return made


class Looks(Times):
    """Reads what another layer has left in an object."""

    def call(self, x, memory=None):
        seen = ops.one_hot(memory.place, 6, dtype=x.dtype)
        return self.times(x) * memory.last + seen


@dataclasses.dataclass
class Gate:
    """A tensor that TensorFlow does not find."""

    value: Any


class Gated(Times):
    def call(self, x, gate=None):
        return self.times(x) * gate.value


@row(GROUP)
def tensors_in_functions_and_objects(run):
    def make(base):
        class Model(base):
            def between(self, x):
                leaves, applies, passes, looks, gated = self.inner
                memory = types.SimpleNamespace()
                x = leaves(x, memory=memory)
                x = applies(x, function=lambda made: made * memory.last)
                x = looks(passes(x, memory=memory), memory=memory)
                return gated(x, gate=Gate(ops.sigmoid(x)))

        return Model(Leaves(), Applies(), Passes(), Looks(), Gated())

    in_both_ways(run, make)


class Switched(Times):
    """Does something else in a second call."""

    is_first = True

    def call(self, x):
        return ops.tanh(self.times(x)) if self.is_first else x * self.times(x)


class Counting(Times):
    """Takes the next of its scales in each call."""

    def build(self, shape):
        super().build(shape)
        self.scales = self.add_weight(
            shape=(2, 6), name="scales", initializer="random_normal"
        )

    def call(self, x):
        place, self.calls = self.calls, self.calls + 1
        return ops.tanh(self.times(x) * (1 + self.scales[place]))


class Universal(Times):
    """Adds what it made the last time."""

    def call(self, x):
        made = ops.tanh(self.times(x))
        if self.last is not None:
            made += self.last
        self.last = made
        return made


@row(GROUP)
def flags_counters_and_last_outputs(run):
    def make(base):
        class Model(base):
            def between(self, x):
                switched, counting, universal = self.inner
                switched.is_first = True
                x = switched(x)
                switched.is_first, counting.calls = False, 0
                x = counting(counting(switched(x)))
                universal.last = None
                return universal(universal(x))

        return Model(Switched(), Counting(), Universal())

    in_both_ways(run, make)


class Scored(Times):
    """Leaves scores on its output, which the next layer reads."""

    def call(self, x):
        made = self.times(x) * getattr(x, "scores", 1.0)
        made.scores = ops.tanh(made)
        return made


class Centred(Times):
    """Leaves scores on an output that is made of all rows."""

    def call(self, x):
        made = self.times(x)
        made -= ops.mean(made, axis=0)
        made.scores = ops.tanh(made)
        return made


@row(GROUP)
def attributes_of_outputs(run):
    in_both_ways(run, lambda base: base(Scored(), Scored()))


@row(GROUP)
def attributes_of_outputs_of_all_rows(run):
    in_both_ways(run, lambda base: base(Centred(), Scored()))


class Turns(Times):
    """Makes complex numbers."""

    def call(self, x):
        made = self.times(x)
        return tf.complex(made, ops.tanh(made))


class Returns(Times):
    """Makes real numbers of them."""

    def call(self, x):
        return self.times(tf.math.real(x * x)) + tf.math.imag(x)


class Steadied(Times):
    """Moves a mean of all rows, and reads what it has written."""

    def build(self, shape):
        super().build(shape)
        self.middle = self.add_weight(
            shape=(6,), name="middle", initializer="zeros", trainable=False
        )

    def call(self, x):
        made = self.times(x)
        mean = ops.mean(made, axis=0)
        self.middle.assign(0.9 * self.middle + 0.1 * mean)
        return made - self.middle


@row(GROUP)
def complex_numbers_and_state_that_is_read(run):
    in_both_ways(run, lambda base: base(Turns(), Returns(), Steadied()))


class Asking(Network):
    """Leaves what is between in an object that a step makes."""

    def call(self, x, memory=None):
        between = self.between(self.wide(x))
        if memory is not None:
            memory.last = between
        return self.narrow(between)

    def train_step(self, data):
        x, y = data
        memory = types.SimpleNamespace()
        with tf.GradientTape() as tape:
            made = self(x, training=True, memory=memory)
            loss = self.compute_loss(x, y, made)
            loss += ops.mean(ops.square(ops.mean(memory.last, axis=0)))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@row(GROUP)
def an_object_that_a_step_gives_its_model(run):
    def build():
        model = Asking(Times())
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    run.fit(build, models.points(), models.points()[:, :2])


class Keeping(Network):
    """Leaves tensors in an object, which a step reads."""

    def __init__(self, memory, *inner):
        super().__init__(*inner)
        self.memory = memory

    def between(self, x):
        self.memory.last = x
        return self.inner[0](x, memory=self.memory)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            loss += ops.mean(ops.square(self.memory.last - 1))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@row(GROUP)
def an_object_of_the_model_that_a_step_reads(run):
    def build():
        model = Keeping(types.SimpleNamespace(), Passes())
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    run.fit(build, models.points(), models.points()[:, :2])


@row(GROUP)
def an_object_of_a_module_that_a_step_reads(run):
    class Memory:
        """Its class is what the model has."""

        last = None

    def build():
        model = Keeping(Memory, Passes())
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    run.fit(build, models.points(), models.points()[:, :2])


class Written(Times):
    """Leaves a tensor in an object that another layer has, too."""

    def __init__(self, memory):
        super().__init__()
        self.memory = memory

    def call(self, x):
        self.memory.last = ops.tanh(self.times(x))
        return x


class Read(Written):
    def call(self, x):
        return self.times(x) * self.memory.last


@row(GROUP)
def an_object_that_layers_share(run):
    def build():
        memory = types.SimpleNamespace()
        inputs = keras.Input((4,))
        x = Written(memory)(layers.Dense(6)(inputs))
        x = Read(memory)(layers.Dense(6, "tanh")(x))
        model = keras.Model(inputs, layers.Dense(2)(x))
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    run.fit(build, models.points(), models.points()[:, :2])

"""Programs from outside: quantized layers.

Those in float8 keep the largest values of the last steps, which Keras writes
over variables as their gradients (Micikevicius et al., 2022). Batches have 13,
13 and 5 rows. Keras rounds biases, and so their gradients, to bfloat16:
replicas round their own sums, so only one program here has biases. In others
no value lies so near to the middle of two numbers of float8 that the order of
a sum decides.
"""

import keras
import tensorflow as tf
from keras import layers

from tests.conformance import models
from tests.conformance.harness import row

GROUP = "Outside: quantized layers"
# Keras keeps what it scales by in float32.
SINGLE = {"floatx": "float32", "tolerance": 1e-5}


def learn(run, build):
    random = models.random(0)
    x = random.normal(size=(31, 4, 5)).astype("float32")
    y = random.normal(size=(31, 4, 2)).astype("float32")
    run.fit(build, x, y, batch_size=13, epochs=2, shuffle=False)


def network(kind=keras.Model, optimizer=None, bias=False):
    def build():
        options = {"use_bias": bias, "dtype": "float8_from_float32"}
        inputs = keras.Input((4, 5))
        x = layers.Dense(6, "tanh", **options)(inputs)
        if bias:
            x = layers.Dense(4, "tanh", **options)(x)
        else:
            x = layers.EinsumDense(
                "abc,cd->abd", (None, 4), dtype="float8_from_float32"
            )(layers.LayerNormalization()(x))
        model = kind(inputs, layers.Dense(2)(x))
        made = keras.optimizers.Adam(0.01) if optimizer is None else optimizer()
        return models.compiled(model, "mse", made)

    return build


class Authored(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(x, y, outputs)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return self.compute_metrics(x, y, outputs)


@row(GROUP, **SINGLE)
def two_layers_in_float8(run):
    learn(run, network())


class Block(layers.Layer):
    """Layers in float8 within one of the author's."""

    def __init__(self):
        super().__init__()
        options = {"use_bias": False, "dtype": "float8_from_float32"}
        self.norm = layers.LayerNormalization()
        self.wide = layers.Dense(8, "relu", **options)
        self.narrow = layers.Dense(5, **options)

    def call(self, x):
        return x + self.narrow(self.wide(self.norm(x)))


@row(GROUP, **SINGLE)
def blocks_with_layers_in_float8(run):
    def build():
        inputs = keras.Input((4, 5))
        x = Block()(Block()(inputs))
        model = keras.Model(inputs, layers.Dense(2)(x))
        return models.compiled(model, "mse", keras.optimizers.Adam(0.01))

    learn(run, build)


@row(GROUP, floatx="float32", tolerance=1e-3)
def layers_in_float8_with_biases(run):
    learn(run, network(bias=True))


@row(GROUP, **SINGLE)
def a_step_of_ones_own_in_float8(run):
    learn(run, network(Authored))


@row(GROUP, **SINGLE)
def gradients_accumulated_in_float8(run):
    def optimizer():
        return keras.optimizers.Adam(0.02, gradient_accumulation_steps=2)

    learn(run, network(optimizer=optimizer))


@row(GROUP, **SINGLE)
def a_scaled_and_clipped_loss_in_float8(run):
    def optimizer():
        inner = keras.optimizers.SGD(0.1, global_clipnorm=0.1)
        return keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)

    learn(run, network(optimizer=optimizer))


@row(GROUP, **SINGLE)
def a_model_that_is_quantized_to_float8(run):
    def build():
        model = keras.Sequential(
            [
                keras.Input((4, 5)),
                layers.Dense(6, "tanh", use_bias=False),
                layers.Dense(2, use_bias=False),
            ]
        )
        model.quantize("float8")
        return models.compiled(model, "mse", keras.optimizers.Lion(0.01))

    learn(run, build)


class Summed(layers.Layer):
    """What it keeps is a sum over rows, and no largest value."""

    def build(self, shape):
        self.kept = self.add_weight(
            shape=(), initializer="zeros", overwrite_with_gradient=True
        )

    def compute_output_shape(self, shape):
        return shape

    def call(self, x):
        @tf.custom_gradient
        def noted(x, kept):
            return x + kept, lambda up: (up, tf.reduce_sum(up))

        return noted(x, tf.convert_to_tensor(self.kept))


@row(GROUP)
def a_sum_that_overwrites_a_variable(run):
    def build():
        inputs = keras.Input((4, 5))
        model = keras.Model(inputs, layers.Dense(2)(Summed()(inputs)))
        return models.compiled(model, "mse", keras.optimizers.SGD(0.1))

    learn(run, build)


class Centred(layers.Dense):
    """It mixes rows once it is quantized."""

    def _int8_call(self, inputs, training=None):
        centred = inputs - keras.ops.mean(inputs, axis=0)
        return super()._int8_call(centred, training)


class Ranged(keras.quantizers.AbsMaxQuantizer):
    """One scale for all rows of a batch."""

    def __call__(self, x, axis=None, **options):
        return super().__call__(x, axis=(0, 1, 2), **options)


def with_quantized(run, make, change=lambda layer: None):
    def build():
        layer = make(4)
        inputs = keras.Input((4, 5))
        x = layer(layers.Dense(6, "tanh")(inputs))
        model = keras.Model(inputs, layers.Dense(2)(x))
        layer.quantize("int8", type_check=False)
        change(layer)
        return models.compiled(model, "mse", keras.optimizers.SGD(0.1))

    learn(run, build)


@row(GROUP, **SINGLE)
def a_quantized_layer_of_ones_own(run):
    with_quantized(run, Centred)


@row(GROUP, **SINGLE)
def a_quantizer_of_ones_own(run):
    def change(layer):
        layer.inputs_quantizer = Ranged(axis=-1)

    with_quantized(run, layers.Dense, change)

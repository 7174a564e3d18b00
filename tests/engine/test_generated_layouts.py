"""Models and layouts that a seed makes, against Keras's own `fit`.

A program has two to four layers of one of the kinds below. Each of its weights
is split along a dimension and an axis of the mesh, or stays whole. Some layouts
divide sequences too. The last batch has fewer rows than the others, in every
other program a single one.
"""

import dataclasses
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras.src.utils import naming

import mgpu_tf
from tests.engine import tensor_models as models
from tests.engine.test_tensor_parallel import compared, strategy_of
from tests.tiers import tiered

LENGTH, WIDTH, WORDS, BATCH = 6, 12, 12, 16
MESHES = [
    {"data": 2},
    {"data": 3},
    {"fsdp": 2},
    {"tensor": 2},
    {"tensor": 3},
    {"data": 2, "tensor": 2},
    {"data": 2, "fsdp": 2},
    {"fsdp": 2, "tensor": 2},
]


class Gate(layers.Layer):
    """A layer with weights and a count of its own."""

    def build(self, shape):
        self.value = layers.Dense(WIDTH, name="value")
        self.gate = layers.Dense(WIDTH, activation="sigmoid", name="gate")
        self.value.build(shape)
        self.gate.build(shape)
        self.scale = self.add_weight(shape=(WIDTH,), initializer="ones")
        self.calls = self.add_weight(
            shape=(), initializer="zeros", trainable=False
        )

    def call(self, x, training=False):
        if training:
            self.calls.assign_add(1.0)
        return x + self.scale * self.value(x) * self.gate(x)


def twice(x):
    shared = layers.Dense(WIDTH, activation="tanh")
    return shared(shared(x))


def wide(x):
    x = layers.Dense(2 * WIDTH, activation="gelu")(x)
    return layers.Dense(WIDTH)(layers.Dropout(0.3, seed=1)(x))


def side_by_side(x):
    normal = layers.LayerNormalization()(x)
    parts = [layers.Dense(5)(x), layers.Dense(WIDTH - 5, "relu")(normal)]
    return layers.Concatenate()(parts)


def attention(x):
    attend = layers.MultiHeadAttention(2, 6, dropout=0.2, seed=1)
    return attend(x, x, use_causal_mask=True)


def bounded(x):
    return layers.Dense(
        WIDTH,
        kernel_regularizer="l2",
        kernel_constraint=keras.constraints.MaxNorm(1.0),
        activity_regularizer="l2",
    )(x)


def einsum(x):
    return layers.EinsumDense(
        "bsd,de->bse", (LENGTH, WIDTH), bias_axes="e", activation="tanh"
    )(x)


KINDS = [
    *(twice, wide, side_by_side, attention, bounded, einsum),
    lambda x: Gate()(x),
    lambda x: layers.Dense(WIDTH, activation="softmax")(x),
    lambda x: layers.Add()([x, layers.Dense(WIDTH, use_bias=False)(x)]),
    lambda x: layers.Conv1D(WIDTH, 3, padding="same", activation="relu")(x),
    lambda x: layers.SeparableConv1D(WIDTH, 3, padding="same")(x),
    lambda x: layers.GRU(WIDTH, return_sequences=True)(x),
    lambda x: layers.BatchNormalization(synchronized=True)(x),
    lambda x: layers.GroupNormalization(3)(x),
    lambda x: layers.PReLU(shared_axes=[1], alpha_initializer="ones")(x),
    lambda x: layers.SpatialDropout1D(0.3, seed=1)(x),
    lambda x: layers.GaussianNoise(0.1, seed=1)(x),
]
OPTIMIZERS = [
    lambda: keras.optimizers.Adam(0.02, epsilon=1e-3),
    lambda: keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5),
    lambda: keras.optimizers.AdamW(
        0.02, epsilon=1e-3, weight_decay=0.1, clipnorm=0.3
    ),
]


class OwnStep(keras.Model):
    """A step whose loss has a mean of all rows that is squared."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            mean = tf.square(tf.reduce_mean(outputs))
            loss = self.compute_loss(x, y, outputs) + 0.01 * mean
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return self.compute_metrics(x, y, outputs)


@dataclasses.dataclass
class Program:
    """What a seed makes."""

    seed: int

    def build(self):
        # The same names each time, by which the layout knows weights.
        naming.reset_uids()
        draw = random.Random(self.seed)
        inputs = keras.Input((LENGTH, WIDTH))
        x = inputs
        if self.seed % 3 == 0:
            inputs = keras.Input((LENGTH,), dtype="int32")
            masks = draw.random() < 0.3
            x = layers.Embedding(WORDS, WIDTH, mask_zero=masks)(inputs)
        for _ in range(draw.randint(2, 4)):
            x = draw.choice(KINDS)(x)
        if draw.random() < 0.5:
            x = layers.GlobalAveragePooling1D()(x)
        kind = OwnStep if self.seed % 4 == 1 else keras.Model
        model = kind(inputs, layers.Dense(3)(x))
        loss = draw.choice(["mse", "mae", "huber"])
        optimizer = draw.choice(OPTIMIZERS)()
        return models.compiled(model, optimizer, loss, metrics=["mae"])

    def data(self):
        generator = np.random.default_rng(self.seed)
        rows = 2 * BATCH + (1 if self.seed % 2 else 9)
        model = self.build()
        shape = (rows, *model.input_shape[1:])
        x = generator.normal(size=shape)
        if len(shape) == 2:
            x = generator.integers(0, WORDS, size=shape)
        return x, generator.normal(size=(rows, *model.output_shape[1:]))

    def strategy(self):
        mesh = MESHES[self.seed % len(MESHES)]
        axes = [] if "tensor" not in mesh else ["model"]
        axes += ["batch"] if {"data", "fsdp"} & mesh.keys() else []
        draw = random.Random(-self.seed)
        weights = self.build().trainable_variables
        layout = {}
        for weight in weights:
            if draw.random() < 0.5 and weight.shape:
                split = [None] * len(weight.shape)
                split[draw.randrange(len(split))] = draw.choice(axes)
                layout[f"(.*/)?{weight.path}"] = tuple(split)
        return strategy_of(
            **mesh,
            layout=layout or "auto",
            sequence_parallel="tensor" in mesh and draw.random() < 0.5,
        )


SEEDS = list(range(48))


@pytest.mark.filterwarnings("ignore:Layer .* does not support masking")
@pytest.mark.filterwarnings("ignore:Layer .* was passed an input with a mask")
@pytest.mark.parametrize("seed", tiered(SEEDS, [5], [9, 12, 21, 28]))
def test_as_keras(seed):
    program = Program(seed)
    strategy, data = program.strategy(), program.data()

    try:
        _, difference = compared(program.build, data, strategy)
    except mgpu_tf.ConfigurationError as refusal:
        pytest.fail(f"refused: {refusal}")
    assert difference < 1e-9

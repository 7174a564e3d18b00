"""Some layers are computed again in the backward pass: those, and no others.

The numbers are those of Keras's own `fit`, dropout included.
"""

import collections
import functools
from typing import ClassVar

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import mgpu_tf
from tests.engine.test_per_layer import Block, check, compiled, train, words
from tests.tiers import tiered

pytestmark = pytest.mark.usefixtures("float64")

RATE = 0.3


def build():
    """A block that is a model, one that is a layer, and layers around them."""
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(30, 8, name="words")(inputs)
    block = keras.Sequential(
        [
            keras.Input((6, 8)),
            layers.Dense(16, "gelu", name="wide"),
            layers.Dropout(RATE, seed=7),
            layers.Dense(8, name="narrow"),
        ],
        name="block_0",
    )
    x = Block(RATE, name="block_1")(block(x))
    x = layers.GlobalAveragePooling1D()(block(x))
    x = layers.Activation("gelu", name="last")(
        layers.Dense(9, name="hidden")(x)
    )
    return compiled(inputs, layers.Dense(4, name="head")(x))


def is_dense(layer):
    return isinstance(layer, layers.Dense)


CHOICES = {
    "pattern": "block_*",
    "names": "block_1, hidden",
    "list": ["block_0", "last"],
    "tuple": ("words", "head"),
    "inner": ["wide"],
    "function": is_dense,
}
COLUMNS = [
    "one_device",
    "mirrored_x3",
    "fsdp_x3",
    "zero1_x2",
    "tensor_x3",
    "data_2_tensor_2",
]


@functools.cache
def stock():
    return train(build, words)


@pytest.mark.parametrize(
    ("column", "choice"),
    tiered(
        [(column, choice) for column in COLUMNS for choice in CHOICES],
        [("one_device", "inner")],
    ),
)
def test_the_numbers_of_keras(column, choice, strategies):
    """A block is called twice; the embedding is looked up once, as always."""
    found = train(build, words, strategies[column], recompute=CHOICES[choice])
    check(found, stock())


class Counted(layers.Dense):
    """Counts how often its code runs in a graph."""

    count: ClassVar = collections.Counter()

    def call(self, x, training=None):
        if tf.is_symbolic_tensor(x):
            self.count[self.name] += 1
        return super().call(x, training=training)


def counted():
    block = keras.Sequential(
        [keras.Input((4,)), Counted(4, name="a"), Counted(4, name="b")],
        name="block",
    )
    inputs = keras.Input((4,))
    x = Counted(4, name="c")(block(Counted(4, name="first")(inputs)))
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(
    "column", tiered(["one_device", "data_2_tensor_2"], ["one_device"])
)
@pytest.mark.parametrize(
    ("recompute", "again"),
    [
        (["block"], {"a", "b"}),
        ("c,first", {"c", "first"}),
        (lambda layer: layer.name == "b", {"b"}),
        ("layers", {"a", "b", "c", "first"}),
    ],
)
def test_no_others_are_computed_again(recompute, again, column, strategies):
    def calls(**options):
        trainer = mgpu_tf.Trainer(counted, strategies[column], **options)
        Counted.count.clear()
        x = np.ones((8, 4))
        trainer.fit(x, x[:, :1], batch_size=4, verbose=0)
        return Counted.count.copy()

    without, found = calls(), calls(recompute=recompute)
    assert {name for name in found if found[name] > without[name]} == again


@pytest.mark.parametrize(
    ("recompute", "message"),
    [
        (["blok"], "'blok', which no layer has. Did you mean 'block'"),
        ("block,last", "'last', which no layer has"),
        ("layer", "Did you mean 'layers'"),
        (lambda layer: False, "chooses none of 6 layers"),
        ([], "or is left out"),
        ([3], "must be of type"),
        (3, "must be of type"),
    ],
)
def test_what_chooses_nothing_is_told(recompute, message, strategies):
    with pytest.raises(mgpu_tf.ConfigurationError) as error:
        mgpu_tf.Trainer(counted, strategies["one_device"], recompute=recompute)
    assert message in str(error.value)
    assert "\n" not in str(error.value)

"""Experts whose weights are one tensor, against Keras's own `fit`."""

import logging

import keras
import pytest
from keras import layers, ops

import mgpu_tf
from mgpu_tf.engine.step.tensor_parallel.linear import Linear
from tests.engine import tensor_models as models
from tests.engine.test_tensor_parallel import adam, compared
from tests.tiers import tiered

EXPERTS, WIDTH, HIDDEN, CAPACITY = 4, 8, 12, 2


class SwitchFeedForward(layers.Layer):
    """Fedus et al. 2021: each token to one expert, as far as it has room.

    Tokens of an example compete for the places; the loss that balances is of
    the global batch.
    """

    def __init__(self):
        super().__init__()
        self.router = layers.Dense(EXPERTS)
        self.inner = layers.EinsumDense(
            "ebcd,edh->ebch", (None, None, HIDDEN), activation="gelu"
        )
        self.outer = layers.EinsumDense("ebch,ehd->ebcd", (None, None, WIDTH))

    def build(self, shape):
        self.router.build(shape)
        self.inner.build((EXPERTS, None, CAPACITY, WIDTH))
        self.outer.build((EXPERTS, None, CAPACITY, HIDDEN))
        self.built = True

    def call(self, tokens):
        chances = ops.softmax(self.router(tokens))
        chosen = ops.one_hot(ops.argmax(chances, -1), EXPERTS)
        chosen = ops.cast(chosen, tokens.dtype)
        share = mgpu_tf.batch_mean(ops.mean(chosen, 1))
        chance = mgpu_tf.batch_mean(ops.mean(chances, 1))
        self.add_loss(0.1 * EXPERTS * ops.sum(share * chance))
        place = ops.cumsum(chosen, 1) * chosen - 1
        places = ops.one_hot(ops.cast(place, "int32"), CAPACITY)
        places = ops.cast(places, tokens.dtype)
        sent = ops.einsum("btec,btd->ebcd", places, tokens)
        made = self.outer(self.inner(sent))
        weights = places * ops.max(chances, -1)[..., None, None]
        return tokens + ops.einsum("btec,ebcd->btd", weights, made)


def build():
    words = keras.Input((models.LENGTH,), dtype="int32")
    x = layers.Embedding(models.VOCABULARY, WIDTH)(words)
    x = SwitchFeedForward()(x)
    x = SwitchFeedForward()(layers.LayerNormalization()(x))
    model = keras.Model(words, layers.Dense(models.VOCABULARY)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return models.compiled(model, adam(global_clipnorm=0.5), loss)


@pytest.mark.parametrize(
    ("equation", "inputs", "outputs", "axes"),
    [
        # By each dimension of the kernel: the axis of inputs, and of outputs.
        (
            *("ebcd,edh->ebch", (4, 2, 3, 8), (2, 3, 5)),
            [(-4, -4), (-1, None), (None, -1)],
        ),
        (
            *("becd,dhe->bche", (2, 4, 3, 8), (3, 5, 4)),
            [(-1, None), (None, -2), (-3, -1)],
        ),
        (
            *("bd,edh->beh", (2, 8), (4, 5)),
            [(None, -2), (-1, None), (None, -1)],
        ),
        (
            *("...ed,edh->...eh", (2, 4, 8), (4, 5)),
            [(-2, -2), (-1, None), (None, -1)],
        ),
        ("ed...,edh->eh...", (4, 8, 2), (5, 2), [(None, None)] * 3),
    ],
)
def test_what_an_equation_says(equation, inputs, outputs, axes):
    layer = layers.EinsumDense(equation, outputs)
    layer.build(inputs)
    found = Linear(layer)
    dims = range(3)
    assert [(found.input_axis(d), found.output_axis(d)) for d in dims] == axes


@pytest.mark.parametrize(
    "column",
    tiered(
        ["tensor_x3", "data_2_tensor_2", "fsdp_2_tensor_2", "fsdp_x3"],
        [],
        ["data_2_tensor_2"],
    ),
)
def test_as_keras(column, strategies, caplog):
    data = models.transformer_data()
    with caplog.at_level(logging.INFO, "mgpu_tf"):
        trainer, difference = compared(build, data, strategies[column])
    assert difference < 1e-9
    kernels = [
        weight
        for weight in trainer.model.trainable_variables
        if "einsum_dense" in weight.path and weight.path.endswith("kernel")
    ]
    assert len(kernels) == 4
    if "tensor" in column:
        assert " 2 layers take parts from the layers before" in caplog.text
        # Of four experts, two devices have two each; three, all and a part.
        dims = [weight.value.split.dim for weight in kernels]
        assert dims == ([2, 1] * 2 if column == "tensor_x3" else [0] * 4)

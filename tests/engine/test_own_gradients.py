"""LayerNormalization and GELU with gradients by hand, against Keras's own."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import mgpu_tf
from mgpu_tf.engine.kernels import Kernels
from tests.parity import cases
from tests.tiers import full


def one_layer(strategy, layer, shape, dtype):
    random = np.random.default_rng(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input(shape[1:], dtype=dtype), layer()])
        model.compile("sgd", "mse")
    for weight in model.weights:
        weight.assign(random.uniform(-1.0, 1.0, weight.shape))
    return model


def computed(strategy, kernels, layer, shape, dtype="float64"):
    """Outputs, first and second gradients; what is replaced."""
    model = one_layer(strategy, layer, shape, dtype)
    (layer,) = model.layers
    random = np.random.default_rng(0)
    x, upstream = (
        tf.cast(random.normal(1.0, size=size), dtype)
        for size in (shape, layer.compute_output_shape(shape))
    )
    weights = [weight.value for weight in layer.weights]

    @tf.function(autograph=False)
    def step(x, upstream):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch([x, *weights])
                y = layer(x)
                loss = tf.reduce_sum(y * tf.cast(upstream, y.dtype))
            first = tape.gradient(loss, [x, *weights])
            bent = tf.reduce_sum(tf.tanh(first[0]))
        return [y, *first, outer.gradient(bent, x)]

    forms = Kernels(model, strategy, kernels)
    with forms.in_place():
        found = step(x, upstream)
    return [tf.cast(one, tf.float64).numpy() for one in found], forms.replaced


CASES = {
    "normalized": (layers.LayerNormalization, {"LayerNormalization": 1}),
    "no gamma": (
        lambda **options: layers.LayerNormalization(scale=False, **options),
        {"LayerNormalization": 1},
    ),
    "no beta": (
        lambda **options: layers.LayerNormalization(
            center=False, epsilon=0.1, **options
        ),
        {"LayerNormalization": 1},
    ),
    "another axis": (
        lambda **options: layers.LayerNormalization(axis=1, **options),
        {},
    ),
    "two axes": (
        lambda **options: layers.LayerNormalization(axis=[1, 2], **options),
        {},
    ),
    "by the root": (
        lambda **options: layers.LayerNormalization(
            rms_scaling=True, **options
        ),
        {},
    ),
    "gelu": (
        lambda **options: layers.Activation("gelu", **options),
        {"GELU": 1},
    ),
    "gelu of Dense": (
        lambda **options: layers.Dense(8, activation="gelu", **options),
        {"GELU": 1},
    ),
    "approximated": (
        lambda **options: layers.Activation(
            lambda x: keras.activations.gelu(x, approximate=True), **options
        ),
        {},
    ),
}


# Keras warns of rms_scaling.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_keras_own(name, strategies):
    layer, expected = CASES[name]
    strategy, shape = strategies["one_device"], (4, 3, 8)
    ours, replaced = computed(
        strategy, "fused", lambda: layer(dtype="float64"), shape
    )
    theirs, none = computed(
        strategy, "keras", lambda: layer(dtype="float64"), shape
    )
    assert (replaced, none) == (expected, {})
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("policy", "tolerance"), [("float32", 2e-5), ("mixed_bfloat16", 5e-2)]
)
@pytest.mark.parametrize("name", ["normalized", "gelu of Dense"])
def test_other_types(name, policy, tolerance, strategies):
    layer, _ = CASES[name]
    ours, theirs = (
        computed(
            strategies["one_device"],
            kernels,
            lambda: layer(dtype=policy),
            (4, 3, 8),
            "float32",
        )[0]
        for kernels in ("fused", "keras")
    )
    for one, other in zip(ours, theirs, strict=True):
        size = max(np.max(np.abs(other)), 1e-30)
        assert np.max(np.abs(one - other)) / size <= tolerance


def transformer():
    tokens = keras.Input((6,), dtype="int32")
    hidden = layers.Embedding(11, 8)(tokens)
    normed = layers.LayerNormalization()(hidden)
    hidden += layers.MultiHeadAttention(2, 4)(normed, normed)
    normed = layers.LayerNormalization()(hidden)
    hidden += layers.Dense(8)(layers.Dense(16, activation="gelu")(normed))
    model = keras.Model(tokens, layers.Dense(11)(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01, global_clipnorm=1.0), loss)
    return model


@pytest.mark.parametrize(
    ("column", "replaced"),
    [
        pytest.param(
            "mirrored_x3",
            {"Adam": 1, "Embedding": 1, "GELU": 1, "LayerNormalization": 2},
            marks=full,
        ),
        pytest.param(
            "fsdp_x3",
            {"Adam": 1, "GELU": 1, "LayerNormalization": 2},
            marks=full,
        ),
        pytest.param(
            "pipeline_x2",
            {"Adam": 1, "GELU": 1, "LayerNormalization": 2},
            marks=full,
        ),
        # Computed in parts, by TensorFlow's gradients.
        pytest.param("tensor_x3", {"Adam": 1}, marks=full),
    ],
)
def test_a_transformer_has_the_numbers_of_keras(column, replaced, strategies):
    cases.set_floatx("float64")
    try:
        x = np.random.default_rng(0).integers(0, 11, (22, 6))
        fit = {"batch_size": 8, "epochs": 2, "verbose": 0, "shuffle": False}
        keras.utils.set_random_seed(0)
        model = transformer()
        history = model.fit(x, np.roll(x, 1, 1), **fit).history
        trainer = mgpu_tf.Trainer(transformer, strategies[column])
        ours = trainer.fit(x, np.roll(x, 1, 1), **fit).history
        np.testing.assert_allclose(ours["loss"], history["loss"], rtol=1e-9)
        assert trainer.fused == replaced
        assert trainer.global_step == 6
        for own, ref in zip(
            trainer.model.get_weights(), model.get_weights(), strict=True
        ):
            np.testing.assert_allclose(own, ref, atol=1e-9)
    finally:
        cases.set_floatx("float32")

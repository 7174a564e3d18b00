"""A mesh of the data axis alone: as much as a mirrored strategy has."""

import keras
import numpy as np
import pytest

import mgpu_tf

X = np.random.default_rng(0).normal(size=(40, 6)).astype("float32")
Y = X[:, :1] * X[:, 1:2]


def build_model(table=False, jit_compile=False):
    layers = [
        keras.layers.Dense(8),
        keras.layers.LayerNormalization(),
        keras.layers.Activation("gelu"),
        keras.layers.Dense(8, activation="gelu"),
        keras.layers.Dense(1),
    ]
    if table:
        layers = [
            keras.layers.Lambda(lambda x: keras.ops.cast(x > 0, "int32")),
            mgpu_tf.layers.ShardedEmbedding(6, 4),
            keras.layers.Flatten(),
            *layers,
        ]
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile("adam", "mse", jit_compile=jit_compile)
    return model


def trained(strategy, build=build_model, **options):
    trainer = mgpu_tf.Trainer(build, strategy, **options)
    history = trainer.fit(X, Y, batch_size=10, epochs=2, verbose=0)
    return trainer, history.history["loss"]


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"recompute": "layers"}, marks=pytest.mark.full)],
    ids=["plain", "recompute"],
)
def test_as_mirrored(options, strategies):
    found, losses = trained(strategies["data_3"], **options)
    mirrored, expected = trained(strategies["mirrored_x3"], **options)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert found.fused == mirrored.fused
    assert "LayerNormalization" in found.fused


@pytest.mark.full
def test_xla_compiles_the_step(strategies, caplog):
    with caplog.at_level("INFO", "mgpu_tf"):
        trained(strategies["data_3"], lambda: build_model(jit_compile=True))
    assert "runs without" not in caplog.text


def test_a_spread_table_is_looked_up_once(strategies):
    def build():
        return build_model(table=True)

    _, expected = trained(strategies["data_3"], build)
    _, losses = trained(strategies["data_3"], build, recompute="layers")
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_a_table_leaves_other_models_as_they_are(strategies):
    trained(strategies["data_3"], lambda: build_model(table=True))
    found, _ = trained(strategies["data_3"])
    assert "LayerNormalization" in found.fused

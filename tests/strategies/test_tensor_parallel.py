"""Runs with layers in parts: saved, resumed, moved to another mesh, counted."""

import keras
import numpy as np
import pytest
from keras import layers

import mgpu_tf
from tests.strategies.resuming import (
    check_elsewhere,
    check_same_bits,
    data,
    fit,
    state_of,
)
from tests.tiers import tiered

TENSOR = ["tensor_x3", "data_2_tensor_2", "fsdp_2_tensor_2"]
STAGES = ["tensor_2_pipeline_2", "fsdp_2_tensor_2_pipeline_2"]


@pytest.fixture(params=tiered(TENSOR, ["fsdp_2_tensor_2"], []))
def strategy(request, strategies):
    return strategies[request.param]


def build(rate=0.3):
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(12, activation="tanh"),
            layers.Dropout(rate, seed=2),
            layers.Dense(12, activation="tanh"),
            layers.Dense(6),
        ]
    )
    model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae"])
    return model


def plain():
    return build(rate=0.0)


@pytest.mark.parametrize(
    "name", tiered(TENSOR + STAGES, [], ["data_2_tensor_2", STAGES[0]])
)
def test_resumed_bit_for_bit(name, strategies, tmp_path):
    check_same_bits(build, strategies[name], tmp_path)


@pytest.mark.parametrize(
    ("first", "then"),
    tiered(
        [
            ("tensor_x3", "fsdp_x3"),
            ("fsdp_x3", "data_2_tensor_2"),
            ("data_2_tensor_2", "one_device"),
            ("one_device", "tensor_x3"),
            ("pipeline_x2", "data_2_tensor_2"),
            ("tensor_x3", "data_2_pipeline_2"),
            ("fsdp_2_tensor_2", "data_2_tensor_2"),
            ("data_2_pipeline_2", "fsdp_2_tensor_2"),
            ("tensor_2_pipeline_2", "mirrored_x3"),
            ("mirrored_x3", "tensor_2_pipeline_2"),
            ("tensor_x3", "fsdp_2_tensor_2_pipeline_2"),
            ("fsdp_2_tensor_2_pipeline_2", "data_2_tensor_2_pipeline_2"),
        ],
        [],
        [
            ("one_device", "tensor_x3"),
            ("tensor_x3", "data_2_pipeline_2"),
            ("mirrored_x3", "tensor_2_pipeline_2"),
        ],
    ),
)
def test_resumed_on_another_mesh(first, then, strategies, tmp_path):
    check_elsewhere(plain, strategies[first], strategies[then], tmp_path)


@pytest.mark.full
def test_a_saved_model_is_an_ordinary_one(strategy, tmp_path):
    trainer = mgpu_tf.Trainer(plain, strategy)
    fit(trainer, epochs=1)
    path = str(tmp_path / "model.keras")
    trainer.save(path)
    loaded = keras.models.load_model(path)
    for ours, theirs in zip(
        state_of(trainer.model), state_of(loaded), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    x, y = data(6)
    assert loaded.evaluate(x, y, verbose=0) == pytest.approx(
        trainer.evaluate(x, y, verbose=0), rel=1e-5
    )

    # A model whose optimizer is built already is split with its slots.
    def again():
        return keras.models.load_model(path)

    resumed = mgpu_tf.Trainer(again, strategy)
    fit(resumed, epochs=1)
    loaded.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    for ours, theirs in zip(
        state_of(resumed.model), state_of(loaded), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    _check_memory(resumed, strategy)


def _check_memory(trainer, strategy):
    """A device has its part of each split weight, and of two slots for it."""
    mesh = strategy.mesh
    # Kernels and the first bias; the last bias; the bias that is added to sums.
    parts = [(6 * 12 + 12 + 12 * 12 + 12 * 6, mesh.tensor * mesh.fsdp)]
    parts += [(6, mesh.tensor), (12, mesh.fsdp)]
    assert sum(p for p, _ in parts) == trainer.model.count_params()
    stored = sum(size / devices for size, devices in parts)
    rows = trainer.memory().rows
    assert len(rows) == mesh.size
    for row in rows:
        assert row.weights == pytest.approx(4 * stored, abs=16)
        assert row.optimizer == pytest.approx(2 * row.weights, abs=64)

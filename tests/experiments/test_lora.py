"""The recipe of LoRA against Keras's own `fit`, on three replicas."""

import functools

import keras
import numpy as np
import pytest

import mgpu_tf
from experiments.tutorials import lora
from tests.tiers import full

pytestmark = full

EXAMPLES = 29  # Three replicas of 8 rows have 3, 3 and 2, and at last 2, 2, 1.
OPTIONS = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}


def in_float64(kind):
    class Double(kind):
        """Its adapters have its type, where Keras keeps float32."""

        def add_weight(self, *args, dtype=None, **options):
            return super().add_weight(*args, **options)

    return Double


DOUBLES = {kind: in_float64(kind) for kind in lora.HAS_LORA}


def build_model():
    """The model of the recipe, in float64 down to its adapters."""
    base = keras.models.clone_model(
        lora.build_base(),
        clone_function=lambda layer: DOUBLES.get(
            type(layer), type(layer)
        ).from_config(layer.get_config()),
    )
    return lora.with_adapters(base, rank=2)


def data():
    x, y = lora.digits(turned=True)
    return x[:EXAMPLES], y[:EXAMPLES]


@functools.cache
def of_keras():
    keras.utils.set_random_seed(0)
    model = build_model()
    before = model.get_weights()
    history = model.fit(*data(), **OPTIONS).history
    return before, history, model.get_weights()


@pytest.mark.parametrize("column", ["mirrored_x3", "fsdp_x3"])
def test_the_numbers_of_keras(column, strategies, float64):
    before, history, weights = of_keras()
    trainer = mgpu_tf.Trainer(build_model, strategies[column])
    found = trainer.fit(*data(), **OPTIONS).history
    for name, values in history.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-9)
    model = trainer.model
    assert {v.dtype for v in model.weights} == {"float64"}
    for variable, first, expected, value in zip(
        model.weights, before, weights, model.get_weights(), strict=True
    ):
        adapter = "lora" in variable.path
        assert variable.trainable == adapter, variable.path
        assert np.array_equal(first, value) != adapter, variable.path
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("column", ["mirrored_x3", "fsdp_x3"])
def test_adapters_are_saved_and_merged(column, strategies, tmp_path):
    base, merged = (
        str(tmp_path / f"{name}.weights.h5") for name in ("base", "merged")
    )
    adapters = str(tmp_path / "adapters.npz")
    keras.utils.set_random_seed(1)
    lora.build_base().save_weights(base)

    def adapted():
        model = lora.build_base()
        model.load_weights(base)
        return lora.with_adapters(model, rank=2)

    x, y = data()
    trainer = mgpu_tf.Trainer(adapted, strategies[column])
    before = trainer.predict(x, verbose=0)
    trainer.fit(x, y, **OPTIONS)
    trained = trainer.predict(x, verbose=0)
    assert np.abs(trained - before).max() > 0.1
    lora.save_adapters(trainer.model, adapters)
    trainer.save_weights(merged)

    again = adapted()
    lora.load_adapters(again, adapters)
    plain = lora.build_base()
    plain.load_weights(merged)
    assert plain.count_params() < again.count_params()
    for model in (again, plain):
        found = model.predict(x, verbose=0)
        np.testing.assert_allclose(found, trained, rtol=1e-4, atol=1e-5)

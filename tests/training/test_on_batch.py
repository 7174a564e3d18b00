"""`train_on_batch`, `test_on_batch` and `predict_on_batch` are Keras's."""

import keras
import numpy as np
import pytest

import mgpu_tf
from tests import columns
from tests.engine.test_overridden_step import arrays, network

pytestmark = pytest.mark.usefixtures("float64")

BATCHES = (8, 7, 8, 5)


def build():
    model = network(5, 1)
    model.compile(
        keras.optimizers.Adam(0.01, clipnorm=0.5), "mse", metrics=["mae"]
    )
    return model


@pytest.mark.parametrize("column", columns.EVERY)
def test_batches_are_those_of_keras(column, strategies):
    x, y = arrays()
    weights = np.abs(x[:, 0])
    keras.utils.set_random_seed(0)
    model = build()
    trainer = mgpu_tf.Trainer(build, strategies[column])
    for place, rows in enumerate(BATCHES):
        given = x[:rows], y[:rows], weights[:rows] if place % 2 else None
        model.reset_metrics()  # Keras 3.14 does not.
        ref = model.train_on_batch(*given)
        own = trainer.train_on_batch(*given)
        np.testing.assert_allclose(own, ref, rtol=1e-9)
    for ref, own in zip(
        model.get_weights(), trainer.model.get_weights(), strict=True
    ):
        np.testing.assert_allclose(own, ref, atol=1e-12)
    model.reset_metrics()
    np.testing.assert_allclose(
        list(trainer.test_on_batch(x, y, return_dict=True).values()),
        list(model.test_on_batch(x, y, return_dict=True).values()),
        rtol=1e-9,
    )
    np.testing.assert_allclose(
        trainer.predict_on_batch(x[:7]), model.predict_on_batch(x[:7])
    )
    assert trainer.global_step == len(BATCHES)
    assert trainer.examples_seen == sum(BATCHES)


def build_two():
    inputs = keras.Input((5,))
    outputs = {name: keras.layers.Dense(1, name=name)(inputs) for name in "ab"}
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse", metrics={"a": "mae", "b": "mape"})
    return model


def names_of(model):
    """The names of what is returned, kept and shown, in their order."""
    x, y = arrays()
    data = x, {"a": y, "b": y}
    shown = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda _, logs: shown.append(list(logs)),
        on_epoch_end=lambda _, logs: shown.append(list(logs)),
        on_test_batch_end=lambda _, logs: shown.append(list(logs)),
    )
    options = {"verbose": 0, "callbacks": [watch]}
    history = model.fit(*data, validation_data=data, **options).history
    return {
        "train_on_batch": list(model.train_on_batch(*data, return_dict=True)),
        "test_on_batch": list(model.test_on_batch(*data, return_dict=True)),
        "evaluate": list(model.evaluate(*data, return_dict=True, **options)),
        "history": list(history),
        "callbacks": shown,
    }


def test_names_have_the_order_of_keras(strategies):
    trainer = mgpu_tf.Trainer(build_two, strategies["mirrored_x3"])
    assert names_of(trainer) == names_of(build_two())

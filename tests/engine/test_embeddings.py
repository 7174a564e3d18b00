"""Gradients of embedding tables: every optimizer, and rows that are summed.

Keras's own `fit` on one device is the reference: weights, slots, losses.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from mgpu_tf.engine.rows import summed_rows
from tests.parity import cases
from tests.tiers import tiered

OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "amsgrad": lambda: keras.optimizers.Adam(0.05, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(0.05, weight_decay=0.1),
    "nadam": lambda: keras.optimizers.Nadam(0.05),
    "adamax": lambda: keras.optimizers.Adamax(0.05),
    "adadelta": lambda: keras.optimizers.Adadelta(0.5),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "lion": lambda: keras.optimizers.Lion(0.01),
    "lamb": lambda: keras.optimizers.Lamb(0.05),
    "adafactor": lambda: keras.optimizers.Adafactor(0.05),
    "clipvalue": lambda: keras.optimizers.Adam(0.05, clipvalue=0.002),
    "ema": lambda: keras.optimizers.Adam(
        0.05, use_ema=True, ema_overwrite_frequency=3
    ),
}


@pytest.fixture(autouse=True)
def float64():
    cases.set_floatx("float64")
    yield
    cases.set_floatx("float32")


@pytest.mark.full
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_as_keras(name, strategies):
    case = cases.Case(cases.text_model(OPTIMIZERS[name]), cases.text)
    reference = cases.run_stock(case)
    result = cases.run(case, strategies["mirrored_x3"])
    assert result.loss_difference(reference) < 1e-12
    assert result.largest_difference(reference) < 1e-12


def summed_alone(x, y):
    """Adam by hand on the gradient of the loss, dense: one step."""
    keras.utils.set_random_seed(0)
    model = cases.text_model(lambda: keras.optimizers.Adam(0.05))()
    with tf.GradientTape() as tape:
        loss = model.loss(y, model(x))
    weights = model.trainable_variables
    gradients = tape.gradient(loss, weights)
    return [
        w.numpy() - 0.05 * g / (np.sqrt(g**2) + 1e-7 / np.sqrt(1e-3))
        for w, g in zip(
            weights,
            [tf.convert_to_tensor(g).numpy() for g in gradients],
            strict=True,
        )
    ]


@pytest.mark.parametrize(
    "column",
    tiered(
        ["one_device", "mirrored_x3", "central_storage_x2"], ["mirrored_x3"]
    ),
)
def test_summed(column, strategies):
    data = cases.text(cases.BATCH_SIZE)
    trainer = mgpu_tf.Trainer(
        cases.text_model(lambda: keras.optimizers.Adam(0.05)),
        strategies[column],
        embedding_gradients="summed",
    )
    trainer.fit(**data, batch_size=cases.BATCH_SIZE, verbose=0, shuffle=False)
    ours = [w.numpy() for w in trainer.model.trainable_variables]
    for mine, wanted in zip(
        ours, summed_alone(data["x"], data["y"]), strict=True
    ):
        # Keras takes its betas through float32.
        np.testing.assert_allclose(mine, wanted, atol=1e-6)


def test_rows_of_one_index_are_one():
    slices = tf.IndexedSlices(
        tf.constant([[1.0], [2.0], [4.0]]), tf.constant([5, 3, 5]), None
    )
    found = summed_rows(slices)
    assert found.indices.numpy().tolist() == [5, 3]
    assert found.values.numpy().tolist() == [[5.0], [2.0]]


def test_unknown_rule(strategies):
    with pytest.raises(mgpu_tf.ConfigurationError, match="embedding_gradients"):
        mgpu_tf.Trainer(
            cases.text_model(keras.optimizers.Adam),
            strategies["one_device"],
            embedding_gradients="dense",
        )

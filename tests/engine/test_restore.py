"""A bad batch is left out, and the run is that of the other batches."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from mgpu_tf.data import order
from tests.tiers import tiered

ROWS, SIZE = 96, 8
STEPS = ROWS // SIZE
BAD = 6  # The index of the bad batch in the first epoch.


def numbers(bad=(BAD,), value=np.nan):
    x = np.random.default_rng(0).normal(size=(ROWS, 4))
    y = x[:, :1] + 0.1
    for batch in bad:
        x[SIZE * batch + 5] = value
    return x, y


def build():
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(9, activation="tanh"),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01, clipnorm=1.0), "mse")
    return model


def alone(order):
    """Returns what Keras makes of some batches, one after the other."""
    x, y = numbers()
    model = build()
    for batch in order:
        rows = slice(SIZE * batch, SIZE * (batch + 1))
        model.train_on_batch(x[rows], y[rows])
    return model


@pytest.fixture
def float64():
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


def fit(strategy, folder, data=None, epochs=1, every=4, **options):
    data = numbers() if data is None else data
    given = {"on_nan": "restore", "steps_per_execution": 3} | options
    trainer = mgpu_tf.Trainer(build, strategy, **given)
    arrays = {} if isinstance(data, tf.data.Dataset) else {"batch_size": SIZE}
    trainer.fit(
        *(data if arrays else (data,)),
        **arrays,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        checkpoint=mgpu_tf.SaveOptions(str(folder), save_every_steps=every),
    )
    return trainer


def same(trainer, model):
    assert trainer.model.optimizer.iterations.numpy() == (
        model.optimizer.iterations.numpy()
    )
    pairs = [
        *zip(trainer.model.weights, model.weights, strict=True),
        *zip(
            trainer.model.optimizer.variables,
            model.optimizer.variables,
            strict=True,
        ),
    ]
    for mine, theirs in pairs:
        np.testing.assert_allclose(
            keras.ops.convert_to_numpy(mine),
            keras.ops.convert_to_numpy(theirs),
            rtol=0,
            atol=1e-12,
            err_msg=theirs.path,
        )


@pytest.mark.parametrize(
    ("name", "every", "per_execution"),
    tiered(
        [
            ("mirrored_x3", 4, 3),
            ("one_device", 20, "auto"),
            ("one_device", 6, 1),
            ("fsdp_x3", 4, 3),
            ("central_storage_x2", 4, 3),
            ("data_2_pipeline_2", 4, 2),
            ("data_2_tensor_2", 4, 3),
        ],
        [("mirrored_x3", 4, 3)],
    ),
)
def test_the_weights_are_those_without_the_batch(
    name, every, per_execution, strategies, tmp_path, float64
):
    trainer = fit(
        strategies[name],
        tmp_path,
        every=every,
        steps_per_execution=per_execution,
    )
    same(trainer, alone([b for b in range(STEPS) if b != BAD]))
    assert trainer.global_step == STEPS - 1
    assert trainer.records[0].steps == STEPS - 1
    (batch,) = trainer.left_out
    assert (batch.epoch, batch.batch, batch.step) == (1, BAD + 1, BAD + 1)
    assert batch.loss == "nan"

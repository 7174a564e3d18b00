"""An optimizer that is applied outside of a step, as Keras would."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import mgpu_tf
from tests.engine.test_whole_update import Centred, Whitened
from tests.strategies.resuming import Stop
from tests.tiers import tiered

TOKENS = 11


def adam(**options):
    return keras.optimizers.Adam(0.02, **options)


OPTIMIZERS = {
    "adam": adam,
    "clipped": lambda: adam(
        global_clipnorm=0.05,
        weight_decay=0.1,
        use_ema=True,
        ema_overwrite_frequency=3,
    ),
    "accumulated": lambda: adam(gradient_accumulation_steps=3, clipnorm=0.1),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        adam(global_clipnorm=0.05), initial_scale=8.0
    ),
    "whole": lambda: Whitened(0.05, clipnorm=0.1, use_ema=True),
    "by norms": lambda: mgpu_tf.optimizers.LARS(0.5, momentum=0.9),
    "own apply": lambda: Centred(0.02, clipnorm=0.05, use_ema=True),
}


class Descends(keras.callbacks.Callback):
    """Steps of its own on all rows, one of them before all others."""

    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def descend(self, by_pairs):
        model, optimizer = self.model, self.model.optimizer
        with tf.GradientTape() as tape:
            loss = ops.mean((model(self.x, training=True) - self.y) ** 2)
            loss = optimizer.scale_loss(loss)
        weights = model.trainable_variables
        gradients = tape.gradient(loss, weights)
        if by_pairs:
            optimizer.apply_gradients(zip(gradients, weights, strict=True))
        else:
            optimizer.apply(gradients, trainable_variables=weights)

    def on_train_begin(self, logs=None):
        self.descend(False)

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.descend(True)

    def on_epoch_end(self, epoch, logs=None):
        self.descend(False)


def data():
    generator = np.random.default_rng(0)
    x = generator.integers(0, TOKENS, size=(17, 4))
    return x, generator.normal(size=(17, 1))


def built(optimizer):
    def build():
        keras.utils.set_random_seed(0)
        x = inputs = keras.Input((4,), dtype="int32")
        x = layers.Flatten()(layers.Embedding(TOKENS, 3)(x))
        x = layers.Dense(6, "tanh", kernel_constraint="non_neg")(x)
        model = keras.Model(inputs, layers.Dense(1)(x))
        model.compile(OPTIMIZERS[optimizer](), "mse")
        return model

    return build


def trained(model, **options):
    model.fit(
        *data(),
        batch_size=7,
        shuffle=False,
        verbose=0,
        **{"epochs": 3, "callbacks": [Descends(*data())]} | options,
    )
    model = getattr(model, "model", model)
    state = [*model.variables, *model.optimizer.variables]
    # Between two updates each replica has a sum of its own rows.
    return [v.numpy() for v in state if "accumulator" not in v.path]


def check_same(found, expected, atol=1e-9):
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)


COLUMNS = (
    *("fsdp_x3", "tensor_x3", "data_2_fsdp_2", "zero1_x2"),
    *("mirrored_x3", "fsdp_3_pipeline_2", "data_2_pipeline_2"),
)


# A step refuses them, with a table that is looked up in parts.
REFUSED = [("tensor_x3", "whole"), ("tensor_x3", "own apply")]
CASES = [(column, name) for column in COLUMNS for name in OPTIMIZERS]


@pytest.mark.parametrize(
    ("column", "optimizer"),
    tiered(
        [case for case in CASES if case not in REFUSED],
        [
            ("fsdp_x3", "adam"),
            ("tensor_x3", "clipped"),
            ("mirrored_x3", "accumulated"),
        ],
    ),
)
def test_as_keras(strategies, float64, column, optimizer):
    expected = trained(built(optimizer)())
    found = trained(mgpu_tf.Trainer(built(optimizer), strategies[column]))
    check_same(found, expected)


class Later(Descends):
    """Not when it begins, which a resumed run does once more."""

    def on_train_begin(self, logs=None):
        pass


@pytest.mark.full
def test_a_run_that_is_broken_off(strategies, float64, tmp_path):
    def run(name, at=None):
        trainer = mgpu_tf.Trainer(built("clipped"), strategies["fsdp_x3"])
        saves = mgpu_tf.SaveOptions(str(tmp_path / name), save_every_steps=1)
        callbacks = [Later(*data()), Stop(at)]
        return trained(trainer, checkpoint=saves, callbacks=callbacks)

    whole = run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("broken", at=2)
    check_same(run("broken"), whole, atol=0)


def test_in_a_function_of_tensorflow(strategies, float64):
    def moved(model):
        weights = model.trainable_variables
        gradients = [tf.ones(w.shape, w.dtype) for w in weights]
        # The first call makes the optimizer's variables.
        model.optimizer.apply(gradients, weights)

        @tf.function
        def move(gradients):
            model.optimizer.apply(gradients, weights)

        for _ in range(2):
            move(gradients)
        return [
            v.numpy() for v in [*model.variables, *model.optimizer.variables]
        ]

    trainer = mgpu_tf.Trainer(built("clipped"), strategies["fsdp_x3"])
    check_same(moved(trainer.model), moved(built("clipped")()))

"""Workers with unequal shares of the global batch."""

import os
import shutil
import time

import keras
import numpy as np
import tensorflow as tf

import mgpu_tf
from mgpu_tf.strategies.replicas import balance as balance_lib
from mgpu_tf.strategies.replicas.balance import Balance
from tests.parity import cases

SIZE, BATCH = 45, 8


def arrays():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(SIZE, 6))
    return x, generator.integers(0, 3, size=SIZE)


def data(options):
    """Arrays, or a dataset of whole batches where none are asked for."""
    if "batch_size" in options:
        return arrays()
    whole = tf.data.Dataset.from_tensor_slices(arrays()).batch(BATCH)
    return (whole.repeat() if "steps_per_epoch" in options else whole,)


def build(first=()):
    model = keras.Sequential(
        [
            *first,
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dense(3, kernel_regularizer="l2"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.01, global_clipnorm=0.5),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def variables(model):
    """Weights and slots."""
    return [
        np.asarray(keras.ops.convert_to_numpy(variable)).tolist()
        for variable in [*model.weights, *model.optimizer.variables]
        if "seed" not in variable.path
    ]


class SlowRows(keras.layers.Layer):
    """Takes a while for each row on worker 1."""

    def call(self, x):
        slow = mgpu_tf.ClusterConfig.from_environment().worker_index == 1
        seconds = 0.025 if slow else 0.005

        def wait(x):
            time.sleep(seconds * len(x))
            return x

        y = tf.numpy_function(wait, [x], x.dtype, stateful=True)
        y.set_shape(x.shape)
        return x + tf.stop_gradient(y - x)


def trained(strategy, balance, first=()):
    cases.set_floatx("float64")
    strategy.balance = balance
    try:
        # A layer has the type that is set when it is made.
        trainer = mgpu_tf.Trainer(
            lambda: build([kind() for kind in first]), strategy
        )
        history = trainer.fit(
            *arrays(), batch_size=BATCH, epochs=3, shuffle=False, verbose=0
        )
        return {
            "losses": history.history["loss"],
            "variables": variables(trainer.model),
            "shares": list(strategy.balance.shares),
        }
    finally:
        strategy.balance = Balance()
        cases.set_floatx("float32")


def given(strategy, folder):
    return trained(strategy, Balance.of("3,1", 2, 2))


def measured(strategy, folder):
    return trained(strategy, Balance.of("auto", 2, 2), [SlowRows])


def saved(strategy, folder):
    """A run that measures, and the same again from its second epoch."""
    cases.set_floatx("float64")
    found, worth = {}, balance_lib.WORTH
    # Noise must not change shares again; from equal ones it is more.
    balance_lib.WORTH = 0.4
    whole, resumed = os.path.join(folder, "a"), os.path.join(folder, "b")
    try:
        for name, path in (("whole", whole), ("resumed", resumed)):
            strategy.balance = Balance.of("auto", 2, 2)
            trainer = mgpu_tf.Trainer(lambda: build([SlowRows()]), strategy)
            trainer.fit(
                *arrays(),
                batch_size=BATCH,
                epochs=4,
                verbose=0,
                checkpoint=mgpu_tf.SaveOptions(
                    checkpoint_dir=path, keep_checkpoints=9
                ),
            )
            found[name] = variables(trainer.model)
            found["shares"] = list(strategy.balance.shares)
            if name == "whole" and mgpu_tf.is_chief(strategy):
                second = sorted(
                    name for name in os.listdir(whole) if "step-" in name
                )[1]
                shutil.copytree(
                    os.path.join(whole, second), os.path.join(resumed, second)
                )
        return found
    finally:
        balance_lib.WORTH = worth
        strategy.balance = Balance()
        cases.set_floatx("float32")


def other_shares(strategy, folder):
    index = mgpu_tf.ClusterConfig.from_environment().worker_index
    try:
        trained(strategy, Balance((2, 1 + index)))
    except mgpu_tf.ConfigurationError as error:
        return str(error)
    return "nothing"


JOBS = {job.__name__: job for job in (given, measured, saved, other_shares)}

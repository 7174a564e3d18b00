"""A new trace that an author asks for, between calls and in callbacks.

Keras's own loops run `model.train_function` and its like. They take a layer
that was frozen, or another attribute, where that is made anew. The reference is
Keras's own `fit`.
"""

import keras
import numpy as np
import pytest

import mgpu_tf
from tests.tiers import tiered

COLUMNS = tiered(
    ["one_device", "mirrored_x3", "fsdp_x3", "data_2_tensor_2", "pipeline_x2"],
    ["mirrored_x3", "fsdp_x3"],
)
FIT = {"batch_size": 5, "shuffle": False, "verbose": 0}

pytestmark = pytest.mark.usefixtures("float64")


class Scale(keras.layers.Layer):
    """What a trace takes as it is: a number, and a function that is called."""

    def __init__(self):
        super().__init__()
        self.factor, self.function = 1.0, keras.ops.tanh

    def call(self, x):
        return self.function(x) * self.factor


def center(x):
    """Mixes the rows of a batch."""
    return x - keras.ops.mean(x, axis=0, keepdims=True)


def build():
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(6, activation="tanh")(inputs)
    outputs = keras.layers.Dense(1)(Scale()(hidden))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def arrays(rows=13):
    x = np.random.default_rng(0).normal(size=(rows, 4))
    return x, x[:, :1] ** 2


class EachEpoch(keras.callbacks.Callback):
    """Changes a model after an epoch, and asks for a new trace."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def on_epoch_end(self, epoch, logs=None):
        self.change(self.model, epoch)
        self.model.make_train_function(force=True)
        self.model.test_function = None


def freeze(model, epoch):
    model.layers[1].trainable = epoch % 2 == 1


def scale(model, epoch):
    model.layers[2].factor = 0.5 + epoch


def mix(model, epoch):
    del epoch
    model.layers[2].function = center


def program(trainer, model, change):
    """Trains, changes the model, and trains with more changes; the logs."""
    found = [trainer.fit(*arrays(), epochs=2, **FIT).history]
    change(model, 0)
    model.make_train_function(force=True)
    found.append(trainer.fit(*arrays(), epochs=2, **FIT).history)
    found.append(
        trainer.fit(
            *arrays(),
            epochs=3,
            validation_data=arrays(7),
            callbacks=[EachEpoch(change)],
            **FIT,
        ).history
    )
    change(model, 1)
    model.predict_function = None
    outputs = trainer.predict(arrays()[0], batch_size=5, verbose=0)
    model.make_test_function(force=True)
    scores = trainer.evaluate(*arrays(), batch_size=5, verbose=0)
    return found, outputs, scores


@pytest.mark.parametrize("change", [freeze, scale, mix])
@pytest.mark.parametrize("column", COLUMNS)
def test_a_new_trace_is_that_of_keras(column, change, strategies):
    if column == "pipeline_x2" and change is mix:
        pytest.skip("No stage has all rows.")
    keras.utils.set_random_seed(0)
    model = build()
    expected = program(model, model, change)
    trainer = mgpu_tf.Trainer(build, strategies[column], seed=0)
    found = program(trainer, trainer.model, change)
    for ours, theirs in zip(found[0], expected[0], strict=True):
        assert set(ours) == set(theirs)
        for name, values in theirs.items():
            np.testing.assert_allclose(ours[name], values, rtol=1e-9)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-9)
    np.testing.assert_allclose(found[2], expected[2], rtol=1e-9)
    for ours, theirs in (
        (trainer.model.variables, model.variables),
        (trainer.model.optimizer.variables, model.optimizer.variables),
    ):
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(
                one.numpy(), other.numpy(), rtol=1e-9, atol=1e-12
            )


def test_what_an_engine_counts_stays(strategies, tmp_path):
    """Checkpoints after a new trace have the estimate from before it."""
    trainer = mgpu_tf.Trainer(
        build, strategies["mirrored_x3"], seed=0, noise_scale=True
    )
    history = trainer.fit(
        *arrays(),
        epochs=3,
        checkpoint_dir=str(tmp_path),
        callbacks=[EachEpoch(scale)],
        **FIT,
    ).history
    again = mgpu_tf.Trainer(
        build, strategies["mirrored_x3"], seed=1, noise_scale=True
    )
    resumed = again.fit(
        *arrays(),
        epochs=3,
        checkpoint_dir=str(tmp_path),
        callbacks=[EachEpoch(scale)],
        **FIT,
    ).history
    assert resumed == history
    for one, other in zip(
        again.model.get_weights(), trainer.model.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(one, other)


class Predicting(keras.callbacks.Callback):
    """Predicts by a new trace after each batch."""

    def __init__(self, trainer):
        super().__init__()
        self.trainer, self.found = trainer, []

    def on_train_batch_end(self, batch, logs=None):
        self.model.layers[2].factor += 0.5
        self.model.predict_function = None
        x = arrays()[0]
        self.found.append(self.trainer.predict(x, batch_size=5, verbose=0))


def test_a_callback_predicts_by_a_new_trace(strategies):
    """And the run goes on, with its replicas compared after each step."""
    trainer = mgpu_tf.Trainer(
        build,
        strategies["mirrored_x3"],
        seed=0,
        steps_per_execution=1,
        check_replicas_every=1,
    )
    callback = Predicting(trainer)
    trainer.fit(*arrays(), epochs=1, callbacks=[callback], **FIT)
    assert len(callback.found) == 3
    assert not np.allclose(callback.found[0], callback.found[1])


def test_without_a_question_nothing_is_traced_anew(strategies):
    """`make_train_function()` keeps what is there, as in Keras."""
    trainer = mgpu_tf.Trainer(build, strategies["mirrored_x3"], seed=0)
    trainer.fit(*arrays(), **FIT)
    functions = dict(trainer._distributed.engine._functions)
    trainer.model.make_train_function()
    trainer.fit(*arrays(), **FIT)
    assert trainer._distributed.engine._functions == functions

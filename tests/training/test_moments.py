"""When metrics are reset, and how steps are counted, as callbacks see it.

Keras's own `fit` and `evaluate` are the reference.
"""

import keras
import numpy as np
import pytest

import mgpu_tf

pytestmark = pytest.mark.usefixtures("float64")

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(26, 5))
Y = X[:, :2]
COLUMNS = ["one_device", "mirrored_x3", "fsdp_x3"]


def build(steps_per_execution=1, trainable=True):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((5,)), Moving(), keras.layers.Dense(2)]
    )
    model.layers[-1].trainable = trainable
    model.compile("sgd", "mse", steps_per_execution=steps_per_execution)
    model.extra = keras.metrics.Sum(name="extra")
    return model


class Moving(keras.layers.Layer):
    """Takes a moving mean away."""

    def build(self, shape):
        self.mean = self.add_weight(
            shape=shape[1:], initializer="zeros", trainable=False
        )

    def call(self, x, training=False):
        if training:
            mean = keras.ops.mean(x, axis=0)
            self.mean.assign(0.9 * self.mean + 0.1 * mean)
        return x - self.mean


class Sees(keras.callbacks.Callback):
    """What metrics hold as an epoch and an evaluation begin."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_begin(self, epoch, logs=None):
        self.model.extra.update_state(3.0)
        self.seen.append(("epoch", float(self.model.metrics[0].result())))

    def on_test_begin(self, logs=None):
        self.seen.append(("test", float(self.model.metrics[0].result())))
        self.seen.append(("extra", float(self.model.extra.result())))
        self.model.extra.update_state(5.0)

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(("step", batch))

    def on_test_batch_end(self, batch, logs=None):
        self.seen.append(("test step", batch))


def seen(model, **options):
    callback = Sees()
    fit = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(X, Y, callbacks=[callback], **fit | options)
    model.evaluate(X, Y, batch_size=8, verbose=0, callbacks=[callback])
    return callback.seen, history.history


def check(name, strategies, options=None, **kwargs):
    expected, logs = seen(build(**options or {}), **kwargs)
    trainer = mgpu_tf.Trainer(lambda: build(**options or {}), strategies[name])
    found, own = seen(trainer, **kwargs)
    assert [what for what, _ in found] == [what for what, _ in expected]
    np.testing.assert_allclose(
        [value for _, value in found], [value for _, value in expected], 1e-9
    )
    assert own.keys() == logs.keys()
    for key, values in logs.items():
        np.testing.assert_allclose(own[key], values, 1e-9, err_msg=key)


@pytest.mark.parametrize("name", COLUMNS)
def test_metrics_are_reset_when_keras_resets_them(name, strategies):
    validation = {"validation_data": (X[:9], Y[:9])}
    check(name, strategies, validation_batch_size=4, **validation)


@pytest.mark.parametrize("name", COLUMNS)
def test_executions_are_counted_whole(name, strategies):
    """Of 4 steps in executions of 3, the last one ends with number 5."""
    check(name, strategies, {"steps_per_execution": 3})


@pytest.mark.filterwarnings("ignore:The model .* trainable weights")
@pytest.mark.parametrize("name", COLUMNS)
def test_a_model_without_trainable_weights(name, strategies):
    """Its layers may still take statistics of the data."""
    check(name, strategies, {"trainable": False})

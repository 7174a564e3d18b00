"""Where a `keras.utils.PyDataset` is called around epochs, as Keras does."""

import keras
import numpy as np
import pytest

import mgpu_tf

pytestmark = pytest.mark.usefixtures("float64")

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(20, 4))
Y = X[:, :1] ** 2


class Reordered(keras.utils.PyDataset):
    """A new order in each epoch, of a generator of its own."""

    def __init__(self, calls, name, **options):
        super().__init__(**options)
        self.calls, self.name = calls, name
        self.order, self.random = np.arange(20), np.random.default_rng(5)

    def __len__(self):
        return 3

    def __getitem__(self, index):
        rows = self.order[index * 7 : (index + 1) * 7]
        return X[rows], Y[rows]

    def on_epoch_begin(self):
        self.calls.append(f"{self.name} begins")

    def on_epoch_end(self):
        self.calls.append(f"{self.name} ends")
        self.random.shuffle(self.order)


def build():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def numbers(model, validates=True, **options):
    calls = []
    data = Reordered(calls, "data")
    if validates:
        options["validation_data"] = Reordered(calls, "validation")
    fit = model.fit(data, epochs=3, shuffle=False, verbose=0, **options)
    score = model.evaluate(data, verbose=0)
    outputs = model.predict(data, verbose=0)
    again = model.fit(data, epochs=1, shuffle=False, verbose=0)
    return calls, [*fit.history.values(), score, outputs, again.history["loss"]]


@pytest.mark.parametrize(
    "options", [{}, {"validates": False, "steps_per_epoch": 3}], ids=str
)
def test_epochs_begin_and_end_as_in_keras(options, strategies):
    calls, values = numbers(build(), **options)
    trainer = mgpu_tf.Trainer(build, strategies["mirrored_x3"])
    own_calls, own_values = numbers(trainer, **options)
    assert own_calls == calls
    if "steps_per_epoch" not in options:  # Keras reads ahead of the hooks.
        for own, value in zip(own_values, values, strict=True):
            np.testing.assert_allclose(own, value, rtol=1e-9)


def test_a_run_that_is_stopped_does_not_end_its_epoch(strategies):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 1

    found = []
    for model in (build(), mgpu_tf.Trainer(build, strategies["mirrored_x3"])):
        calls = []
        data = Reordered(calls, "data")
        model.fit(data, epochs=2, verbose=0, callbacks=[Stop()])
        found.append(calls)
    assert found[1] == found[0] == ["data ends", "data begins"]

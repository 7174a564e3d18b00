"""Where a `keras.utils.PyDataset` is called around epochs, as Keras does."""

import logging
import re

import keras
import numpy as np
import pytest

import mgpu_tf
from mgpu_tf.errors import ConfigurationError
from tests.tiers import tiered

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


def batches_of_a_generator():
    for first in range(0, 20, 4):
        yield X[first : first + 4], Y[first : first + 4]


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(
    ("steps", "epochs"), tiered([(3, 2), (5, 1), (9, 1)], [(3, 2), (5, 1)])
)
def test_a_generator_that_ends_keeps_the_history(
    steps, epochs, strategies, caplog
):
    given = {"epochs": 4, "steps_per_epoch": steps, "shuffle": False}
    given["verbose"] = 0
    history = build().fit(batches_of_a_generator(), **given).history
    trainer = mgpu_tf.Trainer(build, strategies["mirrored_x3"])
    own = trainer.fit(batches_of_a_generator(), **given).history
    np.testing.assert_allclose(own["loss"], history["loss"][:epochs], rtol=1e-9)
    assert trainer.global_step == 5
    said = [r.getMessage() for r in caplog.records if r.name == "mgpu_tf"]
    assert [text[:24] for text in said] == ["the generator has ended "]
    with pytest.raises(ConfigurationError, match="one batch or more"):
        trainer.fit(iter([]), **given)


class Changing(keras.utils.PyDataset):
    """Has more batches, or fewer, after each epoch."""

    def __init__(self, length, change, most=5):
        super().__init__()
        self.length, self.change, self.most = length, change, most

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index >= self.length:
            raise IndexError(f"{index} of {self.length}")
        rows = slice(4 * index, 4 * index + 4)
        return X[rows], Y[rows]

    def on_epoch_end(self):
        self.length = max(1, min(self.most, self.length + self.change))


class Stopped(Exception):
    """Stands for what ends a run."""


class Stop(keras.callbacks.Callback):
    """Ends a run within an epoch."""

    step = 6

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == self.step:
            raise Stopped


def lengths(model, change, first, **options):
    data = Changing(first, change)
    if "steps_per_epoch" not in options:
        options["validation_data"] = Changing(first, -change)
    fit = model.fit(data, epochs=3, shuffle=False, verbose=0, **options)
    again = model.fit(Changing(first, change), shuffle=False, verbose=0)
    outputs = model.predict(Changing(first, change), verbose=0)
    return [*fit.history.values(), again.history["loss"], outputs]


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(
    ("first", "change"), tiered([(5, -1), (2, 1), (3, -2)], [(5, -1)])
)
def test_length_changes_as_in_keras(first, change, strategies, caplog):
    expected = lengths(build(), change, first)
    trainer = mgpu_tf.Trainer(build, strategies["mirrored_x3"])
    found = lengths(trainer, change, first)
    for own, value in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, value, rtol=1e-9)
    said = [r for r in caplog.records if r.name == "mgpu_tf"]
    said = [r for r in said if r.levelno == logging.WARNING]
    assert [r.getMessage()[:9] for r in said] == (
        ["epoch 1 e"] * 2 if change < 0 else []
    )


def test_fewer_batches_with_steps_per_epoch_are_refused(strategies):
    trainer = mgpu_tf.Trainer(build, strategies["mirrored_x3"])
    with pytest.raises(ConfigurationError, match="keep its length"):
        trainer.fit(Changing(5, -1), epochs=3, steps_per_epoch=2, verbose=0)


def test_a_run_with_fewer_batches_resumes(strategies, tmp_path, monkeypatch):
    strategy = strategies["mirrored_x3"]
    given = {"epochs": 4, "shuffle": False, "verbose": 0}
    whole = mgpu_tf.Trainer(build, strategy)
    whole.fit(Changing(5, -1), **given)
    given["checkpoint"] = mgpu_tf.SaveOptions(str(tmp_path), save_every_steps=1)
    given["callbacks"] = [Stop()]
    with pytest.raises(Stopped):  # The epochs have 4, 3, 2 and 1 steps.
        mgpu_tf.Trainer(build, strategy).fit(Changing(5, -1), **given)
    with pytest.raises(ConfigurationError, match="epochs of the same length"):
        mgpu_tf.Trainer(build, strategy).fit(Changing(5, -2), **given)
    monkeypatch.setattr(Stop, "step", 0)
    resumed = mgpu_tf.Trainer(build, strategy)
    resumed.fit(Changing(5, -1), **given)
    assert resumed.global_step == whole.global_step == 10
    for one, other in zip(
        resumed.model.get_weights(), whole.model.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("steps", [2, None])
def test_a_validation_generator_that_ends(steps, strategies, caplog):
    x = np.random.default_rng(0).normal(size=(12, 3)).astype("float32")

    def batches():
        for begin in (0, 4, 8):
            yield x[begin : begin + 4], x[begin : begin + 4, :1]

    def build():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    trainer = mgpu_tf.Trainer(build, strategies["mirrored_x3"])
    with caplog.at_level("WARNING"):
        history = trainer.fit(
            *(x, x[:, :1]),
            batch_size=4,
            epochs=3,
            verbose=0,
            validation_data=batches(),
            validation_steps=steps,
        ).history
    assert len(history["loss"]) == 3
    assert len(history["val_loss"]) == (2 if steps else 1)
    expected = ["1 of 2", "0 of 2"] if steps else ["0", "0"]
    said = re.findall(r"had (.*) batches, since", caplog.text)
    assert said == expected
    with pytest.raises(ConfigurationError, match="one batch or more"):
        trainer.evaluate(iter(()))

"""What callbacks know, as plain values and back."""

import collections
import enum
import itertools
import json
import math
import random

import keras
import numpy as np
import pytest
import tensorflow as tf

from mgpu_tf.checkpoints.callback_state import (
    changes,
    decode,
    encode,
    remembered,
    remind,
    with_arrays,
    without_arrays,
)


def through_json(value):
    """As a checkpoint holds it: JSON, and arrays apart."""
    arrays = {}

    def store(array):
        arrays[str(len(arrays))] = array
        return str(len(arrays) - 1)

    text = json.dumps(without_arrays(encode(value), store))
    return decode(with_arrays(json.loads(text), arrays))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        0.1,
        math.inf,
        "kind",
        [1, [2.5, None]],
        (1, (2, "a")),
        {"kind": "array", 3: (1,), None: {}},
        [],
        {},
        {3, 1},
        frozenset([2, 1]),
        b"\x00\xff",
        1 + 2j,
        collections.deque([1, 2], maxlen=3),
        collections.Counter("aab"),
        collections.OrderedDict(b=1, a=2),
    ],
    ids=repr,
)
def test_values_come_back(value):
    back = through_json(value)
    assert back == value
    assert type(back) is type(value)


def test_arrays_come_back():
    value = {"best": [np.arange(6.0).reshape(2, 3), np.float32(0.1)]}
    back = through_json(value)
    np.testing.assert_array_equal(back["best"][0], value["best"][0])
    assert back["best"][0].dtype == np.float64
    assert type(back["best"][1]) is np.float32
    assert back["best"][1] == np.float32(0.1)


@pytest.mark.parametrize(
    "value", [object(), print, {1: iter(())}, np.array([None])]
)
def test_what_cannot_be_stored(value):
    with pytest.raises(TypeError):
        encode(value)


def test_only_changes_come_back():
    before = keras.callbacks.EarlyStopping(patience=3)
    known = remembered(before)
    before.wait = 2
    before.best = 0.25
    before.best_weights = [np.ones(3)]
    state = changes(known, remembered(before))
    assert set(state) == {"wait", "best", "best_weights"}
    after = keras.callbacks.EarlyStopping(patience=7)
    remind(after, state)
    assert (after.wait, after.best, after.patience) == (2, 0.25, 7)
    np.testing.assert_array_equal(after.best_weights[0], np.ones(3))


def test_what_is_remembered_does_not_change_with_the_callback():
    callback = keras.callbacks.Callback()
    callback.seen, callback.sums = [1], np.zeros(2)
    known = remembered(callback)
    callback.seen.append(2)
    callback.sums += 1
    assert set(changes(known, remembered(callback))) == {"seen", "sums"}


def test_not_a_number_is_no_change():
    callback = keras.callbacks.Callback()
    callback.last = math.nan
    assert not changes(remembered(callback), remembered(callback))


@pytest.mark.parametrize("stored", ["as given", "by an earlier version"])
def test_the_least_improvement_keeps_its_sign(stored):
    """Keras turns it in the first epoch of a process, if less is better."""

    def trained(values=None):
        callback = keras.callbacks.EarlyStopping("loss", 0.5, patience=3)
        before = remembered(callback)
        if values is not None:
            remind(callback, values)
        callback.set_model(keras.Sequential())
        for epoch, loss in enumerate((1.0, 0.9, 0.8)):
            callback.on_epoch_end(epoch, {"loss": loss})
        return callback, changes(before, remembered(callback))

    first, found = trained()
    assert first.min_delta == -0.5
    assert "min_delta" not in found
    if stored == "by an earlier version":
        found["min_delta"] = -0.5
    second, _ = trained(found)
    assert second.min_delta == -0.5
    assert (first.wait, second.wait) == (2, 5)
    remind(second, found)
    assert second.min_delta == -0.5


class Phase(enum.Enum):
    FIRST = 1
    SECOND = 2


class Helper:
    """An object of the author's, which knows its owner."""

    def __init__(self, owner):
        self.owner, self.count, self.log = owner, 0, []

    def __call__(self):
        self.count += 1
        self.log.append(self.count)


class Knows(keras.callbacks.Callback):
    """One of everything that a callback may go on from."""

    def __init__(self):
        super().__init__()
        self.losses = []
        self.alias = self.losses
        self.by_layer = collections.defaultdict(list)
        self.seen = {"batches": 0, "print": print}
        self.last = collections.deque(maxlen=2)
        self.names = np.array(["a", "b"])
        self.phase = Phase.FIRST
        self.helper = Helper(self)
        self.inner = keras.callbacks.EarlyStopping()
        self.numpy = np.random.default_rng(3)
        self.old_numpy = np.random.RandomState(3)
        self.python = random.Random(3)
        self.seed = keras.random.SeedGenerator(3)
        self.draws = tf.random.Generator.from_seed(3)
        self.plain = tf.Variable(0.0)
        self.rate = keras.Variable(0.0)
        self.both = [tf.Variable(0.0), 0]
        self.mean = keras.metrics.Mean()
        self.tensor = tf.constant(0.0)

    def goes_on(self):
        """Changes all of it, and returns what was drawn."""
        self.losses.append(0.5)
        self.by_layer["dense"].append(1)
        self.seen["batches"] += 1
        self.last.append(len(self.losses))
        self.names = np.array(["c"])
        self.phase = Phase.SECOND
        self.helper()
        self.inner.wait += 1
        self.plain.assign_add(1.0)
        self.rate.assign_add(1.0)
        self.both[0].assign_add(1.0)
        self.both[1] += 1
        self.mean.update_state(self.helper.count)
        self.tensor += 1.0
        return [
            *self.numpy.normal(size=2),
            *self.old_numpy.normal(size=2),
            self.python.random(),
            *np.array(keras.random.normal([2], seed=self.seed)),
            *self.draws.normal([2]).numpy(),
        ]

    def known(self):
        """All of it, as plain values."""
        return [
            *(self.losses, self.alias is self.losses, dict(self.by_layer)),
            *(self.seen["batches"], self.seen["print"], list(self.last)),
            *(self.last.maxlen, self.names.tolist(), self.phase),
            *(self.helper.count, self.helper.log, self.inner.wait),
            *(float(self.plain), float(self.rate), float(self.both[0])),
            *(self.both[1], float(self.mean.result()), float(self.tensor)),
        ]


def stored(values):
    arrays = {}

    def store(array):
        arrays[str(len(arrays))] = array
        return str(len(arrays) - 1)

    text = json.dumps(without_arrays(values, store))
    return with_arrays(json.loads(text), arrays)


def test_all_that_a_callback_knows_goes_on():
    whole, killed, resumed = Knows(), Knows(), Knows()
    begun = remembered(killed)
    for each in (whole, killed):
        each.goes_on()
    remind(resumed, stored(changes(begun, remembered(killed))))
    assert resumed.known() == killed.known()
    assert resumed.goes_on() == whole.goes_on()
    assert resumed.known() == whole.known()
    resumed.by_layer["new"].append(1)  # The function of a new key is there.
    assert resumed.helper.owner is resumed
    left_out = []
    remembered(resumed, left_out=left_out)
    assert not left_out


def test_what_is_made_later_is_made_again():
    class Later(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.seen = collections.Counter(a=1)
            self.draws = np.random.default_rng(1)
            self.draws.normal()

    first, second = Later(), Later()
    before = remembered(first)
    first.on_train_begin()
    remind(second, stored(changes(before, remembered(first))))
    assert second.seen == first.seen
    assert second.draws.normal() == first.draws.normal()


def test_variables_of_the_model_are_not_stored_again():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    callback = keras.callbacks.Callback()
    callback.kept = model.weights
    callback.rate = model.optimizer.learning_rate
    values = remembered(callback, model)
    assert "rate" not in values
    assert all(each["kind"] == "held" for each in values["kept"])


def test_what_is_not_kept_is_named():
    callback = keras.callbacks.Callback()
    callback.steps = itertools.count()
    callback.rows = {"of": [iter(())]}
    callback.by_callback = {callback: 1}
    callback.function, callback.layers = print, [keras.layers.Dense(1)]
    callback.numbers, callback.module = range(3), np
    callback.type = np.dtype("float32")
    left_out = []
    remembered(callback, left_out=left_out)
    assert left_out == [
        "steps (count)",
        "rows (tuple_iterator)",
        "by_callback (dict)",
    ]


def test_lists_that_were_one_object_are_told_apart():
    """In the script two names have one list; one of them got another."""

    class Lists(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.one = self.other = []
            self.rows = [[0]] * 2
            self.helpers = [Helper(self)]
            self.log = self.helpers[0].log

    first, second = Lists(), Lists()
    before = remembered(first)
    first.other, first.rows = [2], [[1], [2]]
    first.one.append(1)
    first.helpers[0]()
    remind(second, stored(changes(before, remembered(first))))
    assert (second.one, second.other) == ([1], [2])
    assert second.rows == [[1], [2]]
    assert second.helpers[0].log == second.log == [1]


def test_what_the_script_has_not_made_is_named(caplog):
    class Late(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.phase = None

        def on_train_batch_end(self, batch, logs=None):
            self.phase = Phase.SECOND
            self.mean = keras.metrics.Mean()

    first, second = Late(), Late()
    before = remembered(first)
    first.on_train_batch_end(0)
    remind(second, stored(changes(before, remembered(first))))
    assert second.phase is None
    assert not hasattr(second, "mean")
    for name in ("phase", "mean"):
        assert f"Late begins anew with {name}, which" in caplog.text


def test_what_keras_makes_when_it_is_needed_is_not_named(caplog, tmp_path):
    def made():
        return keras.callbacks.TensorBoard(str(tmp_path))

    first, second = made(), made()
    before = remembered(first)
    first._writers = {"train": keras.metrics.Mean()}
    first._global_train_batch = 7
    remind(second, stored(changes(before, remembered(first))))
    assert second._global_train_batch == 7
    assert not caplog.text

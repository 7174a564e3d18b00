"""What callbacks know, as plain values and back."""

import json
import math

import keras
import numpy as np
import pytest

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


@pytest.mark.parametrize("value", [object(), print, {1: {2}}, np.array(["a"])])
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

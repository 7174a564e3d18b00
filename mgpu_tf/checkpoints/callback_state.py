"""What callbacks have come to know since training began, as plain values.

    before = [remembered(callback) for callback in callbacks]
    ...
    state = [changes(b, remembered(c)) for b, c in zip(before, callbacks)]
    for callback, values in zip(callbacks, state):
        remind(callback, values)

Taken are numbers, texts, lists, dicts and arrays among a callback's
attributes, where they differ from what they were when training began: so a
counter comes back, and a setting that was changed on purpose stays changed.

`EarlyStopping` and `ReduceLROnPlateau` turn the sign of `min_delta` once they
know that less is better. It is stored as it was given: a new process turns it
again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

Encoded = dict[str, Any]

# Set by Keras, not by the callback.
_NOT_STATE = ("params", "_params", "_model")
_TURNED = "min_delta"


def remembered(callback: Any) -> Encoded:
    """Returns the attributes of a callback that can be stored, encoded.

    Args:
        callback: A callback.

    Returns:
        By name; nothing that the callback goes on to change.
    """
    values = {}
    for name, value in vars(callback).items():
        if name in _NOT_STATE:
            continue
        if name == _TURNED and _has_turned(callback):
            value = -value
        try:
            values[name] = encode(value)
        except TypeError:
            continue
    return values


def changes(before: Encoded, now: Encoded) -> Encoded:
    """Returns what differs from before."""
    return {
        name: value
        for name, value in now.items()
        if name not in before or not _same(before[name], value)
    }


def remind(callback: Any, values: Encoded) -> None:
    """Gives a callback its attributes back."""
    for name, stored in values.items():
        value = decode(stored)
        if name == _TURNED and hasattr(callback, "monitor_op"):
            # Checkpoints of earlier versions have it turned.
            value = -abs(value) if _has_turned(callback) else abs(value)
        setattr(callback, name, value)


def encode(value: Any) -> Any:
    """Turns a value into what JSON can hold, and arrays.

    Args:
        value: Numbers, texts, None, lists, tuples, dicts, NumPy arrays and
            numbers, nested.

    Returns:
        Lists and dicts of plain values and arrays; a dict names its kind.

    Raises:
        TypeError: There is something else in it.
    """
    if type(value) in (type(None), bool, int, float, str):
        return value
    if isinstance(value, np.generic):
        return {"kind": "scalar", "of": np.array(value)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufV":
        return {"kind": "array", "of": np.array(value)}
    if type(value) is list:
        return [encode(item) for item in value]
    if type(value) is tuple:
        return {"kind": "tuple", "of": [encode(item) for item in value]}
    if type(value) is dict:
        pairs = [[encode(k), encode(v)] for k, v in value.items()]
        return {"kind": "dict", "of": pairs}
    raise TypeError(type(value).__name__)


def decode(value: Any) -> Any:
    """Undoes `encode`."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind, of = value["kind"], value["of"]
    if kind == "tuple":
        return tuple(decode(item) for item in of)
    if kind == "dict":
        return {decode(k): decode(v) for k, v in of}
    return of[()] if kind == "scalar" else np.array(of)


def without_arrays(value: Any, store: Callable[[np.ndarray], str]) -> Any:
    """Replaces the arrays in an encoded value by names.

    Args:
        value: From `encode`.
        store: Takes an array, returns its name.

    Returns:
        What JSON can hold.
    """
    if isinstance(value, np.ndarray):
        return store(value)
    if isinstance(value, list):
        return [without_arrays(item, store) for item in value]
    if isinstance(value, dict):
        return {k: without_arrays(v, store) for k, v in value.items()}
    return value


def with_arrays(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Undoes `without_arrays`."""
    if isinstance(value, list):
        return [with_arrays(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("kind") in ("array", "scalar"):
        return {"kind": value["kind"], "of": arrays[value["of"]]}
    return {k: with_arrays(v, arrays) for k, v in value.items()}


def _has_turned(callback: Any) -> bool:
    return getattr(callback, "monitor_op", None) is keras.ops.less


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return (
            isinstance(one, np.ndarray)
            and isinstance(other, np.ndarray)
            and one.dtype == other.dtype
            and np.array_equal(one, other)
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            _same(one[key], other[key]) for key in one
        )
    return bool(one == other) or (one != one and other != other)

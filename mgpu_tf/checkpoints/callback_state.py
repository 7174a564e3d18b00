"""What callbacks have come to know since training began, as plain values.

    before = [remembered(callback) for callback in callbacks]
    ...
    state = [changes(b, remembered(c)) for b, c in zip(before, callbacks)]
    for callback, values in zip(callbacks, state):
        remind(callback, values)

Taken are a callback's attributes where they differ from what they were when
training began: so a counter comes back, and a setting that was changed on
purpose stays changed. Values are numbers, texts, containers, arrays, generators
of random numbers, variables, and objects of the author's with such attributes.
They are put back into the objects that are there, if these are of the same
type: two names of one list remain so, and a `defaultdict` keeps its function.
What has no value, such as a function, a file or a model, stays as it is.
What else is not taken is named.

`EarlyStopping` and `ReduceLROnPlateau` turn the sign of `min_delta` once they
know that less is better. It is stored as it was given: a new process turns it
again.
"""

from __future__ import annotations

import collections
import enum
import logging
import operator
import random
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.strategies.split.sharded_variable import ShardedVariable

_log = logging.getLogger("mgpu_tf")

Encoded = dict[str, Any]

# Set by Keras, not by the callback.
_NOT_STATE = ("params", "_params", "_model")
_TURNED = "min_delta"
_PLAIN = (type(None), bool, int, float, str)
# Which of several equal ones is held does not matter.
_ALIKE = (*_PLAIN, bytes, complex, tuple, frozenset, np.generic, enum.Enum)
# Containers besides list, tuple and dict: how one is made of its items.
_ITEMS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
_DICTS: dict[str, Callable[[], Any]] = {
    "dict": dict,
    "Counter": collections.Counter,
    "OrderedDict": collections.OrderedDict,
    "defaultdict": collections.defaultdict,
}
# Their "of" is an array.
_ARRAYS = ("array", "scalar", "bytes", "tensor", "variable")
# What these modules make has no value that a run goes on from.
_RESOURCES = ("keras", "tensorflow", "mgpu_tf")
# What these make has one, and so have containers.
_VALUES = ("collections", "itertools", "pandas")
_CONTAINERS = (list, tuple, dict, set, frozenset, bytearray, np.ndarray)
_LIBRARIES = tuple(
    sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")
)


def remembered(
    callback: Any,
    model: keras.Model | None = None,
    left_out: list[str] | None = None,
) -> Encoded:
    """Returns the attributes of a callback that can be stored, encoded.

    Args:
        callback: A callback.
        model: What is trained; its variables are not taken.
        left_out: Gets the names and the types of values that are not stored,
            though they may count.

    Returns:
        By name; nothing that the callback goes on to change.
    """
    return _Taken(model, left_out).attributes(callback)


def changes(before: Encoded, now: Encoded) -> Encoded:
    """Returns what differs from before."""
    return {
        name: value
        for name, value in now.items()
        if name not in before or not _same(before[name], value)
    }


def remind(callback: Any, values: Encoded) -> None:
    """Gives a callback its attributes back.

    A warning names those that are to be put into an object which the script
    has not made.
    """
    _Given(callback).attributes(callback, values)


class _Given:
    """Puts what is stored into a callback, and what it holds.

    Args:
        callback: The callback.
    """

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        # What was filled: another attribute may hold the same object now.
        self._filled: set[int] = set()

    def attributes(self, holder: Any, values: Encoded) -> None:
        """Gives an object its attributes back."""
        for name, stored in values.items():
            held = getattr(holder, name, None)
            try:
                value = self._of(stored, held)
            except _NothingHeld:
                if keras_internals.is_of_library(self._callback):
                    continue  # Keras makes it when it needs it, as files.
                _log.warning(
                    "%s begins anew with %s, which a checkpoint holds and the "
                    "script has not made before training. Make it in __init__",
                    type(self._callback).__name__,
                    name,
                )
                continue
            if name == _TURNED and hasattr(holder, "monitor_op"):
                # Checkpoints of earlier versions have it turned.
                value = -abs(value) if _has_turned(holder) else abs(value)
            setattr(holder, name, value)

    def _of(self, stored: Any, held: Any) -> Any:
        kind = stored["kind"] if isinstance(stored, dict) else None
        if kind == "same":
            return operator.attrgetter(stored["of"])(self._callback)
        if kind == "object":
            if held is None:
                raise _NothingHeld
            self.attributes(held, stored["of"])
            return held
        made = decode(stored, held)
        mutable = isinstance(made, list | dict | set | collections.deque)
        if not mutable or type(held) is not type(made):
            return made
        if id(held) in self._filled:
            return made
        self._filled.add(id(held))
        held.clear()
        if isinstance(made, list | collections.deque):
            held.extend(made)
        else:
            held.update(made)
        return held


class _NothingHeld(Exception):
    """There is no object into which a stored value can be put."""


def encode(value: Any) -> Any:
    """Turns a value into what JSON can hold, and arrays.

    Args:
        value: Numbers, texts, None, containers, NumPy arrays and numbers,
            nested.

    Returns:
        Lists and dicts of plain values and arrays; a dict names its kind.

    Raises:
        TypeError: There is something else in it.
    """
    return _encoded(value, encode)


def _encoded(value: Any, inner: Callable[[Any], Any]) -> Any:
    """Encodes a value, and by `inner` what is in it."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, np.generic):
        return {"kind": "scalar", "of": np.array(value)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufcV":
        return {"kind": "array", "of": np.array(value)}
    if isinstance(value, np.ndarray) and value.dtype.kind == "U":
        return {"kind": "texts", "of": value.tolist()}
    if kind is list:
        return [inner(item) for item in value]
    if kind is complex:
        return {"kind": "complex", "of": [value.real, value.imag]}
    if kind is bytes:
        return {"kind": "bytes", "of": np.frombuffer(value, np.uint8)}
    if kind.__name__ in _ITEMS and kind in _ITEMS.values():
        items = value if kind is tuple else sorted(value, key=repr)
        return {"kind": kind.__name__, "of": [inner(item) for item in items]}
    if kind is collections.deque:
        items = [inner(item) for item in value]
        return {"kind": "deque", "of": items, "most": value.maxlen}
    if kind.__name__ in _DICTS and kind in _DICTS.values():
        pairs = [[encode(k), inner(v)] for k, v in value.items()]
        return {"kind": kind.__name__, "of": pairs}
    if kind is np.random.Generator:
        return {"kind": "generator", "of": encode(value.bit_generator.state)}
    if kind is np.random.RandomState:
        return {"kind": "random_state", "of": encode(value.get_state())}
    if kind is random.Random:
        return {"kind": "random", "of": encode(value.getstate())}
    raise TypeError(kind.__name__)


class _Taken:
    """Encodes what a callback has, and notes what it leaves out.

    Args:
        model: As for `remembered`.
        left_out: As for `remembered`.
    """

    def __init__(
        self, model: keras.Model | None, left_out: list[str] | None
    ) -> None:
        self._left_out = [] if left_out is None else left_out
        self._known = set() if model is None else _variables_of(model)
        self._path: list[str] = []
        # By identity, the attribute that has an object.
        self._first: dict[int, str] = {}
        # In how many containers the walk is; these have no attributes.
        self._inside = 0
        self._within: list[int] = []

    def attributes(self, holder: Any) -> Encoded:
        """Returns the attributes of an object, encoded, by name."""
        found = {}
        self._within.append(id(holder))
        for name, value in vars(holder).items():
            if isinstance(holder, keras.callbacks.Callback) and (
                name in _NOT_STATE
            ):
                continue
            if name == _TURNED and _has_turned(holder):
                value = -value
            self._path.append(name)
            path = ".".join(self._path)
            first = path
            if not self._inside and not isinstance(value, _ALIKE):
                first = self._first.setdefault(id(value), path)
            if first != path:
                found[name] = {"kind": "same", "of": first}
            elif (stored := self._of(value)) is not _HELD:
                found[name] = stored
            self._path.pop()
        self._within.pop()
        return found

    def _of(self, value: Any) -> Any:
        """Returns a value encoded, `_HELD` for one that stays as it is."""
        if id(value) in self._within:
            return _HELD
        inside = isinstance(value, _CONTAINERS)
        self._inside += inside
        self._within.append(id(value))
        try:
            return _encoded(value, self._of)
        except TypeError:
            return self._of_object(value)
        finally:
            self._within.pop()
            self._inside -= inside

    def _of_object(self, value: Any) -> Any:
        if isinstance(value, tf.Variable | keras.Variable):
            return self._of_variable(value)
        if isinstance(value, tf.Tensor) and not tf.is_symbolic_tensor(value):
            return {"kind": "tensor", "of": np.array(value)}
        if isinstance(value, enum.Enum):
            return {"kind": "enum", "of": value.name}
        if isinstance(value, keras.metrics.Metric):
            return {
                "kind": "variables",
                "of": list(map(self._of_variable, value.variables)),
            }
        if isinstance(value, keras.random.SeedGenerator | tf.random.Generator):
            return {"kind": "variables", "of": [self._of_variable(value.state)]}
        own = isinstance(value, keras.callbacks.Callback) or _is_authors(value)
        if own and hasattr(value, "__dict__"):
            return {"kind": "object", "of": self.attributes(value)}
        if own or _is_value(value):
            name = ".".join(self._path)
            self._left_out.append(f"{name} ({type(value).__name__})")
        return _HELD

    def _of_variable(self, variable: Any) -> Any:
        kept = isinstance(variable, keras.Variable)
        there = keras_internals.stored(variable) if kept else variable
        if id(variable) in self._known or isinstance(there, ShardedVariable):
            return _HELD
        return {"kind": "variable", "of": np.array(variable)}


# What stays as it is where it is held.
_HELD: Encoded = {"kind": "held", "of": None}


def _variables_of(model: keras.Model) -> set[int]:
    optimizer = model.optimizer
    every = [
        *model.variables,
        *model.metrics_variables,
        *([] if optimizer is None else keras_internals.state_of(optimizer)),
    ]
    return set(map(id, every))


def _is_authors(value: Any) -> bool:
    """Whether an object is of a class that no library made."""
    kinds = type(value).__mro__[:-1]
    roots = {kind.__module__.partition(".")[0] for kind in kinds}
    if isinstance(value, type) or roots & {*_RESOURCES}:
        return False
    module = sys.modules.get(type(value).__module__)
    file = getattr(module, "__file__", None)
    if file is None:
        return type(value).__module__ == "__main__"
    return not file.startswith(_LIBRARIES)


def _is_value(value: Any) -> bool:
    """Whether it is of a type of which each object has a value of its own."""
    if isinstance(value, Iterator):
        return not hasattr(value, "read")  # A file is a resource.
    root = type(value).__module__.partition(".")[0]
    return isinstance(value, _CONTAINERS) or (
        root in _VALUES and not callable(value)
    )


def decode(value: Any, held: Any = None) -> Any:
    """Undoes `encode`.

    Args:
        value: From `encode`, or among the values of `remembered`.
        held: What there is already, into which it is put if it can be.
    """
    if isinstance(value, list):
        return _items(value, held)
    if not isinstance(value, dict):
        return value
    kind, of = value["kind"], value["of"]
    if kind in _DICTS:
        there = held if isinstance(held, dict) else {}
        made = _DICTS[kind]()
        for stored, item in of:
            key = decode(stored)
            made[key] = decode(item, there.get(key))
        if isinstance(made, collections.defaultdict):
            made.default_factory = getattr(held, "default_factory", None)
        return made
    if kind in _ITEMS:
        return _ITEMS[kind](_items(of, held))
    if kind == "deque":
        return collections.deque(_items(of, held), value["most"])
    if kind in _IN_PLACE and held is None:
        raise _NothingHeld
    return _DECODED[kind](of, held)


def _items(stored: list[Any], held: Any) -> list[Any]:
    """Returns the items of a container; variables are those that are held."""
    ordered = isinstance(held, list | tuple | collections.deque)
    there = list(held) if ordered else []
    there += [None] * (len(stored) - len(there))
    return [
        decode(item, each) for item, each in zip(stored, there, strict=False)
    ]


def _assigned(of: Any, held: Any) -> Any:
    held.assign(of)
    return held


def _variables(of: Any, held: Any) -> Any:
    metric = isinstance(held, keras.metrics.Metric)
    state = held.variables if metric else [held.state]
    for variable, stored in zip(state, of, strict=True):
        decode(stored, variable)
    return held


def _object(of: Any, held: Any) -> Any:
    remind(held, of)
    return held


def _generator(of: Any, held: Any) -> Any:
    state = decode(of)
    if not isinstance(held, np.random.Generator) or (
        held.bit_generator.state["bit_generator"] != state["bit_generator"]
    ):
        kind = getattr(np.random, state["bit_generator"])
        held = np.random.Generator(kind())
    held.bit_generator.state = state
    return held


def _random_state(of: Any, held: Any) -> Any:
    made = held if isinstance(held, np.random.RandomState) else None
    made = made or np.random.RandomState()
    made.set_state(decode(of))
    return made


def _random(of: Any, held: Any) -> Any:
    made = held if isinstance(held, random.Random) else random.Random()
    made.setstate(decode(of))
    return made


# They are put into what is held.
_IN_PLACE = ("enum", "held", "object", "variable", "variables")
_DECODED: dict[str, Callable[[Any, Any], Any]] = {
    "array": lambda of, held: np.array(of),
    "bytes": lambda of, held: np.array(of).tobytes(),
    "complex": lambda of, held: complex(*of),
    "enum": lambda of, held: type(held)[of],
    "generator": _generator,
    "held": lambda of, held: held,
    "object": _object,
    "random": _random,
    "random_state": _random_state,
    "scalar": lambda of, held: of[()],
    "tensor": lambda of, held: tf.constant(of),
    "texts": lambda of, held: np.array(of, np.str_),
    "variable": _assigned,
    "variables": _variables,
}


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
    if value.get("kind") in _ARRAYS:
        return value | {"of": arrays[value["of"]]}
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

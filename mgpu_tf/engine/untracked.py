"""Variables that the objects of a model hold, and that Keras does not track.

Keras tracks its own variables in attributes of layers, and in lists and dicts
of these. It does not track a `tf.Variable`, nor what a loss or another object
of the author's holds. A step may write to these as well, so a run that is
resumed needs them. They are found through attributes.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals

# Objects of their classes, but for layers, hold no variable of the author's.
_LIBRARIES = {"builtins", "keras", "mgpu_tf", "numpy", "tensorflow"}
_NO_STATE = (type, types.ModuleType, types.FunctionType, types.MethodType)


class PlainVariable:
    """A `tf.Variable` with what Keras's variables have.

    Attributes:
        path: Its place in the model.
        shape: Its shape.
        dtype: The name of its type.
    """

    def __init__(self, variable: tf.Variable, path: str) -> None:
        self._value = variable
        self.path = path
        self.shape = tuple(variable.shape)
        self.dtype = variable.dtype.name

    @property
    def value(self) -> tf.Variable:
        """What it holds."""
        return self._value

    def assign(self, value: Any) -> None:
        """Writes to the variable."""
        self._value.assign(value)


def untracked_variables(model: keras.Model) -> list[Any]:
    """Returns the variables that a model holds and Keras does not track.

    Args:
        model: A built and compiled model.

    Returns:
        Keras's variables, and a `PlainVariable` for each `tf.Variable` of
        numbers. No variable comes twice.
    """
    optimizers = keras_internals.optimizers_of(model)
    tracked = [
        *model.variables,
        *(v for o in optimizers for v in keras_internals.state_of(o)),
        *(v for m in keras_internals.metrics_of(model) for v in m.variables),
    ]
    seen = {id(keras_internals.stored(variable)) for variable in tracked}
    found = []
    losses = enumerate(keras_internals.losses_of(model))
    roots = [(model.name, model), *((f"loss_{i}", loss) for i, loss in losses)]
    for path, variable in _variables(*roots):
        plain = isinstance(variable, tf.Variable)
        held = variable if plain else keras_internals.stored(variable)
        if id(held) in seen or held.dtype == "string":
            continue
        seen.add(id(held))
        found.append(PlainVariable(held, path) if plain else variable)
    return found


def _variables(*roots: tuple[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields variables below some objects, each with its path."""
    left, seen = list(reversed(roots)), set()
    while left:
        path, value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, keras.Variable | tf.Variable):
            yield path, value
        else:
            parts = [(f"{path}/{name}", each) for name, each in _parts(value)]
            left += reversed(parts)


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    """Returns what an object of the author's consists of, by names."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    library = type(value).__module__.partition(".")[0] in _LIBRARIES
    if library and not isinstance(value, keras.layers.Layer):
        return ()
    if isinstance(value, _NO_STATE) or not hasattr(value, "__dict__"):
        return ()
    return list(vars(value).items())

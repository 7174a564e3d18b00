"""What of a model must be the same on all workers.

    peers.compare(likeness.configuration(model))
    peers.compare(likeness.values(model))

A mirrored variable begins with the value of the first worker; what the author
does to it afterwards (`set_weights`, `adapt`, an assignment), and how layers,
optimizer and loss are configured, is each worker's own. Facts are sent by
name, one for each entry of a configuration and each variable, so that the
first that differs can be named.
"""

from __future__ import annotations

import re
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from mgpu_tf.checkpoints.run_state import LAYERS, OPTIMIZERS
from mgpu_tf.engine import keras_internals
from mgpu_tf.strategies.split.sharded_variable import ShardedVariable

# What differs between the same object of two processes.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def configuration(model: keras.Model) -> dict[str, str]:
    """Returns what a model, its optimizers and its loss are made of.

    Args:
        model: A compiled model; what cannot be compared is left out.

    Returns:
        Each entry of a configuration by the place where it stands.
    """
    layers = keras_internals.layers_of(model)
    # Keras numbers layers through a process, whatever it made before.
    names = {layer.name: f"layer {i}" for i, layer in enumerate(layers)}
    kinds = ", ".join(type(layer).__name__ for layer in layers)
    optimizers = keras_internals.optimizers_of(model)
    facts = {
        LAYERS: kinds,
        OPTIMIZERS: ", ".join(type(each).__name__ for each in optimizers),
    }
    for place, layer in enumerate(layers):
        prefix = f"model ({type(layer).__name__}, layer {place}): "
        facts |= _flat(prefix, _config_of(layer), names)
        facts |= _flat(prefix, _learned(layer), names)
    for place, optimizer in enumerate(optimizers):
        prefix = f"optimizer {place}: " if place else "optimizer: "
        facts |= _flat(prefix, _config_of(optimizer), names)
    return facts | _flat("compile: ", _compiled(model), names)


def values(model: keras.Model) -> dict[str, str]:
    """Returns a hash of each variable of a model and of its optimizers.

    Args:
        model: A model; layers that are not built yet have no variables.

    Returns:
        The hashes by the names of the variables.
    """
    optimizers = keras_internals.optimizers_of(model)
    groups = {"weight": model.weights} | {
        f"optimizer variable {i or ''}".strip(): keras_internals.state_of(
            optimizer
        )
        for i, optimizer in enumerate(optimizers)
    }
    return {
        f"{group} (number {number}, {_last(variable.path)})": _hash(variable)
        for group, variables in groups.items()
        for number, variable in enumerate(variables)
    }


def _hash(variable: keras.Variable) -> str:
    held = keras_internals.stored(variable)
    if isinstance(held, ShardedVariable) and held.is_apart:
        # Together the workers hold one value; each has assigned its own.
        return f"values of shape {held.shape} with hash {held.assigned}"
    array = np.asarray(keras.ops.convert_to_numpy(variable.value))
    return (
        f"{array.dtype} values of shape {array.shape} with hash "
        f"{_hash_of(array)}"
    )


def _hash_of(array: np.ndarray) -> str:
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return f"{zlib.crc32(data.data):08x}"


def _last(path: str) -> str:
    return path.rpartition("/")[2]


def _config_of(thing: Any) -> Any:
    """Returns the configuration of what has one that can be compared."""
    try:
        with warnings.catch_warnings():
            # It is compared, and not saved.
            warnings.simplefilter("ignore")
            found = dict(thing.get_config())
    except Exception:  # An author's own class may raise anything.
        return {}
    if isinstance(found.get("layers"), list):
        # They raise errors of their own.
        found["layers"] = [
            {k: v for k, v in layer.items() if k != "config"}
            for layer in found["layers"]
        ]
    return found


def _learned(layer: keras.layers.Layer) -> dict[str, Any]:
    """Returns what `adapt` leaves outside of variables."""
    learned = {}
    if hasattr(layer, "get_vocabulary"):
        with_words = zlib.crc32("\0".join(_words(layer)).encode())
        learned["vocabulary"] = f"hash {with_words:08x}"
    boundaries = getattr(layer, "bin_boundaries", None)
    if boundaries is not None:
        learned["bin_boundaries"] = np.asarray(boundaries).tolist()
    return learned


def _words(layer: Any) -> Iterator[str]:
    try:
        return map(str, layer.get_vocabulary())
    except Exception:  # Not adapted yet.
        return iter(())


def _compiled(model: keras.Model) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = dict(model.get_compile_config() or {})
    except Exception:  # A loss or metric of the author's own, as above.
        found = {"loss": model.loss}
    found.pop("optimizer", None)
    return found


def _flat(prefix: str, value: Any, names: dict[str, str]) -> dict[str, str]:
    """Returns the entries of a nested configuration."""
    if isinstance(value, dict):
        if value.get("class_name") == "__lambda__":
            # Its bytes hold counts of references, which vary.
            return {prefix: "a lambda"}
        items = [(k, v) for k, v in value.items() if k not in _IGNORED]
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    else:
        return {prefix.rstrip(". "): _shown(value, names)}
    facts: dict[str, str] = {}
    for key, item in items:
        facts |= _flat(f"{prefix}{key}.", item, names)
    return facts


# Names, and what Keras writes of where a class was registered.
_IGNORED = {"name", "registered_name", "build_config", "shared_object_id"}


def _shown(value: Any, names: dict[str, str]) -> str:
    if isinstance(value, str):
        return names.get(value, value)
    if callable(value) and hasattr(value, "__code__"):
        code = value.__code__
        return f"{code.co_name} {zlib.crc32(code.co_code):08x}"
    if isinstance(value, np.ndarray) and value.dtype != object:
        return f"{value.shape} {_hash_of(value)}"
    return _ADDRESS.sub("", repr(value))

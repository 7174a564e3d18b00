"""Variables that the objects of a model hold, and that Keras does not track.

Keras tracks its own variables in attributes of layers, and in lists and dicts
of these. It does not track a `tf.Variable`, nor what a loss or another object
of the author's holds. A step may write to these as well, so a run that is
resumed needs them. They are found through attributes.
"""

from __future__ import annotations

import gc
import hashlib
import types
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.strategies.split.sharded_variable import ShardedVariable

# Objects of their classes, but for layers, hold no variable of the author's.
_LIBRARIES = {"builtins", "keras", "mgpu_tf", "numpy", "tensorflow"}
_Digest = bytes
_STATE = (keras.Variable, tf.Variable, keras.random.SeedGenerator)
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


class UnheldVariables:
    """Variables that a step changes, and that no object of the model holds.

    A closure or a module has them. What a step only reads need not be kept.

    Args:
        strategy: The model's strategy.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy
        # With whether each replica has its own, and the value before the step.
        self._found: dict[int, tuple[tf.Variable, bool, _Digest]] = {}

    def note(self, graph: Any, known: Iterable[Any]) -> None:
        """Notes what is in the graph of a step, before it has run.

        Args:
            graph: Its outermost graph.
            known: The variables that checkpoints have.
        """
        held = [keras_internals.stored(variable) for variable in known]
        have = set(self._found) | {
            id(part.handle)
            for each in held
            for parts in (
                each.stored
                if isinstance(each, ShardedVariable)
                else [self._strategy.experimental_local_results(each)]
            )
            for part in parts
        }
        unknown = {
            id(inner): id(outer)
            for outer, inner in graph.captures
            if outer.dtype == tf.resource and id(outer) not in have
        }
        # To look for variables, and to read them after each execution, costs
        # more than a step where they are large.
        written = keras_internals.written_in(graph) if unknown else ()
        handles = {unknown[key] for key in unknown.keys() & written}
        if not handles:
            return
        made_here = self._strategy.extended.variable_created_in_scope
        with tf.init_scope():
            for each in gc.get_objects():
                if not issubclass(type(each), tf.Variable) or issubclass(
                    type(each), tf.distribute.DistributedValues
                ):
                    continue
                key = id(each.handle)
                if key in handles:
                    self._found[key] = each, made_here(each), _digest(each)

    def check_alone(self) -> None:
        """Refuses what all replicas have changed, one after another.

        Raises:
            ConfigurationError: A step has changed a variable that was made
                outside of the strategy's scope.
        """
        if self._strategy.num_replicas_in_sync == 1:
            return
        for variable, apart, before in self._found.values():
            if not apart and _digest(variable) != before:
                raise ConfigurationError(
                    "On several replicas, a step writes variables that are "
                    f"made in build_model. Received: {variable.name!r}, which "
                    "was made outside of it. Make it there, as an attribute "
                    "of the model."
                )

    def check_saved(self) -> None:
        """Refuses a checkpoint that would lack what a step has changed.

        Raises:
            ConfigurationError: A step has changed such a variable.
        """
        for variable, _, before in self._found.values():
            if _digest(variable) != before:
                raise ConfigurationError(
                    "A checkpoint has the variables that are attributes of "
                    "the model or of its parts. Received: "
                    f"{variable.name!r}, which a step writes. Make it an "
                    "attribute of the model."
                )


def _digest(variable: tf.Variable) -> _Digest:
    return hashlib.sha256(variable.numpy().tobytes()).digest()


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
    for path, variable in _held(model):
        if isinstance(variable, keras.random.SeedGenerator):
            variable = variable.state
        plain = isinstance(variable, tf.Variable)
        held = variable if plain else keras_internals.stored(variable)
        if id(held) in seen or held.dtype == "string":
            continue
        seen.add(id(held))
        found.append(PlainVariable(held, path) if plain else variable)
    return found


def seed_generators(model: keras.Model) -> list[keras.random.SeedGenerator]:
    """Returns the generators of random seeds that a model holds.

    Those of its layers, and of other objects of its author's, as a loss.

    Args:
        model: A built and compiled model.
    """
    found = {id(g): g for g in keras_internals.tracked_generators(model)}
    for _, each in _held(model):
        if isinstance(each, keras.random.SeedGenerator):
            found[id(each)] = each
    return list(found.values())


def _held(model: keras.Model) -> Iterator[tuple[str, Any]]:
    """Yields the variables and generators of a model, each with its path."""
    metrics = keras_internals.metrics_of(model)
    roots = [
        (model.name, model),
        *_numbered("loss", keras_internals.losses_of(model)),
        *_numbered("metric", keras_internals.single_metrics(metrics)),
    ]
    left, seen = list(reversed(roots)), set()
    while left:
        path, value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, _STATE):
            yield path, value
        else:
            parts = [(f"{path}/{name}", each) for name, each in _parts(value)]
            left += reversed(parts)


def _numbered(name: str, values: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for number, value in enumerate(values):
        yield f"{name}_{number}", value


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

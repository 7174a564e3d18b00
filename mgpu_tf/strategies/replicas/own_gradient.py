"""`tf.custom_gradient`, and sums over replicas, of graphs that can be freed.

    @own_gradient
    def cube(x):
        return x**3, lambda upstream: upstream * 3 * x**2

    total = sum_over_replicas([loss, count])      # on a replica

TensorFlow registers the gradient of each call in a graph by a name of its own,
and forgets none. The registered function holds the graph, so each model that
was ever trained would stay in memory. `ReplicaContext.all_reduce` does so too.
Here one name is registered, and each graph holds its own functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record

from mgpu_tf.errors import ConfigurationError
from mgpu_tf.strategies.replicas import tensorflow_internals, turns

_NAME = "MgpuTfOwnGradient"
_FUNCTIONS = "mgpu_tf/own_gradients"
_SUMS = "mgpu_tf/sums_over_replicas"

Function = Callable[..., tuple[Any, Callable[..., Any]]]


@tf.RegisterGradient(_NAME)
def _gradient_of(operation: tf.Operation, *upstream: Any) -> list[Any]:
    (functions,) = operation.graph.get_collection(_FUNCTIONS)
    return list(functions[operation.name](*upstream))


def own_gradient(function: Function) -> Callable[..., Any]:
    """Returns a function whose gradient is that which its author gives.

    Args:
        function: Takes tensors and reads no variables. It returns a structure
            of tensors, and a function of their gradients that returns the
            gradients of the arguments.

    Returns:
        A function of the same arguments that returns the first of these. It
        raises a `ConfigurationError` where derivatives are taken forward.
    """

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        given = [tf.convert_to_tensor(each) for each in arguments]
        if tensorflow_internals.have_tangents(given):
            raise ConfigurationError(
                "What replicas send each other has derivatives by tf."
                "GradientTape alone. Received: a tf.autodiff."
                "ForwardAccumulator around it. For a product with a Jacobian, "
                "take the gradient of a gradient: with v = tf.zeros_like(y), "
                "outer.gradient(inner.gradient(y, x, v), v, tangents)."
            )
        results, backward = function(*given)
        flat = [tf.convert_to_tensor(each) for each in tf.nest.flatten(results)]
        if tf.executing_eagerly():
            after = [tf.identity(each) for each in flat]
            record.record_operation(
                _NAME,
                after,
                given,
                lambda *upstream: tf.nest.flatten(backward(*upstream)),
            )
            return tf.nest.pack_sequence_as(results, after)

        def of_all(*upstream: Any) -> list[Any]:
            found = backward(*upstream[: len(flat)])
            return [None] * len(flat) + tf.nest.flatten(found)

        graph = tf.compat.v1.get_default_graph()
        before = [*flat, *given]
        with graph.gradient_override_map({"IdentityN": _NAME}):
            after = tf.identity_n(before)
        functions = graph.get_collection_ref(_FUNCTIONS)
        if not functions:
            functions.append({})
        functions[0][after[0].op.name] = of_all
        # A tape looks up no names.
        record.record_operation(_NAME, after, before, of_all)
        return tf.nest.pack_sequence_as(results, after[: len(flat)])

    return call


def sum_over_replicas(value: Any) -> Any:
    """Returns the sum over all replicas, to each. On a replica.

    The gradient of a sum is the sum of the gradients of all replicas.

    Args:
        value: A structure of tensors, of the same shapes on all replicas.
    """
    context = tf.distribute.get_replica_context()
    if getattr(context, "is_abstract", False):
        return value  # There is no other.
    if isinstance(context.strategy, tf.distribute.TPUStrategy):
        return context.all_reduce("sum", value)

    @own_gradient
    def summed(*values: tf.Tensor) -> Any:
        found = turns.merged(_summed, values)
        found = tf.nest.map_structure(tf.identity, found)
        _note_sums(tf.nest.flatten(found, expand_composites=True))
        return found, lambda *upstream: sum_over_replicas(list(upstream))

    flat = summed(*tf.nest.flatten(value))
    return tf.nest.pack_sequence_as(value, flat)


def _note_sums(tensors: list[tf.Tensor]) -> None:
    for tensor in filter(tf.is_symbolic_tensor, tensors):
        noted = tensor.graph.get_collection_ref(_SUMS)
        if not noted:
            noted.append(set())
        noted[0].add(tensor.op.name)


def is_sum_over_replicas(operation: tf.Operation) -> bool:
    """Returns whether an operation of a graph is such a sum, on a replica."""
    noted = operation.graph.get_collection_ref(_SUMS)
    return bool(noted) and operation.name in noted[0]


def _summed(strategy: tf.distribute.Strategy, *values: Any) -> Any:
    pairs = [
        (value, value.device if isinstance(value, tf.Tensor) else value)
        for value in values
    ]
    return strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, pairs)

"""What operations take from outside, and do besides making their outputs.

    for op, resource in written(graph, first):     variables, tables, generators
        ...
    if acts(graph, first):                         prints and calls Python, too
        ...
    for op, given, source in taken(graph, first):  what was there before
        ...

An operation writes to each resource that it takes and that it is not known
only to read. What functions, branches and loops of TensorFlow do is looked at
with what goes into them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from mgpu_tf.engine import keras_internals

# What takes a resource and leaves it as it is.
_READS = frozenset(
    (
        "Identity",
        "IdentityN",
        "LookupTableExportV2",
        "LookupTableFindV2",
        "LookupTableSizeV2",
        "ReadVariableOp",
        "ResourceGather",
        "ResourceGatherNd",
        "VarIsInitializedOp",
        "VariableShape",
    )
)
_PYTHON = ("EagerPyFunc", "PyFunc")
# What is stateful for TensorFlow, and may be done twice or not at all.
_IDLE = _READS | {"Assert", "CheckNumerics", "NoOp", "VarHandleOp"}


def acts(graph: Any, first: int = 0) -> bool:
    """Returns whether operations of a graph do more than make their outputs.

    Args:
        graph: The graph.
        first: The operation to begin with, by its number in the graph.
    """
    return act(graph.get_operations()[first:])


def act(operations: Iterable[tf.Operation]) -> bool:
    """Returns whether operations do more than make their outputs."""
    return any(map(_acts, _stateful(operations)))


def _stateful(operations: Iterable[tf.Operation]) -> Iterator[tf.Operation]:
    """Yields the operations that may do more: all that take a resource too."""
    stateful: dict[str, bool] = {}
    for op in operations:
        kind = op.type
        if kind not in stateful:
            stateful[kind] = op.op_def.is_stateful
        if stateful[kind]:
            yield op


def _acts(op: tf.Operation) -> bool:
    if op.type in _IDLE or is_exchange(op):
        return False
    bodies = [body_of(op, function) for function in functions_of(op)]
    return not bodies or any(body is None or acts(body) for body in bodies)


def is_exchange(op: tf.Operation) -> bool:
    """Returns whether replicas exchange values, with a token in turn."""
    return op.type.startswith("Collective")


def written(graph: Any, first: int = 0) -> Iterator[tuple[tf.Operation, Any]]:
    """Yields what operations of a graph may write, of what was there before.

    Args:
        graph: The graph.
        first: The operation to begin with, by its number in the graph.

    Yields:
        An operation of the graph and a resource, as no graph around this one
        has captured it; None where it calls Python, which may write anything.
    """
    for op in _stateful(graph.get_operations()[first:]):
        for resource in written_by(op):
            found = outside(resource)
            # What the graph itself makes is gone with it.
            made = tf.is_symbolic_tensor(found) and found.op.type
            if not (made and made.startswith("Anonymous")):
                yield op, found


def taken(
    graph: Any, first: int, passed_over: Callable[[int], bool]
) -> Iterator[tuple[tf.Operation, tf.Tensor, Any]]:
    """Yields what operations of a graph take that was there before them.

    Args:
        graph: The graph.
        first: The operation to begin with, by its number in the graph.
        passed_over: Whether not to look at an operation, by its number.

    Yields:
        An operation, a tensor that it takes, and the same as no graph around
        this one has captured it.
    """
    operations = graph.get_operations()[first:]
    made = {op.name for op in operations}
    # Their placeholders are made where they are first taken.
    captured = {inner.name: outer for outer, inner in _captures(graph)}
    for place, op in enumerate(operations, first):
        if passed_over(place):
            continue
        for given in op.inputs:
            if given.name in captured:
                yield op, given, outside(captured[given.name])
            elif given.op.name not in made:
                yield op, given, given


def written_by(op: tf.Operation) -> list[Any]:
    """Returns the resources among what an operation takes that it may write.

    None is among them where it calls Python, and the operation itself where it
    calls a function that cannot be found.
    """
    if op.type in _PYTHON:
        return [None]
    resources = [
        _source(each) for each in op.inputs if each.dtype == tf.resource
    ]
    if op.type in _READS or is_exchange(op):
        return []
    functions = functions_of(op)
    if not functions:
        return resources
    found = []
    for function in functions:
        body = body_of(op, function)
        if body is None:
            return [*resources, op]
        # A branch or a loop may take more, which comes first.
        given = list(op.inputs)[len(op.inputs) - len(body.inputs) :]
        taken = {
            id(inner): _source(outer)
            for inner, outer in zip(body.inputs, given, strict=False)
        }
        for each in _stateful(body.get_operations()):
            found += [taken.get(id(r), r) for r in written_by(each)]
    return found


def functions_of(op: tf.Operation) -> list[Any]:
    """Returns the functions that an operation calls."""
    return tf.nest.flatten(
        [
            op.get_attr(attribute.name)
            for attribute in op.op_def.attr
            if attribute.type in ("func", "list(func)")
        ]
    )


def body_of(op: tf.Operation, function: Any) -> Any:
    """Returns the graph of a function, None where it cannot be found."""
    graph = op.graph
    while graph is not None:
        body = keras_internals.body_of_function(graph, function.name)
        if body is not None and body.get_operations():
            return body
        graph = getattr(graph, "outer_graph", None)
    return None


def _source(tensor: tf.Tensor) -> tf.Tensor:
    while tensor.op.type in ("Identity", "IdentityN"):
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def outside(resource: Any) -> Any:
    """Returns a resource where no graph has captured it."""
    while tf.is_symbolic_tensor(resource):
        captures = _captures(resource.graph)
        found = [outer for outer, inner in captures if inner is resource]
        if not found:
            break
        resource = found[0]
    return resource


def _captures(graph: Any) -> Any:
    """Returns what a graph has captured, and as what; a `tf.Graph` nothing."""
    return getattr(graph, "captures", ())
